//go:build e2e

package e2e

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/env"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// gatePolicy creates a policy that gates jobs, of which no node is proven. It is deleted after the test.
func gatePolicy(ctx context.Context, t *testing.T, name string) *evenkeel.NetworkCheckPolicy {
	t.Helper()
	// The policy must run its own check, and not use the results of other tests.
	if err := cluster.Client.DeleteAllOf(ctx, &evenkeel.NodeNetworkHealth{}); err != nil {
		t.Fatal(err)
	}
	size, iterations := int64(4<<20), int32(5)
	policy := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: evenkeel.NetworkCheckPolicySpec{
		Triggers: evenkeel.TriggerSpec{NewNodes: evenkeel.SwitchDisabled, JobStart: evenkeel.SwitchEnabled},
		Check: evenkeel.CheckOptions{
			Runner: evenkeel.RunnerSpec{Type: evenkeel.RunnerBench},
			Sweep:  evenkeel.SweepSpec{MinBytes: &size, MaxBytes: &size, Iterations: &iterations},
		},
	}}
	if err := cluster.Client.Create(ctx, policy); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Client.Delete(context.Background(), policy); err != nil {
			t.Error(err)
		}
	})
	return policy
}

// A job is gated before it has a pod, as many nodes are checked as it needs, and it starts on those that passed. The
// next job uses their results.
func TestGateHoldsJobUntilItsNodesPass(t *testing.T) {
	ctx := testContext(t)
	policy := gatePolicy(ctx, t, "gate")
	ns := newNamespace(t)
	job := trainingJob{profile: "default", script: "true"}.object(ns)
	wouldBeSuspended := func(job *unstructured.Unstructured, want bool) func(context.Context) (bool, error) {
		return func(ctx context.Context) (bool, error) {
			try := job.DeepCopy()
			err := cluster.Client.Create(ctx, try, client.DryRunAll)
			return isSuspended(try) == want, err
		}
	}
	eventually(ctx, t, "the webhook has read the policy", wouldBeSuspended(job, true))
	if err := cluster.Client.Create(ctx, job); err != nil {
		t.Fatal(err)
	}
	if !isSuspended(job) || job.GetLabels()[evenkeel.GatedKey] == "" {
		t.Fatalf("the job is not gated: %v", job.Object)
	}
	eventsOfJob := func() map[string]string {
		var list corev1.EventList
		if err := cluster.Client.List(ctx, &list, client.InNamespace(ns)); err != nil {
			t.Fatal(err)
		}
		events := map[string]string{}
		for _, e := range list.Items {
			if e.InvolvedObject.UID == job.GetUID() {
				events[e.Reason] += e.Message + "\n"
			}
		}
		return events
	}
	t.Cleanup(func() {
		if t.Failed() {
			out, err := cluster.Kubectl(context.Background(), "get", "netcheck,nodehealth,netcheckpolicy,pods,pytorchjobs", "-A", "-o", "wide")
			t.Logf("%s %v", out, err)
		}
	})
	eventually(ctx, t, "an Event on the job says that it started, and why", func(ctx context.Context) (bool, error) {
		var pods corev1.PodList
		if err := cluster.Client.List(ctx, &pods, client.InNamespace(ns)); err != nil {
			return false, err
		}
		events := eventsOfJob()
		if len(pods.Items) > 0 && events["EvenkeelNetworkProven"] == "" {
			t.Fatalf("the job has pods before its nodes passed: %v", events)
		}
		return events["EvenkeelNetworkProven"] != "", nil
	})
	events := eventsOfJob()
	if !strings.Contains(events["EvenkeelWaitingForCheck"], "the network of n1, n2, n3 is checked") || !strings.Contains(events["EvenkeelNetworkProven"], "nodes that it may run on is proven") {
		t.Errorf("Events of the job: %v", events)
	}
	waitJob(ctx, t, ns, "Succeeded")
	oneCheck := func() {
		t.Helper()
		var checks evenkeel.NetworkCheckList
		if err := cluster.Client.List(ctx, &checks, client.InNamespace(env.Namespace), client.MatchingLabels{evenkeel.PolicyKey: policy.Name}); err != nil {
			t.Fatal(err)
		}
		if len(checks.Items) != 1 || !strings.HasPrefix(checks.Items[0].Name, "gate-job-") {
			t.Errorf("%d checks", len(checks.Items))
		}
	}
	oneCheck()

	// There are enough nodes with recent verdicts now, so another job starts without a check.
	other := newNamespace(t)
	next := trainingJob{profile: "default", script: "true"}.object(other)
	if err := cluster.Client.Create(ctx, next); err != nil {
		t.Fatal(err)
	}
	waitJob(ctx, t, other, "Succeeded")
	oneCheck()
	first := pod(ctx, t, other, "train-master-0").CreationTimestamp
	t.Logf("from the job's creation to that of its first pod: %s (the API counts whole seconds)", first.Sub(next.GetCreationTimestamp().Time))
}

func isSuspended(job *unstructured.Unstructured) bool {
	suspended, _, _ := unstructured.NestedBool(job.Object, "spec", "runPolicy", "suspend")
	return suspended
}
