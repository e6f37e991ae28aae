//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/env"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// A checkResult is the expected status of a check.
type checkResult struct {
	verdict, fabric evenkeel.Verdict
	badNodes        string
	passed          int32
}

// startCheck creates a NetworkCheck over all nodes. It is deleted after the test.
func startCheck(ctx context.Context, t *testing.T, name string, change func(*evenkeel.NetworkCheckSpec)) *evenkeel.NetworkCheck {
	t.Helper()
	size, iterations := int64(4<<20), int32(5)
	c := &evenkeel.NetworkCheck{
		ObjectMeta: metav1.ObjectMeta{Namespace: env.Namespace, Name: name},
		Spec: evenkeel.NetworkCheckSpec{
			Nodes: evenkeel.NodeSet{Selector: &metav1.LabelSelector{}},
			CheckOptions: evenkeel.CheckOptions{
				Runner: evenkeel.RunnerSpec{Type: evenkeel.RunnerBench},
				Sweep:  evenkeel.SweepSpec{MinBytes: &size, MaxBytes: &size, Iterations: &iterations},
			},
		},
	}
	if change != nil {
		change(&c.Spec)
	}
	if err := cluster.Client.Create(ctx, c); err != nil {
		t.Fatalf("create the check: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, args := range [][]string{{"get", "netcheck,mpijobs,jobs,pods,configmaps", "-o", "wide"}, {"get", "netcheck", name, "-o", "yaml"}} {
				out, err := cluster.Kubectl(context.Background(), append([]string{"-n", env.Namespace}, args...)...)
				t.Logf("%s %v", out, err)
			}
		}
		if err := cluster.Client.Delete(context.Background(), c); err != nil {
			t.Errorf("delete the check: %v", err)
		}
	})
	return c
}

// awaitCheck waits until the check is complete. It calls observe, if there is one, at each poll.
func awaitCheck(ctx context.Context, t *testing.T, c *evenkeel.NetworkCheck, observe func(context.Context) error) *evenkeel.NetworkCheck {
	t.Helper()
	eventually(ctx, t, "check "+c.Name+" is complete", func(ctx context.Context) (bool, error) {
		if observe != nil {
			if err := observe(ctx); err != nil {
				return false, err
			}
		}
		err := cluster.Client.Get(ctx, client.ObjectKeyFromObject(c), c)
		return meta.IsStatusConditionTrue(c.Status.Conditions, evenkeel.ConditionComplete), err
	})
	return c
}

// check runs a NetworkCheck over all nodes, and returns it when it is complete.
func check(ctx context.Context, t *testing.T, name string, change func(*evenkeel.NetworkCheckSpec)) *evenkeel.NetworkCheck {
	t.Helper()
	return awaitCheck(ctx, t, startCheck(ctx, t, name, change), nil)
}

// asJobs runs a check without the mpi-operator.
func asJobs(spec *evenkeel.NetworkCheckSpec) { spec.Runner.Launcher = evenkeel.LauncherIndexedJob }

// smallMessages are for checks of slow nodes: a link at a tenth of the rate is still found.
func smallMessages() evenkeel.SweepSpec {
	size, iterations := int64(1<<20), int32(3)
	return evenkeel.SweepSpec{MinBytes: &size, MaxBytes: &size, Iterations: &iterations}
}

// slowThresholds find cards at a tenth of their rate. Other work of the processors halves the rate of healthy ones now
// and then.
func slowThresholds() evenkeel.ThresholdSpec {
	percent := int32(40)
	return evenkeel.ThresholdSpec{MinPercentOfMedian: &percent}
}

// quickPairs runs the stage Pairs alone, with small messages. It sets the minimum bandwidth, as a first round in which
// all pairs are slow has no other reference.
func quickPairs(spec *evenkeel.NetworkCheckSpec) {
	minimum := resource.MustParse("7M")
	spec.Stages = []evenkeel.Stage{evenkeel.StagePairs}
	spec.Sweep = smallMessages()
	spec.Thresholds = slowThresholds()
	spec.Thresholds.MinBusBandwidth = &minimum
}

// An mpiJob is a run of a check.
type mpiJob struct {
	uid   types.UID
	nodes []string
}

