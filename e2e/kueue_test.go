//go:build e2e && kueue

package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/env"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func init() { withKueue = true }

// queue is a queue of Kueue in a namespace. It admits workloads that pass the policy's AdmissionCheck.
const queue = `
apiVersion: kueue.x-k8s.io/v1beta2
kind: AdmissionCheck
metadata: {name: network-preflight}
spec: {controllerName: evenkeel.dev/preflight, parameters: {apiGroup: evenkeel.dev, kind: NetworkCheckPolicy, name: queue}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: any}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: all}
spec:
  namespaceSelector: {}
  resourceGroups:
    - coveredResources: [cpu, memory]
      flavors: [{name: any, resources: [{name: cpu, nominalQuota: 8}, {name: memory, nominalQuota: 8Gi}]}]
  admissionChecksStrategy: {admissionChecks: [{name: network-preflight}]}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: team, namespace: %s}
spec: {clusterQueue: all}
`

// A kueueStatus is the part of a Workload's status that the test reads.
type kueueStatus struct {
	Conditions      []metav1.Condition `json:"conditions"`
	AdmissionChecks []struct {
		Name    string `json:"name"`
		State   string `json:"state"`
		Message string `json:"message"`
	} `json:"admissionChecks"`
}

// workload is the status of the namespace's one Workload, once it has a check.
func workload(ctx context.Context, namespace string) (status kueueStatus, there bool, err error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(schema.GroupVersionKind{Group: "kueue.x-k8s.io", Version: "v1beta2", Kind: "WorkloadList"})
	if err := cluster.Client.List(ctx, list, client.InNamespace(namespace)); err != nil || len(list.Items) == 0 {
		return status, false, err
	}
	if len(list.Items) > 1 {
		return status, false, fmt.Errorf("%d Workloads", len(list.Items))
	}
	content, _, err := unstructured.NestedMap(list.Items[0].Object, "status")
	if err != nil {
		return status, false, err
	}
	err = runtime.DefaultUnstructuredConverter.FromUnstructured(content, &status)
	return status, len(status.AdmissionChecks) > 0, err
}

