package preflight

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	realclock "k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/cli"
	"evenkeel.dev/evenkeel/operator/internal/kube/sweep"
	"evenkeel.dev/evenkeel/operator/internal/uninstall"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// cleanup does what the chart's hook does after everything else was deleted, with the hook's permissions.
func cleanup(t *testing.T) {
	t.Helper()
	hook, err := client.New(apiserver.As(config, namespace, "evenkeel-cleanup"), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	now := realclock.RealClock{}
	steps := append(uninstall.Gates(hook, now), uninstall.Leftovers(hook, now)...)
	var out bytes.Buffer
	if err := uninstall.Run(t.Context(), &out, now, append(steps, uninstall.Release{Namespace: namespace}.Checks(hook))...); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
}

func TestCleanupOpensEveryGate(t *testing.T) {
	var jobs []*unstructured.Unstructured
	for _, kind := range []string{"Job", "PyTorchJob"} {
		jobs = append(jobs, newJob(t, kind, "uninstall", nil))
	}
	mine := newJob(t, "Job", "uninstall", func(j *unstructured.Unstructured) {
		j.SetName("mine")
		j.SetLabels(nil)
	})
	pods := newHeldPods(t, "uninstall", 2)
	check := admissionCheck(t, "uninstall", "uninstall")
	w := reservedWorkload(t, "uninstall", "uninstall", "uninstall-0")
	for range 2 { // it may be started again
		cleanup(t)
		for _, job := range jobs {
			isState(t, job, started)
		}
		isState(t, mine, suspended)
		areOpen(t, pods)
		isAnswered(t, w, "uninstall", "Ready", "Evenkeel was uninstalled")
		isActive(t, check, "False", "Uninstalled")
	}
	// The check counts again once Evenkeel is back.
	start(t, newFleet(t, stuck), &clock{}, &clock{})
	isActive(t, check, "True", "NoPolicy")
}

// Whatever somebody else changes on a pod while its gate is opened stays, and a gate that is open is not opened again: the admission
// policy would refuse that.
func TestGateOfPodOpensOnce(t *testing.T) {
	pod := newHeldPods(t, "changes", 1)[0]
	c, err := client.New(apiserver.As(config, namespace, account), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	gateOf := func() sweep.Item {
		items, err := uninstall.Gates(c, realclock.RealClock{})[0].List(t.Context())
		if err != nil || len(items) != 1 {
			t.Fatalf("%d gates, %v", len(items), err)
		}
		return items[0]
	}
	old := gateOf()
	if err := admin.Patch(t.Context(), pod, client.RawPatch("application/merge-patch+json", []byte(`{"metadata": {"labels": {"mine": "kept"}}}`))); err != nil {
		t.Fatal(err)
	}
	if err := old.Remove(t.Context()); err != nil {
		t.Errorf("the pod has changed: %v", err)
	}
	now := gateOf()
	for range 2 {
		if err := now.Remove(t.Context()); err != nil {
			t.Error(err)
		}
	}
	areOpen(t, []*corev1.Pod{pod})
	if pod.Labels["mine"] != "kept" {
		t.Errorf("labels %v", pod.Labels)
	}
}

func TestCleanupClearsNodes(t *testing.T) {
	f := newFleet(t, links(map[string]float64{"cleanup-1": 0.1}))
	stop := start(t, f, &clock{}, &clock{})
	nodes := newNodes(t, "cleanup", 4)
	newPolicy(t, "cleanup", func(s *evenkeel.NetworkCheckPolicySpec) { s.OnFail.Taint = evenkeel.SwitchEnabled })
	carries(t, "cleanup-1", "False TooSlow|unhealthy|evenkeel.dev/network=unhealthy:NoSchedule")
	carries(t, "cleanup-0", "True Proven|healthy|")
	stop()
	other := []byte(`{"spec": {"taints": [{"key": "evenkeel.dev/network", "value": "unhealthy", "effect": "NoSchedule"}, {"key": "example.com/other", "effect": "NoExecute"}]}}`)
	if err := admin.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "cleanup-1"}}, client.RawPatch("application/merge-patch+json", other)); err != nil {
		t.Fatal(err)
	}
	for range 2 { // it may be started again
		cleanup(t)
		for _, n := range nodes {
			carries(t, n, "||")
		}
	}
	node := &corev1.Node{}
	if err := admin.Get(t.Context(), client.ObjectKey{Name: "cleanup-1"}, node); err != nil || len(node.Status.Conditions) != 1 || node.Labels["pool"] != "cleanup" || len(node.Spec.Taints) != 1 || node.Spec.Taints[0].Key != "example.com/other" {
		t.Errorf("%v: %+v", err, node)
	}
}

