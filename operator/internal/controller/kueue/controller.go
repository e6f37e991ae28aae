// Package kueue is the controller of Kueue's AdmissionChecks that name ControllerName: workloads that have their quota
// are admitted when the network of their nodes is proven. Kueue's kinds are handled as unstructured objects; a cluster
// without Kueue costs a look now and then.
package kueue

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
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
	"evenkeel.dev/evenkeel/operator/internal/controller/checkpolicy"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobstart"
	"evenkeel.dev/evenkeel/operator/internal/controller/kinds"
	"evenkeel.dev/evenkeel/operator/internal/controller/nodehealth"
	"evenkeel.dev/evenkeel/operator/internal/events"
	"evenkeel.dev/evenkeel/operator/internal/gate"
)

const (
	// ControllerName is what an AdmissionCheck names to be decided here.
	ControllerName = "evenkeel.dev/preflight"

	fieldOwner            = client.FieldOwner("evenkeel-preflight")
	firstRetry, lastRetry = 5 * time.Millisecond, 15 * time.Second
	passTimeout           = time.Minute
)

// group is Kueue's. Its versions v1beta1 and v1beta2 are understood.
const group = "kueue.x-k8s.io"

// Controller decides AdmissionChecks.
type Controller struct {
	// Namespace is where checks are run.
	Namespace string
	// Demand takes what has to be checked.
	Demand *checkpolicy.Demand
	// Now is the time, and Poll how often Kueue is looked for while it is not there.
	Now  func() time.Time
	Poll time.Duration

	client client.Client
	cache  cache.Cache
	kinds  *kinds.Watch

	news  gate.News
	asked map[string]bool
}

var everything = reconcile.Request{NamespacedName: types.NamespacedName{Name: "workloads"}}

// SetupWithManager starts the controller with the manager.
func (c *Controller) SetupWithManager(mgr manager.Manager) error {
	c.client = mgr.GetClient()
	var err error
	c.cache, err = cache.New(mgr.GetConfig(), cache.Options{
		HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
		DefaultTransform: cache.TransformStripManagedFields(), ReaderFailOnMissingInformer: true,
	})
	if err != nil {
		return fmt.Errorf("cache of Kueue's workloads: %w", err)
	}
	if err := mgr.Add(c.cache); err != nil {
		return fmt.Errorf("cache of Kueue's workloads: %w", err)
	}
	all := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return []reconcile.Request{everything} })
	watcher, err := builder.ControllerManagedBy(mgr).Named("kueue").
		Watches(&corev1.Node{}, all, builder.WithPredicates(nodehealth.NodeChanged)).
		Watches(&evenkeel.NodeNetworkHealth{}, all).
		Watches(&evenkeel.NetworkCheckPolicy{}, all, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&evenkeel.NetworkCheck{}, all).
		WithOptions(controller.Options{RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, lastRetry)}).
		Build(c)
	if err != nil {
		return err
	}
	c.kinds = &kinds.Watch{Cache: c.cache, Mapper: mgr.GetRESTMapper(), Poll: c.Poll, Controller: watcher, Request: everything}
	for _, kind := range needed {
		c.kinds.Kinds = append(c.kinds.Kinds, schema.GroupVersionKind{Group: group, Kind: kind})
	}
	return mgr.Add(c.kinds)
}

// Reconcile decides all workloads that wait for one of our checks.
func (c *Controller) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	for _, kind := range needed {
		if _, served := c.kinds.Served(schema.GroupKind{Group: group, Kind: kind}); !served {
			return reconcile.Result{}, nil // there is no Kueue
		}
	}
	ctx, cancel := context.WithTimeout(ctx, passTimeout)
	defer cancel()
	var policies evenkeel.NetworkCheckPolicyList
	if err := c.client.List(ctx, &policies); err != nil {
		return reconcile.Result{}, fmt.Errorf("list NetworkCheckPolicies: %w", err)
	}
	checks, err := c.list(ctx, kindCheck)
	if err != nil {
		return reconcile.Result{}, err
	}
	var all []error
	ours := map[string]string{} // policies, by AdmissionCheck
	for i := range checks {
		if name, policy, is := parameters(&checks[i]); is {
			ours[name] = policy
			all = append(all, c.tell(ctx, &checks[i], policies.Items))
		}
	}
	next, err := c.decide(ctx, ours)
	if err := errors.Join(append(all, err)...); err != nil {
		return reconcile.Result{}, err
	}
	if next.IsZero() {
		return reconcile.Result{}, nil
	}
	return reconcile.Result{RequeueAfter: max(time.Millisecond, next.Sub(c.Now()))}, nil
}