// The real Kueue reserves a job's quota, waits for Evenkeel's AdmissionCheck, and starts the job when its nodes have passed.
func TestKueueAdmitsJobWhenItsNodesPass(t *testing.T) {
	ctx, ns := testContext(t), newNamespace(t)
	t.Cleanup(func() {
		if t.Failed() {
			for _, args := range [][]string{
				{"get", "netcheck,nodehealth,netcheckpolicy,pods,pytorchjobs,workloads,clusterqueues,admissionchecks", "-A", "-o", "wide"},
				{"get", "workloads,admissionchecks", "-A", "-o", "yaml"}, {"-n", "kueue-system", "logs", "deployment/kueue-controller-manager", "--tail=60"},
			} {
				out, err := cluster.Kubectl(context.Background(), args...)
				t.Logf("%s %v", out, err)
			}
		}
	})
	plugin := kubectlPlugin(ctx, t)
	size, iterations := int64(4<<20), int32(5)
	policy := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "queue"}, Spec: evenkeel.NetworkCheckPolicySpec{
		Triggers: evenkeel.TriggerSpec{NewNodes: evenkeel.SwitchDisabled},
		Check: evenkeel.CheckOptions{
			Runner: evenkeel.RunnerSpec{Type: evenkeel.RunnerBench},
			Sweep:  evenkeel.SweepSpec{MinBytes: &size, MaxBytes: &size, Iterations: &iterations},
		},
	}}
	if err := cluster.Client.Create(ctx, policy); err != nil {
		t.Fatal(err)
	}
	objects := fmt.Sprintf(queue, ns)
	t.Cleanup(func() {
		if _, err := cluster.KubectlInput(context.Background(), objects, "delete", "--wait=false", "-f", "-"); err != nil {
			t.Error(err)
		}
		if err := cluster.Client.Delete(context.Background(), policy); err != nil {
			t.Error(err)
		}
	})
	if _, err := cluster.KubectlInput(ctx, objects, "apply", "--server-side", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	// An AdmissionCheck is active when Evenkeel has set its condition.
	if _, err := cluster.Kubectl(ctx, "wait", "clusterqueue/all", "--for=condition=Active", "--timeout=60s"); err != nil {
		t.Fatal(err)
	}
	job := trainingJob{profile: "default", script: "true"}.object(ns)
	job.SetLabels(map[string]string{"kueue.x-k8s.io/queue-name": "team"})
	// A workload has the checks of its flavors; one without requests has no flavors.
	for _, replica := range []string{"Master", "Worker"} {
		containers, _, err := unstructured.NestedSlice(job.Object, "spec", "pytorchReplicaSpecs", replica, "template", "spec", "containers")
		if err != nil {
			t.Fatal(err)
		}
		containers[0].(map[string]any)["resources"] = map[string]any{"requests": map[string]any{"cpu": "100m"}}
		if err := unstructured.SetNestedSlice(job.Object, containers, "spec", "pytorchReplicaSpecs", replica, "template", "spec", "containers"); err != nil {
			t.Fatal(err)
		}
	}
	if err := cluster.Client.Create(ctx, job); err != nil {
		t.Fatal(err)
	}
	if suspended, _, _ := unstructured.NestedBool(job.Object, "spec", "runPolicy", "suspend"); !suspended || job.GetLabels()[evenkeel.GatedKey] != "" {
		t.Fatalf("the job is not suspended by Kueue: %v", job.Object)
	}
	var status kueueStatus
	eventually(ctx, t, "the workload waits for the check", func(ctx context.Context) (there bool, err error) {
		status, there, err = workload(ctx, ns)
		return there && status.AdmissionChecks[0].Message != "", err
	})
	if c := status.AdmissionChecks[0]; c.Name != "network-preflight" || c.State != "Pending" || !strings.Contains(c.Message, "n1, n2, n3, n4") {
		t.Errorf("the check is %+v", c)
	}
	output, err := exec.CommandContext(ctx, plugin, "why", "pytorchjob/train", "-n", ns, "--kubeconfig", cluster.Kubeconfig).CombinedOutput()
	if err != nil || !strings.Contains(string(output), "admission check network-preflight is Pending: waits until the network") {
		t.Errorf("kubectl evenkeel why: %v\n%s", err, output)
	}
	waitJob(ctx, t, ns, "Succeeded")

	if status, _, err = workload(ctx, ns); err != nil {
		t.Fatal(err)
	}
	if c := status.AdmissionChecks[0]; c.State != "Ready" || !strings.Contains(c.Message, "the network of all 4 nodes that it may run on is proven") {
		t.Errorf("the check is %+v", c)
	}
	var checks evenkeel.NetworkCheckList
	if err := cluster.Client.List(ctx, &checks, client.InNamespace(env.Namespace), client.MatchingLabels{evenkeel.PolicyKey: policy.Name}); err != nil {
		t.Fatal(err)
	}
	var pods corev1.PodList
	if err := cluster.Client.List(ctx, &pods, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	reserved, admitted := meta.FindStatusCondition(status.Conditions, "QuotaReserved"), meta.FindStatusCondition(status.Conditions, "Admitted")
	if len(checks.Items) != 1 || len(pods.Items) != 2 || reserved == nil || admitted == nil || checks.Items[0].Status.CompletionTime == nil {
		t.Fatalf("%d checks, %d pods, conditions %+v", len(checks.Items), len(pods.Items), status.Conditions)
	}
	// The order of events, by the times of the API objects.
	times := []metav1.Time{reserved.LastTransitionTime, checks.Items[0].CreationTimestamp, *checks.Items[0].Status.CompletionTime, admitted.LastTransitionTime, pods.Items[0].CreationTimestamp}
	if !slices.IsSortedFunc(times, func(a, b metav1.Time) int { return a.Compare(b.Time) }) {
		t.Errorf("quota reserved, check created, check complete, admitted, first pod created at %v", times)
	}
}