// runs are the present runs of the check, by name.
func runs(ctx context.Context, c *evenkeel.NetworkCheck) (map[string]mpiJob, error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(schema.GroupVersionKind{Group: "kubeflow.org", Version: "v2beta1", Kind: "MPIJobList"})
	if err := cluster.Client.List(ctx, list, client.InNamespace(env.Namespace), client.MatchingLabels{evenkeel.CheckKey: c.Name}); err != nil {
		return nil, err
	}
	found := map[string]mpiJob{}
	for _, j := range list.Items {
		content, _, err := unstructured.NestedMap(j.Object, "spec", "mpiReplicaSpecs", "Worker", "template")
		if err != nil {
			return nil, err
		}
		var template corev1.PodTemplateSpec
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(content, &template); err != nil {
			return nil, err
		}
		r := mpiJob{uid: j.GetUID()}
		for _, term := range template.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
			r.nodes = append(r.nodes, term.MatchFields[0].Values...)
		}
		found[j.GetName()] = r
	}
	return found, nil
}

// awaitRuns waits until a number of runs exist at the same time.
func awaitRuns(ctx context.Context, t *testing.T, c *evenkeel.NetworkCheck, count int) [][]string {
	t.Helper()
	var groups [][]string
	eventually(ctx, t, fmt.Sprintf("%d runs of check %s exist", count, c.Name), func(ctx context.Context) (bool, error) {
		now, err := runs(ctx, c)
		groups = nil
		for _, name := range slices.Sorted(maps.Keys(now)) {
			groups = append(groups, now[name].nodes)
		}
		return len(groups) == count, err
	})
	return groups
}

func (r checkResult) verify(t *testing.T, c *evenkeel.NetworkCheck) {
	t.Helper()
	got := checkResult{verdict: c.Status.Verdict, badNodes: c.Status.BadNodes, fabric: evenkeel.VerdictPass}
	for _, fabric := range c.Status.Fabrics {
		if fabric.Verdict != evenkeel.VerdictPass {
			got.fabric = fabric.Verdict
		}
	}
	if c.Status.Summary.Passed != nil {
		got.passed = *c.Status.Summary.Passed
	}
	if got != r {
		t.Errorf("the check found %+v, want %+v: %s", got, r, c.Status.Message)
	}
}