func (c *Controller) list(ctx context.Context, kind string) ([]unstructured.Unstructured, error) {
	watched, _ := c.kinds.Served(schema.GroupKind{Group: group, Kind: kind})
	watched.Kind += "List"
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(watched)
	// They are looked at, and copied before they are changed.
	if err := c.cache.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list Kueue's %ss: %w", kind, err)
	}
	return list.Items, nil
}

// tell says on an AdmissionCheck of ours whether it can be decided: Kueue admits nothing by one that is not active.
func (c *Controller) tell(ctx context.Context, check *unstructured.Unstructured, policies []evenkeel.NetworkCheckPolicy) error {
	want := active(check, policies)
	var status struct {
		Conditions []metav1.Condition `json:"conditions"`
	}
	if err := field(check, "status", &status); err != nil {
		return err
	}
	before := meta.FindStatusCondition(status.Conditions, want.Type)
	if before != nil && before.Status == want.Status && before.Reason == want.Reason && before.Message == want.Message && before.ObservedGeneration == want.ObservedGeneration {
		return nil
	}
	want.LastTransitionTime = metav1.NewTime(c.Now().UTC().Truncate(time.Second))
	if before != nil && before.Status == want.Status {
		want.LastTransitionTime = before.LastTransitionTime
	}
	condition, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&want)
	if err != nil {
		return err
	}
	return c.apply(ctx, check, map[string]any{"conditions": []any{condition}})
}

// decide goes through the workloads, and returns when time alone changes something.
func (c *Controller) decide(ctx context.Context, ours map[string]string) (next time.Time, err error) {
	workloads, err := c.list(ctx, kindWorkload)
	if err != nil {
		return next, err
	}
	var waiting []waits
	var all []error
	for i := range workloads {
		w, err := pending(&workloads[i], ours)
		all = append(all, err)
		waiting = append(waiting, w...)
	}
	asks, uids := map[string]bool{}, map[types.UID]bool{}
	if len(waiting) > 0 {
		flavors, err := c.list(ctx, kindFlavor)
		if err != nil {
			return next, errors.Join(append(all, err)...)
		}
		world, err := jobstart.See(ctx, c.client, c.Namespace, c.Now())
		if err != nil {
			return next, errors.Join(append(all, err)...)
		}
		for _, w := range waiting {
			job, ready, err := w.job(flavors)
			if err != nil {
				all = append(all, err)
				continue
			}
			if !ready {
				continue // the end of what it waits for is an event
			}
			d := world.Decide(job)
			key := fmt.Sprintf("%s %s/%s", w.check, w.object.GetNamespace(), w.object.GetName())
			c.Demand.Set(key, d.Check)
			asks[key], uids[w.uid()] = true, true
			all = append(all, c.answer(ctx, w, d, world.TimedOut(job)))
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
	c.news.Forget(func(job types.UID) bool { return uids[job] })
	return next, errors.Join(all...)
}

// answer writes the state of the workload's check, if it is news.
func (c *Controller) answer(ctx context.Context, w waits, d gate.Decision, timedOut bool) error {
	state, after := answerOf(d, timedOut)
	if state == statePending && !c.news.Is(w.uid(), d) {
		return nil
	}
	about := corev1.ObjectReference{APIVersion: w.object.GetAPIVersion(), Kind: w.object.GetKind(), Namespace: w.object.GetNamespace(), Name: w.object.GetName(), UID: w.object.GetUID()}
	severity := corev1.EventTypeNormal
	if d.Action == gate.GiveUp || state == stateRetry {
		severity = corev1.EventTypeWarning
	}
	if err := events.Write(ctx, c.client, events.New(about, severity, d.Reason, d.Message, c.Now())); err != nil {
		return err
	}
	entry := map[string]any{
		"name": w.check, "state": state, "message": d.Message, "lastTransitionTime": c.Now().UTC().Format(time.RFC3339),
	}
	if after > 0 {
		entry["requeueAfterSeconds"] = int64(after / time.Second)
	}
	if err := c.apply(ctx, w.object, map[string]any{"admissionChecks": []any{entry}}); err != nil {
		return err
	}
	c.news.Told(w.uid(), d)
	return nil
}

// apply writes a part of the object's status, unless somebody changed the object meanwhile: that is an event of its own.
func (c *Controller) apply(ctx context.Context, object *unstructured.Unstructured, status map[string]any) error {
	apply := &unstructured.Unstructured{Object: map[string]any{"status": status}}
	apply.SetGroupVersionKind(object.GroupVersionKind())
	apply.SetNamespace(object.GetNamespace())
	apply.SetName(object.GetName())
	apply.SetUID(object.GetUID())
	apply.SetResourceVersion(object.GetResourceVersion())
	err := c.client.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(apply), fieldOwner, client.ForceOwnership)
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("write the status of %s %s: %w", object.GetKind(), object.GetName(), err)
	}
	return nil
}
