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
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
)

const (
	// ControllerName is what an AdmissionCheck names to be decided here.
	ControllerName = "evenkeel.dev/preflight"

	fieldOwner = client.FieldOwner("evenkeel-jobgate")
)

// group is Kueue's. Its versions v1beta1 and v1beta2 are understood.
const group = "kueue.x-k8s.io"

// Controller decides AdmissionChecks.
type Controller struct{ jobgate.Keeper }

// SetupWithManager starts the controller with the manager.
func (c *Controller) SetupWithManager(mgr manager.Manager) error {
	var waiting []schema.GroupVersionKind
	for _, kind := range needed {
		waiting = append(waiting, schema.GroupVersionKind{Group: group, Kind: kind})
	}
	_, err := c.Watch(mgr, "jobgate-kueue", waiting, nil, c.look)
	return err
}

// look decides all workloads that wait for one of our checks.
func (c *Controller) look(ctx context.Context) (reconcile.Result, error) {
	for _, kind := range needed {
		if _, served := c.Kinds.Served(schema.GroupKind{Group: group, Kind: kind}); !served {
			return reconcile.Result{}, nil // there is no Kueue
		}
	}
	var policies evenkeel.NetworkCheckPolicyList
	if err := c.Client.List(ctx, &policies); err != nil {
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
	waiting, err := c.waiting(ctx, ours)
	all = append(all, err)
	result, err := c.Round(ctx, waiting)
	if err := errors.Join(append(all, err)...); err != nil {
		return reconcile.Result{}, err
	}
	return result, nil
}

func (c *Controller) list(ctx context.Context, kind string) ([]unstructured.Unstructured, error) {
	watched, _ := c.Kinds.Served(schema.GroupKind{Group: group, Kind: kind})
	watched.Kind += "List"
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(watched)
	// They are looked at, and copied before they are changed.
	if err := c.Waiting.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
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

// waiting are the workloads' checks of ours that can be decided: the end of what the others wait for is an event.
func (c *Controller) waiting(ctx context.Context, ours map[string]string) ([]jobgate.Waiter, error) {
	workloads, err := c.list(ctx, kindWorkload)
	if err != nil {
		return nil, err
	}
	flavors, err := c.list(ctx, kindFlavor)
	if err != nil {
		return nil, err
	}
	var waiting []jobgate.Waiter
	var all []error
	for i := range workloads {
		found, err := pending(&workloads[i], ours)
		all = append(all, err)
		for _, w := range found {
			job, ready, err := w.job(flavors)
			all = append(all, err)
			if err != nil || !ready {
				continue
			}
			key := fmt.Sprintf("%s %s/%s", w.check, w.object.GetNamespace(), w.object.GetName())
			waiting = append(waiting, jobgate.Waiter{Key: key, Told: w.uid(), Job: job, Act: func(ctx context.Context, d gate.Decision, news bool) error {
				return c.answer(ctx, w, d, news)
			}})
		}
	}
	return waiting, errors.Join(all...)
}

// answer writes the state of the workload's check, if it is news.
func (c *Controller) answer(ctx context.Context, w waits, d gate.Decision, news bool) error {
	state, after := answerOf(d)
	if state == statePending && !news {
		return nil
	}
	about := corev1.ObjectReference{APIVersion: w.object.GetAPIVersion(), Kind: w.object.GetKind(), Namespace: w.object.GetNamespace(), Name: w.object.GetName(), UID: w.object.GetUID()}
	severity := corev1.EventTypeNormal
	if d.Action == gate.GiveUp || state == stateRetry {
		severity = corev1.EventTypeWarning
	}
	if err := events.Write(ctx, c.Client, events.New(about, severity, d.Reason, d.Message, c.Now())); err != nil {
		return err
	}
	entry := map[string]any{
		"name": w.check, "state": state, "message": d.Message, "lastTransitionTime": c.Now().UTC().Format(time.RFC3339),
	}
	if after > 0 {
		entry["requeueAfterSeconds"] = int64(after / time.Second)
	}
	return c.apply(ctx, w.object, map[string]any{"admissionChecks": []any{entry}})
}

// apply writes a part of the object's status, unless somebody changed the object meanwhile: that is an event of its own.
func (c *Controller) apply(ctx context.Context, object *unstructured.Unstructured, status map[string]any) error {
	apply := &unstructured.Unstructured{Object: map[string]any{"status": status}}
	apply.SetGroupVersionKind(object.GroupVersionKind())
	apply.SetNamespace(object.GetNamespace())
	apply.SetName(object.GetName())
	apply.SetUID(object.GetUID())
	apply.SetResourceVersion(object.GetResourceVersion())
	err := c.Client.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(apply), fieldOwner, client.ForceOwnership)
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("write the status of %s %s: %w", object.GetKind(), object.GetName(), err)
	}
	return nil
}
