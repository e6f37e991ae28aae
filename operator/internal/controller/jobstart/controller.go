// Package jobstart holds jobs until the network of their nodes is proven, as NetworkCheckPolicies ask for. The webhook
// closes the gates when jobs and pods are made; this package opens them. All that it knows lies in the API: what is held
// carries a label, which goes when it may start.
package jobstart

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
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
	"sigs.k8s.io/controller-runtime/pkg/source"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/checkpolicy"
	"evenkeel.dev/evenkeel/operator/internal/controller/kinds"
	"evenkeel.dev/evenkeel/operator/internal/controller/nodehealth"
	"evenkeel.dev/evenkeel/operator/internal/events"
	"evenkeel.dev/evenkeel/operator/internal/gate"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

const (
	// A job starts soon after the API server answers, however long it was away.
	firstRetry, lastRetry = 5 * time.Millisecond, 15 * time.Second
	// passTimeout bounds one look at everything that is held.
	passTimeout = time.Minute
)

// ReasonStarted is that of the Event about a job that somebody else started.
const ReasonStarted = "EvenkeelGateOpenedByHand"

// Controller opens the gates of jobs and pods.
type Controller struct {
	// Namespace is where checks are run.
	Namespace string
	// Demand takes what has to be checked.
	Demand *checkpolicy.Demand
	// Now is the time, and Poll how often kinds of job that the cluster does not serve are looked for.
	Now  func() time.Time
	Poll time.Duration

	client client.Client
	// gated has what carries the gate's label, and nothing else.
	gated cache.Cache
	kinds *kinds.Watch

	// news is what held jobs know, asked who has a demand: between one look and the next.
	news  gate.News
	asked map[string]bool
}

// everything is the one request of this controller: nodes and checks are about all jobs.
var everything = []reconcile.Request{{NamespacedName: types.NamespacedName{Name: "gates"}}}

// Held selects what is held.
func Held() labels.Selector {
	held, err := labels.NewRequirement(evenkeel.GateKey, selection.Exists, nil)
	if err != nil {
		panic(err) // the key is a constant
	}
	return labels.NewSelector().Add(*held)
}

// SetupWithManager starts the controller with the manager.
func (c *Controller) SetupWithManager(mgr manager.Manager) error {
	c.client = mgr.GetClient()
	var err error
	c.gated, err = cache.New(mgr.GetConfig(), cache.Options{
		HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
		DefaultLabelSelector: Held(), DefaultTransform: cache.TransformStripManagedFields(), ReaderFailOnMissingInformer: true,
	})
	if err != nil {
		return fmt.Errorf("cache of held jobs: %w", err)
	}
	if err := mgr.Add(c.gated); err != nil {
		return fmt.Errorf("cache of held jobs: %w", err)
	}
	all := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return everything })
	watcher, err := builder.ControllerManagedBy(mgr).Named("jobstart").
		WatchesRawSource(source.Kind(c.gated, client.Object(&corev1.Pod{}), all)).
		Watches(&corev1.Node{}, all, builder.WithPredicates(nodehealth.NodeChanged)).
		Watches(&evenkeel.NodeNetworkHealth{}, all).
		Watches(&evenkeel.NetworkCheckPolicy{}, all, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&evenkeel.NetworkCheck{}, all).
		WithOptions(controller.Options{RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, lastRetry)}).
		Build(c)
	if err != nil {
		return err
	}
	c.kinds = &kinds.Watch{Kinds: workload.Suspendable(), Cache: c.gated, Mapper: mgr.GetRESTMapper(), Poll: c.Poll, Controller: watcher, Request: everything[0]}
	return mgr.Add(c.kinds)
}

// Reconcile opens the gates of all that may start, and asks for the checks that the others wait for.
func (c *Controller) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, passTimeout)
	defer cancel()
	var all []error
	held, err := c.jobs(ctx)
	all = append(all, err)
	pods, err := c.pods(ctx)
	all = append(all, err)
	held = append(held, pods...)

	asks, waiting := map[string]bool{}, map[types.UID]bool{}
	var next time.Time
	if len(held) > 0 {
		world, err := See(ctx, c.client, c.Namespace, c.Now())
		if err != nil {
			return reconcile.Result{}, errors.Join(append(all, err)...)
		}
		for _, h := range held {
			d := world.Decide(h.job)
			c.Demand.Set(h.key, d.Check)
			asks[h.key], waiting[h.about.UID] = true, true
			all = append(all, c.act(ctx, h, d))
			if d.Holds() && !d.Next.IsZero() && (next.IsZero() || d.Next.Before(next)) {
				next = d.Next
			}
		}
	}
	for key := range c.asked {
		if !asks[key] {
			c.Demand.Set(key, nil)
		}
	}
	c.asked = asks
	c.news.Forget(func(job types.UID) bool { return waiting[job] })
	if err := errors.Join(all...); err != nil {
		return reconcile.Result{}, err
	}
	if next.IsZero() {
		return reconcile.Result{}, nil
	}
	return reconcile.Result{RequeueAfter: max(time.Millisecond, next.Sub(c.Now()))}, nil
}

