package preflight

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	realclock "k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/uninstall"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// held is one job of each kind of gate, in a namespace of its own, and what they wait for.
type held struct {
	name     string
	policy   *evenkeel.NetworkCheckPolicy
	calendar *clock
	fleet    *fleet
	stop     func()
	running  bool // a controller

	job      *unstructured.Unstructured
	pods     []*corev1.Pod
	workload *unstructured.Unstructured
	// retried: the workload is to choose other nodes.
	retried bool
}

// gateTimeout is the timeout of the policy.
const gateTimeout = 10 * time.Minute

// newHeld makes the jobs. No controller runs yet.
func newHeld(t *testing.T, name string) *held {
	t.Helper()
	h := &held{name: name, calendar: &clock{}, fleet: newFleet(t, stuck), stop: func() {}}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := admin.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	newNodes(t, name, 2)
	h.policy = newPolicy(t, name, onStart(func(s *evenkeel.NetworkCheckPolicySpec) {
		limit := int32(gateTimeout / time.Second)
		hundred := int32(100)
		s.Gate.TimeoutSeconds, s.OnFail.MaxUnhealthyPercent = &limit, &hundred
	}))
	admissionCheck(t, name, name)
	h.job = newJob(t, "PyTorchJob", name, func(j *unstructured.Unstructured) { j.SetNamespace(name) })
	h.pods = newHeldPodsIn(t, name, name, 2)
	h.workload = reservedWorkloadIn(t, name, name, name, name+"-0", name+"-1")
	return h
}

func (h *held) start(t *testing.T) {
	t.Helper()
	h.stop, h.running = start(t, h.fleet, &clock{}, h.calendar), true
}

// end ends the controller. Then Kueue takes the quota back from a workload that is to retry, and reserves it again.
func (h *held) end(t *testing.T) {
	t.Helper()
	h.stop()
	h.running = false
	if h.retried {
		evict(t, h.workload, h.name, true, h.calendar.Now())
	}
}

// isOpen waits until everything has started.
func (h *held) isOpen(t *testing.T) {
	t.Helper()
	isState(t, h.job, started)
	areOpen(t, h.pods)
	isAnswered(t, h.workload, h.name, "Ready", "")
}

// isOpenInTime waits until everything has started, although nothing is proven, as the time is up.
func (h *held) isOpenInTime(t *testing.T) {
	t.Helper()
	if !h.retried {
		h.isOpen(t)
		return
	}
	// The workload has hosts that failed, and others may be chosen for it: that takes some attempts.
	isState(t, h.job, started)
	areOpen(t, h.pods)
	for attempt := 2; attempt <= 5; attempt++ {
		isAnswered(t, h.workload, h.name, "Retry", fmt.Sprintf("(attempt %d)", attempt))
		evict(t, h.workload, h.name, true, h.calendar.Now())
	}
	isAnswered(t, h.workload, h.name, "Ready", "starts although")
}

// outlivesHooks lets the time of everything run out, while the controller that runs goes on.
func (h *held) outlivesHooks(t *testing.T) {
	t.Helper()
	h.calendar.advance(gateTimeout)
	if !h.running {
		h.start(t)
	}
	if h.retried {
		evict(t, h.workload, h.name, true, h.calendar.Now())
	}
	trigger(t, h.job)
	trigger(t, h.workload)
	h.isOpenInTime(t)
	// What started can be changed.
	for _, object := range []client.Object{h.job, h.pods[0], h.workload} {
		trigger(t, object)
	}
}

// installHooks creates the webhook configuration of the chart, which nobody answers, and returns what deletes it. Both return when
// the API server has taken notice.
func installHooks(t *testing.T) (remove func()) {
	t.Helper()
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	objects, err := apiserver.Chart(root, namespace)
	if err != nil {
		t.Fatal(err)
	}
	var hooks *unstructured.Unstructured
	for _, object := range objects {
		if object.GetKind() == "MutatingWebhookConfiguration" {
			hooks = object
		}
	}
	noticed := func(refuses bool) {
		t.Helper()
		err := wait.PollUntilContextTimeout(context.Background(), 20*time.Millisecond, waitTimeout, true, func(ctx context.Context) (bool, error) {
			job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: "hooked", Annotations: map[string]string{evenkeel.ProfileKey: "default"}}}
			job.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "main", Image: "registry.example.com/train:1"}}}
			err := admin.Create(ctx, job, client.DryRunAll)
			return (err != nil && strings.Contains(err.Error(), "failed calling webhook")) == refuses, nil
		})
		if err != nil {
			t.Errorf("waited in vain until annotated jobs are refused: %t", refuses)
		}
	}
	remove = func() {
		if err := admin.Delete(context.Background(), hooks); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
		noticed(false)
	}
	if err := admin.Create(t.Context(), hooks); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(remove)
	noticed(true)
	return remove
}