// slow limits nodes' links for the rest of the test.
func slow(t *testing.T, rate string, nodes ...string) {
	t.Helper()
	for _, node := range nodes {
		if err := cluster.Local.LimitLink(t.Context(), node, rate); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := cluster.Local.LimitLink(context.Background(), node, ""); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestPreflightPassesHealthyNodes(t *testing.T) {
	ctx, cancel := context.WithTimeout(testContext(t), 3*time.Minute)
	defer cancel()
	c := check(ctx, t, "healthy", nil)
	checkResult{verdict: evenkeel.VerdictPass, fabric: evenkeel.VerdictPass, passed: 4}.verify(t, c)
	if c.Status.Launcher != evenkeel.LauncherMPIJob {
		t.Errorf("the runs were started by %s", c.Status.Launcher)
	}
	if len(c.Status.Networks) != 1 || c.Status.Networks[0].Name != "Evenkeel" {
		t.Errorf("the networks of the check are %+v", c.Status.Networks)
	}
	report := &corev1.ConfigMap{}
	if err := cluster.Client.Get(ctx, client.ObjectKey{Namespace: env.Namespace, Name: c.Status.ReportName}, report); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(report.Data["report.md"], "n1") || !strings.HasPrefix(report.Data["pairs.svg"], "<svg") {
		t.Errorf("the report is %q", report.Data)
	}
}

func TestPreflightNamesSlowNodesAndClearsThem(t *testing.T) {
	ctx := testContext(t)
	t.Run("one", func(t *testing.T) {
		slow(t, cardRate, "n1", "n2", "n4")
		slow(t, slowRate, "n3")
		checkResult{verdict: evenkeel.VerdictFail, fabric: evenkeel.VerdictPass, badNodes: "n3", passed: 3}.verify(t, check(ctx, t, "one-slow", func(spec *evenkeel.NetworkCheckSpec) {
			spec.Sweep, spec.Thresholds = smallMessages(), slowThresholds()
		}))
	})
	t.Run("restored", func(t *testing.T) {
		checkResult{verdict: evenkeel.VerdictPass, fabric: evenkeel.VerdictPass, passed: 4}.verify(t, check(ctx, t, "restored", asJobs))
	})
	t.Run("all", func(t *testing.T) {
		slow(t, "40mbit", "n1", "n2", "n3", "n4")
		c := check(ctx, t, "all-slow", func(spec *evenkeel.NetworkCheckSpec) {
			asJobs(spec)
			quickPairs(spec)
		})
		checkResult{verdict: evenkeel.VerdictFail, fabric: evenkeel.VerdictFail}.verify(t, c)
	})
}

func TestPreflightNamesTwoSlowNodes(t *testing.T) {
	for name, together := range map[string]bool{"in-different-pairs": false, "in-one-pair": true} {
		t.Run(name, func(t *testing.T) {
			ctx := testContext(t)
			c := startCheck(ctx, t, name, quickPairs)
			// The pairs of round 1 are not known before. Slowing a link is faster than starting the check's pods.
			pairs := awaitRuns(ctx, t, c, 2)
			bad := []string{pairs[0][0], pairs[1][0]}
			if together {
				bad = slices.Clone(pairs[0])
			}
			slow(t, "40mbit", bad...)
			slices.Sort(bad)
			checkResult{verdict: evenkeel.VerdictFail, fabric: evenkeel.VerdictPass, badNodes: strings.Join(bad, ", "), passed: 2}.verify(t, awaitCheck(ctx, t, c, nil))
		})
	}
}

func TestPreflightResumesAfterControllerCrash(t *testing.T) {
	ctx := testContext(t)
	c := startCheck(ctx, t, "killed", quickPairs)
	awaitRuns(ctx, t, c, 2)
	if _, err := cluster.Kubectl(ctx, "-n", env.Namespace, "delete", "pods", "-l", "app.kubernetes.io/component=controller", "--grace-period=0", "--force"); err != nil {
		t.Fatal(err)
	}
	made := map[types.UID]string{}
	awaitCheck(ctx, t, c, func(ctx context.Context) error {
		now, err := runs(ctx, c)
		for name, r := range now {
			made[r.uid] = name
		}
		return err
	})
	checkResult{verdict: evenkeel.VerdictPass, fabric: evenkeel.VerdictPass, passed: 4}.verify(t, c)
	names := slices.Sorted(maps.Values(made))
	if len(slices.Compact(slices.Clone(names))) != len(names) || len(names) != int(*c.Status.Summary.Runs) {
		t.Errorf("MPIJobs were created for %v, and %d runs are recorded", names, *c.Status.Summary.Runs)
	}
}

// The node exists in the API alone: its pods never start, as on a machine that is about to be removed.
func TestPreflightDeletedNodeIsNotAFailure(t *testing.T) {
	ctx := testContext(t)
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "leaving", Labels: map[string]string{corev1.LabelHostname: "leaving"}},
		Spec:       corev1.NodeSpec{Taints: []corev1.Taint{{Key: "leaving", Effect: corev1.TaintEffectNoSchedule}}},
	}
	if err := cluster.Client.Create(ctx, node); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Client.Delete(context.Background(), node); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	room := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("4Gi"), corev1.ResourcePods: resource.MustParse("20")}
	beat := func(ctx context.Context) error {
		status := node.DeepCopy()
		status.Status = corev1.NodeStatus{Capacity: room, Allocatable: room, Conditions: []corev1.NodeCondition{{
			Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Test", LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
		}}}
		return cluster.Client.Status().Patch(ctx, status, client.MergeFrom(node))
	}
	if err := beat(ctx); err != nil {
		t.Fatal(err)
	}
	// Without heartbeats the node would no longer be Ready when a busy machine schedules the rank.
	alive, die := context.WithCancel(ctx)
	defer die()
	go wait.UntilWithContext(alive, func(ctx context.Context) { _ = beat(ctx) }, 2*time.Second) // a lost one is made up for by the next
	c := startCheck(ctx, t, "leaving", func(spec *evenkeel.NetworkCheckSpec) {
		quickPairs(spec)
		spec.Nodes = evenkeel.NodeSet{Names: []string{"n1", "n2", "n3", "leaving"}}
		spec.Runner.Tolerations = []corev1.Toleration{{Key: "leaving", Operator: corev1.TolerationOpExists}}
	})
	eventually(ctx, t, "a rank is scheduled to the node", func(ctx context.Context) (bool, error) {
		var pods corev1.PodList
		err := cluster.Client.List(ctx, &pods, client.InNamespace(env.Namespace), client.MatchingLabels{evenkeel.CheckKey: c.Name})
		return slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.NodeName == node.Name }), err
	})
	die()
	if err := cluster.Client.Delete(ctx, node); err != nil {
		t.Fatal(err)
	}
	checkResult{verdict: evenkeel.VerdictInconclusive, fabric: evenkeel.VerdictPass, passed: 3}.verify(t, awaitCheck(ctx, t, c, nil))
	if !strings.Contains(c.Status.Message, "node leaving was deleted") {
		t.Errorf("the check's message is %q", c.Status.Message)
	}
}