// newQueue makes a ClusterQueue that names AdmissionChecks.
func newQueue(t *testing.T, name string, checks ...string) *unstructured.Unstructured {
	t.Helper()
	list := ""
	for _, check := range checks {
		list += fmt.Sprintf("{name: %s}, ", check)
	}
	return kueueObject(t, fmt.Sprintf(`{apiVersion: kueue.x-k8s.io/v1beta2, kind: ClusterQueue, metadata: {name: %s}, spec: {admissionChecksStrategy: {admissionChecks: [%s]}}}`, name, list))
}

// Before anything is uninstalled, the chart's hook looks for queues, with an account that can do nothing else.
func TestHookBeforeUninstallNamesQueues(t *testing.T) {
	admissionCheck(t, "hooked", "hooked")
	newQueue(t, "hooked", "hooked")
	hook, err := client.New(apiserver.As(config, namespace, "evenkeel-cleanup-check"), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	queues, err := uninstall.Queues(hook).List(t.Context())
	if err != nil || !slices.ContainsFunc(queues, func(q sweep.Item) bool { return strings.HasPrefix(q.Name, "ClusterQueue hooked,") }) {
		t.Errorf("%v, %v", queues, err)
	}
	for _, list := range []client.ObjectList{&corev1.NodeList{}, &corev1.PodList{}, &corev1.SecretList{}} {
		if err := hook.List(t.Context(), list); !apierrors.IsForbidden(err) {
			t.Errorf("it can list a %T: %v", list, err)
		}
	}
}

// checksOf are the AdmissionChecks that a ClusterQueue names.
func checksOf(t *testing.T, queue *unstructured.Unstructured) string {
	t.Helper()
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(queue), queue); err != nil {
		t.Fatal(err)
	}
	list, _, err := unstructured.NestedSlice(queue.Object, "spec", "admissionChecksStrategy", "admissionChecks")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, item := range list {
		names = append(names, fmt.Sprint(item.(map[string]any)["name"]))
	}
	return strings.Join(names, " ")
}

// newRelease makes what another release of the chart installs, so that the others' permissions stay.
func newRelease(t *testing.T) (release string, objects []*unstructured.Unstructured) {
	t.Helper()
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	rendered, err := apiserver.Chart(root, "leaving-system", "--set", "fullnameOverride=leaving,crds.enabled=false,defaultProfile.spec.plugin.image="+pluginName, "--set-string", "nameOverride=leaving")
	if err != nil {
		t.Fatal(err)
	}
	if err := admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "leaving-system"}}); err != nil {
		t.Fatal(err)
	}
	for _, object := range rendered {
		labels := object.GetLabels()
		labels["app.kubernetes.io/instance"] = "leaving"
		object.SetLabels(labels)
		if object.GetAnnotations()["helm.sh/hook"] != "" {
			continue
		}
		if err := admin.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := admin.Delete(context.Background(), object); client.IgnoreNotFound(err) != nil {
				t.Error(err)
			}
		})
		objects = append(objects, object)
	}
	return "leaving", objects
}

