package preflight

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate/suspend"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/workload"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// users is where jobs are: not where checks run.
const users = "default"

// newJob makes a job as the webhook leaves a gated one, for the pool's nodes; it goes with the test.
func newJob(t *testing.T, kind, pool string, change func(*unstructured.Unstructured)) *unstructured.Unstructured {
	t.Helper()
	template := map[string]any{"spec": map[string]any{
		"restartPolicy": "Never", "nodeSelector": map[string]any{"pool": pool},
		"containers": []any{map[string]any{"name": "pytorch", "image": "registry.example.com/train:1"}},
	}}
	job := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "batch/v1", "kind": "Job", "spec": map[string]any{"parallelism": int64(4), "completions": int64(4), "template": template}}}
	if kind == "PyTorchJob" {
		job.Object = map[string]any{"apiVersion": "kubeflow.org/v1", "kind": kind, "spec": map[string]any{
			"pytorchReplicaSpecs": map[string]any{"Worker": map[string]any{"replicas": int64(4), "template": template}},
		}}
	}
	job.SetNamespace(users)
	job.SetName(strings.ToLower(kind) + "-" + pool)
	job.SetAnnotations(map[string]string{evenkeel.ProfileKey: "default"})
	job.SetLabels(map[string]string{evenkeel.GatedKey: evenkeel.GatedValue})
	if err := workload.Suspend(job, true); err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(job)
	}
	if err := admin.Create(t.Context(), job); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := admin.Delete(context.Background(), job, client.PropagationPolicy(metav1.DeletePropagationBackground)); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	return job
}

// state is how a job is: whether it is suspended, and whether it carries the gate's label.
func state(ctx context.Context, job *unstructured.Unstructured) (string, error) {
	if err := admin.Get(ctx, client.ObjectKeyFromObject(job), job); err != nil {
		return "", err
	}
	suspended, _ := workload.Suspended(job)
	_, gated := job.GetLabels()[evenkeel.GatedKey]
	return fmt.Sprintf("suspended %t, gated %t", suspended, gated), nil
}

const (
	waiting   = "suspended true, gated true"
	started   = "suspended false, gated false"
	suspended = "suspended true, gated false"
)

func isState(t *testing.T, job *unstructured.Unstructured, want string) {
	t.Helper()
	got := ""
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s was last seen %s; Events: %v", job.GetName(), got, eventsOf(t, job))
		}
	})
	eventually(t, fmt.Sprintf("%s is %s", job.GetName(), want), func(ctx context.Context) (bool, error) {
		var err error
		got, err = state(ctx, job)
		return got == want, err
	})
}

// eventsOf returns the Events about an object: reason and message.
func eventsOf(t *testing.T, about client.Object) map[string]string {
	t.Helper()
	var list corev1.EventList
	if err := admin.List(context.Background(), &list, client.InNamespace(about.GetNamespace())); err != nil {
		t.Fatal(err)
	}
	events := map[string]string{}
	for _, e := range list.Items {
		if e.InvolvedObject.UID == about.GetUID() {
			events[e.Reason] += e.Type + ": " + e.Message + "\n"
		}
	}
	return events
}

func isTold(t *testing.T, about client.Object, reason, part string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s has the Event %s: %s", about.GetName(), reason, part), func(context.Context) (bool, error) {
		return strings.Contains(eventsOf(t, about)[reason], part), nil
	})
}

// trigger makes the controller read the clock. Its own timer would take as long as the timeout.
func trigger(t *testing.T, job client.Object) {
	t.Helper()
	patch := fmt.Sprintf(`{"metadata": {"annotations": {"look": "%d"}}}`, time.Now().UnixNano())
	if err := admin.Patch(t.Context(), job, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
		t.Fatal(err)
	}
}

// onStart makes a policy that gates jobs and checks for nothing else.
func onStart(change func(*evenkeel.NetworkCheckPolicySpec)) func(*evenkeel.NetworkCheckPolicySpec) {
	return func(s *evenkeel.NetworkCheckPolicySpec) {
		s.Triggers.JobStart, s.Triggers.NewNodes = evenkeel.SwitchEnabled, evenkeel.SwitchDisabled
		if change != nil {
			change(s)
		}
	}
}

