package preflight

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// newPolicy makes a policy for the pool's nodes, which goes with the test, and its checks with it.
func newPolicy(t *testing.T, pool string, change func(*evenkeel.NetworkCheckPolicySpec)) *evenkeel.NetworkCheckPolicy {
	t.Helper()
	p := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: pool}}
	p.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"pool": pool}}
	p.Spec.Check.Stages = []evenkeel.Stage{evenkeel.StagePairs}
	p.Spec.Check.PoolLabel = "pool"
	p.Spec.Check.Runner = evenkeel.RunnerSpec{Type: evenkeel.RunnerBench, Launcher: evenkeel.LauncherIndexedJob}
	hundred := int32(100)
	p.Spec.OnFail.MaxUnhealthyPercent = &hundred
	if change != nil {
		change(&p.Spec)
	}
	if err := admin.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := admin.Delete(context.Background(), p); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
		// The garbage collector would do this.
		if err := admin.DeleteAllOf(context.Background(), &evenkeel.NetworkCheck{}, client.InNamespace(namespace), client.MatchingLabels{evenkeel.PolicyKey: p.Name}); err != nil {
			t.Error(err)
		}
	})
	return p
}

// carried is what a node carries, in a line: condition, label, taint.
func carried(ctx context.Context, name string) (string, error) {
	node := &corev1.Node{}
	if err := admin.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return "", err
	}
	condition, taint := "", ""
	for _, c := range node.Status.Conditions {
		if c.Type == evenkeel.ConditionNodeHealthy {
			condition = string(c.Status) + " " + c.Reason
		}
	}
	for _, x := range node.Spec.Taints {
		if x.Key == evenkeel.HealthKey {
			taint = x.ToString()
		}
	}
	return strings.Join([]string{condition, node.Labels[evenkeel.HealthKey], taint}, "|"), nil
}

func carries(t *testing.T, name, want string) {
	t.Helper()
	eventually(t, fmt.Sprintf("node %s carries %q", name, want), func(ctx context.Context) (bool, error) {
		got, err := carried(ctx, name)
		return got == want, err
	})
}

func policyChecks(t *testing.T, p *evenkeel.NetworkCheckPolicy) []evenkeel.NetworkCheck {
	t.Helper()
	var list evenkeel.NetworkCheckList
	if err := admin.List(t.Context(), &list, client.InNamespace(namespace), client.MatchingLabels{evenkeel.PolicyKey: p.Name}); err != nil {
		t.Fatal(err)
	}
	return list.Items
}

func waitPolicy(t *testing.T, p *evenkeel.NetworkCheckPolicy, what string, wanted func() bool) {
	t.Helper()
	eventually(t, what, func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKeyFromObject(p), p)
		return err == nil && wanted(), err
	})
}

func TestPolicyChecksAndLabelsNewNodes(t *testing.T) {
	f := newFleet(t, links(map[string]float64{"marks-1": 0.1}))
	start(t, f, &clock{}, &clock{})
	nodes := newNodes(t, "marks", 4)
	p := newPolicy(t, "marks", func(s *evenkeel.NetworkCheckPolicySpec) { s.OnFail.Taint = evenkeel.SwitchEnabled })
	carries(t, "marks-1", "False TooSlow|unhealthy|evenkeel.dev/network=unhealthy:NoSchedule")
	for _, good := range []string{"marks-0", "marks-2", "marks-3"} {
		carries(t, good, "True Proven|healthy|")
	}
	waitPolicy(t, p, "the policy counts its nodes", func() bool {
		return p.Status.RunningCheck == "" && p.Status.Healthy != nil && *p.Status.Healthy == 3 && *p.Status.Unhealthy == 1 && p.Status.BadNodes == "marks-1"
	})
	if ready := meta.FindStatusCondition(p.Status.Conditions, evenkeel.ConditionReady); ready == nil || ready.Status != metav1.ConditionTrue || ready.Message != "3 of 4 nodes are healthy" {
		t.Errorf("%+v", ready)
	}
	if checks := policyChecks(t, p); len(checks) != 1 {
		t.Errorf("%d checks for one set of new nodes", len(checks))
	}
	state := &evenkeel.NodeNetworkHealth{}
	if err := admin.Get(t.Context(), client.ObjectKey{Name: "marks-1"}, state); err != nil {
		t.Fatal(err)
	}
	if state.Status.Health != evenkeel.HealthUnhealthy || len(state.Status.History) != 1 || state.Status.BusBandwidth.String() != "100M" || state.OwnerReferences[0].Kind != "Node" {
		t.Errorf("%+v", state)
	}
	if m := state.Status.Measured; m.LatencyMicroseconds == nil || *m.LatencyMicroseconds != 30 || m.Devices == nil || *m.Devices != 1 || m.ProfileName != p.Spec.Check.WithDefaults().ProfileName {
		t.Errorf("%+v", m)
	}
	if err := admin.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		carries(t, n, "||")
	}
}