func TestUninstallCommand(t *testing.T) {
	config := kubeconfig(t)
	job, pods := newJob(t, "PyTorchJob", "command", nil), newHeldPods(t, "command", 1)
	admissionCheck(t, "command", "command")
	theirs := kueueObject(t, `{apiVersion: kueue.x-k8s.io/v1beta2, kind: AdmissionCheck, metadata: {name: theirs}, spec: {controllerName: example.com/other}}`)
	w := reservedWorkload(t, "command", "command", "command-0")
	queue, other, alone := newQueue(t, "command", "command", "theirs"), newQueue(t, "elsewhere", "theirs"), newQueue(t, "alone", "command")
	release, objects := newRelease(t)
	running := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: "leaving-system", Name: "running"}}
	running.Spec.Nodes.Names = []string{"command-0", "command-1"}
	running.Spec.Runner = evenkeel.RunnerSpec{Type: evenkeel.RunnerBench}
	if err := admin.Create(t.Context(), running); err != nil {
		t.Fatal(err)
	}
	args := "uninstall -n leaving-system --release " + release
	untouched := func(when string) {
		t.Helper()
		for _, object := range objects {
			if err := admin.Get(t.Context(), client.ObjectKeyFromObject(object), object); err != nil {
				t.Errorf("%s: %v", when, err)
			}
		}
		if got, err := state(t.Context(), job); err != nil || got != waiting || checksOf(t, queue) != "command theirs" {
			t.Errorf("%s: the job is %s, %v; the queue names %s", when, got, err, checksOf(t, queue))
		}
	}
	plugin(t, config, cli.ExitRefused, args, "these would admit nothing without Evenkeel", "ClusterQueue command, which names command")
	untouched("a refused uninstall")
	plugin(t, config, cli.ExitRefused, args+" --dry-run", "ClusterQueue command, which names command", "gate of PyTorchJob default/pytorchjob-command", "Deployment leaving-system/leaving-controller", " more")
	untouched("a dry run")
	plugin(t, config, cli.ExitPass, args+" --dry-run --detach-queues", "ClusterQueue command, which names command")
	untouched("a dry run")
	plugin(t, config, cli.ExitError, args+" --detach-queues --timeout 1ns", "rerun to continue")
	// Before anything is opened, what is left of the admission policies refuses no pod.
	var out bytes.Buffer
	if err := uninstall.Run(t.Context(), &out, realclock.RealClock{}, uninstall.Release{Name: release, Namespace: "leaving-system"}.Stop(admin)...); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	bindings := 0
	for _, object := range objects {
		if object.GetKind() == "ValidatingAdmissionPolicyBinding" {
			bindings++
			if err := admin.Get(t.Context(), client.ObjectKeyFromObject(object), object.DeepCopy()); client.IgnoreNotFound(err) != nil || err == nil {
				t.Errorf("binding %s is left: %v", object.GetName(), err)
			}
		}
	}
	if bindings == 0 {
		t.Error("the release has no binding")
	}
	for range 2 { // it may be started again
		plugin(t, config, cli.ExitPass, args+" --detach-queues", "nothing waits for Evenkeel any more")
		isState(t, job, started)
		areOpen(t, pods)
		isAnswered(t, w, "command", "Ready", "Evenkeel was uninstalled")
		if left := checksOf(t, queue) + ", " + checksOf(t, other) + ", " + checksOf(t, alone); left != "theirs, theirs, " {
			t.Errorf("the queues name %s", left)
		}
		for _, object := range objects {
			if err := admin.Get(t.Context(), client.ObjectKeyFromObject(object), object.DeepCopy()); client.IgnoreNotFound(err) != nil || err == nil {
				t.Errorf("%s %s is left: %v", object.GetKind(), object.GetName(), err)
			}
		}
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(running), running); client.IgnoreNotFound(err) != nil || err == nil {
			t.Errorf("a check runs on: %v", err)
		}
	}
	if conditions, found, err := unstructured.NestedSlice(theirs.Object, "status", "conditions"); err != nil || found {
		t.Errorf("the check of another: %v, %v", conditions, err)
	}
	// The permissions of another release, and the CRDs, are not touched.
	if err := admin.Get(t.Context(), client.ObjectKey{Name: "default"}, &evenkeel.NetworkProfile{}); err != nil {
		t.Errorf("the profile: %v", err)
	}
	role := &unstructured.Unstructured{}
	role.SetAPIVersion("rbac.authorization.k8s.io/v1")
	role.SetKind("ClusterRole")
	if err := admin.Get(t.Context(), client.ObjectKey{Name: account}, role); err != nil {
		t.Errorf("the role of another release: %v", err)
	}
}