// stuck is a fleet whose runs never end.
func stuck([]string) ending { return ending{running: true} }

func TestGateOpensWhenNodesAreProven(t *testing.T) {
	for _, kind := range []string{"Job", "PyTorchJob"} {
		pool := "gate-" + strings.ToLower(kind)
		t.Run(kind, func(t *testing.T) {
			bad := pool + "-1"
			start(t, newFleet(t, links(map[string]float64{bad: 0.1})), &clock{}, &clock{})
			newNodes(t, pool, 4)
			newNode(t, pool+"-elsewhere", "elsewhere")
			p := newPolicy(t, pool, onStart(func(s *evenkeel.NetworkCheckPolicySpec) { s.NodeSelector = nil }))
			mine := newJob(t, kind, pool, nil)
			theirs := newJob(t, kind, pool+"-x", func(j *unstructured.Unstructured) { j.SetLabels(nil) })
			isState(t, mine, started)
			isTold(t, mine, gate.ReasonChecking, pool+"-0, "+bad)
			isTold(t, mine, gate.ReasonProven, "3 nodes that it may run on is proven, that of "+bad+" failed")
			// Its pods avoid the bad node by the label, so that has to be there first.
			if got, err := carried(t.Context(), bad); err != nil || got != "False TooSlow|unhealthy|" {
				t.Errorf("the job started, and %s carries %q %v", bad, got, err)
			}
			checks := policyChecks(t, p)
			if len(checks) != 1 || !strings.HasPrefix(checks[0].Name, pool+"-job-") || slices.Contains(checks[0].Spec.Nodes.Names, pool+"-elsewhere") {
				t.Errorf("checks %+v", checks)
			}
			if got, err := state(t.Context(), theirs); err != nil || got != suspended {
				t.Errorf("a job that its user suspended is %s, %v", got, err)
			}

			// All verdicts are fresh now.
			next := newJob(t, kind, pool, func(j *unstructured.Unstructured) { j.SetName("next-" + pool) })
			isState(t, next, started)
			if n := len(policyChecks(t, p)); n != 1 || eventsOf(t, next)[gate.ReasonChecking] != "" {
				t.Errorf("%d checks, and the Events of the second job are %v", n, eventsOf(t, next))
			}
		})
	}
}

// A small job starts although ten others wait, whose checks do not end.
func TestGateOpensBesideWaitingJobs(t *testing.T) {
	start(t, newFleet(t, func(nodes []string) ending {
		if strings.HasPrefix(nodes[0], "crowd-quick") {
			return links(nil)(nodes)
		}
		return stuck(nodes)
	}), &clock{}, &clock{})
	slow, quick := newNodes(t, "crowd-slow", 20), newNodes(t, "crowd-quick", 6)
	giveGPUs(t, 8, slow...)
	giveGPUs(t, 8, quick...)
	newPolicy(t, "crowd", onStart(func(s *evenkeel.NetworkCheckPolicySpec) {
		s.NodeSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "pool", Operator: metav1.LabelSelectorOpIn, Values: []string{"crowd-slow", "crowd-quick"}}}}
	}))
	two := func(name string) func(*unstructured.Unstructured) {
		return func(j *unstructured.Unstructured) {
			j.SetName(name)
			worker := []string{"spec", "pytorchReplicaSpecs", "Worker"}
			containers := []any{map[string]any{"name": "pytorch", "image": "registry.example.com/train:1", "resources": map[string]any{"limits": map[string]any{"nvidia.com/gpu": "8"}}}}
			if err := errors.Join(unstructured.SetNestedField(j.Object, int64(2), append(worker, "replicas")...),
				unstructured.SetNestedSlice(j.Object, containers, append(worker, "template", "spec", "containers")...)); err != nil {
				t.Fatal(err)
			}
		}
	}
	var others []*unstructured.Unstructured
	for i := range 10 {
		others = append(others, newJob(t, "PyTorchJob", "crowd-slow", two(fmt.Sprintf("crowd-slow-%d", i))))
	}
	isTold(t, others[0], gate.ReasonChecking, "runs")
	job := newJob(t, "PyTorchJob", "crowd-quick", two("crowd-quick"))
	isState(t, job, started)
	isTold(t, job, gate.ReasonProven, "does not wait for the others")
	for _, other := range others {
		if got, err := state(t.Context(), other); err != nil || got != waiting {
			t.Errorf("%s is %s, %v", other.GetName(), got, err)
		}
	}
}