// See reads what decisions about gates are made from.
func See(ctx context.Context, c client.Reader, namespace string, now time.Time) (*gate.World, error) {
	nodes, states, policies, err := nodehealth.Read(ctx, c)
	if err != nil {
		return nil, err
	}
	var checks evenkeel.NetworkCheckList
	if err := c.List(ctx, &checks, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list NetworkChecks: %w", err)
	}
	return gate.See(nodes, states, policies, checks.Items, now), nil
}

// act tells what was decided, and opens the gate if that was it.
func (c *Controller) act(ctx context.Context, h held, d gate.Decision) error {
	severity := corev1.EventTypeNormal
	if d.Action == gate.GiveUp {
		severity = corev1.EventTypeWarning
	}
	if c.news.Is(h.about.UID, d) {
		if err := events.Write(ctx, c.client, events.New(h.about, severity, d.Reason, d.Message, c.Now())); err != nil {
			return err
		}
		c.news.Told(h.about.UID, d)
	}
	if d.Holds() {
		return nil
	}
	return h.open(ctx)
}

// A held is a job, or the pods of one, that waits.
type held struct {
	key   string
	about corev1.ObjectReference
	job   gate.Job
	open  func(context.Context) error
}

// jobs are those that are held by being suspended. Those that are not suspended any more, or now wait for Kueue, are let go.
func (c *Controller) jobs(ctx context.Context) ([]held, error) {
	var found []held
	var all []error
	for _, kind := range workload.Suspendable() {
		if _, served := c.kinds.Served(kind.GroupKind()); !served {
			continue
		}
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		if err := c.gated.List(ctx, list); err != nil {
			all = append(all, fmt.Errorf("list held %s: %w", kind.Kind, err))
			continue
		}
		for i := range list.Items {
			job := &list.Items[i]
			if job.GetDeletionTimestamp() != nil {
				continue
			}
			h := held{
				key:   fmt.Sprintf("%s %s/%s", kind.GroupKind(), job.GetNamespace(), job.GetName()),
				about: corev1.ObjectReference{APIVersion: job.GetAPIVersion(), Kind: job.GetKind(), Namespace: job.GetNamespace(), Name: job.GetName(), UID: job.GetUID()},
				open:  func(ctx context.Context) error { return openJob(ctx, c.client, job) },
			}
			if suspended, _ := workload.Suspended(job); !suspended || workload.Queued(job) {
				all = append(all, c.letGo(ctx, h, job, suspended))
				continue
			}
			h.job = gate.Job{Profile: job.GetAnnotations()[evenkeel.ProfileKey], Since: job.GetCreationTimestamp().Time}
			templates, err := workload.Templates(job)
			for _, t := range templates {
				spec, err := t.PodSpec()
				if err != nil {
					all = append(all, fmt.Errorf("%s: %w", h.key, err))
					continue
				}
				h.job.Pods = append(h.job.Pods, spec)
			}
			all = append(all, err)
			found = append(found, h)
		}
	}
	return found, errors.Join(all...)
}

// letGo takes the label from a job that somebody else decides about, and changes nothing else.
func (c *Controller) letGo(ctx context.Context, h held, job *unstructured.Unstructured, suspended bool) error {
	if !suspended {
		e := events.New(h.about, corev1.EventTypeNormal, ReasonStarted, "it was started before its nodes were proven", c.Now())
		if err := events.Write(ctx, c.client, e); err != nil {
			return err
		}
	}
	return release(ctx, c.client, job, func(*unstructured.Unstructured) error { return nil })
}

// pods are those with the scheduling gate, by the job that made them.
func (c *Controller) pods(ctx context.Context) ([]held, error) {
	var list corev1.PodList
	if err := c.gated.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("list held pods: %w", err)
	}
	byOwner := map[types.UID]*held{}
	mine := map[types.UID][]*corev1.Pod{}
	for i := range list.Items {
		pod := &list.Items[i]
		if pod.DeletionTimestamp != nil {
			continue
		}
		about := corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
		for _, o := range pod.OwnerReferences {
			if o.Controller != nil && *o.Controller {
				about = corev1.ObjectReference{APIVersion: o.APIVersion, Kind: o.Kind, Namespace: pod.Namespace, Name: o.Name, UID: o.UID}
			}
		}
		h := byOwner[about.UID]
		if h == nil {
			h = &held{key: fmt.Sprintf("pods of %s %s/%s", about.Kind, about.Namespace, about.Name), about: about}
			h.job = gate.Job{Profile: pod.Labels[evenkeel.ProfileKey], Since: pod.CreationTimestamp.Time}
			h.open = func(ctx context.Context) error {
				var all []error
				for _, pod := range mine[about.UID] {
					all = append(all, openPod(ctx, c.client, pod))
				}
				return errors.Join(all...)
			}
			byOwner[about.UID] = h
		}
		if pod.CreationTimestamp.Time.Before(h.job.Since) {
			h.job.Since = pod.CreationTimestamp.Time
		}
		h.job.Pods = append(h.job.Pods, &pod.Spec)
		mine[about.UID] = append(mine[about.UID], pod)
	}
	var found []held
	for _, uid := range slices.Sorted(maps.Keys(byOwner)) {
		found = append(found, *byOwner[uid])
	}
	return found, nil
}
