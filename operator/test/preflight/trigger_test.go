package preflight

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/nodeuse"
)

// taintNode gives the node a taint, or none.
func taintNode(t *testing.T, name, key string) {
	t.Helper()
	patch := `{"spec": {"taints": null}}`
	if key != "" {
		patch = fmt.Sprintf(`{"spec": {"taints": [{"key": %q, "effect": "NoSchedule"}]}}`, key)
	}
	if err := admin.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		t.Fatal(err)
	}
}

// touch makes the controller read the clock, which its own timers do too late for a test.
func touch(t *testing.T, p *evenkeel.NetworkCheckPolicy, value string) {
	t.Helper()
	if err := admin.Patch(t.Context(), p.DeepCopy(), client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata": {"annotations": {"look": %q}}}`, value))); err != nil {
		t.Fatal(err)
	}
}

func TestPolicyWaitsForStartupTaints(t *testing.T) {
	f := newFleet(t, links(nil))
	newNodes(t, "startup", 4)
	taintNode(t, "startup-3", "ebs.csi.aws.com/agent-not-ready")
	start(t, f, &clock{}, &clock{})
	p := newPolicy(t, "startup", nil)
	carries(t, "startup-0", "True Proven|healthy|")
	waitPolicy(t, p, "no check runs", func() bool { return p.Status.RunningCheck == "" && p.Status.Healthy != nil && *p.Status.Healthy == 3 })
	state := &evenkeel.NodeNetworkHealth{}
	if err := admin.Get(t.Context(), client.ObjectKey{Name: "startup-3"}, state); client.IgnoreNotFound(err) != nil || err == nil {
		t.Errorf("the node that is starting was checked: %+v %v", state.Status, err)
	}
	taintNode(t, "startup-3", "")
	carries(t, "startup-3", "True Proven|healthy|")
}

