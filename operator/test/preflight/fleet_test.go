package preflight

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/jobs"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// An ending is how a run goes.
type ending struct {
	// speed, GB/s, over network; the run fails with the line of failure if that is set.
	speed   float64
	network string
	failure string
	// log is what it writes, if not what would follow from the above.
	log string
	// waiting is a reason for which the pods' containers wait, forever.
	waiting string
	// running leaves the pods running, and silent keeps the log of pods that ended.
	running, silent bool
}

// A fleet does what a cluster's job controller and kubelets would: it makes the pods of each Job, and ends them.
type fleet struct {
	// end decides; it is called each time that a run is looked at, until the run has ended. Deciding guards what it uses.
	end      func(nodes []string) ending
	deciding sync.Mutex
	// criteria is that Jobs get the condition SuccessCriteriaMet before they are complete, as from Kubernetes 1.31 on. An earlier API
	// server refuses it for Jobs without a policy of success.
	criteria bool

	// hold leaves all runs running.
	hold atomic.Bool

	mu sync.Mutex
	// taken are the names of pods that somebody deleted.
	taken map[string]bool
	// logs of pods that have ended, by name.
	logs map[string]string
	// runs has the nodes of every Job that was ever made, by UID.
	runs map[types.UID]madeRun
	most int // nodes with pods of small runs at once
	// missed counts the times that somebody wanted a log that is not there.
	missed int
}

type madeRun struct {
	name  string
	nodes []string
}

// Tail implements the controller's LogReader.
func (f *fleet) Tail(_ context.Context, _, pod string) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	text, ok := f.logs[pod]
	if !ok {
		f.missed++
		return nil, fmt.Errorf("pod %s has no log", pod)
	}
	return []byte(text), nil
}

// all are the runs that were made, sorted by name.
func (f *fleet) all() []madeRun {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.SortedFunc(maps.Values(f.runs), func(a, b madeRun) int { return strings.Compare(a.name, b.name) })
}

// newFleet works until the test ends.
func newFleet(t *testing.T, end func(nodes []string) ending) *fleet {
	t.Helper()
	f := &fleet{end: end, criteria: apiserver.AtLeast(t, "1.31"), logs: map[string]string{}, runs: map[types.UID]madeRun{}}
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan struct{})
	const pause, manyRuns = 20 * time.Millisecond, 20
	timer := time.NewTimer(pause)
	go func() {
		defer close(stopped)
		for {
			select {
			case <-ctx.Done():
				return
			case <-timer.C:
				began := time.Now()
				runs, err := f.tick(ctx)
				if err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
					t.Errorf("fleet: %v", err)
					return
				}
				rest := pause
				if runs > manyRuns { // it leaves the processors to what is measured
					rest = max(pause, 3*time.Since(began))
				}
				timer.Reset(rest)
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-stopped
		timer.Stop()
	})
	return f
}

// tick does what is due, and returns how many Jobs there are.
func (f *fleet) tick(ctx context.Context) (runs int, err error) {
	var jobs batchv1.JobList
	var pods corev1.PodList
	if err := admin.List(ctx, &jobs, client.InNamespace(namespace)); err != nil {
		return 0, err
	}
	if err := admin.List(ctx, &pods, client.InNamespace(namespace)); err != nil {
		return 0, err
	}
	exist := map[types.UID]bool{}
	for i := range jobs.Items {
		exist[jobs.Items[i].UID] = true
	}
	alive := map[types.UID][]*corev1.Pod{}
	var orphans []*corev1.Pod
	for i := range pods.Items {
		pod := &pods.Items[i]
		owner := metav1.GetControllerOf(pod)
		switch {
		case owner == nil || owner.Kind != "Job":
		case exist[owner.UID]:
			alive[owner.UID] = append(alive[owner.UID], pod)
		default:
			orphans = append(orphans, pod)
		}
	}
	if err := many(len(orphans), func(i int) error {
		return client.IgnoreNotFound(admin.Delete(ctx, orphans[i], client.GracePeriodSeconds(0)))
	}); err != nil {
		return 0, err
	}
	if err := many(len(jobs.Items), func(i int) error {
		return f.job(ctx, &jobs.Items[i], alive[jobs.Items[i].UID])
	}); err != nil {
		return 0, err
	}
	if err := f.mpiJobs(ctx); err != nil {
		return 0, err
	}
	busy := 0
	for i := range jobs.Items {
		if size := int(*jobs.Items[i].Spec.Completions); len(jobs.Items[i].Status.Conditions) == 0 && size <= 3 {
			busy += size
		}
	}
	f.mu.Lock()
	f.most = max(f.most, busy)
	f.mu.Unlock()
	return len(jobs.Items), nil
}

func (f *fleet) ending(nodes []string) ending {
	f.deciding.Lock()
	defer f.deciding.Unlock()
	return f.end(nodes)
}