func TestGateTimeout(t *testing.T) {
	calendar := &clock{}
	start(t, newFleet(t, stuck), &clock{}, calendar)
	newNodes(t, "patient", 2)
	newNodes(t, "steadfast", 2)
	newPolicy(t, "patient", onStart(func(s *evenkeel.NetworkCheckPolicySpec) { limit := int32(600); s.Gate.TimeoutSeconds = &limit }))
	newPolicy(t, "steadfast", onStart(func(s *evenkeel.NetworkCheckPolicySpec) {
		limit := int32(600)
		s.Gate.TimeoutSeconds, s.Gate.OnTimeout = &limit, evenkeel.GateWait
	}))
	patient, steadfast := newJob(t, "Job", "patient", nil), newJob(t, "Job", "steadfast", nil)
	isTold(t, patient, gate.ReasonChecking, "runs")
	isTold(t, steadfast, gate.ReasonChecking, "runs")
	calendar.advance(11 * time.Minute)
	trigger(t, steadfast)
	isState(t, patient, started)
	isTold(t, patient, gate.ReasonNotProven, "Warning: starts although its nodes are not proven, as it waited for 10m0s")
	if got, err := state(t.Context(), steadfast); err != nil || got != waiting {
		t.Errorf("the job that has to wait is %s, %v", got, err)
	}
}

func TestGateOpensWhenPolicyIsDeleted(t *testing.T) {
	start(t, newFleet(t, stuck), &clock{}, &clock{})
	newNodes(t, "leaving", 2)
	p := newPolicy(t, "leaving", onStart(nil))
	job := newJob(t, "PyTorchJob", "leaving", nil)
	isTold(t, job, gate.ReasonChecking, "runs")
	if err := admin.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	isState(t, job, started)
	isTold(t, job, gate.ReasonNothingToCheck, "none of the nodes")
}

func TestGateControllerRestart(t *testing.T) {
	var released atomic.Bool
	f := newFleet(t, func(nodes []string) ending {
		if released.Load() {
			return links(nil)(nodes)
		}
		return stuck(nodes)
	})
	stop := start(t, f, &clock{}, &clock{})
	newNodes(t, "restart", 2)
	p := newPolicy(t, "restart", onStart(nil))
	job := newJob(t, "Job", "restart", nil)
	isTold(t, job, gate.ReasonChecking, "runs")
	stop()
	if got, err := state(t.Context(), job); err != nil || got != waiting {
		t.Errorf("without a controller the job is %s, %v", got, err)
	}
	released.Store(true)
	start(t, f, &clock{}, &clock{})
	isState(t, job, started)
	if checks := policyChecks(t, p); len(checks) != 1 {
		t.Errorf("%d checks", len(checks))
	}
}

func TestGateLeavesJobsOfOthers(t *testing.T) {
	start(t, newFleet(t, stuck), &clock{}, &clock{})
	newNodes(t, "others", 2)
	newPolicy(t, "others", onStart(nil))
	queued := newJob(t, "Job", "others", func(j *unstructured.Unstructured) {
		j.SetName("queued")
		j.SetLabels(map[string]string{evenkeel.GatedKey: evenkeel.GatedValue, "kueue.x-k8s.io/queue-name": "team"})
	})
	isState(t, queued, suspended)
	job := newJob(t, "PyTorchJob", "others", nil)
	isTold(t, job, gate.ReasonChecking, "runs")
	if err := admin.Patch(t.Context(), job, client.RawPatch("application/merge-patch+json", []byte(`{"spec": {"runPolicy": {"suspend": false}}}`))); err != nil {
		t.Fatal(err)
	}
	isState(t, job, started)
	isTold(t, job, suspend.ReasonOpenedManually, "before its nodes were proven")
}