// as does what follows the end of the last controller, with the permissions of an account.
func as(t *testing.T, account string) {
	t.Helper()
	c, err := client.New(apiserver.As(config, namespace, account), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	now := realclock.RealClock{}
	var out bytes.Buffer
	if err := uninstall.Run(t.Context(), &out, now, append(uninstall.Gates(c, now), uninstall.Leftovers(c, now)...)...); err != nil {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// Nothing that can be deleted keeps a job waiting: at every stage, with every kind of gate.
func TestHeldJobsOutliveDeletions(t *testing.T) {
	stages := []struct {
		name  string
		reach func(*testing.T, *held)
	}{
		{"unseen", func(*testing.T, *held) {}},
		{"checked", func(t *testing.T, h *held) {
			h.start(t)
			isTold(t, h.job, gate.ReasonChecking, "runs")
			isAnswered(t, h.workload, h.name, "Pending", "runs")
		}},
		{"failed", func(t *testing.T, h *held) {
			h.start(t)
			for i := range 2 {
				recordHealth(t, fmt.Sprintf("%s-%d", h.name, i), evenkeel.HealthUnhealthy, evenkeel.VerdictFail)
			}
			isTold(t, h.job, gate.ReasonWaiting, "")
			isAnswered(t, h.workload, h.name, "Retry", "failed a check")
			h.retried = true
		}},
	}
	deletions := []struct {
		name   string
		delete func(*testing.T, *held)
	}{
		{"policy", func(t *testing.T, h *held) {
			if err := admin.Delete(t.Context(), h.policy); err != nil {
				t.Fatal(err)
			}
			h.end(t)
			h.start(t)
			h.isOpen(t)
		}},
		{"controller", func(t *testing.T, h *held) {
			h.end(t)
			h.calendar.advance(gateTimeout)
			h.start(t)
			h.isOpenInTime(t)
		}},
		{"webhook", func(t *testing.T, h *held) {
			installHooks(t)
			h.outlivesHooks(t)
		}},
		{"webhook configuration", func(t *testing.T, h *held) {
			remove := installHooks(t)
			remove()
			h.outlivesHooks(t)
		}},
		{"chart", func(t *testing.T, h *held) {
			h.end(t)
			as(t, "evenkeel-cleanup")
			h.isOpen(t)
		}},
		// What a controller does when the pods of its namespace are ended.
		{"evenkeel's namespace", func(t *testing.T, h *held) {
			h.end(t)
			as(t, account)
			h.isOpen(t)
		}},
		{"job's namespace", func(t *testing.T, h *held) { h.endNamespace(t) }},
	}
	for _, stage := range stages {
		for _, deletion := range deletions {
			name := strings.NewReplacer(" ", "-", "'", "").Replace("held-" + stage.name + "-" + deletion.name)
			t.Run(stage.name+"/"+deletion.name, func(t *testing.T) {
				h := newHeld(t, name)
				stage.reach(t, h)
				deletion.delete(t, h)
			})
		}
	}
}

// recordHealth records the result of a check of the node.
func recordHealth(t *testing.T, name string, state evenkeel.Health, verdict evenkeel.Verdict) {
	t.Helper()
	node := &corev1.Node{}
	if err := admin.Get(t.Context(), client.ObjectKey{Name: name}, node); err != nil {
		t.Fatal(err)
	}
	now := metav1.Now()
	health := &evenkeel.NodeNetworkHealth{ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: name, UID: node.UID}}}}
	if err := admin.Create(t.Context(), health); err != nil {
		t.Fatal(err)
	}
	health.Status = evenkeel.NodeNetworkHealthStatus{
		Health: state, Reason: "Test", ObservedTime: &now,
		History: []evenkeel.HealthResult{{Check: "test", UID: "0", Time: now, Verdict: verdict}},
	}
	if err := admin.Status().Update(t.Context(), health); err != nil {
		t.Fatal(err)
	}
}