// pinnedTo are the nodes that pods of the template may run on.
func pinnedTo(template *corev1.PodTemplateSpec) []string {
	var nodes []string
	for _, term := range template.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		nodes = append(nodes, term.MatchFields[0].Values...)
	}
	return nodes
}

func (f *fleet) job(ctx context.Context, j *batchv1.Job, pods []*corev1.Pod) error {
	nodes := pinnedTo(&j.Spec.Template)
	f.mu.Lock()
	f.runs[j.UID] = madeRun{j.Name, nodes}
	f.mu.Unlock()
	if len(j.Status.Conditions) > 0 || j.Spec.Suspend != nil && *j.Spec.Suspend {
		return nil
	}
	if len(pods) == 0 {
		for i, node := range nodes {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
				Namespace: j.Namespace, Name: fmt.Sprintf("%s-%d-abcde", j.Name, i), Labels: maps.Clone(j.Spec.Template.Labels), Annotations: j.Spec.Template.Annotations,
				OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(j, batchv1.SchemeGroupVersion.WithKind("Job"))},
			}, Spec: *j.Spec.Template.Spec.DeepCopy()}
			pod.Labels["batch.kubernetes.io/job-completion-index"] = strconv.Itoa(i)
			pod.Spec.NodeName = node
			if err := admin.Create(ctx, pod); err != nil {
				return err
			}
			pods = append(pods, pod)
		}
	}
	e := f.ending(nodes)
	e.running = e.running || f.hold.Load()
	for _, pod := range pods {
		if f.isTaken(pod.Name) {
			continue
		}
		if err := f.pod(ctx, pod, e, nodes); err != nil {
			return err
		}
	}
	if e.running || e.waiting != "" {
		return nil
	}
	now := metav1.Now()
	j.Status.StartTime = &now
	kinds := []batchv1.JobConditionType{batchv1.JobComplete}
	if f.criteria {
		kinds = []batchv1.JobConditionType{batchv1.JobSuccessCriteriaMet, batchv1.JobComplete}
	}
	if e.failure != "" {
		kinds = []batchv1.JobConditionType{batchv1.JobFailureTarget, batchv1.JobFailed}
	} else {
		j.Status.CompletionTime = &now
		j.Status.Succeeded = *j.Spec.Completions
	}
	for _, kind := range kinds {
		j.Status.Conditions = append(j.Status.Conditions, batchv1.JobCondition{Type: kind, Status: corev1.ConditionTrue, Reason: "Test", LastTransitionTime: now})
	}
	return admin.Status().Update(ctx, j)
}

// mpiJobs does what the mpi-operator would, with what counts for a check: the pods, and the condition at the end.
func (f *fleet) mpiJobs(ctx context.Context) error {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(jobs.MPIJobKind.GroupVersion().WithKind("MPIJobList"))
	if err := admin.List(ctx, list, client.InNamespace(namespace)); err != nil {
		return err
	}
	for i := range list.Items {
		j := &list.Items[i]
		if f.has(j.GetUID()) {
			continue
		}
		var nodes []string
		end := "Succeeded"
		for _, role := range []string{"Worker", "Launcher"} {
			content, _, err := unstructured.NestedMap(j.Object, "spec", "mpiReplicaSpecs", role, "template")
			if err != nil {
				return err
			}
			var template corev1.PodTemplateSpec
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(content, &template); err != nil {
				return err
			}
			hosts := pinnedTo(&template)
			if role == "Launcher" {
				hosts = hosts[:1]
			} else {
				nodes = hosts
			}
			for at, node := range hosts {
				pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%s-%s-%d", j.GetName(), strings.ToLower(role), at), Labels: template.Labels}, Spec: template.Spec}
				pod.Spec.NodeName, pod.Spec.RestartPolicy = node, corev1.RestartPolicyNever
				if err := admin.Create(ctx, pod); err != nil {
					return err
				}
				e := ending{running: true} // sshd does not end by itself
				if role == "Launcher" {
					e = f.ending(nodes)
				}
				if e.failure != "" {
					end = "Failed"
				}
				if err := f.pod(ctx, pod, e, nodes); err != nil {
					return err
				}
			}
		}
		f.mu.Lock()
		f.runs[j.GetUID()] = madeRun{j.GetName(), nodes}
		f.mu.Unlock()
		if err := unstructured.SetNestedSlice(j.Object, []any{map[string]any{"type": end, "status": "True", "reason": "MPIJob" + end, "message": "it ended"}}, "status", "conditions"); err != nil {
			return err
		}
		if err := admin.Status().Update(ctx, j); err != nil {
			return err
		}
	}
	return nil
}

// forget makes the fleet leave the pod alone, whose place another one takes.
func (f *fleet) forget(pod *corev1.Pod) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.taken == nil {
		f.taken = map[string]bool{}
	}
	f.taken[pod.Name] = true
}

func (f *fleet) isTaken(pod string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.taken[pod]
}

