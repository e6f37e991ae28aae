package upgrade

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

const waitTimeout = 60 * time.Second

// earlier are objects as users and controllers of the earlier version have written them. The jobs come first: no webhook answers.
const earlier = `
apiVersion: v1
kind: Node
metadata: {name: old-0, labels: {pool: old}}
status: {conditions: [{type: Ready, status: "True", reason: Test}]}
---
apiVersion: batch/v1
kind: Job
metadata: {name: held, namespace: default, labels: {evenkeel.dev/gated: "true"}, annotations: {evenkeel.dev/profile: old}}
spec:
  suspend: true
  template:
    metadata: {labels: {evenkeel.dev/profile: old}, annotations: {evenkeel.dev/plugin-image: PINNED}}
    spec: {restartPolicy: Never, nodeSelector: {pool: old}, containers: [{name: c, image: registry.example.com/train:1}]}
---
apiVersion: batch/v1
kind: Job
metadata: {name: train, namespace: default, labels: {evenkeel.dev/reduction-client: train-reduce}, annotations: {evenkeel.dev/profile: old}}
spec:
  template:
    metadata: {labels: {evenkeel.dev/profile: old}, annotations: {evenkeel.dev/plugin-image: PINNED, an.earlier/annotation: x}}
    spec: {restartPolicy: Never, containers: [{name: c, image: registry.example.com/train:1}]}
`

// installed are those that need the chart.
const installed = `
apiVersion: evenkeel.dev/v1alpha1
kind: NetworkProfile
metadata: {name: old}
spec:
  nodeSelector: {matchLabels: {pool: old}}
  plugin: {image: PINNED, delivery: InitContainer}
  environment: [{name: NCCL_DEBUG, value: INFO}]
  reduction: {mode: OnRequest, maxServers: 4, server: {cpu: "4", tolerations: [{key: pool, value: old}]}}
---
apiVersion: evenkeel.dev/v1alpha1
kind: NetworkCheckPolicy
metadata: {name: old}
spec:
  nodeSelector: {matchLabels: {pool: old}}
  triggers: {newNodes: Disabled, jobStart: Enabled, schedule: "@weekly"}
  gate: {onTimeout: Wait}
  onFail: {taint: Enabled}
  check: {profileName: old, runner: {type: Bench, resources: {cpu: "1", memory: 1Gi}, tolerations: [{key: pool}]}, ttlSecondsAfterFinished: 600}
---
apiVersion: evenkeel.dev/v1alpha1
kind: NetworkCheck
metadata: {name: past, namespace: evenkeel-system}
spec: {nodes: {names: [old-0]}, profileName: old, runner: {type: Bench}}
status:
  verdict: Fail
  message: 1 of 1 nodes failed
  startTime: "2026-11-20T00:00:00Z"
  completionTime: "2026-11-20T00:01:00Z"
  conditions: [{type: Complete, status: "True", reason: Fail, message: it has ended, lastTransitionTime: "2026-11-20T00:01:00Z"}]
---
apiVersion: evenkeel.dev/v1alpha1
kind: NodeNetworkHealth
metadata: {name: old-0, ownerReferences: [{apiVersion: v1, kind: Node, name: old-0, uid: UID-old-0}]}
status:
  health: Unhealthy
  reason: TooSlow
  message: 1 GB/s of 40
  observedTime: "2026-11-20T00:01:00Z"
  history: [{check: past, uid: "1", time: "2026-11-20T00:01:00Z", verdict: Fail, reason: TooSlow, busBandwidth: 1G}]
---
apiVersion: evenkeel.dev/v1alpha1
kind: ReductionService
metadata: {name: train-reduce, namespace: default, ownerReferences: [{apiVersion: batch/v1, kind: Job, name: train, uid: UID-train}]}
spec:
  workloadRef: {apiVersion: batch/v1, kind: Job, name: train}
  replicas: 2
  image: SERVERS
  server: {cpu: "4", tolerations: [{key: pool, value: old}]}
`