// newHeldPods makes pods as the webhook leaves those of a job that cannot be suspended.
func newHeldPods(t *testing.T, pool string, count int) []*corev1.Pod {
	t.Helper()
	return newHeldPodsIn(t, users, pool, count)
}

func newHeldPodsIn(t *testing.T, namespace, pool string, count int, change ...func(*corev1.Pod)) []*corev1.Pod {
	t.Helper()
	yes := true
	var pods []*corev1.Pod
	for i := range count {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: fmt.Sprintf("%s-%d", pool, i),
				Labels:          map[string]string{evenkeel.GatedKey: evenkeel.GatedValue, evenkeel.ProfileKey: "default"},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "batch.volcano.sh/v1alpha1", Kind: "Job", Name: pool, UID: "00000000-0000-0000-0000-000000000001", Controller: &yes}},
			},
			Spec: corev1.PodSpec{
				NodeSelector:    map[string]string{"pool": pool},
				SchedulingGates: []corev1.PodSchedulingGate{{Name: "example.com/another"}, {Name: evenkeel.SchedulingGate}},
				Containers:      []corev1.Container{{Name: "main", Image: "registry.example.com/train:1"}},
			},
		}
		for _, f := range change {
			f(pod)
		}
		if err := admin.Create(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := admin.Delete(context.Background(), pod, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
				t.Error(err)
			}
		})
		pods = append(pods, pod)
	}
	return pods
}

func areOpen(t *testing.T, pods []*corev1.Pod) {
	t.Helper()
	for _, pod := range pods {
		eventually(t, pod.Name+" has the gates of others only", func(ctx context.Context) (bool, error) {
			err := admin.Get(ctx, client.ObjectKeyFromObject(pod), pod)
			return len(pod.Spec.SchedulingGates) == 1 && pod.Spec.SchedulingGates[0].Name == "example.com/another" && pod.Labels[evenkeel.GatedKey] == "", err
		})
	}
}

func TestGateOfPodsOpensWhenNodesAreProven(t *testing.T) {
	start(t, newFleet(t, links(nil)), &clock{}, &clock{})
	newNodes(t, "podgate", 2)
	p := newPolicy(t, "podgate", onStart(nil))
	pods := newHeldPods(t, "podgate", 2)
	areOpen(t, pods)
	carries(t, "podgate-0", "True Proven|healthy|")
	if n := len(policyChecks(t, p)); n != 1 {
		t.Errorf("%d checks", n)
	}
}

