// Package kueue is the controller of those AdmissionChecks of Kueue that name ControllerName. Workloads with quota are
// admitted when the network of their nodes is proven. Kueue's kinds are handled as unstructured objects, so that
// clusters without Kueue cost next to nothing.
package kueue

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/openapi"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

const (
	// ControllerName is the value of spec.controllerName of the AdmissionChecks that this package decides.
	ControllerName = "evenkeel.dev/preflight"

	fieldOwner = client.FieldOwner("evenkeel-jobgate")
)

// group is Kueue's. Its versions v1beta1 and v1beta2 are understood.
const group = "kueue.x-k8s.io"

// Reconciler decides AdmissionChecks.
type Reconciler struct {
	jobgate.Evaluator
	// asked is set once an AdmissionCheck is ours. Before that, no workload is watched.
	asked atomic.Bool
	// schemas are the schemas of the kinds that the cluster serves. fields is nil until they have been read.
	schemas openapi.Client
	fields  *optionalFields
	// retries counts, for each check of a workload, how often the workload returned its quota.
	retries map[types.UID]int
	// next is when an answer is due that was put off, in this pass.
	next time.Time
}

// SetupWithManager starts the controller with the manager.
func (c *Reconciler) SetupWithManager(mgr manager.Manager) error {
	var waiting []schema.GroupVersionKind
	for _, kind := range requiredKinds {
		waiting = append(waiting, schema.GroupVersionKind{Group: group, Kind: kind})
	}
	client, err := discovery.NewDiscoveryClientForConfigAndClient(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return fmt.Errorf("client for the schemas of kinds: %w", err)
	}
	c.schemas, c.retries = client.OpenAPIV3(), map[types.UID]int{}
	c.Transform = slim
	c.Wanted = func(kind schema.GroupKind) bool { return kind.Kind == kindCheck || c.asked.Load() }
	_, err = c.NewController(mgr, "jobgate-kueue", waiting, nil, c.reconcileAll)
	return err
}