func TestPolicyLeavesWindowsNodesAlone(t *testing.T) {
	f := newFleet(t, links(nil))
	start(t, f, &clock{}, &clock{})
	newNodes(t, "mixed", 5)
	windows := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "mixed-4"}}
	if err := admin.Patch(t.Context(), windows, client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"labels": {"kubernetes.io/os": "windows"}}}`))); err != nil {
		t.Fatal(err)
	}
	p := newPolicy(t, "mixed", nil)
	waitPolicy(t, p, "the four others are healthy", func() bool {
		return p.Status.RunningCheck == "" && p.Status.Healthy != nil && *p.Status.Healthy == 4 && *p.Status.Nodes == 4
	})
	carries(t, "mixed-4", "||")
	check := newCheck(t, "mixed", nil)
	eventually(t, "a check by their labels has ended", func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKeyFromObject(check), check)
		return meta.IsStatusConditionTrue(check.Status.Conditions, evenkeel.ConditionComplete), err
	})
	if s := check.Status.Summary; *s.Nodes != 4 || *s.Passed != 4 {
		t.Errorf("%+v", check.Status)
	}
}

func TestPolicyClearsRepairedNode(t *testing.T) {
	var repaired atomic.Bool
	f := newFleet(t, func(nodes []string) ending {
		if repaired.Load() {
			return links(nil)(nodes)
		}
		return links(map[string]float64{"repair-0": 0.1})(nodes)
	})
	now := &clock{}
	start(t, f, now, now)
	newNodes(t, "repair", 4)
	p := newPolicy(t, "repair", func(s *evenkeel.NetworkCheckPolicySpec) {
		one, long := int32(1), int32(86400) // Jobs are made by the API server's clock
		s.Check.RunTimeoutSeconds = &long
		s.Triggers.Schedule, s.Triggers.TimeZone, s.History = "@hourly", "Europe/Berlin", &one
	})
	carries(t, "repair-0", "False TooSlow|unhealthy|")
	repaired.Store(true)
	waitPolicy(t, p, "no check runs", func() bool {
		return p.Status.RunningCheck == "" && p.Status.Unhealthy != nil && *p.Status.Unhealthy == 1
	})
	now.advance(time.Hour)
	// The controller's own timer would take an hour. An event makes it read the clock.
	if err := admin.Patch(t.Context(), p.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"metadata": {"annotations": {"look": "now"}}}`))); err != nil {
		t.Fatal(err)
	}
	carries(t, "repair-0", "True Proven|healthy|")
	waitPolicy(t, p, "the schedule is noted, and one check of each trigger is kept", func() bool {
		return p.Status.LastScheduleTime != nil && p.Status.LastScheduleTime.Minute() == 0 && len(policyChecks(t, p)) == 2
	})
	state := &evenkeel.NodeNetworkHealth{}
	if err := admin.Get(t.Context(), client.ObjectKey{Name: "repair-0"}, state); err != nil {
		t.Fatal(err)
	}
	if len(state.Status.History) != 2 || state.Status.History[0].Verdict != evenkeel.VerdictPass || *state.Status.Baseline.Samples != 1 {
		t.Errorf("%+v", state.Status)
	}
	says(t, "default", "repair-0", "Warning EvenkeelNetworkUnhealthy", "Normal EvenkeelNetworkHealthy")
}