// endNamespace deletes the namespace of the jobs as its controller does. Nothing of Evenkeel's keeps anything in it.
func (h *held) endNamespace(t *testing.T) {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: h.name}}
	if err := admin.Delete(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	objects := []client.Object{h.job, h.workload}
	for _, pod := range h.pods {
		objects = append(objects, pod)
	}
	for _, object := range objects {
		if err := admin.Delete(t.Context(), object, client.GracePeriodSeconds(0)); err != nil {
			t.Error(err)
		}
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(object), object.DeepCopyObject().(client.Object)); !apierrors.IsNotFound(err) {
			t.Errorf("%s is still there: %v", object.GetName(), err)
		}
	}
	eventually(t, "the namespace is gone", func(ctx context.Context) (bool, error) {
		if err := admin.Get(ctx, client.ObjectKeyFromObject(ns), ns); err != nil {
			return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
		}
		ns.Spec.Finalizers = nil
		err := admin.SubResource("finalize").Update(ctx, ns)
		return false, client.IgnoreNotFound(err)
	})
	// The next job of other namespaces is decided as ever.
	h.stop()
	h.start(t)
	job := newJob(t, "Job", h.name, nil)
	h.calendar.advance(gateTimeout)
	trigger(t, job)
	isState(t, job, started)
}

// A cable is what connections to the API server go through. It can be cut.
type cable struct {
	mu    sync.Mutex
	cut   bool
	conns []net.Conn
}

func (c *cable) dial(ctx context.Context, network, address string) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut {
		return nil, errors.New("cut by the test")
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err == nil {
		c.conns = append(c.conns, conn)
	}
	return conn, err
}

func (c *cable) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
	if !cut {
		return
	}
	for _, conn := range c.conns {
		_ = conn.Close() // those that are closed already
	}
	c.conns = nil
}

// While the API server is away nothing is decided, and nothing is lost: what is due is done when it is back.
func TestHeldJobsOutliveAPIServerOutage(t *testing.T) {
	line := &cable{}
	whole := config
	config = rest.CopyConfig(config)
	config.Dial = line.dial
	t.Cleanup(func() { config = whole })
	h := newHeld(t, "outage")
	h.start(t)
	config = whole
	isTold(t, h.job, gate.ReasonChecking, "runs")
	isAnswered(t, h.workload, h.name, "Pending", "runs")
	line.set(true)
	h.calendar.advance(gateTimeout)
	late := newJob(t, "Job", h.name, func(j *unstructured.Unstructured) { j.SetNamespace(h.name) })
	if got, err := state(t.Context(), h.job); err != nil || got != waiting {
		t.Errorf("without the API server the job is %s, %v", got, err)
	}
	line.set(false)
	h.isOpen(t)
	h.calendar.advance(gateTimeout)
	trigger(t, late)
	isState(t, late, started)
}

// A job does not wait for a node that is gone, though its check has not ended. One that it was assigned to returns its nodes.
func TestHeldJobsOutliveNode(t *testing.T) {
	start(t, newFleet(t, stuck), &clock{}, &clock{})
	newNodes(t, "nodeless", 3)
	for i := range 2 {
		recordHealth(t, fmt.Sprintf("nodeless-%d", i), evenkeel.HealthHealthy, evenkeel.VerdictPass)
	}
	newPolicy(t, "nodeless", onStart(nil))
	admissionCheck(t, "nodeless", "nodeless")
	job, pods := newJob(t, "Job", "nodeless", nil), newHeldPods(t, "nodeless", 2)
	workload := reservedWorkload(t, "nodeless", "nodeless", "nodeless-0", "nodeless-2")
	isTold(t, job, gate.ReasonChecking, "nodeless-2")
	isAnswered(t, workload, "nodeless", "Pending", "nodeless-2")
	if err := admin.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "nodeless-2"}}); err != nil {
		t.Fatal(err)
	}
	isState(t, job, started)
	areOpen(t, pods)
	isTold(t, job, gate.ReasonProven, "all 2 nodes")
	isAnswered(t, workload, "nodeless", "Retry", "nodeless-2 is gone: other nodes are needed (attempt 1)")
	assign(t, workload, "nodeless-0", "nodeless-1")
	evict(t, workload, "nodeless", true, time.Now())
	isAnswered(t, workload, "nodeless", "Ready", "all 2 nodes")
}

// assign gives the workload other hosts, as Kueue does when it reserves quota again. Whoever evicts it writes them.
func assign(t *testing.T, workload *unstructured.Unstructured, hosts ...any) {
	t.Helper()
	sets, _, err := unstructured.NestedSlice(workload.Object, "status", "admission", "podSetAssignments")
	if err != nil {
		t.Fatal(err)
	}
	topology := map[string]any{"levels": []any{corev1.LabelHostname}, "slices": []any{map[string]any{
		"domainCount": int64(len(hosts)), "podCounts": map[string]any{"universal": int64(1)}, "valuesPerLevel": []any{map[string]any{"individual": map[string]any{"roots": hosts}}},
	}}}
	if err := errors.Join(unstructured.SetNestedMap(sets[0].(map[string]any), topology, "topologyAssignment"),
		unstructured.SetNestedSlice(workload.Object, sets, "status", "admission", "podSetAssignments")); err != nil {
		t.Fatal(err)
	}
}
