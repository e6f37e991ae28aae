package preflight

import (
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

// A node that is in use when the schedule checks all nodes is checked when its job ends.
func TestPolicyChecksNodesWhenTheirJobEnds(t *testing.T) {
	f := newFleet(t, links(nil))
	nodes := newNodes(t, "gap", 4)
	giveGPUs(t, 8, nodes...)
	leave := useNode(t, "gap-1", 8)
	now := &clock{}
	start(t, f, now, now)
	p := newPolicy(t, "gap", func(s *evenkeel.NetworkCheckPolicySpec) {
		long := int32(86400) // Jobs are made by the API server's clock
		s.Check.RunTimeoutSeconds = &long
		s.Triggers.Schedule, s.Triggers.NewNodes = "@hourly", evenkeel.SwitchDisabled
	})
	waitPolicy(t, p, "the nodes are counted", func() bool { return p.Status.Nodes != nil && *p.Status.Nodes == 4 })
	now.advance(time.Hour)
	touch(t, p, "after an hour")
	for _, name := range []string{"gap-0", "gap-2", "gap-3"} {
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
