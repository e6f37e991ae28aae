// Package jobgate holds what the controllers of gated jobs share. Each evaluates everything that waits at once, since
// nodes and checks concern all of it. It requests the checks that are needed, and applies the decisions.
package jobgate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/networkcheckpolicy"
	"evenkeel.dev/evenkeel/operator/internal/controller/nodenetworkhealth"
	"evenkeel.dev/evenkeel/operator/internal/kube/debounce"
	"evenkeel.dev/evenkeel/operator/internal/kube/optionalwatch"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/nodeuse"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
)

const (
	// A short maximum, so that jobs start soon after an outage of the API server.
	firstRetry, lastRetry = 5 * time.Millisecond, 15 * time.Second
	// debounceDelay is how long changes of nodes are collected, since each evaluation is over all of them.
	debounceDelay = 300 * time.Millisecond
	// passTimeout bounds one evaluation.
	passTimeout = time.Minute
)

// MaxRequests is the number of requests that one controller makes at a time.
const MaxRequests = 16

// An Evaluator decides about everything that waits for one controller.
type Evaluator struct {
	// Namespace is where checks run.
	Namespace string
	// Requests receives the nodes that have to be checked.
	Requests *networkcheckpolicy.CheckRequests
	// Use reports which nodes are in use.
	Use *nodeuse.Tracker
	// Clock is replaced in tests. Poll is the interval of requests for kinds that the cluster does not serve yet.
	Clock clock.PassiveClock
	Poll  time.Duration
	// Delays scales how long changes are collected, and the pods of a gang.
	Delays debounce.Scale

	// Transform, if set, reduces the objects that wait to what is needed of them. Wanted, if set, reports which of
	// their kinds to watch.
	Transform toolscache.TransformFunc
	Wanted    func(schema.GroupKind) bool
	// Requesters is the number of decisions applied at a time. If zero, they are applied one after the other.
	Requesters int

	// Client, WaitingCache and OptionalKinds are set by NewController. The cache holds only waiting objects.
	Client        client.Client
	WaitingCache  cache.Cache
	OptionalKinds *optionalwatch.Watch

	// name is the controller's.
	name string
	// changes and requested are kept from one evaluation to the next: the decisions that were reported, and the keys of
	// the waiters that requested checks.
	changes   gate.ChangeTracker
	requested map[string]bool
}

// ErrStale is what a Waiter's Apply returns if somebody changed the object meanwhile. The decision counts as not
// reported, and the change is another event.
var ErrStale = errors.New("the object was changed meanwhile")

// singleRequest is the only request of such a controller.
var singleRequest = reconcile.Request{NamespacedName: types.NamespacedName{Name: "all"}}

// EnqueueAll requests an evaluation, whatever the event.
var EnqueueAll = handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return []reconcile.Request{singleRequest} })

// NewController makes a controller that evaluates when nodes, their health, policies or checks change, or an object
// that waits. Those objects are of the waiting kinds and match the selector; nil selects all. A kind is watched as soon
// as the cluster serves it.
func (e *Evaluator) NewController(mgr manager.Manager, name string, waiting []schema.GroupVersionKind, selector labels.Selector, evaluate func(context.Context) (reconcile.Result, error)) (controller.Controller, error) {
	e.Client, e.name = mgr.GetClient(), name
	transform := e.Transform
	if transform == nil {
		transform = cache.TransformStripManagedFields()
	}
	var err error
	e.WaitingCache, err = cache.New(mgr.GetConfig(), cache.Options{
		HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
		DefaultLabelSelector: selector, DefaultTransform: transform, ReaderFailOnMissingInformer: true,
	})
	if err != nil {
		return nil, fmt.Errorf("cache of gated objects: %w", err)
	}
	if err := mgr.Add(e.WaitingCache); err != nil {
		return nil, fmt.Errorf("cache of gated objects: %w", err)
	}
	bounded := reconcile.Func(func(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
		ctx, cancel := context.WithTimeout(ctx, passTimeout)
		defer cancel()
		return evaluate(ctx)
	})
	watcher, err := builder.ControllerManagedBy(mgr).Named(name).
		Watches(&corev1.Node{}, debounce.Handler(e.Delays.Of(debounceDelay), EnqueueAll), builder.WithPredicates(nodenetworkhealth.NodeChanged)).
		Watches(&evenkeel.NodeNetworkHealth{}, debounce.Handler(e.Delays.Of(debounceDelay), EnqueueAll)).
		Watches(&evenkeel.NetworkCheckPolicy{}, EnqueueAll, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&evenkeel.NetworkCheck{}, EnqueueAll).
		WatchesRawSource(e.Use.Source(func(context.Context, client.Object) []reconcile.Request { return []reconcile.Request{singleRequest} })).
		WithOptions(controller.Options{RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, lastRetry)}).
		Build(bounded)
	if err != nil {
		return nil, err
	}
	e.OptionalKinds = &optionalwatch.Watch{Kinds: waiting, Cache: e.WaitingCache, Mapper: mgr.GetRESTMapper(), Poll: e.Poll, Controller: watcher, Request: singleRequest, Wanted: e.Wanted}
	return watcher, mgr.Add(e.OptionalKinds)
}

