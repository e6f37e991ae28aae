// Package nodenetworkhealth records the results of checks on nodes. Every node that was ever checked has a
// NodeNetworkHealth. Nodes that a policy selects also get a condition, a label and, if configured, a taint.
package nodenetworkhealth

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/networkcheck"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
	"evenkeel.dev/evenkeel/operator/internal/preflight/report"
)

// Reasons of the Events on nodes.
const (
	EventUnhealthy = "EvenkeelNetworkUnhealthy"
	EventHealthy   = "EvenkeelNetworkHealthy"
	// EventSuspicionCleared is the reason of the Event on a node that a job suspected, and that passed a check.
	EventSuspicionCleared = "EvenkeelSuspicionCleared"
)

const (
	// replacedNodeRetry is the time after which the NodeNetworkHealth of a deleted node of the same name should be gone.
	replacedNodeRetry = 5 * time.Second
	// concurrentRequests is the number of nodes whose result is written at a time.
	concurrentRequests = 16
	// maxNodeEvents bounds the Events on nodes after one check. What changes thousands of nodes is no fault of each: the
	// check's own Event sums it up, and each node has its condition and NodeNetworkHealth.
	maxNodeEvents = 100
)

// ResultRecorder adds the results of checks to NodeNetworkHealths, one check at a time.
type ResultRecorder struct {
	client client.Client
	live   client.Reader
}

// SetupWithManager starts the controller with the manager.
func (r *ResultRecorder) SetupWithManager(mgr manager.Manager) error {
	r.client, r.live = mgr.GetClient(), mgr.GetAPIReader()
	if _, err := mgr.GetCache().GetInformer(context.Background(), &evenkeel.NodeNetworkHealth{}); err != nil {
		return fmt.Errorf("watch NodeNetworkHealths: %w", err)
	}
	ended := predicate.NewPredicateFuncs(func(object client.Object) bool {
		check, ok := object.(*evenkeel.NetworkCheck)
		return ok && meta.IsStatusConditionTrue(check.Status.Conditions, evenkeel.ConditionComplete) && check.Status.ReportName != ""
	})
	return builder.ControllerManagedBy(mgr).Named("nodenetworkhealth-results").
		For(&evenkeel.NetworkCheck{}, builder.WithPredicates(ended)).
		Complete(r)
}

// Reconcile adds the check's results to its nodes, unless they are there already.
func (r *ResultRecorder) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	check := &evenkeel.NetworkCheck{}
	if err := r.client.Get(ctx, request.NamespacedName, check); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if check.Status.CompletionTime == nil || check.Status.ReportName == "" {
		return reconcile.Result{}, nil
	}
	found, err := report.Read(ctx, r.live, check.Namespace, check.Status.ReportName)
	var unreadable *report.UnreadableError
	switch {
	case errors.As(err, &unreadable):
		return reconcile.Result{}, reconcile.TerminalError(err)
	case err != nil:
		return reconcile.Result{}, client.IgnoreNotFound(err) // somebody deleted it: there are no results
	}
	nodes := preflight.Decide(networkcheck.OptionsOf(check), found.Record).Nodes
	problems := make([]error, len(nodes))
	said := make([]*corev1.Event, len(nodes))
	var late atomic.Bool
	benchmark := networkcheck.BenchmarkOf(check, found.Record)
	var requests errgroup.Group
	requests.SetLimit(concurrentRequests)
	for i := range nodes {
		requests.Go(func() error {
			waits, event, err := r.recordNode(ctx, check, found.Record, &nodes[i], benchmark)
			if waits {
				late.Store(true)
			}
			said[i], problems[i] = event, err
			return nil
		})
	}
	_ = requests.Wait() // each has its problem
	// A failure is only logged: the status has the same information.
	if err := events.Write(ctx, r.client, boundEvents(said)...); err != nil {
		log.FromContext(ctx).Info("cannot write an Event", "reason", err.Error())
	}
	if err := errors.Join(problems...); err != nil {
		return reconcile.Result{}, err
	}
	if late.Load() {
		return reconcile.Result{RequeueAfter: replacedNodeRetry}, nil
	}
	return reconcile.Result{}, nil
}

