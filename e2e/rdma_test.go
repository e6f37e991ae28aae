//go:build e2e

package e2e

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/env"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const hca = "rdma/hca_shared_devices_a"

// pretendHCAs registers shared RDMA devices that do not exist at every node, as the RDMA shared device plugin does with
// real ones, until the test ends.
func pretendHCAs(ctx context.Context, t *testing.T) {
	t.Helper()
	device := func(what, want string) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		eventually(ctx, t, what, func(ctx context.Context) (bool, error) {
			p := &evenkeel.NetworkProfile{}
			err := cluster.Client.Get(ctx, client.ObjectKey{Name: "default"}, p)
			return p.Status.RDMAResourceName == want, err
		})
	}
	// Cleanups run in reverse: first the devices are removed, then this waits until the profile has noticed.
	t.Cleanup(func() { device("the profile has no device any more", "") })
	for _, node := range cluster.Local.Nodes() {
		plugin, err := cluster.Local.PretendDevice(context.WithoutCancel(ctx), node, hca, 8)
		if err != nil {
			t.Fatal(err)
		}
		if err := plugin.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := plugin.Process.Kill(); err != nil {
				t.Error(err)
			}
			plugin.Wait() // it was killed
		})
	}
	device("the profile has the device of every node", hca)
}

func TestRDMADeviceOfEveryNodeIsRequested(t *testing.T) {
	ctx := testContext(t)
	pretendHCAs(ctx, t)
	t.Run("job", func(t *testing.T) {
		ns := newNamespace(t)
		trainingJob{profile: "default", script: "exit 0"}.create(ctx, t, ns)
		waitJob(ctx, t, ns, "Succeeded")
		for _, name := range []string{"train-master-0", "train-worker-0"} {
			p := pod(ctx, t, ns, name)
			if got := p.Spec.Containers[0].Resources.Limits[hca]; got.Value() != 1 || variable(p, "EVENKEEL_TRANSPORT") != "auto" {
				t.Errorf("%s: limits %v, EVENKEEL_TRANSPORT=%q", name, p.Spec.Containers[0].Resources.Limits, variable(p, "EVENKEEL_TRANSPORT"))
			}
		}
	})
	t.Run("servers", func(t *testing.T) {
		ns := newNamespace(t)
		reportServers(t, ns)
		trainingJob{profile: "default", reduction: "1", script: strings.ReplaceAll(sum, "-n 3", "-n 1000000")}.create(ctx, t, ns)
		service := servers(ctx, t, ns, evenkeel.ReasonAllReady)
		if c := meta.FindStatusCondition(service.Status.Conditions, evenkeel.ConditionRDMA); c == nil || c.Reason != evenkeel.ReasonServersHaveDevice {
			t.Errorf("condition %+v", c)
		}
		pods, err := serverPods(ctx, ns)
		if err != nil || len(pods) != 1 {
			t.Fatalf("%d servers, %v", len(pods), err)
		}
		if got := pods[0].Spec.Containers[0].Resources.Limits[hca]; got.Value() != 1 || variable(&pods[0], "EVENKEEL_TRANSPORT") != "auto" {
			t.Errorf("limits %v, EVENKEEL_TRANSPORT=%q", pods[0].Spec.Containers[0].Resources.Limits, variable(&pods[0], "EVENKEEL_TRANSPORT"))
		}
		// Over TCP, as the devices do not exist.
		eventually(ctx, t, "the server sums", func(ctx context.Context) (bool, error) {
			return sums(ctx, ns, strings.TrimSuffix(service.Status.Endpoints[0], ":7470"))
		})
	})
	// The devices do not exist, so no node may pass. As all nodes fail, the plugin or its settings are the more likely
	// cause.
	t.Run("check", func(t *testing.T) {
		c := check(ctx, t, "pretend-rdma", func(spec *evenkeel.NetworkCheckSpec) {
			asJobs(spec)
			spec.Nodes = evenkeel.NodeSet{Names: []string{"n1", "n2"}}
			spec.Stages = []evenkeel.Stage{evenkeel.StageCapacity, evenkeel.StageRDMA}
		})
		if c.Status.Verdict == evenkeel.VerdictPass || c.Status.Summary.Passed == nil || *c.Status.Summary.Passed != 0 || *c.Status.Summary.Runs != 2 {
			t.Errorf("%s: %s: %+v", c.Status.Verdict, c.Status.Message, c.Status.Summary)
		}
		const suspect = "PluginSuspect"
		if passed := meta.FindStatusCondition(c.Status.Conditions, evenkeel.ConditionPassed); passed == nil || passed.Status != metav1.ConditionFalse ||
			passed.Reason != suspect || !strings.Contains(passed.Message, "2 of 2 nodes failed by themselves") {
			t.Errorf("condition %+v", passed)
		}
		if len(c.Status.Findings) != 2 {
			t.Errorf("findings %+v", c.Status.Findings)
		}
		for _, f := range c.Status.Findings {
			// The rest of the message depends on the memlock limit of this machine.
			if f.Stage != evenkeel.StageRDMA || f.Reason != suspect || !strings.HasPrefix(f.Message, "inside the node: ") {
				t.Errorf("finding %+v", f)
			}
		}
		report := &corev1.ConfigMap{}
		if err := cluster.Client.Get(ctx, client.ObjectKey{Namespace: env.Namespace, Name: c.Status.ReportName + "-1"}, report); err != nil {
			t.Fatal(err)
		}
		runs := 0
		for line := range strings.Lines(report.Data["record.jsonl"]) {
			// Both ranks of a run may say so.
			if strings.Contains(line, "EVENKEEL_TRANSPORT=rdma: ") {
				runs++
			}
		}
		if runs != 2 {
			t.Errorf("the runs did not fail for want of a device: %s", report.Data["record.jsonl"])
		}
	})
}
