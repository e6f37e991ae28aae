package suspend

import (
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
	"evenkeel.dev/evenkeel/operator/internal/kube/slim/slimtest"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

func slimmed(t *testing.T, slim func(any) (any, error), pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	object, err := slim(pod)
	if err != nil {
		t.Fatal(err)
	}
	return object.(*corev1.Pod)
}

// Thousands of gated pods are kept in memory, and what is not read of them is not kept. To read more of them means to add it here.
func TestGatedPodsInMemoryHaveTheseFieldsOnly(t *testing.T) {
	whole := &corev1.Pod{}
	slimtest.Fill(whole)
	whole.Labels = slimtest.Texts(evenkeel.GatedKey, evenkeel.ProfileKey, evenkeel.OwnerKey, "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/jobset-uid", "leaderworkerset.sigs.k8s.io/name")
	whole.Annotations = slimtest.Texts(evenkeel.GateKey, evenkeel.TemplateKey)
	if all := slimtest.Fields(whole); !slices.Contains(all, "Spec.Containers[].Env[].ValueFrom.SecretKeyRef.Name") {
		t.Fatalf("fields of a pod are not set: %q", all)
	}
	requirement := func(path string) []string {
		return []string{path + ".Key", path + ".Operator", path + ".Values[]"}
	}
	term := "Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[]"
	want := slices.Concat(requirement(term+".MatchExpressions[]"), requirement(term+".MatchFields[]"), []string{
		"Annotations[evenkeel.dev/gate]", "Annotations[evenkeel.dev/template]", "CreationTimestamp", "DeletionTimestamp",
		"Labels[evenkeel.dev/gated]", "Labels[evenkeel.dev/owner]", "Labels[evenkeel.dev/profile]",
		"Labels[jobset.sigs.k8s.io/jobset-name]", "Labels[jobset.sigs.k8s.io/jobset-uid]", "Labels[leaderworkerset.sigs.k8s.io/name]",
		"Name", "Namespace", "OwnerReferences[].APIVersion", "OwnerReferences[].Controller", "OwnerReferences[].Kind", "OwnerReferences[].Name", "OwnerReferences[].UID", "ResourceVersion", "UID",
		"Spec.Containers[].Resources.Claims[].Name", "Spec.Containers[].Resources.Claims[].Request", "Spec.Containers[].Resources.Requests[]", "Spec.Containers[].RestartPolicy", "Spec.InitContainers[].Resources.Claims[].Name", "Spec.InitContainers[].Resources.Claims[].Request", "Spec.InitContainers[].Resources.Requests[]", "Spec.InitContainers[].RestartPolicy",
		"Spec.NodeName", "Spec.NodeSelector[text]", "Spec.Overhead[]", "Spec.Resources.Requests[]",
		"Spec.Tolerations[].Effect", "Spec.Tolerations[].Key", "Spec.Tolerations[].Operator", "Spec.Tolerations[].TolerationSeconds", "Spec.Tolerations[].Value",
	})
	slices.Sort(want)
	slim := slimmer()
	got := slimmed(t, slim, whole.DeepCopy())
	if diff := cmp.Diff(want, slimtest.Fields(got)); diff != "" {
		t.Errorf("fields that are kept (-want +got):\n%s", diff)
	}
	if again := slimmed(t, slim, got.DeepCopy()); !reflect.DeepEqual(again, got) { // as the first list is
		t.Errorf("reduced once more, it is another pod:\n%s", cmp.Diff(got, again))
	}
}

// Gated pods of one job differ in their names, and share the rest.
func TestGatedPodsInMemoryShareWhatTheirTemplateSays(t *testing.T) {
	slim := slimmer()
	kept := func(name, pool string) *corev1.Pod {
		yes := true
		return slimmed(t, slim, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{evenkeel.GatedKey: evenkeel.GatedValue, "pod": name}, OwnerReferences: []metav1.OwnerReference{{Kind: "Job", Name: "train", Controller: &yes}}},
			Spec: corev1.PodSpec{
				Hostname: name, NodeSelector: map[string]string{"pool": pool}, Tolerations: []corev1.Toleration{{Key: "gpu"}},
				Containers: []corev1.Container{{Env: []corev1.EnvVar{{Name: "RANK", Value: name}}, Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")}}}},
			},
		})
	}
	a, b, other := kept("a", "x"), kept("b", "x"), kept("c", "y")
	same := func(a, b any) bool { return reflect.ValueOf(a).Pointer() == reflect.ValueOf(b).Pointer() }
	if !same(a.Labels, b.Labels) || !same(a.OwnerReferences, b.OwnerReferences) || !same(a.Spec.NodeSelector, b.Spec.NodeSelector) || !same(a.Spec.Tolerations, b.Spec.Tolerations) || !same(a.Spec.Containers, b.Spec.Containers) {
		t.Errorf("kept twice:\n%+v\n%+v", a, b)
	}
	if a.Name != "a" || b.Name != "b" || other.Spec.NodeSelector["pool"] != "y" {
		t.Errorf("%+v, %+v and %+v are mixed up", a, b, other)
	}
}

// What is decided about a gated pod is the same as if it had been kept whole.
func TestGatedPodsInMemoryDecideAsWholeOnes(t *testing.T) {
	yes, always := true, corev1.ContainerRestartPolicyAlways
	cpu := func(n string) corev1.ResourceRequirements {
		return corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(n)}, Limits: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("64")}}
	}
	affinity := func(op corev1.NodeSelectorOperator) *corev1.Affinity {
		return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
			{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "pool", Operator: op, Values: []string{"x"}}}},
		}}}, PodAntiAffinity: &corev1.PodAntiAffinity{}}
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{"pool": "x"}}}
	node.Spec.Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	node.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"), "nvidia.com/gpu": resource.MustParse("8")}
	tolerates := []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
	slim := slimmer()
	for name, test := range map[string]struct {
		spec corev1.PodSpec
		fits bool
	}{
		"anywhere":                    {corev1.PodSpec{Tolerations: tolerates}, true},
		"without a toleration":        {corev1.PodSpec{}, false},
		"placed elsewhere":            {corev1.PodSpec{Tolerations: tolerates, NodeName: "m"}, false},
		"another pool":                {corev1.PodSpec{Tolerations: tolerates, NodeSelector: map[string]string{"pool": "y"}}, false},
		"its pool, by affinity":       {corev1.PodSpec{Tolerations: tolerates, Affinity: affinity(corev1.NodeSelectorOpIn)}, true},
		"another one, by affinity":    {corev1.PodSpec{Tolerations: tolerates, Affinity: affinity(corev1.NodeSelectorOpNotIn)}, false},
		"it fits":                     {corev1.PodSpec{Tolerations: tolerates, Containers: []corev1.Container{{Resources: cpu("3")}, {Resources: cpu("1")}}}, true},
		"too large":                   {corev1.PodSpec{Tolerations: tolerates, Containers: []corev1.Container{{Resources: cpu("3")}, {Resources: cpu("2")}}}, false},
		"too large, with its sidecar": {corev1.PodSpec{Tolerations: tolerates, InitContainers: []corev1.Container{{RestartPolicy: &always, Resources: cpu("2")}}, Containers: []corev1.Container{{Resources: cpu("3")}}}, false},
		"its steps one by one":        {corev1.PodSpec{Tolerations: tolerates, InitContainers: []corev1.Container{{Resources: cpu("2")}}, Containers: []corev1.Container{{Resources: cpu("3")}}}, true},
		"too large, with its runtime": {corev1.PodSpec{Tolerations: tolerates, Overhead: cpu("2").Requests, Containers: []corev1.Container{{Resources: cpu("3")}}}, false},
		"too large as a pod":          {corev1.PodSpec{Tolerations: tolerates, Resources: &corev1.ResourceRequirements{Requests: cpu("5").Requests}, Containers: []corev1.Container{{}}}, false},
	} {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "team", Name: "p", UID: "1", CreationTimestamp: metav1.NewTime(noon), Labels: map[string]string{evenkeel.GatedKey: evenkeel.GatedValue, evenkeel.ProfileKey: "default", evenkeel.OwnerKey: "2"},
				Annotations:     map[string]string{evenkeel.GateKey: evenkeel.GateDisabled},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Other", Name: "o"}, {APIVersion: "batch.volcano.sh/v1alpha1", Kind: "Job", Name: "train", UID: "3", Controller: &yes}},
			},
			Spec: test.spec,
		}
		got := slimmed(t, slim, pod.DeepCopy())
		for of, decide := range map[string]func(*corev1.Pod) any{
			"node":     func(pod *corev1.Pod) any { return gate.NodeFilter([]*corev1.PodSpec{&pod.Spec})(node) },
			"gang":     func(pod *corev1.Pod) any { return workload.GangOf(pod) },
			"job":      func(pod *corev1.Pod) any { return workload.JobOf(pod) },
			"selector": func(pod *corev1.Pod) any { return workload.GangSelector(pod) },
			"gate": func(pod *corev1.Pod) any {
				job := jobgate.FromPods([]*corev1.Pod{pod})
				job.Pods = nil
				return job
			},
		} {
			if want, is := decide(pod), decide(got); !reflect.DeepEqual(want, is) {
				t.Errorf("%s: its %s is %+v, of the whole pod %+v", name, of, is, want)
			}
		}
		if fits := gate.NodeFilter([]*corev1.PodSpec{&got.Spec})(node); fits != test.fits {
			t.Errorf("%s: fits %t, want %t", name, fits, test.fits)
		}
	}
}
