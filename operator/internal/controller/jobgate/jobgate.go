// Package jobgate is what the controllers share that hold jobs until the network of their nodes is proven: each looks at all
// that waits at once, as nodes and checks are about all of it, asks for the checks that it waits for, and acts on what is
// decided.
package jobgate

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
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
	"evenkeel.dev/evenkeel/operator/internal/kube/optionalwatch"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
)

const (
	// A job starts soon after the API server answers, however long it was away.
	firstRetry, lastRetry = 5 * time.Millisecond, 15 * time.Second
	// passTimeout bounds one look at everything that waits.
	passTimeout = time.Minute
)

// A Keeper keeps the gates of one controller.
type Keeper struct {
	// Namespace is where checks are run.
	Namespace string
	// Demand takes what has to be checked.
	Demand *networkcheckpolicy.Demand
	// Now is the time, and Poll how often kinds that the cluster does not serve are looked for.
	Now  func() time.Time
	Poll time.Duration

	// What Watch sets: the manager's client, a cache of what waits, and nothing else, and the kinds of that.
	Client  client.Client
	Waiting cache.Cache
	Kinds   *optionalwatch.Watch

	// news is what those that wait know, asked who has a demand: between one look and the next.
	news  gate.News
	asked map[string]bool
}

// everything is the one request of such a controller.
var everything = reconcile.Request{NamespacedName: types.NamespacedName{Name: "everything"}}

// All asks for a look at everything that waits, whatever happened.
var All = handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return []reconcile.Request{everything} })

// Watch makes a controller that looks whenever nodes, what is known about them, policies or checks change, or one of the
// kinds of which the selector selects what waits; nil selects all. The kinds are watched from when the cluster serves them.
func (k *Keeper) Watch(mgr manager.Manager, name string, waiting []schema.GroupVersionKind, selector labels.Selector, look func(context.Context) (reconcile.Result, error)) (controller.Controller, error) {
	k.Client = mgr.GetClient()
	var err error
	k.Waiting, err = cache.New(mgr.GetConfig(), cache.Options{
		HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
		DefaultLabelSelector: selector, DefaultTransform: cache.TransformStripManagedFields(), ReaderFailOnMissingInformer: true,
	})
	if err != nil {
		return nil, fmt.Errorf("cache of what waits: %w", err)
	}
	if err := mgr.Add(k.Waiting); err != nil {
		return nil, fmt.Errorf("cache of what waits: %w", err)
	}
	bounded := reconcile.Func(func(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
		ctx, cancel := context.WithTimeout(ctx, passTimeout)
		defer cancel()
		return look(ctx)
	})
	watcher, err := builder.ControllerManagedBy(mgr).Named(name).
		Watches(&corev1.Node{}, All, builder.WithPredicates(nodenetworkhealth.NodeChanged)).
		Watches(&evenkeel.NodeNetworkHealth{}, All).
		Watches(&evenkeel.NetworkCheckPolicy{}, All, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&evenkeel.NetworkCheck{}, All).
		WithOptions(controller.Options{RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, lastRetry)}).
		Build(bounded)
	if err != nil {
		return nil, err
	}
	k.Kinds = &optionalwatch.Watch{Kinds: waiting, Cache: k.Waiting, Mapper: mgr.GetRESTMapper(), Poll: k.Poll, Controller: watcher, Request: everything}
	return watcher, mgr.Add(k.Kinds)
}

// A Waiter is a job that waits, or a part of one.
type Waiter struct {
	// Key tells it from all that waits for any controller.
	Key string
	// Told is who is told the news.
	Told types.UID
	Job  gate.Job
	// Act does what was decided; news says that it has not been told so yet.
	Act func(ctx context.Context, d gate.Decision, news bool) error
}

// Round decides about all that waits, asks for the checks that are needed, and says when time alone changes a decision.
func (k *Keeper) Round(ctx context.Context, waiting []Waiter) (reconcile.Result, error) {
	asks, told := map[string]bool{}, map[types.UID]bool{}
	var next time.Time
	var all []error
	if len(waiting) > 0 {
		world, err := See(ctx, k.Client, k.Namespace, k.Now())
		if err != nil {
			return reconcile.Result{}, err
		}
		for _, w := range waiting {
			d := world.Decide(w.Job)
			k.Demand.Set(w.Key, d.Check)
			asks[w.Key], told[w.Told] = true, true
			news := k.news.Is(w.Told, d)
			if err := w.Act(ctx, d, news); err != nil {
				all = append(all, err)
			} else if news {
				k.news.Told(w.Told, d)
			}
			if d.Holds() && !d.Next.IsZero() && (next.IsZero() || d.Next.Before(next)) {
				next = d.Next
			}
		}
	}
	for key := range k.asked {
		if !asks[key] {
			k.Demand.Set(key, nil)
		}
	}
	k.asked = asks
	k.news.Forget(func(job types.UID) bool { return told[job] })
	if err := errors.Join(all...); err != nil || next.IsZero() {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: max(time.Millisecond, next.Sub(k.Now()))}, nil
}

// See reads what decisions about gates are made from. Checks are run in the namespace.
func See(ctx context.Context, c client.Reader, namespace string, now time.Time) (*gate.World, error) {
	nodes, states, policies, err := nodenetworkhealth.Read(ctx, c)
	if err != nil {
		return nil, err
	}
	var checks evenkeel.NetworkCheckList
	if err := c.List(ctx, &checks, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list NetworkChecks: %w", err)
	}
	return gate.See(nodes, states, policies, checks.Items, now), nil
}
