//go:build e2e

package e2e

import (
	"context"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const hca = "rdma/hca_shared_devices_a"

// pretendHCAs lets every node offer shared RDMA devices that do not exist, as the RDMA shared device plugin would offer real
// ones, until the test ends.
func pretendHCAs(ctx context.Context, t *testing.T) {
	t.Helper()
	device := func(what, want string) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		eventually(ctx, t, what, func(ctx context.Context) (bool, error) {
			p := &evenkeel.NetworkProfile{}
			err := env.Client.Get(ctx, client.ObjectKey{Name: "default"}, p)
			return p.Status.RDMAResourceName == want, err
		})
	}
	// The devices go first, and then it is waited for that.
	t.Cleanup(func() { device("the profile has heard that the devices are gone", "") })
	for _, node := range env.Local.Nodes() {
		plugin, err := env.Local.PretendDevice(context.WithoutCancel(ctx), node, hca, 8)
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
	device("the profile has heard that every node offers the device", hca)
}

func TestJobsGetTheRDMADeviceThatEveryNodeOffers(t *testing.T) {
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
		// By TCP: the devices do not exist.
		eventually(ctx, t, "the server sums", func(ctx context.Context) (bool, error) {
			return sums(ctx, ns, strings.TrimSuffix(service.Status.Endpoints[0], ":7470"))
		})
	})
	// What a node offers is a promise. The devices do not exist, so no node may pass.
	t.Run("check", func(t *testing.T) {
		c := check(ctx, t, "pretend-rdma", func(spec *evenkeel.NetworkCheckSpec) {
			asJobs(spec)
			spec.Nodes = evenkeel.NodeSet{Names: []string{"n1", "n2"}}
			spec.Stages = []evenkeel.Stage{evenkeel.StageCapacity, evenkeel.StageRDMA}
		})
		if c.Status.Verdict == evenkeel.VerdictPass || c.Status.Summary.Passed == nil || *c.Status.Summary.Passed != 0 || *c.Status.Summary.Runs != 2 {
			t.Errorf("%s: %s: %+v", c.Status.Verdict, c.Status.Message, c.Status.Summary)
		}
	})
}