// renamed are the fields that later versions call otherwise. They are lost when a later version writes the object.
var renamed = []string{
	"NetworkCheckPolicy spec.check.runner.resources.cpu", "NetworkCheckPolicy spec.check.runner.resources.memory", "NetworkCheckPolicy spec.check.ttlSecondsAfterFinished",
	"ReductionService spec.workloadRef.apiVersion",
}

// create makes the objects of a text, with their status.
func (c *cluster) create(t *testing.T, text string) (all []*unstructured.Unstructured) {
	t.Helper()
	uids := []string{"PINNED", pinned, "SERVERS", servers}
	for name, about := range map[string]client.Object{"old-0": &corev1.Node{}, "train": &batchv1.Job{}} {
		key := client.ObjectKey{Name: name}
		if name == "train" {
			key.Namespace = "default"
		}
		if err := c.client.Get(t.Context(), key, about); err == nil {
			uids = append(uids, "UID-"+name, string(about.GetUID()))
		}
	}
	for _, one := range strings.Split(strings.NewReplacer(uids...).Replace(text), "\n---\n") {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(one), &object.Object); err != nil {
			t.Fatal(err)
		}
		status := object.Object["status"]
		if err := c.client.Create(t.Context(), object, client.FieldValidation("Strict")); err != nil {
			t.Fatalf("%s: %v", object.GetKind(), err)
		}
		if status != nil {
			object.Object["status"] = status
			if err := c.client.Status().Update(t.Context(), object, client.FieldValidation("Strict")); err != nil {
				t.Fatalf("status of %s: %v", object.GetKind(), err)
			}
		}
		all = append(all, object)
	}
	return all
}

// read returns the object as it is now.
func (c *cluster) read(ctx context.Context, object *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	now := &unstructured.Unstructured{}
	now.SetGroupVersionKind(object.GroupVersionKind())
	return now, c.client.Get(ctx, client.ObjectKeyFromObject(object), now)
}

// lost lists the fields that the object had and that have gone or changed.
func lost(path string, before, now any) (all []string) {
	if before == nil {
		return nil
	}
	fields, is := before.(map[string]any)
	if !is {
		if fmt.Sprint(before) != fmt.Sprint(now) {
			all = append(all, path)
		}
		return all
	}
	others, _ := now.(map[string]any)
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		all = append(all, lost(strings.TrimPrefix(path+"."+key, "."), fields[key], others[key])...)
	}
	return all
}

// controller runs this version's controller until stop.
func (c *cluster) controller(t *testing.T) (stop func()) {
	t.Helper()
	return c.program(t, "controller", "--bench-image=registry.example.com/bench:1", "--reduction-image="+servers)
}

// program runs this version's program in a role, with the chart's permissions, until stop.
func (c *cluster) program(t *testing.T, role string, flags ...string) (stop func()) {
	t.Helper()
	binary := filepath.Join(c.work, "evenkeel-operator")
	if err := apiserver.Command(c.root, nil, "go", "build", "-o", binary, "./operator/cmd/evenkeel-operator"); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	cmd := exec.Command(binary, slices.Concat([]string{role, "--namespace=" + namespace}, flags, []string{"--metrics-bind-address=0", "--health-probe-bind-address=0"})...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig(t, apiserver.As(c.config, namespace, "evenkeel-"+role), c.work, role))
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil || t.Failed() {
			t.Errorf("the %s: %v\n%s", role, err, log.String())
		}
	}
	t.Cleanup(stop)
	return stop
}

func eventually(t *testing.T, what string, condition func(ctx context.Context) (bool, error)) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, waitTimeout, true, condition); err != nil {
		t.Fatalf("waited in vain until %s: %v", what, err)
	}
}

