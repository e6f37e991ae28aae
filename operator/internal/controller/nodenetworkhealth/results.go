// Package nodenetworkhealth records the results of checks on nodes. Every node that was ever checked has a NodeNetworkHealth.
// Nodes that a policy selects also get a condition, a label and, if configured, a taint.
package nodenetworkhealth

import (
	"context"
	"errors"
	"fmt"
	"time"

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
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
	"evenkeel.dev/evenkeel/operator/internal/preflight/report"
)

// Reasons of the Events on nodes.
const (
	EventUnhealthy = "EvenkeelNetworkUnhealthy"
	EventHealthy   = "EvenkeelNetworkHealthy"
)

// replacedNodeRetry is the time after which the NodeNetworkHealth of a deleted node of the same name should be gone.
const replacedNodeRetry = 5 * time.Second

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
	var all []error
	again := reconcile.Result{}
	benchmark := networkcheck.BenchmarkOf(check, found.Record)
	for _, n := range preflight.Decide(networkcheck.OptionsOf(check), found.Record).Nodes {
		late, err := r.recordNode(ctx, check, &n, benchmark)
		all = append(all, err)
		if late {
			again.RequeueAfter = replacedNodeRetry
		}
	}
	if err := errors.Join(all...); err != nil {
		return reconcile.Result{}, err
	}
	return again, nil
}

// recordNode adds one result. It reports whether it has to wait until the NodeNetworkHealth of an earlier node of the same name
// is deleted.
func (r *ResultRecorder) recordNode(ctx context.Context, check *evenkeel.NetworkCheck, n *preflight.NodeResult, benchmark string) (late bool, err error) {
	node := &corev1.Node{}
	if err := r.client.Get(ctx, client.ObjectKey{Name: n.Name}, node); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	state := &evenkeel.NodeNetworkHealth{}
	err = r.client.Get(ctx, client.ObjectKey{Name: n.Name}, state)
	switch {
	case err == nil && (len(state.OwnerReferences) == 0 || state.OwnerReferences[0].UID != node.UID):
		return true, nil
	case client.IgnoreNotFound(err) != nil:
		return false, fmt.Errorf("read NodeNetworkHealth %s: %w", n.Name, err)
	case health.HasResult(&state.Status, string(check.UID), check.Status.CompletionTime.Time):
		return false, nil
	case apierrors.IsNotFound(err):
		state = &evenkeel.NodeNetworkHealth{ObjectMeta: metav1.ObjectMeta{
			Name: n.Name, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}},
		}}
		if err := r.client.Create(ctx, state); err != nil {
			return false, fmt.Errorf("create NodeNetworkHealth %s: %w", n.Name, err)
		}
	}
	state = state.DeepCopy()
	before := state.Status.Health
	state.Status = health.AddResult(state.Status, evenkeel.HealthResult{
		Check: check.Name, UID: string(check.UID), Time: *check.Status.CompletionTime,
		Verdict: n.Verdict, Reason: n.Reason, BusBandwidth: networkcheck.Quantity(n.BusBW), Benchmark: benchmark,
	}, n.Message)
	if err := r.client.Status().Update(ctx, state); err != nil {
		return false, fmt.Errorf("write NodeNetworkHealth %s: %w", n.Name, err)
	}
	if e := healthEvent(node, before, &state.Status, check.Name); e != nil {
		// A failure is only logged: the status has the same information.
		if err := events.Write(ctx, r.client, e); err != nil {
			log.FromContext(ctx).Info("cannot write an Event", "reason", err.Error())
		}
	}
	return false, nil
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
