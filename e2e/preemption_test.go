//go:build e2e

package e2e

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/env"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	gpu          = corev1.ResourceName("nvidia.com/gpu")
	gpusEachNode = 8
)

// pretendGPUs registers GPUs that do not exist at every node, until the test ends.
func pretendGPUs(ctx context.Context, t *testing.T) {
	t.Helper()
	offer := func(what string, count int64) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		eventually(ctx, t, what, func(ctx context.Context) (bool, error) {
			var nodes corev1.NodeList
			err := cluster.Client.List(ctx, &nodes)
			return !slices.ContainsFunc(nodes.Items, func(n corev1.Node) bool {
				offered := n.Status.Allocatable[gpu]
				return offered.Value() != count
			}), err
		})
	}
	// Cleanups run in reverse: first the devices are removed, then this waits until the nodes have noticed.
	t.Cleanup(func() { offer("the nodes have no GPUs any more", 0) })
	for _, node := range cluster.Local.Nodes() {
		plugin, err := cluster.Local.PretendDevice(context.WithoutCancel(ctx), node, string(gpu), gpusEachNode)
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
	offer("the nodes offer GPUs", gpusEachNode)
}

// A check has requested all GPUs of its nodes. A job's pod that needs one of them gets it from the scheduler at once,
// and the check blames nobody.
func TestPreflightGivesNodeBackToJob(t *testing.T) {
	ctx := testContext(t)
	pretendGPUs(ctx, t)
	// The run would last for many minutes.
	size, iterations, timeout := int64(64<<20), int32(100_000), int32(600)
	c := startCheck(ctx, t, "preempted", func(spec *evenkeel.NetworkCheckSpec) {
		asJobs(spec)
		spec.Nodes = evenkeel.NodeSet{Names: []string{"n1", "n2"}}
		spec.Stages = []evenkeel.Stage{evenkeel.StagePairs}
		spec.Sweep = evenkeel.SweepSpec{MinBytes: &size, MaxBytes: &size, Iterations: &iterations}
		spec.RunTimeoutSeconds = &timeout
	})
	rank := &corev1.Pod{}
	eventually(ctx, t, "a rank runs on n1", func(ctx context.Context) (bool, error) {
		var pods corev1.PodList
		err := cluster.Client.List(ctx, &pods, client.InNamespace(env.Namespace), client.MatchingLabels{evenkeel.CheckKey: c.Name})
		i := slices.IndexFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.NodeName == "n1" && p.Status.Phase == corev1.PodRunning })
		if i >= 0 {
			*rank = pods.Items[i]
		}
		return i >= 0, err
	})
	if held := rank.Spec.Containers[0].Resources.Limits[gpu]; held.Value() != gpusEachNode || rank.Spec.Priority == nil || *rank.Spec.Priority >= 0 {
		t.Fatalf("the rank has %s GPUs, priority %v", held.String(), rank.Spec.Priority)
	}

	job := plainPod(newNamespace(t), nil)
	job.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "n1"}
	job.Spec.Containers[0].Resources.Limits = corev1.ResourceList{gpu: *resource.NewQuantity(gpusEachNode, resource.DecimalSI)}
	if err := cluster.Client.Create(ctx, job); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Its GPUs are not counted as used by the tests that follow.
		if err := cluster.Client.Delete(context.Background(), job, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	eventually(ctx, t, "the job's pod runs", func(ctx context.Context) (bool, error) {
		err := cluster.Client.Get(ctx, client.ObjectKeyFromObject(job), job)
		return job.Status.Phase == corev1.PodRunning, err
	})
	events, err := cluster.Kubectl(ctx, "-n", env.Namespace, "get", "events", "--field-selector", "reason=Preempted,involvedObject.name="+rank.Name, "-o", "jsonpath={.items[*].message}")
	if err != nil || !strings.Contains(events, "Preempted by pod "+string(job.UID)) {
		t.Errorf("the scheduler said %q of the rank, %v", events, err)
	}
	awaitCheck(ctx, t, c, nil)
	if c.Status.Verdict != evenkeel.VerdictInconclusive || c.Status.BadNodes != "" {
		t.Errorf("the verdict is %s on %q: %s", c.Status.Verdict, c.Status.BadNodes, c.Status.Message)
	}
	if err := cluster.Client.Get(ctx, client.ObjectKeyFromObject(job), job); err != nil || job.Status.Phase != corev1.PodRunning {
		t.Errorf("the job's pod is %s, %v", job.Status.Phase, err)
	}
}