func TestPolicyPairsNewNodeWithProvenOne(t *testing.T) {
	f := newFleet(t, links(nil))
	start(t, f, &clock{}, &clock{})
	newNodes(t, "later", 2)
	p := newPolicy(t, "later", nil)
	carries(t, "later-0", "True Proven|healthy|")
	waitPolicy(t, p, "no check runs", func() bool { return p.Status.RunningCheck == "" && p.Status.Healthy != nil && *p.Status.Healthy == 2 })
	newNode(t, "later-2", "later")
	carries(t, "later-2", "True Proven|healthy|")
	others := func(r madeRun) bool { return !strings.HasPrefix(r.nodes[0], "later-") }
	if runs := slices.DeleteFunc(f.all(), others); len(runs) != 2 || !slices.ContainsFunc(runs, func(r madeRun) bool { return slices.Contains(r.nodes, "later-2") && len(r.nodes) == 3 }) {
		t.Errorf("%v", runs)
	}
	waitPolicy(t, p, "all three are counted", func() bool { return *p.Status.Healthy == 3 && p.Status.RunningCheck == "" })
	if n := len(policyChecks(t, p)); n != 2 {
		t.Errorf("%d checks", n)
	}
}

func TestPolicyInvalidSchedule(t *testing.T) {
	start(t, newFleet(t, links(nil)), &clock{}, &clock{})
	p := newPolicy(t, "schedule", func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.Schedule = "61 3 * * *" })
	waitPolicy(t, p, "the policy says what is wrong", func() bool {
		ready := meta.FindStatusCondition(p.Status.Conditions, evenkeel.ConditionReady)
		return ready != nil && ready.Reason == "InvalidSchedule" && strings.Contains(ready.Message, `"61 3 * * *"`)
	})
}

func TestNodeGuardLimitsController(t *testing.T) {
	newNodes(t, "guarded", 1)
	for _, name := range []string{account, "evenkeel-cleanup"} {
		guardLimits(t, name)
	}
}

// guardLimits tries what the account may and may not do with a node.
func guardLimits(t *testing.T, name string) {
	t.Helper()
	controller, err := client.New(apiserver.As(config, namespace, name), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "guarded-0"}}
	patch := func(text string) error {
		return controller.Patch(t.Context(), node.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(text)))
	}
	status := func(text string) error {
		return controller.Status().Patch(t.Context(), node.DeepCopy(), client.RawPatch("application/strategic-merge-patch+json", []byte(text)))
	}
	eventually(t, "the API server has read the policy", func(ctx context.Context) (bool, error) {
		return controller.Patch(ctx, node.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"metadata": {"annotations": {"a": "b"}}}`)), client.DryRunAll) != nil, nil
	})
	for what, err := range map[string]error{
		"a label":               patch(`{"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}`),
		"no label":              patch(`{"metadata": {"labels": {"pool": null}}}`),
		"its label otherwise":   patch(`{"metadata": {"labels": {"evenkeel.dev/network": "excellent"}}}`),
		"an annotation":         patch(`{"metadata": {"annotations": {"a": "b"}}}`),
		"an owner that is gone": patch(`{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "gone", "uid": "x"}]}}`),
		"a finalizer":           patch(`{"metadata": {"finalizers": ["example.com/a"]}}`),
		"a taint":               patch(`{"spec": {"taints": [{"key": "other", "effect": "NoSchedule"}]}}`),
		"eviction":              patch(`{"spec": {"taints": [{"key": "evenkeel.dev/network", "effect": "NoExecute"}]}}`),
		"unschedulable":         patch(`{"spec": {"unschedulable": true}}`),
		"the provider":          patch(`{"spec": {"providerID": "aws:///x"}}`),
		"a condition":           status(`{"status": {"conditions": [{"type": "Ready", "status": "False"}]}}`),
		"resources":             status(`{"status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "8"}}}`),
		"addresses":             status(`{"status": {"addresses": [{"type": "InternalIP", "address": "10.6.6.6"}]}}`),
		"the kubelet's port":    status(`{"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 6666}}}}`),
		"images":                status(`{"status": {"images": [{"names": ["a"], "sizeBytes": 1}]}}`),
		"volumes":               status(`{"status": {"volumesAttached": [{"name": "a", "devicePath": "b"}]}}`),
		"the version":           status(`{"status": {"nodeInfo": {"kubeletVersion": "v1.0.0"}}}`),
	} {
		if err == nil || !strings.Contains(err.Error(), "ValidatingAdmissionPolicy") {
			t.Errorf("%s: %s: %v", name, what, err)
		}
	}
	if err := patch(`{"metadata": {"labels": {"evenkeel.dev/network": "healthy"}}, "spec": {"taints": [{"key": "evenkeel.dev/network", "effect": "NoSchedule"}]}}`); err != nil {
		t.Errorf("%s: its own label and taint: %v", name, err)
	}
}