// Nodes that register with Evenkeel's startup taint have it until they have passed, but not for ever.
func TestPolicyKeepsPodsOffUnprovenNodes(t *testing.T) {
	const taint = "evenkeel.dev/network=unproven:NoSchedule"
	slow := links(map[string]float64{"unproven-1": 0.1})
	f := newFleet(t, func(nodes []string) ending {
		if slices.Contains(nodes, "unproven-4") {
			return ending{waiting: "ImagePullBackOff"}
		}
		return slow(nodes)
	})
	names := newNodes(t, "unproven", 5)
	newNode(t, "unproven-elsewhere", "unproven-elsewhere")
	for _, name := range append(names, "unproven-elsewhere") {
		patch := `{"spec": {"taints": [{"key": "evenkeel.dev/network", "value": "unproven", "effect": "NoSchedule"}]}}`
		if err := admin.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
			t.Fatal(err)
		}
	}
	p := newPolicy(t, "unproven", nil)
	now := &clock{}
	start(t, f, now, now)
	for _, good := range []string{"unproven-0", "unproven-2", "unproven-3"} {
		carries(t, good, "True Proven|healthy|")
	}
	carries(t, "unproven-1", "False TooSlow|unhealthy|"+taint)
	waitPolicy(t, p, "no check runs", func() bool { return p.Status.RunningCheck == "" && p.Status.Healthy != nil && *p.Status.Healthy == 3 })
	carries(t, "unproven-4", "Unknown NotChecked||"+taint)
	carries(t, "unproven-elsewhere", "||") // nobody would prove it
	now.advance(31 * time.Minute)
	if err := admin.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "unproven-4"}}, client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"labels": {"look": "now"}}}`))); err != nil {
		t.Fatal(err)
	}
	carries(t, "unproven-4", "Unknown NotChecked||")
	carries(t, "unproven-1", "False TooSlow|unhealthy|"+taint)
}

func TestPolicyRepeatsInconclusiveChecksOfNewNodes(t *testing.T) {
	var pulled atomic.Bool
	f := newFleet(t, func(nodes []string) ending {
		if slices.Contains(nodes, "again-3") && !pulled.Load() {
			return ending{waiting: "ImagePullBackOff"}
		}
		return links(nil)(nodes)
	})
	newNodes(t, "again", 4)
	now := &clock{}
	start(t, f, &clock{}, now)
	p := newPolicy(t, "again", func(s *evenkeel.NetworkCheckPolicySpec) {
		s.Check.Stages = []evenkeel.Stage{evenkeel.StageLocal, evenkeel.StagePairs}
	})
	waitPolicy(t, p, "the others are proven", func() bool { return p.Status.RunningCheck == "" && p.Status.Healthy != nil && *p.Status.Healthy == 3 })
	pulled.Store(true)
	now.advance(6 * time.Minute)
	touch(t, p, "later")
	carries(t, "again-3", "True Proven|healthy|")
}

// A node that failed is repaired and rebooted. Nobody has to tell Evenkeel, and the policy has no schedule.
func TestPolicyChecksFailedNodeAfterReboot(t *testing.T) {
	var repaired atomic.Bool
	f := newFleet(t, func(nodes []string) ending {
		if repaired.Load() {
			return links(nil)(nodes)
		}
		return links(map[string]float64{"reboot-0": 0.1})(nodes)
	})
	newNodes(t, "reboot", 4)
	now := &clock{}
	start(t, f, now, now)
	p := newPolicy(t, "reboot", func(s *evenkeel.NetworkCheckPolicySpec) {
		long := int32(86400) // Jobs are made by the API server's clock
		s.Check.RunTimeoutSeconds = &long
	})
	carries(t, "reboot-0", "False TooSlow|unhealthy|")
	waitPolicy(t, p, "no check runs", func() bool {
		return p.Status.RunningCheck == "" && p.Status.Unhealthy != nil && *p.Status.Unhealthy == 1
	})
	repaired.Store(true)
	now.advance(time.Minute)
	for _, ready := range []string{"False", "True"} {
		patch := fmt.Appendf(nil, `{"status": {"conditions": [{"type": "Ready", "status": %q, "reason": "Test", "lastTransitionTime": %q}]}}`, ready, now.Now().UTC().Format(time.RFC3339))
		if err := admin.Status().Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "reboot-0"}}, client.RawPatch(types.StrategicMergePatchType, patch)); err != nil {
			t.Fatal(err)
		}
	}
	now.advance(time.Minute)
	touch(t, p, "a minute later")
	carries(t, "reboot-0", "True Proven|healthy|")
	if checks := policyChecks(t, p); !slices.ContainsFunc(checks, func(c evenkeel.NetworkCheck) bool { return c.Labels[evenkeel.TriggerKey] == "repair" }) {
		t.Errorf("of the checks %v, none is for a repair", checks)
	}
}

// A repair need not make the node unready: whoever drained it for the repair gives it back, or it starts again so fast that nobody notices.
func TestPolicyChecksFailedNodeThatIsGivenBack(t *testing.T) {
	var repaired atomic.Bool
	f := newFleet(t, func(nodes []string) ending {
		if repaired.Load() {
			return links(nil)(nodes)
		}
		return links(map[string]float64{"back-0": 0.1, "back-1": 0.1, "back-2": 0.1})(nodes)
	})
	newNodes(t, "back", 15)
	now := &clock{}
	start(t, f, now, now)
	p := newPolicy(t, "back", func(s *evenkeel.NetworkCheckPolicySpec) {
		long := int32(86400) // Jobs are made by the API server's clock
		s.Check.RunTimeoutSeconds = &long
	})
	carries(t, "back-0", "False TooSlow|unhealthy|")
	waitPolicy(t, p, "no check runs", func() bool {
		return p.Status.RunningCheck == "" && p.Status.Unhealthy != nil && *p.Status.Unhealthy == 3
	})
	repaired.Store(true)
	now.advance(time.Minute)
	for _, unschedulable := range []string{"true", "false"} {
		patch := client.RawPatch(types.MergePatchType, []byte(`{"spec": {"unschedulable": `+unschedulable+`}}`))
		if err := admin.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "back-0"}}, patch); err != nil {
			t.Fatal(err)
		}
	}
	taintNode(t, "back-1", "karpenter.sh/disrupted")
	taintNode(t, "back-1", "")
	for _, boot := range []string{"first", "second"} {
		patch := client.RawPatch(types.MergePatchType, []byte(`{"status": {"nodeInfo": {"bootID": "`+boot+`"}}}`))
		if err := admin.Status().Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "back-2"}}, patch); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"back-0", "back-1", "back-2"} {
		carries(t, name, "True Proven|healthy|")
	}
	if checks := policyChecks(t, p); !slices.ContainsFunc(checks, func(c evenkeel.NetworkCheck) bool { return c.Labels[evenkeel.TriggerKey] == "repair" }) {
		t.Errorf("of the checks %v, none is for a repair", checks)
	}
}

// A node that is in use when the schedule checks all nodes is checked when its job ends.
func TestPolicyChecksNodesWhenTheirJobEnds(t *testing.T) {
	f := newFleet(t, links(nil))
	nodes := newNodes(t, "gap", 5)
	giveGPUs(t, 8, nodes...)
	leave := useNode(t, "gap-1", 8)
	now := &clock{}
	start(t, f, now, now)
	p := newPolicy(t, "gap", func(s *evenkeel.NetworkCheckPolicySpec) {
		long := int32(86400) // Jobs are made by the API server's clock
		s.Check.RunTimeoutSeconds = &long
		s.Triggers.Schedule, s.Triggers.NewNodes = "@hourly", evenkeel.SwitchDisabled
	})
	waitPolicy(t, p, "the nodes are counted", func() bool { return p.Status.Nodes != nil && *p.Status.Nodes == 5 })
	now.advance(time.Hour)
	touch(t, p, "after an hour")
	for _, name := range []string{"gap-0", "gap-2", "gap-3", "gap-4"} {
		carries(t, name, "True Proven|healthy|")
	}
	waitPolicy(t, p, "no check runs", func() bool { return p.Status.RunningCheck == "" })
	carries(t, "gap-1", "Unknown NotChecked||")
	for _, r := range f.all() {
		if slices.Contains(r.nodes, "gap-1") {
			t.Errorf("run %s was on the node in use", r.name)
		}
	}
	leave()
	carries(t, "gap-1", "True Proven|healthy|")
}

func TestPolicyChecksNodesThatJobsLeave(t *testing.T) {
	f := newFleet(t, links(nil))
	nodes := newNodes(t, "left", 3)
	giveGPUs(t, 8, nodes...)
	leave := useNode(t, "left-1", 8)
	start(t, f, &clock{}, &clock{})
	p := newPolicy(t, "left", func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.NewNodes = evenkeel.SwitchDisabled })
	waitPolicy(t, p, "the nodes are counted", func() bool { return p.Status.Nodes != nil && *p.Status.Nodes == 3 })
	leave()
	carries(t, "left-1", "True Proven|healthy|")
	if checks := policyChecks(t, p); len(checks) != 1 || checks[0].Labels[evenkeel.TriggerKey] != "idle" {
		t.Errorf("%+v", checks)
	}
}

// Three nodes of four are idle, one of them slow. Nothing says that it is slow before the fourth one is idle too.
func TestPolicyProvesNothingWithoutComparison(t *testing.T) {
	f := newFleet(t, links(map[string]float64{"few-1": 0.2}))
	nodes := newNodes(t, "few", 4)
	giveGPUs(t, 8, nodes...)
	leave := useNode(t, "few-3", 8)
	start(t, f, &clock{}, &clock{})
	p := newPolicy(t, "few", nil)
	lastResult := func(name string) string {
		state := &evenkeel.NodeNetworkHealth{}
		if err := admin.Get(t.Context(), client.ObjectKey{Name: name}, state); client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
		if len(state.Status.History) == 0 {
			return ""
		}
		return string(state.Status.Health) + " " + state.Status.History[0].Reason
	}
	eventually(t, "three nodes are checked", func(context.Context) (bool, error) {
		return lastResult("few-0") != "" && lastResult("few-1") != "" && lastResult("few-2") != "", nil
	})
	for _, name := range nodes[:3] {
		if got := lastResult(name); got != "Unknown NothingToCompare" {
			t.Errorf("%s: %s", name, got)
		}
	}
	leave()
	carries(t, "few-1", "False TooSlow|unhealthy|")
	for _, name := range []string{"few-0", "few-2", "few-3"} {
		carries(t, name, "True Proven|healthy|")
	}
	waitPolicy(t, p, "no check runs", func() bool { return p.Status.RunningCheck == "" })
}

// Two nodes are compared with what the others reached earlier, while those are in use.
func TestPolicyComparesWithEarlierResults(t *testing.T) {
	var slow atomic.Bool
	f := newFleet(t, func(nodes []string) ending {
		if slow.Load() {
			return links(map[string]float64{"usual-1": 0.2})(nodes)
		}
		return links(nil)(nodes)
	})
	nodes := newNodes(t, "usual", 4)
	giveGPUs(t, 8, nodes...)
	now, use := &clock{}, nodeuse.New(namespace, &clock{})
	controllers{logs: f, clock: now, calendar: now, use: use}.start(t)
	p := newPolicy(t, "usual", func(s *evenkeel.NetworkCheckPolicySpec) {
		long := int32(86400) // Jobs are made by the API server's clock
		s.Check.RunTimeoutSeconds = &long
	})
	for _, name := range nodes {
		carries(t, name, "True Proven|healthy|")
	}
	waitPolicy(t, p, "no check runs", func() bool { return p.Status.RunningCheck == "" })
	leave := []func(){useNode(t, "usual-0", 8), useNode(t, "usual-1", 8)}
	useNode(t, "usual-2", 8)
	useNode(t, "usual-3", 8)
	results := func(name string) []evenkeel.HealthResult {
		state := &evenkeel.NodeNetworkHealth{}
		if err := admin.Get(t.Context(), client.ObjectKey{Name: name}, state); err != nil {
			t.Fatal(err)
		}
		return state.Status.History
	}
	before := len(results("usual-1"))
	slow.Store(true)
	for _, l := range leave {
		l()
	}
	eventually(t, "both nodes count as idle", func(context.Context) (bool, error) { return use.User("usual-0")+use.User("usual-1") == "", nil })
	now.advance(13 * time.Hour)
	touch(t, p, "later")
	eventually(t, "two nodes are checked", func(context.Context) (bool, error) { return len(results("usual-1")) > before, nil })
	if got := results("usual-1")[0]; got.Verdict != evenkeel.VerdictInconclusive || got.Reason != "FabricSuspect" {
		t.Errorf("%+v", got)
	}
}