// TestCleanupScale cleans as many nodes as -scale says, and counts the requests. Of a large cluster it is measured how long that
// takes; see the log.
func TestCleanupScale(t *testing.T) {
	const parallel = 50
	names := make(chan int)
	var workers sync.WaitGroup
	taints := []corev1.Taint{{Key: evenkeel.HealthKey, Value: evenkeel.UnhealthyValue, Effect: corev1.TaintEffectNoSchedule}, {Key: "example.com/other", Effect: corev1.TaintEffectNoExecute}}
	fast := rest.CopyConfig(config)
	fast.QPS = -1
	maker, err := client.New(fast, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	for range parallel {
		workers.Go(func() {
			for i := range names {
				node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("clean-%04d", i), Labels: map[string]string{"pool": "clean", evenkeel.HealthKey: evenkeel.UnhealthyValue}}}
				node.Spec.Taints = taints
				if err := maker.Create(t.Context(), node); err != nil {
					t.Error(err)
					continue
				}
				node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}, {Type: evenkeel.ConditionNodeHealthy, Status: corev1.ConditionFalse}}
				if err := maker.Status().Update(t.Context(), node); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range *scale {
		names <- i
	}
	close(names)
	workers.Wait()
	t.Cleanup(func() {
		if err := maker.DeleteAllOf(context.Background(), &corev1.Node{}, client.MatchingLabels{"pool": "clean"}); err != nil {
			t.Error(err)
		}
	})

	writes, took := cleanNodes(t)
	t.Logf("%d nodes with condition, label and taint: %d writes, %s", *scale, writes, took.Round(100*time.Millisecond))
	if most := int64(2**scale + 2); writes > most {
		t.Errorf("%d writes for %d nodes, want two for each", writes, *scale)
	}
	var nodes corev1.NodeList
	if err := maker.List(t.Context(), &nodes, client.MatchingLabels{"pool": "clean"}); err != nil || len(nodes.Items) != *scale {
		t.Fatalf("%d nodes, %v", len(nodes.Items), err)
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		keys := map[string]bool{} // the API server adds one of its own
		for _, taint := range n.Spec.Taints {
			keys[taint.Key] = true
		}
		if n.Labels[evenkeel.HealthKey] != "" || keys[evenkeel.HealthKey] || !keys["example.com/other"] || len(n.Status.Conditions) != 1 {
			t.Fatalf("%s: labels %v, taints %v, conditions %v", n.Name, n.Labels, n.Spec.Taints, n.Status.Conditions)
		}
	}
}

// cleanNodes removes everything of ours, as the chart's hook does with its permissions. It returns the number of writes, and the time.
func cleanNodes(t *testing.T) (writes int64, took time.Duration) {
	t.Helper()
	account := apiserver.As(config, namespace, "evenkeel-cleanup")
	account.QPS = -1
	var requests atomic.Int64
	account.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.Method == http.MethodPatch {
				requests.Add(1)
			}
			return next.RoundTrip(r)
		})
	})
	hook, err := client.New(account, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	now := realclock.RealClock{}
	var out bytes.Buffer
	began := time.Now()
	if err := uninstall.Run(t.Context(), &out, now, append(uninstall.Gates(hook, now), uninstall.Leftovers(hook, now)...)...); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	return requests.Load(), time.Since(began)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