// reconcileAll decides about all workloads that wait for one of our checks.
func (c *Reconciler) reconcileAll(ctx context.Context) (reconcile.Result, error) {
	if _, served := c.OptionalKinds.Served(schema.GroupKind{Group: group, Kind: kindCheck}); !served {
		return reconcile.Result{}, nil // there is no Kueue
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
	others := otherChecks{provisioning: map[string]bool{}, dispatching: map[string]*unstructured.Unstructured{}}
	for i := range checks {
		switch {
		case isOf(&checks[i], provisioningController):
			others.provisioning[checks[i].GetName()] = true
		case isOf(&checks[i], workload.MultiKueueController):
			others.dispatching[checks[i].GetName()] = &checks[i]
		}
		if name, policy, is := parseParameters(&checks[i]); is {
			ours[name] = policy
			all = append(all, c.updateAdmissionCheck(ctx, &checks[i], policies.Items))
		}
	}
	if len(ours) > 0 {
		c.asked.Store(true)
	}
	for _, kind := range requiredKinds {
		if _, served := c.OptionalKinds.Served(schema.GroupKind{Group: group, Kind: kind}); !served {
			return reconcile.Result{}, errors.Join(all...) // nothing waits for us, or they are watched soon
		}
	}
	waiting, err := c.listWaiting(ctx, ours, others)
	all = append(all, err)
	c.next = time.Time{}
	result, err := c.Evaluate(ctx, waiting)
	if err := errors.Join(append(all, err)...); err != nil {
		return reconcile.Result{}, err
	}
	if wait := max(time.Millisecond, c.next.Sub(c.Clock.Now())); !c.next.IsZero() && (result.RequeueAfter == 0 || wait < result.RequeueAfter) {
		result.RequeueAfter = wait
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

// updateAdmissionCheck sets the condition Active of one of our AdmissionChecks. Kueue admits nothing by a check that is
// not active.
func (c *Reconciler) updateAdmissionCheck(ctx context.Context, check *unstructured.Unstructured, policies []evenkeel.NetworkCheckPolicy) error {
	return setActive(ctx, c.Client, check, activeCondition(check, policies), c.Clock.Now())
}

// setActive writes the condition Active of one of our AdmissionChecks, unless it is there.
func setActive(ctx context.Context, c client.Client, check *unstructured.Unstructured, want metav1.Condition, now time.Time) error {
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
	want.LastTransitionTime = metav1.NewTime(now.UTC().Truncate(time.Second))
	if before != nil && before.Status == want.Status {
		want.LastTransitionTime = before.LastTransitionTime
	}
	condition, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&want)
	if err != nil {
		return err
	}
	_, err = applyStatus(ctx, c, check, fieldOwner, map[string]any{"conditions": []any{condition}})
	return err
}

// otherChecks are AdmissionChecks of Kueue's own controllers, by name.
type otherChecks struct {
	provisioning map[string]bool
	dispatching  map[string]*unstructured.Unstructured
}

// listWaiting returns the pending checks that can be decided. Some others wait for nodes that an autoscaler has yet to
// bring, which is an event. They say so. Those of workloads that MultiKueue sends away are answered here.
func (c *Reconciler) listWaiting(ctx context.Context, ours map[string]string, others otherChecks) ([]jobgate.Waiter, error) {
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
	there, byKey := map[types.UID]bool{}, map[string]*unstructured.Unstructured{}
	for i := range workloads {
		there[workloads[i].GetUID()] = true
		byKey[workloads[i].GetNamespace()+"/"+workloads[i].GetName()] = &workloads[i]
	}
	for i := range workloads {
		found, err := pendingChecks(&workloads[i], ours)
		all = append(all, err)
		for _, w := range found {
			if by := w.dispatchedBy(others.dispatching); by != nil {
				all = append(all, c.admitElsewhere(ctx, w, by))
				continue
			}
			running, err := runningSlice(w.object, byKey)
			if err != nil {
				all = append(all, err)
				continue
			}
			w.running = running
			job, err := w.job(flavors)
			if err != nil {
				all = append(all, err)
				continue
			}
			if len(w.running) > 0 && len(job.Hosts)+len(job.Pods) == 0 {
				all = append(all, c.admit(ctx, w, "the job runs on its nodes already, and gets no others"))
				continue
			}
			waitsFor, provisioned := w.provisioned(others.provisioning)
			if waitsFor != "" {
				all = append(all, c.say(ctx, w, fmt.Sprintf("waits for nodes, which Kueue asks an autoscaler for by the AdmissionCheck %s; they are checked when they are there", waitsFor)))
				continue
			}
			job.Since, job.Reassigned = later(job.Since, provisioned), c.retried(w)
			key := fmt.Sprintf("%s %s/%s", w.check, w.object.GetNamespace(), w.object.GetName())
			waiting = append(waiting, jobgate.Waiter{Key: key, Subject: w.uid(), Job: job, Apply: func(ctx context.Context, d gate.Decision, changed bool) error {
				return c.updateState(ctx, w, d, changed)
			}})
		}
	}
	maps.DeleteFunc(c.retries, func(check types.UID, _ int) bool {
		of, _, _ := strings.Cut(string(check), "/")
		return !there[types.UID(of)]
	})
	return waiting, errors.Join(all...)
}

// updateState writes the state of the workload's check, if the decision changed, and an Event. A workload does not wait
// as no Event can be written.
func (c *Reconciler) updateState(ctx context.Context, w pendingCheck, d gate.Decision, changed bool) error {
	state, after := stateFor(d, c.retried(w))
	if state == stateRetry && len(w.running) > 0 {
		state = statePending
		d.Message += "; the job runs on as it is: Kueue would stop it to choose other nodes"
	}
	canDelay := c.optionalFields(ctx, w.object.GroupVersionKind()).requeueAfterSeconds
	if state == stateRetry && !canDelay {
		// Kueue would choose again at once. So the workload keeps its quota until then.
		if at := w.since.Add(after); d.Action == gate.Reassign && c.Clock.Now().Before(at) {
			state = statePending
			c.next = earlier(c.next, at)
		}
	}
	var delay *time.Duration
	if state == stateRetry && canDelay {
		// Zero too: Kueue keeps the delay of an earlier answer where there is none.
		delay = &after
	}
	if state == statePending && !changed {
		return nil
	}
	about := corev1.ObjectReference{APIVersion: w.object.GetAPIVersion(), Kind: w.object.GetKind(), Namespace: w.object.GetNamespace(), Name: w.object.GetName(), UID: w.object.GetUID()}
	severity := corev1.EventTypeNormal
	if d.Action == gate.OpenUnproven || d.Action == gate.Reassign || state == stateRetry {
		severity = corev1.EventTypeWarning
	}
	untold := events.Write(ctx, c.Client, events.New(about, severity, d.Reason, d.Message, c.Clock.Now()))
	if state == statePending && w.message == d.Message {
		return untold // only its Event was missing; each write of the state brings the workload back here
	}
	written, err := writeState(ctx, c.Client, w, state, d.Message, delay, c.Clock.Now())
	if err != nil {
		c.fields = nil // the cluster may have another version of Kueue now
		return err
	}
	if !written {
		return jobgate.ErrStale
	}
	if state == statePending {
		return untold // so that it is told again
	}
	if untold != nil {
		log.FromContext(ctx).Info("cannot write an Event", "reason", untold.Error())
	}
	if state == stateRetry {
		c.retries[w.uid()]++
	}
	return nil
}

// say writes the message of a check that stays pending, unless it is there.
func (c *Reconciler) say(ctx context.Context, w pendingCheck, message string) error {
	if w.message == message {
		return nil
	}
	_, err := writeState(ctx, c.Client, w, statePending, message, nil, c.Clock.Now())
	return err
}

// retried returns how often the workload has returned its quota for the check. Versions of Kueue that do not count are
// counted for, as long as this process lives.
func (c *Reconciler) retried(w pendingCheck) int {
	if w.retryCount != nil {
		return *w.retryCount
	}
	return c.retries[w.uid()]
}

// optionalFields returns what the CRD of workloads has; nothing, as long as its schema cannot be read.
func (c *Reconciler) optionalFields(ctx context.Context, kind schema.GroupVersionKind) optionalFields {
	if c.fields == nil {
		fields, err := readFields(c.schemas, kind)
		if err != nil {
			log.FromContext(ctx).Info("cannot read the schema of Kueue's workloads", "reason", err.Error())
			return optionalFields{}
		}
		c.fields = &fields
	}
	return *c.fields
}

// writeState writes the state of one check of a workload; nil: without a delay before Kueue tries again. It is not
// written if somebody changed the workload meanwhile.
func writeState(ctx context.Context, c client.Client, w pendingCheck, state, message string, delay *time.Duration, now time.Time) (written bool, err error) {
	entry := map[string]any{
		"name": w.check, "state": state, "message": message, "lastTransitionTime": now.UTC().Format(time.RFC3339),
	}
	if delay != nil {
		entry["requeueAfterSeconds"] = int64(*delay / time.Second)
	}
	return applyStatus(ctx, c, w.object, ownerOf(w.check), map[string]any{"admissionChecks": []any{entry}})
}

// ownerOf is the field owner of the state of a workload's check. Each check has one: what an owner applies replaces all
// that it applied before, so the state of one check would take the fields of another.
func ownerOf(check string) client.FieldOwner {
	owner := fieldOwner + "/" + client.FieldOwner(check)
	if len(owner) > validation.FieldManagerMaxLength {
		owner = client.FieldOwner(fmt.Sprintf("%s/%x", fieldOwner, sha256.Sum256([]byte(check))))
	}
	return owner
}

// applyStatus writes a part of the object's status as the owner. If somebody changed the object meanwhile it does
// nothing: that change is another event.
func applyStatus(ctx context.Context, c client.Client, object *unstructured.Unstructured, owner client.FieldOwner, status map[string]any) (written bool, err error) {
	apply := &unstructured.Unstructured{Object: map[string]any{"status": status}}
	apply.SetGroupVersionKind(object.GroupVersionKind())
	apply.SetNamespace(object.GetNamespace())
	apply.SetName(object.GetName())
	apply.SetUID(object.GetUID())
	apply.SetResourceVersion(object.GetResourceVersion())
	err = c.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(apply), owner, client.ForceOwnership)
	if ignoreChanged(err) != nil {
		return false, fmt.Errorf("write the status of %s %s: %w", object.GetKind(), object.GetName(), err)
	}
	return err == nil, nil
}

// ignoreChanged ignores that somebody changed or deleted the object meanwhile: that is another event.
func ignoreChanged(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// earlier returns the earlier one of two times, of which zero is none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || b.Before(a) {
		return b
	}
	return a
}
