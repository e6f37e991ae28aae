//go:build e2e && kueue

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os/exec"
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

// The real Kueue reserves a job's quota, waits for Evenkeel's AdmissionCheck, and starts the job when its nodes have
// passed.
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
	plugin := kubectlPlugin(t)
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
	if c := status.AdmissionChecks[0]; c.Name != "network-preflight" || c.State != "Pending" || !strings.Contains(c.Message, "n1, n2, n3") {
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
	if c := status.AdmissionChecks[0]; c.State != "Ready" || !strings.Contains(c.Message, "nodes that it may run on is proven") {
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

// topologyQueue is a queue whose workloads get hosts, by the policy's AdmissionCheck.
const topologyQueue = `
apiVersion: kueue.x-k8s.io/v1beta2
kind: AdmissionCheck
metadata: {name: hosts-preflight}
spec: {controllerName: evenkeel.dev/preflight, parameters: {apiGroup: evenkeel.dev, kind: NetworkCheckPolicy, name: hosts}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: Topology
metadata: {name: hosts}
spec: {levels: [{nodeLabel: kubernetes.io/hostname}]}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: hosts}
spec: {nodeLabels: {kubernetes.io/os: linux}, topologyName: hosts}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: hosts}
spec:
  namespaceSelector: {}
  resourceGroups:
    - coveredResources: [cpu, memory]
      flavors: [{name: hosts, resources: [{name: cpu, nominalQuota: 8}, {name: memory, nominalQuota: 4Ti}]}]
  admissionChecksStrategy: {admissionChecks: [{name: hosts-preflight}]}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: hosts, namespace: %s}
spec: {clusterQueue: hosts}
`

// hostJob is a Job that nobody annotated, and that has to run on the node.
const hostJob = `
apiVersion: batch/v1
kind: Job
metadata: {name: %[1]s, namespace: %[2]s, labels: {kueue.x-k8s.io/queue-name: hosts}}
spec:
  suspend: true
  template:
    metadata: {annotations: {kueue.x-k8s.io/podset-required-topology: kubernetes.io/hostname}}
    spec:
      restartPolicy: Never
      nodeSelector: {kubernetes.io/hostname: %[3]s}
      securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
      containers:
        - name: main
          image: %[4]s
          command: ["true"]
          resources: {requests: {cpu: 100m}}
          securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
`

// newTopologyQueue makes the queue in the namespace, and a policy under which n2 has failed and the others have passed.
func newTopologyQueue(ctx context.Context, t *testing.T, ns string) *evenkeel.NetworkCheckPolicy {
	t.Helper()
	recordResults(ctx, t)
	policy := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "hosts"}}
	policy.Spec.Triggers = evenkeel.TriggerSpec{NewNodes: evenkeel.SwitchDisabled}
	policy.Spec.Check.Runner.Type = evenkeel.RunnerBench
	if err := cluster.Client.Create(ctx, policy); err != nil {
		t.Fatal(err)
	}
	objects := fmt.Sprintf(topologyQueue, ns)
	t.Cleanup(func() {
		if t.Failed() {
			for _, args := range [][]string{
				{"get", "workloads,clusterqueues,admissionchecks,jobs,pods", "-A", "-o", "wide"}, {"get", "workloads,admissionchecks", "-A", "-o", "yaml"},
				{"-n", env.Namespace, "logs", "deployment/evenkeel-controller", "--tail=40"},
			} {
				out, err := cluster.Kubectl(context.Background(), args...)
				t.Logf("%s %v", out, err)
			}
		}
		if _, err := cluster.KubectlInput(context.Background(), objects, "delete", "--wait=false", "--ignore-not-found", "-f", "-"); err != nil {
			t.Error(err)
		}
		if err := cluster.Client.Delete(context.Background(), policy); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	if _, err := cluster.KubectlInput(ctx, objects, "apply", "--server-side", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.Kubectl(ctx, "wait", "clusterqueue/hosts", "--for=condition=Active", "--timeout=60s"); err != nil {
		t.Fatal(err)
	}
	return policy
}

// The real Kueue counts the attempts of a workload that has to have a node that failed, waits between them, and goes on
// admitting when the policy is gone.
func TestKueueRetriesAndPolicyDeletion(t *testing.T) {
	ctx, ns := testContext(t), newNamespace(t)
	policy := newTopologyQueue(ctx, t, ns)
	if _, err := cluster.KubectlInput(ctx, fmt.Sprintf(hostJob, "stubborn", ns, "n2", cluster.Images.Bench), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	var status struct {
		AdmissionChecks []struct {
			RetryCount int `json:"retryCount"`
		} `json:"admissionChecks"`
		RequeueState struct {
			RequeueAt *metav1.Time `json:"requeueAt"`
		} `json:"requeueState"`
	}
	attempts := func(ctx context.Context) (counted int, err error) {
		out, err := cluster.Kubectl(ctx, "-n", ns, "get", "workloads", "-o", "jsonpath={.items[*].status}")
		status.AdmissionChecks, status.RequeueState.RequeueAt = nil, nil
		if err != nil || out == "" {
			return 0, err
		}
		if err := json.Unmarshal([]byte(out), &status); err != nil || len(status.AdmissionChecks) != 1 {
			return 0, err
		}
		return status.AdmissionChecks[0].RetryCount, nil
	}
	eventually(ctx, t, "Kueue waits until the next attempt", func(ctx context.Context) (bool, error) {
		_, err := attempts(ctx)
		return status.RequeueState.RequeueAt != nil, err
	})
	if wait := time.Until(status.RequeueState.RequeueAt.Time); wait > time.Minute {
		t.Errorf("the next attempt is in %s", wait)
	}
	eventually(ctx, t, "Kueue has counted the attempt", func(ctx context.Context) (bool, error) { // by version, before or after the wait
		counted, err := attempts(ctx)
		return counted == 1, err
	})
	if err := cluster.Client.Delete(ctx, policy); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the check says that it has no policy", func(ctx context.Context) (bool, error) {
		reason, err := cluster.Kubectl(ctx, "get", "admissioncheck/hosts-preflight", "-o", "jsonpath={.status.conditions[?(@.type=='Active')].status} {.status.conditions[?(@.type=='Active')].reason}")
		return reason == "True NoPolicy", err
	})
	if _, err := cluster.Kubectl(ctx, "wait", "clusterqueue/hosts", "--for=condition=Active", "--timeout=60s"); err != nil {
		t.Errorf("the queue: %v", err)
	}
	if _, err := cluster.KubectlInput(ctx, fmt.Sprintf(hostJob, "free", ns, "n1", cluster.Images.Bench), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	for _, job := range []string{"free", "stubborn"} {
		if _, err := cluster.Kubectl(ctx, "-n", ns, "wait", "job/"+job, "--for=condition=Complete", "--timeout=180s"); err != nil {
			t.Errorf("the job %s: %v", job, err)
		}
	}
}

// twoHostJob is a Job of two pods of which a host has room for one. Nobody annotated it, and it does not end.
const twoHostJob = `
apiVersion: batch/v1
kind: Job
metadata: {name: lasting, namespace: %[1]s, labels: {kueue.x-k8s.io/queue-name: hosts}}
spec:
  suspend: true
  completions: 2
  parallelism: 2
  template:
    metadata: {annotations: {kueue.x-k8s.io/podset-unconstrained-topology: "true"}}
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 1
      securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
      containers:
        - name: main
          image: %[2]s
          command: ["sleep", "3600"]
          resources: {requests: {cpu: 10m, memory: %[3]q}}
          securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
`

// The real Kueue replaces a host of a running job by Evenkeel's taint. The job keeps its pods until one of them fails
// on that host; then that pod alone moves, and the workload stays admitted.
func TestKueueReplacesTheFailedNodeOfARunningJob(t *testing.T) {
	ctx, ns := testContext(t), newNamespace(t)
	policy := newTopologyQueue(ctx, t, ns)
	before, hundred := policy.DeepCopy(), int32(100) // two of four nodes fail
	policy.Spec.OnFail.Taint, policy.Spec.OnFail.MaxUnhealthyPercent = evenkeel.SwitchEnabled, &hundred
	if err := cluster.Client.Patch(ctx, policy, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	tainted := func(name string) {
		t.Helper()
		eventually(ctx, t, name+" has the taint", func(ctx context.Context) (bool, error) {
			node := &corev1.Node{}
			err := cluster.Client.Get(ctx, client.ObjectKey{Name: name}, node)
			return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == evenkeel.HealthKey }), err
		})
	}
	tainted("n2")
	node := &corev1.Node{}
	if err := cluster.Client.Get(ctx, client.ObjectKey{Name: "n1"}, node); err != nil {
		t.Fatal(err)
	}
	request := resource.NewQuantity(node.Status.Allocatable.Memory().Value()/20*11, resource.BinarySI)
	if _, err := cluster.KubectlInput(ctx, fmt.Sprintf(twoHostJob, ns, cluster.Images.Bench, request), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // so that the queue can be deleted
		if _, err := cluster.Kubectl(context.Background(), "-n", ns, "delete", "job/lasting", "--cascade=foreground", "--timeout=60s"); err != nil {
			t.Error(err)
		}
		if _, err := cluster.Kubectl(context.Background(), "-n", ns, "wait", "workloads", "--all", "--for=delete", "--timeout=60s"); err != nil {
			t.Error(err)
		}
	})
	// running are the job's pods by host.
	running := func(ctx context.Context) (map[string]corev1.Pod, error) {
		var pods corev1.PodList
		err := cluster.Client.List(ctx, &pods, client.InNamespace(ns))
		byHost := map[string]corev1.Pod{}
		for _, p := range pods.Items {
			if p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning {
				byHost[p.Spec.NodeName] = p
			}
		}
		return byHost, err
	}
	var began map[string]corev1.Pod
	eventually(ctx, t, "two pods run", func(ctx context.Context) (_ bool, err error) {
		began, err = running(ctx)
		return len(began) == 2, err
	})
	if _, ok := began["n2"]; ok {
		t.Fatalf("a pod runs on n2, which has the taint: %v", slices.Collect(maps.Keys(began)))
	}
	status, _, err := workload(ctx, ns)
	if err != nil {
		t.Fatal(err)
	}
	admitted := meta.FindStatusCondition(status.Conditions, "Admitted")
	if admitted == nil {
		t.Fatalf("the workload is not admitted: %+v", status.Conditions)
	}

	hosts := slices.Sorted(maps.Keys(began))
	failed, other := hosts[0], hosts[1]
	state := &evenkeel.NodeNetworkHealth{}
	if err := cluster.Client.Get(ctx, client.ObjectKey{Name: failed}, state); err != nil {
		t.Fatal(err)
	}
	state.Status.Health, state.Status.Reason = evenkeel.HealthUnhealthy, "TooSlow"
	state.Status.Message = "with " + other + ": 0.1 GB/s, minimum 1 GB/s"
	if err := cluster.Client.Status().Update(ctx, state); err != nil {
		t.Fatal(err)
	}
	tainted(failed)
	if now, err := running(ctx); err != nil || len(now) != 2 || now[failed].UID != began[failed].UID {
		t.Errorf("the taint has disturbed the job: it runs on %v, %v", slices.Sorted(maps.Keys(now)), err)
	}

	doomed := began[failed]
	if err := cluster.Client.Delete(ctx, &doomed); err != nil {
		t.Fatal(err)
	}
	var after map[string]corev1.Pod
	eventually(ctx, t, "a pod runs in the place of the one that failed", func(ctx context.Context) (_ bool, err error) {
		after, err = running(ctx)
		return len(after) == 2, err
	})
	for _, bad := range []string{failed, "n2"} {
		if _, ok := after[bad]; ok {
			t.Errorf("it runs on %s, which failed", bad)
		}
	}
	if after[other].UID != began[other].UID {
		t.Errorf("the pod on %s, which had no fault, was replaced too", other)
	}
	if status, _, err = workload(ctx, ns); err != nil {
		t.Fatal(err)
	}
	if now := meta.FindStatusCondition(status.Conditions, "Admitted"); now == nil || *now != *admitted || meta.IsStatusConditionTrue(status.Conditions, "Evicted") {
		t.Errorf("the workload did not stay admitted: %+v", status.Conditions)
	}
}

// pairJob is a Job that nobody annotated, and that runs on one of the nodes with the label e2e-pair.
const pairJob = `
apiVersion: batch/v1
kind: Job
metadata: {name: anywhere, namespace: %[1]s, labels: {kueue.x-k8s.io/queue-name: hosts}}
spec:
  suspend: true
  template:
    metadata: {annotations: {kueue.x-k8s.io/podset-required-topology: kubernetes.io/hostname}}
    spec:
      restartPolicy: Never
      nodeSelector: {e2e-pair: "yes"}
      securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
      containers:
        - name: main
          image: %[2]s
          command: ["true"]
          resources: {requests: {cpu: 100m}}
          securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
`

// Kueue gives a job that nobody annotated a node that failed, if it fits: nothing keeps it off. With the policy's taint
// it does not, and the job runs as soon as another node fits.
func TestKueueSteersUnannotatedJobs(t *testing.T) {
	ctx, ns := testContext(t), newNamespace(t)
	policy := newTopologyQueue(ctx, t, ns)
	fit := func(node string) {
		t.Helper()
		if _, err := cluster.Kubectl(ctx, "label", "node", node, "e2e-pair=yes"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := cluster.Kubectl(context.Background(), "label", "node", node, "e2e-pair-"); err != nil {
				t.Error(err)
			}
		})
	}
	says := func(what, path, text string) {
		t.Helper()
		said := ""
		defer func() {
			if t.Failed() {
				t.Logf("the workload says %q", said)
			}
		}()
		eventually(ctx, t, what, func(ctx context.Context) (is bool, err error) {
			said, err = cluster.Kubectl(ctx, "-n", ns, "get", "workloads", "-o", "jsonpath={.items[*].status."+path+"}")
			return strings.Contains(said, text), err
		})
	}
	fit("n2")
	if _, err := cluster.KubectlInput(ctx, fmt.Sprintf(pairJob, ns, cluster.Images.Bench), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	says("Kueue has given the job the node that failed", "admissionChecks[*].message", "the network of n2 failed")
	if err := cluster.Client.Patch(ctx, policy, client.RawPatch(types.MergePatchType, []byte(`{"spec": {"onFail": {"taint": "Enabled"}}}`))); err != nil {
		t.Fatal(err)
	}
	says("at the next attempt, Kueue leaves out the node with the taint", "conditions[?(@.type=='QuotaReserved')].message", evenkeel.HealthKey)
	fit("n3")
	if _, err := cluster.Kubectl(ctx, "-n", ns, "wait", "job/anywhere", "--for=condition=Complete", "--timeout=120s"); err != nil {
		t.Fatal(err)
	}
	var pods corev1.PodList
	if err := cluster.Client.List(ctx, &pods, client.InNamespace(ns)); err != nil || len(pods.Items) != 1 {
		t.Fatalf("%d pods, %v", len(pods.Items), err)
	}
	if p := &pods.Items[0]; p.Spec.NodeName != "n3" || p.Annotations[evenkeel.InjectedKey] != "" {
		t.Errorf("the pod ran on %s with the annotations %v", p.Spec.NodeName, p.Annotations)
	}
}

// It is the last test: Evenkeel is uninstalled. First Helm refuses, since a queue would stop.
func TestKueueUninstall(t *testing.T) {
	ctx, ns := testContext(t), newNamespace(t)
	newTopologyQueue(ctx, t, ns)
	if _, err := cluster.KubectlInput(ctx, fmt.Sprintf(hostJob, "stubborn", ns, "n2", cluster.Images.Bench), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.Helm(ctx, "uninstall", env.Release, "--namespace", env.Namespace, "--timeout", "2m"); err == nil {
		t.Fatal("the chart was uninstalled, though a ClusterQueue names its AdmissionCheck")
	}
	said, err := cluster.Kubectl(ctx, "-n", env.Namespace, "logs", "job/evenkeel-cleanup-check")
	if err != nil || !strings.Contains(said, "ClusterQueue hosts, which names hosts-preflight") || !strings.Contains(said, "--detach-queues") {
		t.Errorf("the hook said %q, %v", said, err)
	}
	if _, err := cluster.Kubectl(ctx, "-n", env.Namespace, "wait", "deployment/evenkeel-controller", "--for=condition=Available", "--timeout=60s"); err != nil {
		t.Errorf("the controller: %v", err)
	}
	plugin := kubectlPlugin(t)
	run := func(status int, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(ctx, plugin, append([]string{"uninstall", "--kubeconfig", cluster.Kubeconfig}, args...)...)
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != status {
			t.Errorf("kubectl evenkeel uninstall %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	run(2, "--dry-run")
	if said := run(0, "--detach-queues"); !strings.Contains(said, "helm uninstall evenkeel") {
		t.Errorf("it said %s", said)
	}
	if _, err := cluster.Kubectl(ctx, "-n", ns, "wait", "job/stubborn", "--for=condition=Complete", "--timeout=120s"); err != nil {
		t.Errorf("the job that waited: %v", err)
	}
	if _, err := cluster.Helm(ctx, "uninstall", env.Release, "--namespace", env.Namespace, "--no-hooks"); err != nil {
		t.Errorf("Helm's own record: %v", err)
	}
}