// The controller has little of a gated pod in memory, and changes nothing of it but its gate.
func TestGateOpenLeavesRestOfPod(t *testing.T) {
	start(t, newFleet(t, links(nil)), &clock{}, &clock{})
	newNodes(t, "podrest", 2)
	newPolicy(t, "podrest", onStart(nil))
	pods := newHeldPodsIn(t, users, "podrest", 2, func(pod *corev1.Pod) {
		pod.Labels["example.com/team"], pod.Annotations = "a", map[string]string{evenkeel.InjectedKey: "0123", "example.com/note": "b"}
		pod.Finalizers = []string{"example.com/finalizer"}
		pod.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		pod.Spec.InitContainers = []corev1.Container{{Name: "first", Image: "registry.example.com/first:1", Command: []string{"c"}}}
		pod.Spec.Tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
		main := &pod.Spec.Containers[0]
		main.Env, main.VolumeMounts = []corev1.EnvVar{{Name: "D", Value: "e"}}, []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
		main.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}
		main.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"f"}}}}
	})
	for _, pod := range pods { // so that they can be deleted
		t.Cleanup(func() {
			if err := admin.Patch(context.Background(), pod, client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"finalizers": null}}`))); client.IgnoreNotFound(err) != nil {
				t.Error(err)
			}
		})
	}
	before := []*corev1.Pod{pods[0].DeepCopy(), pods[1].DeepCopy()}
	areOpen(t, pods)
	for i, pod := range pods {
		before[i].Spec.SchedulingGates = pod.Spec.SchedulingGates // areOpen has looked at them
		delete(before[i].Labels, evenkeel.GatedKey)
		for what, diff := range map[string]string{
			"spec": cmp.Diff(before[i].Spec, pod.Spec), "labels": cmp.Diff(before[i].Labels, pod.Labels), "annotations": cmp.Diff(before[i].Annotations, pod.Annotations),
			"owners": cmp.Diff(before[i].OwnerReferences, pod.OwnerReferences), "finalizers": cmp.Diff(before[i].Finalizers, pod.Finalizers),
		} {
			if diff != "" {
				t.Errorf("the gate of %s is open, and its %s has changed (-before +after):\n%s", pod.Name, what, diff)
			}
		}
	}
}

// gangPod makes a pod as the webhook leaves one whose own annotation asked for a profile, with an owner of the name and the labels.
func gangPod(t *testing.T, name string, pools []string, owner metav1.OwnerReference, labels map[string]string) *corev1.Pod {
	t.Helper()
	yes := true
	owner.Controller = &yes
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name, Labels: map[string]string{evenkeel.GatedKey: evenkeel.GatedValue, evenkeel.ProfileKey: "default"}, OwnerReferences: []metav1.OwnerReference{owner}},
		Spec: corev1.PodSpec{
			SchedulingGates: []corev1.PodSchedulingGate{{Name: "example.com/another"}, {Name: evenkeel.SchedulingGate}},
			Containers:      []corev1.Container{{Name: "main", Image: "registry.example.com/train:1"}},
			Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "pool", Operator: corev1.NodeSelectorOpIn, Values: pools}}}},
			}}},
		},
	}
	maps.Copy(pod.Labels, labels)
	if err := admin.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := admin.Delete(context.Background(), pod, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	return pod
}

// The children of a JobSet start together: the first does not take the nodes that are proven while the second waits for others.
func TestGateOfGangOpensWhole(t *testing.T) {
	var released atomic.Bool
	// With the usual delays, the gang settles after all four pods exist, even on a busy machine.
	f := newFleet(t, func(nodes []string) ending {
		if released.Load() || strings.HasPrefix(nodes[0], "gang-quick") {
			return links(nil)(nodes)
		}
		return stuck(nodes)
	})
	controllers{logs: f, clock: &clock{}, calendar: &clock{}, delays: 1}.start(t)
	newNodes(t, "gang-quick", 2)
	pools := []string{"gang-quick", "gang-slow"}
	newPolicy(t, "gang", onStart(func(s *evenkeel.NetworkCheckPolicySpec) {
		s.NodeSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "pool", Operator: metav1.LabelSelectorOpIn, Values: pools}}}
		s.Gate.OnTimeout = evenkeel.GateWait
	}))
	isState(t, newJob(t, "Job", "gang-quick", nil), started)
	newNodes(t, "gang-slow", 2)

	set := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: "llama", UID: "00000000-0000-0000-0000-00000000005e"}}
	var pods []*corev1.Pod
	for _, child := range []string{"gang-a", "gang-b"} {
		for i := range 2 {
			owner := metav1.OwnerReference{APIVersion: "batch/v1", Kind: "Job", Name: child, UID: types.UID(child)}
			pods = append(pods, gangPod(t, fmt.Sprintf("%s-%d", child, i), pools, owner, map[string]string{"jobset.sigs.k8s.io/jobset-name": set.Name, "jobset.sigs.k8s.io/jobset-uid": string(set.UID)}))
		}
	}
	isTold(t, set, gate.ReasonChecking, "gang-slow-0, gang-slow-1")
	for _, pod := range pods {
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(pod), pod); err != nil || len(pod.Spec.SchedulingGates) != 2 {
			t.Errorf("%s: %v, its gates are %v", pod.Name, err, pod.Spec.SchedulingGates)
		}
	}
	released.Store(true)
	areOpen(t, pods)
}

// asWriters runs the test with the permissions of each account that writes what is others'.
func asWriters(t *testing.T, test func(t *testing.T, writer client.Client)) {
	t.Helper()
	for _, name := range []string{account, "evenkeel-cleanup"} {
		t.Run(name, func(t *testing.T) {
			writer, err := client.New(apiserver.As(config, namespace, name), client.Options{Scheme: scheme})
			if err != nil {
				t.Fatal(err)
			}
			test(t, writer)
		})
	}
}

func TestGateGuardLimitsController(t *testing.T) {
	asWriters(t, func(t *testing.T, writer client.Client) {
		patch := func(object client.Object, text string) error {
			return writer.Patch(t.Context(), object.DeepCopyObject().(client.Object), client.RawPatch("application/merge-patch+json", []byte(text)))
		}
		strategic := func(object client.Object, text string) error {
			return writer.Patch(t.Context(), object.DeepCopyObject().(client.Object), client.RawPatch("application/strategic-merge-patch+json", []byte(text)))
		}
		pods := newHeldPods(t, "gateguard", 1)
		eventually(t, "the API server has read the policy", func(ctx context.Context) (bool, error) {
			err := writer.Patch(ctx, pods[0].DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"metadata": {"annotations": {"a": "b"}}}`)), client.DryRunAll)
			return err != nil, nil
		})
		gated := newJob(t, "PyTorchJob", "gateguard", nil)
		running := newJob(t, "PyTorchJob", "gateguard", func(j *unstructured.Unstructured) {
			j.SetName("running")
			if err := workload.Suspend(j, false); err != nil {
				t.Fatal(err)
			}
		})
		mine := newJob(t, "Job", "gateguard", func(j *unstructured.Unstructured) { j.SetLabels(nil) })
		for name, test := range map[string]struct {
			want string
			err  error
		}{
			"a job that is not gated":  {"only while they are gated", patch(mine, `{"spec": {"suspend": false}}`)},
			"another label":            {"evenkeel.dev/gated only", patch(gated, `{"metadata": {"labels": {"a": "b"}}}`)},
			"annotations":              {"annotations", patch(gated, `{"metadata": {"annotations": {"evenkeel.dev/profile": null}}}`)},
			"finalizers":               {"finalizers", patch(gated, `{"metadata": {"finalizers": ["example.com/a"]}}`)},
			"owners":                   {"owners", patch(gated, `{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "gone", "uid": "x"}]}}`)},
			"the owner of a gated pod": {"owners", patch(pods[0], `{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "gone", "uid": "x"}]}}`)},
			"an image":                 {"suspend", strategic(pods[0], `{"spec": {"containers": [{"name": "main", "image": "miner:1"}]}}`)},
			"the templates":            {"suspend", patch(gated, `{"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 1}}}}`)},
			"the rest of the policy":   {"suspend", patch(gated, `{"spec": {"runPolicy": {"backoffLimit": 3}}}`)},
			"suspending what runs":     {"may not suspend", patch(running, `{"spec": {"runPolicy": {"suspend": true}}}`)},
			"the gates of others":      {"its own only", patch(pods[0], `{"spec": {"schedulingGates": null}}`)},
			"a pod's nodes":            {"suspend", patch(pods[0], `{"spec": {"nodeSelector": {"a": "b"}}}`)},
			"the label of a gated pod": {"evenkeel.dev/gated only", patch(pods[0], `{"metadata": {"labels": {"evenkeel.dev/profile": "other"}}}`)},
		} {
			if test.err == nil || !strings.Contains(test.err.Error(), test.want) || !strings.Contains(test.err.Error(), "ValidatingAdmissionPolicy") {
				t.Errorf("%s: %v", name, test.err)
			}
		}
		if err := patch(gated, `{"metadata": {"labels": {"evenkeel.dev/gated": null}}, "spec": {"runPolicy": {"suspend": false}}}`); err != nil {
			t.Errorf("opening a gate: %v", err)
		}
	})
}