func TestPreflightMissingImageIsNotAFailure(t *testing.T) {
	timeout := int32(20)
	c := check(testContext(t), t, "no-image", func(spec *evenkeel.NetworkCheckSpec) {
		spec.Runner.Image = cluster.Images.Bench[:strings.LastIndex(cluster.Images.Bench, ":")] + ":" + strings.Repeat("0", 64)
		spec.RunTimeoutSeconds = &timeout
	})
	if c.Status.Verdict != evenkeel.VerdictInconclusive || c.Status.BadNodes != "" {
		t.Errorf("the verdict is %s on %q: %s", c.Status.Verdict, c.Status.BadNodes, c.Status.Message)
	}
}

// unmarked are nodes without a policy.
var unmarked = map[string]string{"n1": "", "n2": "", "n3": "", "n4": ""}

// awaitMarks waits until the nodes have these marks: the condition's status, the label's value, and whether they are
// tainted.
func awaitMarks(ctx context.Context, t *testing.T, what string, want map[string]string) {
	t.Helper()
	var marks map[string]string
	defer func() {
		if t.Failed() {
			t.Logf("the nodes' marks, last seen: %v", marks)
		}
	}()
	eventually(ctx, t, what, func(ctx context.Context) (bool, error) {
		nodes := &corev1.NodeList{}
		if err := cluster.Client.List(ctx, nodes); err != nil {
			return false, err
		}
		marks = map[string]string{}
		for _, node := range nodes.Items {
			for _, condition := range node.Status.Conditions {
				if condition.Type == evenkeel.ConditionNodeHealthy {
					marks[node.Name] += string(condition.Status) + " "
				}
			}
			marks[node.Name] += node.Labels[evenkeel.HealthKey]
			for _, taint := range node.Spec.Taints {
				if taint.Key == evenkeel.HealthKey {
					marks[node.Name] += " tainted"
				}
			}
		}
		return maps.Equal(marks, want), nil
	})
}

// A policy checks nodes that are new to it and marks those that fail, and jobs avoid them. Deleting the policy removes
// the marks.
func TestPreflightJobsAvoidFailedNodes(t *testing.T) {
	ctx := testContext(t)
	slow(t, cardRate, "n1", "n3", "n4")
	slow(t, slowRate, "n2")
	policy := &evenkeel.NetworkCheckPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "e2e"},
		Spec: evenkeel.NetworkCheckPolicySpec{
			Check: evenkeel.CheckOptions{
				Runner:     evenkeel.RunnerSpec{Type: evenkeel.RunnerBench},
				Sweep:      smallMessages(),
				Thresholds: slowThresholds(),
			},
			OnFail: evenkeel.OnFailSpec{Taint: evenkeel.SwitchEnabled},
		},
	}
	// The policy must run its own check, and not use the results of other tests.
	if err := cluster.Client.DeleteAllOf(ctx, &evenkeel.NodeNetworkHealth{}); err != nil {
		t.Fatal(err)
	}
	if err := cluster.Client.Create(ctx, policy); err != nil {
		t.Fatal(err)
	}
	deleted := false
	remove := func() {
		if !deleted {
			if err := cluster.Client.Delete(context.Background(), policy); err != nil {
				t.Error(err)
			}
		}
		deleted = true
	}
	t.Cleanup(remove)
	awaitMarks(ctx, t, "the slow node is marked", map[string]string{
		"n1": "True healthy", "n2": "False unhealthy tainted", "n3": "True healthy", "n4": "True healthy",
	})

	ns := newNamespace(t)
	trainingJob{profile: "default", script: "true"}.create(ctx, t, ns)
	waitJob(ctx, t, ns, "Succeeded")
	for _, name := range []string{"train-master-0", "train-worker-0"} {
		p := pod(ctx, t, ns, name)
		if p.Spec.NodeName == "n2" || p.Spec.Affinity == nil || p.Spec.Affinity.NodeAffinity == nil {
			t.Errorf("%s ran on %s with %+v", name, p.Spec.NodeName, p.Spec.Affinity)
		}
	}

	remove()
	awaitMarks(ctx, t, "the nodes have no marks", unmarked)
}
