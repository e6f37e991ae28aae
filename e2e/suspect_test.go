//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/env"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// alltoall goes on until the pod is stopped. Each rank sends to all others, so that a card can be told from the path to
// one peer.
const alltoall = "exec evenkeel-bench collective --transport tcp --elements 200000 --no-verify --iteration-time 3600s alltoall"

// The rates of a card: low, so that the processors that all nodes share do not set the pace.
const cardRate, slowRate = "80mbit", "8mbit"

// A node's card becomes slow while a job runs. The job names the node, and when it has ended a check confirms that. The
// next job runs elsewhere.
func TestSuspectIsNamedConfirmedAndAvoided(t *testing.T) {
	ctx := testContext(t)
	const guilty = "n3"
	plugin := kubectlPlugin(t)
	slow(t, cardRate, "n1", "n2", "n3", "n4")
	watch := fmt.Sprintf(`{apiVersion: evenkeel.dev/v1alpha1, kind: NetworkProfile, metadata: {name: watch}, spec: {plugin: {image: %q}, environment: [{name: EVENKEEL_WATCH, value: "on"}]}}`, cluster.Images.Plugin)
	if _, err := cluster.KubectlInput(ctx, watch, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := cluster.Kubectl(context.Background(), "delete", "networkprofile", "watch"); err != nil {
			t.Error(err)
		}
	})
	if _, err := cluster.Kubectl(ctx, "wait", "networkprofile/watch", "--for=condition=Ready", "--timeout=120s"); err != nil {
		t.Fatal(err)
	}
	suspectPolicy(ctx, t)

	ns := newNamespace(t)
	trainingJob{profile: "watch", workers: 3, script: alltoall}.create(ctx, t, ns)
	waitJob(ctx, t, ns, "Running")
	eventually(ctx, t, "all ranks run", func(ctx context.Context) (bool, error) {
		var pods corev1.PodList
		err := cluster.Client.List(ctx, &pods, client.InNamespace(ns))
		running := 0
		for i := range pods.Items {
			if pods.Items[i].Status.Phase == corev1.PodRunning {
				running++
			}
		}
		return running == 4, err
	})
	begin := time.Now()
	slow(t, slowRate, guilty)

	var out string
	defer func() {
		if t.Failed() {
			t.Logf("kubectl evenkeel why, last seen:\n%s", out)
			for _, args := range [][]string{{"get", "events", "-A"}, {"get", "nodehealth", "-o", "yaml"}, {"-n", env.Namespace, "logs", "deployment/evenkeel-controller", "--tail=50"}} {
				text, err := cluster.Kubectl(context.Background(), args...)
				t.Logf("%s %v", text, err)
			}
		}
	}()
	card := fmt.Sprintf("card eth0 of %s, ", guilty)
	eventually(ctx, t, "kubectl evenkeel why names the node", func(ctx context.Context) (_ bool, err error) {
		cmd := exec.CommandContext(ctx, plugin, "why", "pytorchjob/train", "-n", ns, "--kubeconfig", cluster.Kubeconfig)
		text, err := cmd.CombinedOutput()
		out = string(text)
		return strings.Contains(out, "Its ranks wait, since ") && strings.Contains(out, card), err
	})
	named := time.Since(begin)
	eventually(ctx, t, "the log of a rank names the node", func(ctx context.Context) (bool, error) {
		log, err := cluster.Kubectl(ctx, "logs", "-n", ns, "train-worker-0")
		return strings.Contains(log, "evenkeel: ") && strings.Contains(log, card), err
	})
	for _, about := range []struct{ namespace, name, reason string }{{ns, "train", "EvenkeelJobWaits"}, {metav1.NamespaceDefault, guilty, "EvenkeelNodeSuspected"}} {
		eventually(ctx, t, fmt.Sprintf("an Event about %s names the node", about.name), func(ctx context.Context) (bool, error) {
			var events corev1.EventList
			err := cluster.Client.List(ctx, &events, client.InNamespace(about.namespace))
			for _, e := range events.Items {
				if e.InvolvedObject.Name == about.name && e.Reason == about.reason && strings.Contains(e.Message, card) {
					return true, err
				}
			}
			return false, err
		})
	}
	// Before the job is sure of the card, it may name a path.
	awaitSuspicions(ctx, t, guilty, "is suspected", func(all []evenkeel.Suspicion) bool {
		return slices.ContainsFunc(all, func(s evenkeel.Suspicion) bool {
			return s.Class == evenkeel.SuspectLink && s.Job.Namespace == ns && s.Job.Name == "train"
		})
	})
	// No node fails by a job's word.
	awaitMarks(ctx, t, "the nodes are healthy", map[string]string{"n1": "True healthy", "n2": "True healthy", "n3": "True healthy", "n4": "True healthy"})

	job := &unstructured.Unstructured{}
	job.SetGroupVersionKind(schema.GroupVersionKind{Group: "kubeflow.org", Version: "v1", Kind: "PyTorchJob"})
	job.SetNamespace(ns)
	job.SetName("train")
	ended := time.Now()
	if err := cluster.Client.Delete(ctx, job, client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
		t.Fatal(err)
	}
	awaitMarks(ctx, t, "a check confirms the suspicion", map[string]string{"n1": "True healthy", "n2": "True healthy", "n3": "False unhealthy", "n4": "True healthy"})
	confirmed := time.Since(ended)
	awaitSuspicions(ctx, t, guilty, "is no longer suspected", func(all []evenkeel.Suspicion) bool { return len(all) == 0 })

	next := newNamespace(t)
	trainingJob{profile: "watch", workers: 2, script: "true"}.create(ctx, t, next)
	waitJob(ctx, t, next, "Succeeded")
	for _, name := range []string{"train-master-0", "train-worker-0", "train-worker-1"} {
		if p := pod(ctx, t, next, name); p.Spec.NodeName == guilty {
			t.Errorf("%s of the next job ran on %s", name, guilty)
		}
	}
	t.Logf("named %s after its card became slow, confirmed %s after the job was deleted", named.Round(time.Second), confirmed.Round(time.Second))
}