// A Waiter is a job that waits, or a part of one.
type Waiter struct {
	// Key is unique among the waiters of all controllers.
	Key string
	// Subject is the object that decisions are reported on.
	Subject types.UID
	Job     gate.Job
	// NotBefore is the time of its first decision. Until then it keeps the checks that it asked for.
	NotBefore time.Time
	// Apply applies the decision. changed is true if it has not been reported yet.
	Apply func(ctx context.Context, d gate.Decision, changed bool) error
}

// Evaluate decides about everything that waits, and requests the checks that are needed. The result tells when time
// alone may change a decision.
func (e *Evaluator) Evaluate(ctx context.Context, waiting []Waiter) (reconcile.Result, error) {
	requests, subjects := map[string]bool{}, map[types.UID]bool{}
	var next time.Time
	var closed []Waiter
	var all []error
	if len(waiting) > 0 {
		snapshot, err := NewSnapshot(ctx, e.Client, e.Namespace, e.Use, e.Clock.Now())
		if err != nil {
			return reconcile.Result{}, err
		}
		// The longest waiting are served first.
		slices.SortStableFunc(waiting, func(a, b Waiter) int {
			return cmp.Or(a.Job.Since.Compare(b.Job.Since), cmp.Compare(a.Key, b.Key))
		})
		lookAgain := func(at time.Time) {
			if next.IsZero() || at.Before(next) {
				next = at
			}
		}
		var decided []decision
		for _, w := range waiting {
			requests[w.Key], subjects[w.Subject] = true, true
			if e.Clock.Now().Before(w.NotBefore) {
				lookAgain(w.NotBefore)
				closed = append(closed, w)
				continue
			}
			d := snapshot.Decide(w.Job)
			e.Requests.Set(w.Key, d.Check)
			if d.Waits() && !d.Next.IsZero() {
				lookAgain(d.Next)
			}
			decided = append(decided, decision{w, d, e.changes.Changed(w.Subject, d)})
		}
		var still []Waiter
		still, all = e.apply(ctx, decided)
		closed = append(closed, still...)
	}
	e.record(closed)
	for key := range e.requested {
		if !requests[key] {
			e.Requests.Set(key, nil)
		}
	}
	e.requested = requests
	e.changes.Forget(func(job types.UID) bool { return subjects[job] })
	if err := errors.Join(all...); err != nil || next.IsZero() {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: max(time.Millisecond, next.Sub(e.Clock.Now()))}, nil
}

// A decision is the decision about a waiter. changed is true if it has not been reported yet.
type decision struct {
	waiter  Waiter
	what    gate.Decision
	changed bool
}

// apply applies the decisions, as many at a time as there are requesters, and remembers those that were reported. It
// returns the waiters whose gate is still closed, because they wait or it could not be opened. It opens gates first,
// since slow requests, such as for Events that cannot be written, may end the pass before the rest.
func (e *Evaluator) apply(ctx context.Context, decisions []decision) (closed []Waiter, all []error) {
	slices.SortStableFunc(decisions, func(a, b decision) int {
		switch {
		case a.what.Waits() == b.what.Waits():
			return 0
		case b.what.Waits():
			return -1
		}
		return 1
	})
	problems := make([]error, len(decisions))
	var requesters errgroup.Group
	requesters.SetLimit(max(1, e.Requesters))
	for i, d := range decisions {
		requesters.Go(func() error {
			problems[i] = d.waiter.Apply(ctx, d.what, d.changed)
			return nil
		})
	}
	_ = requesters.Wait() // each has its problem
	for i, d := range decisions {
		if problems[i] != nil || d.what.Waits() {
			closed = append(closed, d.waiter)
		}
		switch err := problems[i]; {
		case errors.Is(err, ErrStale):
		case err != nil:
			all = append(all, err)
		case d.changed:
			e.changes.Record(d.waiter.Subject, d.what)
		}
	}
	return closed, all
}

// record exports how many wait, and since when.
func (e *Evaluator) record(closed []Waiter) {
	var oldest time.Time
	for _, w := range closed {
		if oldest.IsZero() || w.Job.Since.Before(oldest) {
			oldest = w.Job.Since
		}
	}
	metrics.Gated(e.name, len(closed), oldest)
}

// NewSnapshot reads the state that decisions are made from. Checks run in the namespace.
func NewSnapshot(ctx context.Context, c client.Reader, namespace string, use gate.NodeUse, now time.Time) (*gate.Snapshot, error) {
	nodes, states, policies, err := nodenetworkhealth.ListAll(ctx, c)
	if err != nil {
		return nil, err
	}
	var checks evenkeel.NetworkCheckList
	if err := c.List(ctx, &checks, client.InNamespace(namespace), client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list NetworkChecks: %w", err)
	}
	return gate.NewSnapshot(nodes, states, policies, checks.Items, use, now), nil
}