// boundEvents returns some of the Events that are not nil, warnings first.
func boundEvents(all []*corev1.Event) []*corev1.Event {
	all = slices.DeleteFunc(all, func(e *corev1.Event) bool { return e == nil })
	rank := func(e *corev1.Event) int {
		if e.Type == corev1.EventTypeWarning {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(all, func(a, b *corev1.Event) int { return rank(a) - rank(b) })
	return all[:min(len(all), maxNodeEvents)]
}

// recordNode adds one result, and returns the Event about it, if any. It reports whether it has to wait until the
// NodeNetworkHealth of an earlier node of the same name is deleted. A node that was not checked itself gets no result
// of an earlier one.
func (r *ResultRecorder) recordNode(ctx context.Context, check *evenkeel.NetworkCheck, record *preflight.Record, n *preflight.NodeResult, benchmark string) (late bool, event *corev1.Event, err error) {
	node := &corev1.Node{}
	if err := r.client.Get(ctx, client.ObjectKey{Name: n.Name}, node); err != nil {
		return false, nil, client.IgnoreNotFound(err)
	}
	if record.Replaced(&n.Node, node) {
		return false, nil, nil
	}
	state, err := ForNode(ctx, r.client, node)
	switch {
	case err != nil:
		return false, nil, err
	case state == nil:
		return true, nil, nil
	case health.HasResult(&state.Status, string(check.UID), check.Status.CompletionTime.Time):
		return false, nil, nil
	}
	before, suspicions := state.Status.Health, state.Status.Suspicions
	state.Status = health.AddResult(state.Status, evenkeel.HealthResult{
		Check: check.Name, UID: string(check.UID), Time: *check.Status.CompletionTime,
		Verdict: n.Verdict, Reason: n.Reason, BusBandwidth: networkcheck.Quantity(n.BusBW), Benchmark: benchmark,
	}, evenkeel.MeasuredNetwork{ProfileName: check.Spec.WithDefaults().ProfileName, LatencyMicroseconds: latency(n.LatencyUS), Devices: devices(n.Devices)}, n.Message)
	if err := r.client.Status().Update(ctx, state); err != nil {
		return false, nil, fmt.Errorf("write NodeNetworkHealth %s: %w", n.Name, err)
	}
	for range len(suspicions) - len(state.Status.Suspicions) {
		metrics.SuspicionDecided(n.Verdict)
	}
	event = healthEvent(node, before, &state.Status, check.Name)
	if event == nil && n.Verdict == evenkeel.VerdictPass && len(state.Status.Suspicions) < len(suspicions) {
		about := corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}
		event = events.New(about, corev1.EventTypeNormal, EventSuspicionCleared, fmt.Sprintf("suspected by a job, and cleared by network check %s: %s", check.Name, n.Message), check.Status.CompletionTime.Time)
	}
	return false, event, nil
}

// maxLatency is what the plugin accepts at most.
const maxLatency = 1_000_000

// latency is nil if it is unknown. Less than a microsecond counts as one.
func latency(us float64) *int32 {
	if !(us > 0) || us > maxLatency {
		return nil
	}
	rounded := int32(max(1, math.Round(us)))
	return &rounded
}

// devices is nil if the number is unknown.
func devices(count int) *int32 {
	if count < 1 || count > math.MaxInt32 {
		return nil
	}
	known := int32(count)
	return &known
}

// ForNode returns a copy of the node's NodeNetworkHealth. It creates a missing one. It returns nil until the object of
// an earlier node of the same name is deleted.
func ForNode(ctx context.Context, c client.Client, node *corev1.Node) (*evenkeel.NodeNetworkHealth, error) {
	state := &evenkeel.NodeNetworkHealth{}
	err := c.Get(ctx, client.ObjectKey{Name: node.Name}, state)
	switch {
	case err == nil && (len(state.OwnerReferences) == 0 || state.OwnerReferences[0].UID != node.UID):
		return nil, nil
	case client.IgnoreNotFound(err) != nil:
		return nil, fmt.Errorf("read NodeNetworkHealth %s: %w", node.Name, err)
	case apierrors.IsNotFound(err):
		state = &evenkeel.NodeNetworkHealth{ObjectMeta: metav1.ObjectMeta{
			Name: node.Name, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}},
		}}
		if err := c.Create(ctx, state); err != nil {
			return nil, fmt.Errorf("create NodeNetworkHealth %s: %w", node.Name, err)
		}
		return state, nil
	}
	return state.DeepCopy(), nil
}

// healthEvent returns the Event about a node whose health changed; nil if it did not. A first passed check gives none.
func healthEvent(node *corev1.Node, before evenkeel.Health, now *evenkeel.NodeNetworkHealthStatus, check string) *corev1.Event {
	about := corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}
	switch {
	case now.Health == before:
	case now.Health == evenkeel.HealthUnhealthy:
		return events.New(about, corev1.EventTypeWarning, EventUnhealthy, fmt.Sprintf("failed network check %s: %s: %s", check, now.Reason, now.Message), now.ObservedTime.Time)
	case now.Health == evenkeel.HealthHealthy && before == evenkeel.HealthUnhealthy:
		return events.New(about, corev1.EventTypeNormal, EventHealthy, fmt.Sprintf("cleared by network check %s: %s", check, now.Message), now.ObservedTime.Time)
	}
	return nil
}
