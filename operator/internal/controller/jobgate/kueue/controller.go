// Package kueue is the controller of those AdmissionChecks of Kueue that name ControllerName. Workloads with quota are
// admitted when the network of their nodes is proven. Kueue's kinds are handled as unstructured objects, so that clusters
// without Kueue cost next to nothing.
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
	// ControllerName is the value of spec.controllerName of the AdmissionChecks that this package decides.
	ControllerName = "evenkeel.dev/preflight"

	fieldOwner = client.FieldOwner("evenkeel-jobgate")
)

// group is Kueue's. Its versions v1beta1 and v1beta2 are understood.
const group = "kueue.x-k8s.io"

// Reconciler decides AdmissionChecks.
type Reconciler struct{ jobgate.Evaluator }

// SetupWithManager starts the controller with the manager.
func (c *Reconciler) SetupWithManager(mgr manager.Manager) error {
	var waiting []schema.GroupVersionKind
	for _, kind := range requiredKinds {
		waiting = append(waiting, schema.GroupVersionKind{Group: group, Kind: kind})
	}
	_, err := c.NewController(mgr, "jobgate-kueue", waiting, nil, c.reconcileAll)
	return err
}

// reconcileAll decides about all workloads that wait for one of our checks.
func (c *Reconciler) reconcileAll(ctx context.Context) (reconcile.Result, error) {
	for _, kind := range requiredKinds {
		if _, served := c.OptionalKinds.Served(schema.GroupKind{Group: group, Kind: kind}); !served {
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
		if name, policy, is := parseParameters(&checks[i]); is {
			ours[name] = policy
			all = append(all, c.updateAdmissionCheck(ctx, &checks[i], policies.Items))
		}
	}
	waiting, err := c.listWaiting(ctx, ours)
	all = append(all, err)
	result, err := c.Evaluate(ctx, waiting)
	if err := errors.Join(append(all, err)...); err != nil {
		return reconcile.Result{}, err
	}
	return result, nil
}

func (c *Reconciler) list(ctx context.Context, kind string) ([]unstructured.Unstructured, error) {
	watched, _ := c.OptionalKinds.Served(schema.GroupKind{Group: group, Kind: kind})
	watched.Kind += "List"
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(watched)
	// The objects are read only; they are copied before they are changed.
	if err := c.WaitingCache.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list Kueue's %ss: %w", kind, err)
	}
	return list.Items, nil
}

// updateAdmissionCheck sets the condition Active of one of our AdmissionChecks. Kueue admits nothing by a check that is not
// active.
func (c *Reconciler) updateAdmissionCheck(ctx context.Context, check *unstructured.Unstructured, policies []evenkeel.NetworkCheckPolicy) error {
	want := activeCondition(check, policies)
	var status struct {
		Conditions []metav1.Condition `json:"conditions"`
	}
	if err := decodeField(check, "status", &status); err != nil {
		return err
	}
	before := meta.FindStatusCondition(status.Conditions, want.Type)
	if before != nil && before.Status == want.Status && before.Reason == want.Reason && before.Message == want.Message && before.ObservedGeneration == want.ObservedGeneration {
		return nil
	}
	want.LastTransitionTime = metav1.NewTime(c.Clock.Now().UTC().Truncate(time.Second))
	if before != nil && before.Status == want.Status {
		want.LastTransitionTime = before.LastTransitionTime
	}
	condition, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&want)
	if err != nil {
		return err
	}
	return c.applyStatus(ctx, check, map[string]any{"conditions": []any{condition}})
}

// listWaiting returns the pending checks that can be decided. The others wait for Kueue to choose nodes, which is an event.
func (c *Reconciler) listWaiting(ctx context.Context, ours map[string]string) ([]jobgate.Waiter, error) {
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
		found, err := pendingChecks(&workloads[i], ours)
		all = append(all, err)
		for _, w := range found {
			job, ready, err := w.job(flavors)
			all = append(all, err)
			if err != nil || !ready {
				continue
			}
			key := fmt.Sprintf("%s %s/%s", w.check, w.object.GetNamespace(), w.object.GetName())
			waiting = append(waiting, jobgate.Waiter{Key: key, Subject: w.uid(), Job: job, Apply: func(ctx context.Context, d gate.Decision, changed bool) error {
				return c.updateState(ctx, w, d, changed)
			}})
		}
	}
	return waiting, errors.Join(all...)
}

// updateState writes the state of the workload's check, if the decision changed.
func (c *Reconciler) updateState(ctx context.Context, w pendingCheck, d gate.Decision, changed bool) error {
	state, after := stateFor(d)
	if state == statePending && !changed {
		return nil
	}
	about := corev1.ObjectReference{APIVersion: w.object.GetAPIVersion(), Kind: w.object.GetKind(), Namespace: w.object.GetNamespace(), Name: w.object.GetName(), UID: w.object.GetUID()}
	severity := corev1.EventTypeNormal
	if d.Action == gate.OpenUnproven || state == stateRetry {
		severity = corev1.EventTypeWarning
	}
	if err := events.Write(ctx, c.Client, events.New(about, severity, d.Reason, d.Message, c.Clock.Now())); err != nil {
		return err
	}
	entry := map[string]any{
		"name": w.check, "state": state, "message": d.Message, "lastTransitionTime": c.Clock.Now().UTC().Format(time.RFC3339),
	}
	if after > 0 {
		entry["requeueAfterSeconds"] = int64(after / time.Second)
	}
	return c.applyStatus(ctx, w.object, map[string]any{"admissionChecks": []any{entry}})
}

// applyStatus writes a part of the object's status. If somebody changed the object meanwhile it does nothing: that change is
// another event.
func (c *Reconciler) applyStatus(ctx context.Context, object *unstructured.Unstructured, status map[string]any) error {
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