// suspectPolicy makes a policy, and waits until it has proven all nodes.
func suspectPolicy(ctx context.Context, t *testing.T) {
	t.Helper()
	// So small that a check of a slow card takes seconds.
	size, iterations := int64(256<<10), int32(3)
	policy := &evenkeel.NetworkCheckPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "suspects"},
		Spec: evenkeel.NetworkCheckPolicySpec{Check: evenkeel.CheckOptions{
			Stages: []evenkeel.Stage{evenkeel.StagePairs},
			Runner: evenkeel.RunnerSpec{Type: evenkeel.RunnerBench, Launcher: evenkeel.LauncherIndexedJob},
			Sweep:  evenkeel.SweepSpec{MinBytes: &size, MaxBytes: &size, Iterations: &iterations},
		}},
	}
	// It must run its own checks, and not use the results of other tests.
	if err := cluster.Client.DeleteAllOf(ctx, &evenkeel.NodeNetworkHealth{}); err != nil {
		t.Fatal(err)
	}
	if err := cluster.Client.Create(ctx, policy); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Client.Delete(context.Background(), policy); err != nil {
			t.Error(err)
		}
		// Other tests' jobs avoid no node.
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		awaitMarks(ctx, t, "the nodes have no marks", unmarked)
	})
	awaitMarks(ctx, t, "all nodes are proven", map[string]string{"n1": "True healthy", "n2": "True healthy", "n3": "True healthy", "n4": "True healthy"})
}

// awaitSuspicions waits until the node's suspicions are as wanted.
func awaitSuspicions(ctx context.Context, t *testing.T, node, what string, wanted func([]evenkeel.Suspicion) bool) {
	t.Helper()
	eventually(ctx, t, "node "+node+" "+what, func(ctx context.Context) (bool, error) {
		state := &evenkeel.NodeNetworkHealth{}
		err := cluster.Client.Get(ctx, client.ObjectKey{Name: node}, state)
		return wanted(state.Status.Suspicions), err
	})
}
