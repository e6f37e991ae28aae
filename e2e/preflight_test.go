//go:build e2e

package e2e

import (
	"context"
	"maps"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/e2e/setup"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// A finding is what a check said of the whole.
type finding struct {
	verdict, fabric evenkeel.Verdict
	badNodes        string
	passed          int32
}

// check runs a NetworkCheck over all nodes, and returns it when it has ended.
func check(ctx context.Context, t *testing.T, name string, change func(*evenkeel.NetworkCheckSpec)) *evenkeel.NetworkCheck {
	t.Helper()
	size, iterations := int64(4<<20), int32(5)
	c := &evenkeel.NetworkCheck{
		ObjectMeta: metav1.ObjectMeta{Namespace: setup.Namespace, Name: name},
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
	if err := env.Client.Create(ctx, c); err != nil {
		t.Fatalf("create the check: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			out, err := env.Kubectl(context.Background(), "-n", setup.Namespace, "get", "netcheck,jobs,pods,configmaps", "-o", "wide")
			t.Logf("%s %v", out, err)
			out, err = env.Kubectl(context.Background(), "-n", setup.Namespace, "get", "netcheck", name, "-o", "yaml")
			t.Logf("%s %v", out, err)
		}
		if err := env.Client.Delete(context.Background(), c); err != nil {
			t.Errorf("delete the check: %v", err)
		}
	})
	eventually(ctx, t, "check "+name+" ends", func(ctx context.Context) (bool, error) {
		err := env.Client.Get(ctx, client.ObjectKeyFromObject(c), c)
		return meta.IsStatusConditionTrue(c.Status.Conditions, evenkeel.ConditionComplete), err
	})
	return c
}

func (f finding) check(t *testing.T, c *evenkeel.NetworkCheck) {
	t.Helper()
	got := finding{verdict: c.Status.Verdict, badNodes: c.Status.BadNodes, fabric: evenkeel.VerdictPass}
	for _, fabric := range c.Status.Fabrics {
		if fabric.Verdict != evenkeel.VerdictPass {
			got.fabric = fabric.Verdict
		}
	}
	if c.Status.Summary.Passed != nil {
		got.passed = *c.Status.Summary.Passed
	}
	if got != f {
		t.Errorf("the check found %+v, want %+v: %s", got, f, c.Status.Message)
	}
}

// slow limits nodes' links for the rest of the test.
func slow(t *testing.T, rate string, nodes ...string) {
	t.Helper()
	for _, node := range nodes {
		if err := env.Local.LimitLink(t.Context(), node, rate); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := env.Local.LimitLink(context.Background(), node, ""); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestHealthyNodesPassTheCheck(t *testing.T) {
	ctx, cancel := context.WithTimeout(testContext(t), 3*time.Minute)
	defer cancel()
	c := check(ctx, t, "healthy", nil)
	finding{verdict: evenkeel.VerdictPass, fabric: evenkeel.VerdictPass, passed: 4}.check(t, c)
	if len(c.Status.Networks) != 1 || c.Status.Networks[0].Name != "Evenkeel" {
		t.Errorf("what carried the check is %+v", c.Status.Networks)
	}
	report := &corev1.ConfigMap{}
	if err := env.Client.Get(ctx, client.ObjectKey{Namespace: setup.Namespace, Name: c.Status.ReportName}, report); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(report.Data["report.md"], "n1") || !strings.HasPrefix(report.Data["pairs.svg"], "<svg") {
		t.Errorf("the report is %q", report.Data)
	}
}

func TestSlowNodesAreNamedAndClearedAgain(t *testing.T) {
	ctx := testContext(t)
	t.Run("one", func(t *testing.T) {
		slow(t, "40mbit", "n3")
		finding{verdict: evenkeel.VerdictFail, fabric: evenkeel.VerdictPass, badNodes: "n3", passed: 3}.check(t, check(ctx, t, "one-slow", nil))
	})
	t.Run("restored", func(t *testing.T) {
		finding{verdict: evenkeel.VerdictPass, fabric: evenkeel.VerdictPass, passed: 4}.check(t, check(ctx, t, "restored", nil))
	})
	t.Run("all", func(t *testing.T) {
		slow(t, "40mbit", "n1", "n2", "n3", "n4")
		least := resource.MustParse("20M")
		c := check(ctx, t, "all-slow", func(spec *evenkeel.NetworkCheckSpec) {
			spec.Thresholds.MinBusBandwidth = &least
		})
		finding{verdict: evenkeel.VerdictFail, fabric: evenkeel.VerdictFail}.check(t, c)
	})
}

func TestAMissingImageBlamesNobody(t *testing.T) {
	timeout := int32(20)
	c := check(testContext(t), t, "no-image", func(spec *evenkeel.NetworkCheckSpec) {
		spec.Runner.Image = env.Images.Bench[:strings.LastIndex(env.Images.Bench, ":")] + ":" + strings.Repeat("0", 64)
		spec.RunTimeoutSeconds = &timeout
	})
	if c.Status.Verdict != evenkeel.VerdictInconclusive || c.Status.BadNodes != "" {
		t.Errorf("the verdict is %s on %q: %s", c.Status.Verdict, c.Status.BadNodes, c.Status.Message)
	}
}

// A policy checks nodes that are new to it, marks those that fail, and jobs keep off them. All of it goes with the policy.
func TestJobsKeepOffANodeThatFailed(t *testing.T) {
	ctx := testContext(t)
	slow(t, "40mbit", "n2")
	size, iterations := int64(4<<20), int32(5)
	policy := &evenkeel.NetworkCheckPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "e2e"},
		Spec: evenkeel.NetworkCheckPolicySpec{
			Check: evenkeel.CheckOptions{
				Runner: evenkeel.RunnerSpec{Type: evenkeel.RunnerBench},
				Sweep:  evenkeel.SweepSpec{MinBytes: &size, MaxBytes: &size, Iterations: &iterations},
			},
			OnFail: evenkeel.OnFailSpec{Taint: evenkeel.SwitchEnabled},
		},
	}
	// Results of other tests would do for a policy: it is to find out by itself.
	if err := env.Client.DeleteAllOf(ctx, &evenkeel.NodeNetworkHealth{}); err != nil {
		t.Fatal(err)
	}
	if err := env.Client.Create(ctx, policy); err != nil {
		t.Fatal(err)
	}
	deleted := false
	remove := func() {
		if !deleted {
			if err := env.Client.Delete(context.Background(), policy); err != nil {
				t.Error(err)
			}
		}
		deleted = true
	}
	t.Cleanup(remove)
	marked := func(ctx context.Context) (map[string]string, error) {
		nodes := &corev1.NodeList{}
		if err := env.Client.List(ctx, nodes); err != nil {
			return nil, err
		}
		marks := map[string]string{}
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
		return marks, nil
	}
	await := func(what string, want map[string]string) {
		t.Helper()
		var got map[string]string
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("the nodes' marks, last seen: %v", got)
			}
		})
		eventually(ctx, t, what, func(ctx context.Context) (bool, error) {
			var err error
			got, err = marked(ctx)
			return maps.Equal(got, want), err
		})
	}
	await("the slow node is marked", map[string]string{
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
	await("nothing is left on the nodes", map[string]string{"n1": "", "n2": "", "n3": "", "n4": ""})
}