func (f *fleet) has(uid types.UID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, ok := f.runs[uid]
	return ok
}

func (f *fleet) pod(ctx context.Context, pod *corev1.Pod, e ending, nodes []string) error {
	state := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "Completed"}}
	pod.Status.Phase = corev1.PodSucceeded
	switch {
	case e.waiting != "":
		state = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: e.waiting, Message: "the registry says no"}}
		pod.Status.Phase = corev1.PodPending
	case e.running:
		state = corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
		pod.Status.Phase = corev1.PodRunning
	case e.failure != "":
		state.Terminated = &corev1.ContainerStateTerminated{Reason: "Error", ExitCode: 1}
		pod.Status.Phase = corev1.PodFailed
	}
	if e.running && len(pod.Status.ContainerStatuses) > 0 && pod.Status.ContainerStatuses[0].State.Running != nil {
		return nil
	}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: pod.Spec.Containers[0].Name, Image: pod.Spec.Containers[0].Image, State: state}}
	f.mu.Lock()
	if !e.silent {
		f.logs[pod.Name] = text(e, nodes)
	}
	f.mu.Unlock()
	return admin.Status().Update(ctx, pod)
}

// text is what evenkeel-bench would write.
func text(e ending, nodes []string) string {
	if e.log != "" {
		return e.log
	}
	if e.failure != "" {
		return "error: " + e.failure + "\n"
	}
	network := map[string]any{"name": e.network, "version": 10, "library": "/opt/evenkeel/plugin/libnccl-net-evenkeel.so", "sha256": "0123456789ab", "device": "eth0", "speed_mbps": 10000, "devices": 1}
	var ranks []any
	for i, node := range nodes {
		ranks = append(ranks, map[string]any{"rank": i, "host": node, "address": "10.0.0.1", "network": network})
	}
	half := map[string]any{"time_us": 1000, "algbw": e.speed, "busbw": e.speed, "wrong": 0}
	row := map[string]any{"size": 1 << 20, "count": 1 << 18, "out_of_place": half, "in_place": half}
	report, err := json.Marshal(map[string]any{"type": "float", "redop": "sum", "ranks": ranks, "rows": []any{row}, "sent_bytes": 1 << 20, "wrong": 0, "average_busbw": e.speed, "latency_us": 30.4})
	if err != nil {
		panic(err) // maps of plain values marshal
	}
	return string(report) + "\n"
}

// links gives runs the speed of the slowest of their nodes, GB/s: 1, or what slow says.
func links(slow map[string]float64) func(nodes []string) ending {
	return func(nodes []string) ending {
		e := ending{speed: 1, network: "Evenkeel"}
		if len(nodes) == 1 {
			return e // inside the node the link does not count
		}
		for _, n := range nodes {
			if s, ok := slow[n]; ok {
				e.speed = min(e.speed, s)
			}
		}
		return e
	}
}

// newNodes makes ready nodes that go with the test, all with the label pool=NAME.
func newNodes(t *testing.T, pool string, count int) []string {
	t.Helper()
	var names []string
	for i := range count {
		names = append(names, fmt.Sprintf("%s-%d", pool, i))
		newNode(t, names[i], pool)
	}
	return names
}

func newNode(t *testing.T, name, pool string) {
	t.Helper()
	newNodeIn(t, admin, name, pool)
}

func newNodeIn(t *testing.T, admin client.Client, name, pool string) {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"pool": pool}}}
	if err := admin.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// The garbage collector would take the second with the first.
		for _, object := range []client.Object{node, &evenkeel.NodeNetworkHealth{ObjectMeta: metav1.ObjectMeta{Name: name}}} {
			if err := admin.Delete(context.Background(), object); client.IgnoreNotFound(err) != nil {
				t.Error(err)
			}
		}
	})
	// What the node controller does with the taint that a node begins with, once it is ready. Patches, as others write too.
	if err := admin.Patch(t.Context(), node.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"spec": {"taints": null}}`))); err != nil {
		t.Fatal(err)
	}
	ready := []byte(`{"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Test"}]}}`)
	if err := admin.Status().Patch(t.Context(), node.DeepCopy(), client.RawPatch(types.StrategicMergePatchType, ready)); err != nil {
		t.Fatal(err)
	}
}

// newCheck makes a check of the pool's nodes.
func newCheck(t *testing.T, pool string, change func(*evenkeel.NetworkCheckSpec)) *evenkeel.NetworkCheck {
	t.Helper()
	c := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: pool}}
	c.Spec.Nodes.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"pool": pool}}
	c.Spec.PoolLabel = "pool"
	c.Spec.Runner = evenkeel.RunnerSpec{Type: evenkeel.RunnerBench, Launcher: evenkeel.LauncherIndexedJob}
	if change != nil {
		change(&c.Spec)
	}
	if err := admin.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := admin.Delete(context.Background(), c); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	return c
}
