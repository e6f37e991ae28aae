package integration

import (
	"context"
	"regexp"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// onGPUs makes the job's containers request GPUs.
func onGPUs(t *testing.T, job *unstructured.Unstructured, paths [][]string) {
	t.Helper()
	for _, path := range paths {
		at := append(append([]string{}, path...), "spec", "containers")
		list, _, err := unstructured.NestedSlice(job.Object, at...)
		if err != nil {
			t.Fatal(err)
		}
		list[0].(map[string]any)["resources"] = map[string]any{"limits": map[string]any{"nvidia.com/gpu": "1"}}
		if err := unstructured.SetNestedSlice(job.Object, list, at...); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNamespaceDefaultProfile(t *testing.T) {
	waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	name := newProfile(t, "of-the-namespace", evenkeel.NetworkProfileSpec{}).Name
	ns := newNamespace(t, map[string]string{evenkeel.DefaultProfileKey: name})
	user, heard := newUser(t)
	for what, test := range map[string]struct {
		kind        string
		gpus, owned bool
		annotations map[string]string
		want        string
	}{
		"a Job on GPUs":        {kind: "Job", gpus: true, want: name},
		"a PyTorchJob on GPUs": {kind: "PyTorchJob", gpus: true, want: name},
		"a Job on CPUs":        {kind: "Job"},
		"another profile":      {kind: "Job", gpus: true, annotations: map[string]string{evenkeel.ProfileKey: "default"}, want: "default"},
		"it declines":          {kind: "Job", gpus: true, annotations: map[string]string{evenkeel.ProfileKey: ""}},
		"a controller made it": {kind: "Job", gpus: true, owned: true},
	} {
		job, paths := newJob(test.kind, ns, "")
		job.SetName("")
		job.SetGenerateName("train-")
		job.SetAnnotations(test.annotations)
		if test.gpus {
			onGPUs(t, job, paths)
		}
		if test.owned {
			yes := true
			job.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "batch/v1", Kind: "CronJob", Name: "nightly", UID: "1", Controller: &yes}})
		}
		eventually(t, "the webhook knows the namespace", func(ctx context.Context) (bool, error) {
			probe := job.DeepCopy()
			heard.take()
			if err := user.Create(ctx, probe, client.DryRunAll); err != nil {
				return false, err
			}
			got := podOf(t, probe, paths[0]).Labels[evenkeel.ProfileKey]
			if got == test.want && test.want == name && !strings.Contains(strings.Join(heard.take(), "\n"), evenkeel.DefaultProfileKey) {
				t.Errorf("%s: no warning says why it is injected", what)
			}
			return got == test.want, nil
		})
	}
}

// TestUnsupportedAnnotationWarns: whoever annotates what Evenkeel does not inject is told at once, and not refused.
func TestUnsupportedAnnotationWarns(t *testing.T) {
	waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	ns := newNamespace(t, nil)
	asks := map[string]string{evenkeel.ProfileKey: "default"}
	spec := plainPod(ns).Spec
	spec.RestartPolicy = corev1.RestartPolicyAlways
	set := func(object, pods map[string]string) *appsv1.StatefulSet {
		s := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "train", Namespace: ns, Annotations: object}}
		s.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "train"}}
		s.Spec.Template = corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "train"}, Annotations: pods}, Spec: spec}
		return s
	}
	cron := &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Name: "nightly", Namespace: ns, Annotations: asks}}
	cron.Spec.Schedule = "0 0 * * *"
	cron.Spec.JobTemplate.Spec.Template.Spec = plainPod(ns).Spec
	cron.Spec.JobTemplate.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	pod := plainPod(ns)
	pod.Annotations = asks
	job, _ := newJob("Job", ns, "default")
	user, heard := newUser(t)
	for what, test := range map[string]struct {
		object client.Object
		kind   string
	}{
		"a StatefulSet":                       {set(asks, nil), "StatefulSet"},
		"the template of a StatefulSet":       {set(nil, asks), ""},
		"both":                                {set(asks, asks), ""},
		"a CronJob":                           {cron, "CronJob"},
		"a plain pod":                         {pod, ""},
		"a Job":                               {job, ""},
		"a StatefulSet that asks for nothing": {set(nil, nil), ""},
		"a ConfigMap":                         {&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "x", Namespace: ns}}, ""},
		"an injected pod":                     {labelledPod(ns), ""},
	} {
		heard.take()
		if err := user.Create(t.Context(), test.object, client.DryRunAll); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		text := strings.Join(heard.take(), "\n")
		if warned := strings.Contains(text, "has no effect on this "+test.kind+": its pods run without the plugin") && strings.Contains(text, "batch/jobs"); warned != (test.kind != "") {
			t.Errorf("%s: the warnings are %q", what, text)
		}
	}
	// The API server counts them, so that a platform team sees them too.
	clientset, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	text, err := clientset.RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?m)^apiserver_validating_admission_policy_check_total\{[^}]*enforcement_action="warn"[^}]*policy="evenkeel-unsupported"[^}]*\} [1-9]`).Match(text) {
		t.Error("the API server did not count the warnings")
	}
}

// TestAnnotatedPodTemplates: the pods of an owner of any kind get the profile as it was for the first of them.
func TestAnnotatedPodTemplates(t *testing.T) {
	profile := newProfile(t, "by-template", evenkeel.NetworkProfileSpec{Environment: []evenkeel.EnvironmentVariable{{Name: "GENERATION", Value: "first"}}})
	ns := newNamespace(t, nil)
	yes := true
	made := func(owner string) *corev1.Pod {
		pod := plainPod(ns)
		pod.Annotations = map[string]string{evenkeel.ProfileKey: profile.Name}
		if owner != "" {
			pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "ray.io/v1", Kind: "RayCluster", Name: owner, UID: types.UID(owner), Controller: &yes}}
		}
		return createPod(t, pod)
	}
	first := made("one")
	if first.Annotations[evenkeel.InjectedKey] == "" || variable(&first.Spec.Containers[0], "GENERATION") != "first" || variable(&first.Spec.Containers[0], "NCCL_NET_PLUGIN") == "" {
		t.Fatalf("annotations %v, variables %v", first.Annotations, first.Spec.Containers[0].Env)
	}
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(profile), profile); err != nil {
		t.Fatal(err)
	}
	profile.Spec.Environment[0].Value = "second"
	if err := admin.Update(t.Context(), profile); err != nil {
		t.Fatal(err)
	}
	eventually(t, "pods without an owner get the new profile", func(context.Context) (bool, error) {
		return variable(&made("").Spec.Containers[0], "GENERATION") == "second", nil
	})
	// Another webhook, or this one after a restart, knows the profile from the first pod only.
	if err := install.webhook.stop(); err != nil {
		t.Fatal(err)
	}
	var err error
	if install.webhook, err = install.startWebhook(); err != nil {
		t.Fatal(err)
	}
	for owner, want := range map[string]string{"one": "first", "two": "second"} {
		if got := variable(&made(owner).Spec.Containers[0], "GENERATION"); got != want {
			t.Errorf("a pod of %s has the %s profile, want the %s", owner, got, want)
		}
	}
	bad := plainPod(ns)
	bad.Annotations = map[string]string{evenkeel.ProfileKey: "defualt"}
	refused(t, admin.Create(t.Context(), bad), `no NetworkProfile is named "defualt"`)
}