// TestStoredObjectsSurviveUpgradeAndRollback has the objects of the earlier version, and this version's controller between two of its
// own. It starts no job that is held, touches nothing of one that runs, and loses no field that the versions have in common.
func TestStoredObjectsSurviveUpgradeAndRollback(t *testing.T) {
	c := newCluster(t)
	jobs := c.create(t, earlier)
	// The API server taints new nodes until the node controller finds them ready.
	if err := c.client.Patch(t.Context(), jobs[0].DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"spec": {"taints": null}}`))); err != nil {
		t.Fatal(err)
	}
	c.helm(append([]string{"install", "evenkeel", before, "--create-namespace"}, values...)...)
	all := append(jobs, c.create(t, installed)...)
	chart := filepath.Join(c.root, "charts", "evenkeel")

	touched := 0
	// intact checks every object, and that it can be written in this version.
	intact := func(step string) {
		t.Helper()
		touched++
		var gone []string
		for _, before := range all {
			now, err := c.read(t.Context(), before)
			if err != nil || now.GetUID() != before.GetUID() || now.GetDeletionTimestamp() != nil {
				t.Errorf("%s: %s %s: %v", step, before.GetKind(), before.GetName(), err)
				continue
			}
			for _, part := range []string{"spec", "status"} {
				if before.GetKind() == "Node" || before.GetKind() == "Job" && part == "status" {
					continue
				}
				for _, field := range lost(part, before.Object[part], now.Object[part]) {
					gone = append(gone, before.GetKind()+" "+field)
				}
			}
			patch := fmt.Appendf(nil, `{"metadata": {"labels": {"touched": "%d"}}}`, touched)
			if err := c.client.Patch(t.Context(), now, client.RawPatch(types.MergePatchType, patch)); err != nil {
				t.Errorf("%s: %s %s cannot be written: %v", step, before.GetKind(), before.GetName(), err)
			}
		}
		gone = slices.DeleteFunc(gone, func(field string) bool { return slices.Contains(renamed, field) })
		if len(gone) > 0 {
			t.Errorf("%s: lost %q", step, gone)
		}
	}
	held := func(ctx context.Context) (bool, error) {
		job := &batchv1.Job{}
		err := c.client.Get(ctx, client.ObjectKey{Namespace: "default", Name: "held"}, job)
		return *job.Spec.Suspend && job.Labels["evenkeel.dev/gated"] == "true", err
	}
	stays := func(step string) {
		t.Helper()
		if is, err := held(t.Context()); !is || err != nil {
			t.Errorf("%s: the held job does not wait any more, %v", step, err)
		}
	}
	// works waits until the controller has looked at everything.
	works := func() {
		t.Helper()
		eventually(t, "the controller has looked at everything", func(ctx context.Context) (bool, error) {
			for _, object := range all[len(jobs):] {
				now, err := c.read(ctx, object)
				if err != nil {
					return false, err
				}
				if observed, _, _ := unstructured.NestedInt64(now.Object, "status", "observedGeneration"); observed != now.GetGeneration() && object.GetKind() != "NodeNetworkHealth" && object.GetKind() != "NetworkCheck" {
					return false, nil
				}
			}
			node := &corev1.Node{}
			if err := c.client.Get(ctx, client.ObjectKey{Name: "old-0"}, node); err != nil {
				return false, err
			}
			var events corev1.EventList
			err := c.client.List(ctx, &events, client.InNamespace("default"), client.MatchingFields{"involvedObject.name": "held"})
			return node.Labels["evenkeel.dev/network"] == "unhealthy" && len(events.Items) > 0, err
		})
	}

	intact("installed")
	c.helm(append([]string{"upgrade", "evenkeel", chart}, values...)...)
	intact("upgraded")
	stop := c.controller(t)
	works()
	stays("controller")
	intact("controller")
	stop()
	c.helm("rollback", "evenkeel", "1")
	stays("rolled back")
	intact("rolled back")
	c.helm(append([]string{"upgrade", "evenkeel", chart}, values...)...)
	intact("upgraded again")
	stop = c.controller(t)
	works()
	stays("upgraded again")

	// Nobody waits for ever: the gate goes with the policy.
	policy := all[slices.IndexFunc(all, func(o *unstructured.Unstructured) bool { return o.GetKind() == "NetworkCheckPolicy" })]
	if err := c.client.Delete(t.Context(), policy.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the held job starts", func(ctx context.Context) (bool, error) {
		is, err := held(ctx)
		return !is, err
	})
	stop()
}
