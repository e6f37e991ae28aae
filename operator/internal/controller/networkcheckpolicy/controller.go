// Package networkcheckpolicy creates the checks that NetworkCheckPolicies ask for, one at a time for each policy, and counts
// their nodes by health.
package networkcheckpolicy

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"
	_ "time/tzdata" // the image has no time zones of its own

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/nodenetworkhealth"
	"evenkeel.dev/evenkeel/operator/internal/kube/debounce"
	"evenkeel.dev/evenkeel/operator/internal/kube/statusapply"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

const (
	fieldOwner     = client.FieldOwner("evenkeel-networkcheckpolicy")
	defaultHistory = 5
	maxBadNodes    = 512
	// maxUnhealthyNodes is the schema's limit of status.unhealthyNodes.
	maxUnhealthyNodes = 1000
	maxNames          = 5000 // limit of a check's spec
	// debounceDelay is how long new results are collected, so that they are counted with one write.
	debounceDelay = 500 * time.Millisecond
)

// Reasons of the condition Ready.
const (
	ReasonWatching         = "Watching"
	ReasonInvalidSelector  = "InvalidSelector"
	ReasonInvalidSchedule  = "InvalidSchedule"
	ReasonTooManyUnhealthy = "TooManyUnhealthy"
	ReasonNoOverlap        = "NoOverlap"
	ReasonOthersFirst      = "OthersFirst"
)

// Reconciler reconciles NetworkCheckPolicies.
type Reconciler struct {
	// Namespace is where checks run.
	Namespace string
	// Requests are the nodes that gated jobs need checked.
	Requests *CheckRequests
	Clock    clock.PassiveClock

	client client.Client
}

// SetupWithManager starts the controller with the manager.
func (c *Reconciler) SetupWithManager(mgr manager.Manager) error {
	c.client = mgr.GetClient()
	every := handler.EnqueueRequestsFromMapFunc(c.allPolicies)
	return builder.ControllerManagedBy(mgr).Named("networkcheckpolicy").
		For(&evenkeel.NetworkCheckPolicy{}).
		Watches(&corev1.Node{}, every, builder.WithPredicates(nodenetworkhealth.NodeChanged)).
		Watches(&evenkeel.NodeNetworkHealth{}, debounce.Handler(debounceDelay, every)).
		Watches(&evenkeel.NetworkCheck{}, handler.EnqueueRequestsFromMapFunc(policyOfCheck)).
		WatchesRawSource(source.Channel(c.Requests.changed, every)).
		Complete(c)
}

func (c *Reconciler) allPolicies(ctx context.Context, _ client.Object) []reconcile.Request {
	var policies evenkeel.NetworkCheckPolicyList
	if err := c.client.List(ctx, &policies); err != nil {
		return nil // the cache is closing
	}
	var requests []reconcile.Request
	for _, p := range policies.Items {
		requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Name: p.Name}})
	}
	return requests
}

func policyOfCheck(_ context.Context, check client.Object) []reconcile.Request {
	if name := check.GetLabels()[evenkeel.PolicyKey]; name != "" {
		return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: name}}}
	}
	return nil
}

// Reconcile creates the check that is due, if any, and writes the status.
func (c *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	policy := &evenkeel.NetworkCheckPolicy{}
	if err := c.client.Get(ctx, request.NamespacedName, policy); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if policy.DeletionTimestamp != nil {
		return reconcile.Result{}, nil
	}
	nodes, healths, policies, err := nodenetworkhealth.ListAll(ctx, c.client)
	if err != nil {
		return reconcile.Result{}, err
	}
	now := c.Clock.Now()
	marks, counts := health.Evaluate(nodes, healths, policies, now)
	count := counts[policy.Name]
	if count == nil {
		return reconcile.Result{RequeueAfter: time.Second}, nil // the list does not have the policy yet
	}
	status := policy.Status.DeepCopy()
	status.ObservedGeneration = policy.Generation
	status.Nodes, status.Healthy, status.Unhealthy, status.Unknown = &count.Nodes, &count.Healthy, &count.Unhealthy, &count.Unknown
	status.BadNodes = text.List(count.UnhealthyNames, maxBadNodes)
	status.UnhealthyNodes = count.UnhealthyNames[:min(len(count.UnhealthyNames), maxUnhealthyNodes)]

	var mine []*corev1.Node
	wanted := c.Requests.forPolicy(policy.Name)
	under := health.PolicyByNode(nodes, policies)
	for i := range nodes {
		if p := under[nodes[i].Name]; p != nil && p.Name == policy.Name {
			mine = append(mine, &nodes[i])
		}
		// The requester may not have seen yet that there is a verdict.
		if mark := marks[nodes[i].Name]; mark.Condition != nil && mark.Condition.Status != corev1.ConditionUnknown {
			delete(wanted, nodes[i].Name)
		}
	}
	next, problem, err := c.createDueCheck(ctx, policy, status, mine, healths, wanted, now)
	if err != nil {
		return reconcile.Result{}, err
	}
	ready := metav1.Condition{Type: evenkeel.ConditionReady, Status: metav1.ConditionTrue, Reason: ReasonWatching, ObservedGeneration: policy.Generation,
		Message: fmt.Sprintf("%d of %d nodes are healthy", count.Healthy, count.Nodes)}
	switch _, selectorError := metav1.LabelSelectorAsSelector(policy.Spec.NodeSelector); {
	case selectorError != nil:
		ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, ReasonInvalidSelector, "nodeSelector: "+selectorError.Error()
	case problem != nil:
		ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, ReasonInvalidSchedule, problem.Error()
	case count.Unmarked > 0:
		ready.Status, ready.Reason = metav1.ConditionFalse, ReasonTooManyUnhealthy
		ready.Message = fmt.Sprintf("%d of %d nodes are unhealthy; %d of them are not labeled, as that would exceed onFail.maxUnhealthyPercent: check what they have in common", count.Unhealthy, count.Nodes, count.Unmarked)
	}
	meta.SetStatusCondition(&status.Conditions, ready)
	overlapping := metav1.Condition{Type: evenkeel.ConditionOverlapping, Status: metav1.ConditionFalse, Reason: ReasonNoOverlap, ObservedGeneration: policy.Generation,
		Message: "all nodes that it selects are its own"}
	if count.Overlapping > 0 {
		overlapping.Status, overlapping.Reason = metav1.ConditionTrue, ReasonOthersFirst
		overlapping.Message = fmt.Sprintf("%d more nodes that it selects belong to %s: change nodeSelector or priority", count.Overlapping, text.List(count.Others, maxBadNodes))
	}
	meta.SetStatusCondition(&status.Conditions, overlapping)
	if err := statusapply.Apply(ctx, c.client, fieldOwner, policy, &policy.Status, status); err != nil {
		return reconcile.Result{}, err
	}
	// Nodes become stale without an event.
	if !count.NextStale.IsZero() && (next.IsZero() || count.NextStale.Before(next)) {
		next = count.NextStale
	}
	if next.IsZero() {
		return reconcile.Result{}, nil
	}
	return reconcile.Result{RequeueAfter: max(time.Millisecond, next.Sub(now))}, nil
}

// createDueCheck creates the check that is due, unless one is running, and deletes old ones. It records in the status what it
// did, and returns when the schedule is due next. The problem, if any, is an error in the policy.
func (c *Reconciler) createDueCheck(ctx context.Context, policy *evenkeel.NetworkCheckPolicy, status *evenkeel.NetworkCheckPolicyStatus, nodes []*corev1.Node, healths map[string]*evenkeel.NodeNetworkHealthStatus, wanted map[string]bool, now time.Time) (next time.Time, problem, err error) {
	var list evenkeel.NetworkCheckList
	if err := c.client.List(ctx, &list, client.InNamespace(c.Namespace), client.MatchingLabels{evenkeel.PolicyKey: policy.Name}); err != nil {
		return next, nil, fmt.Errorf("list NetworkChecks: %w", err)
	}
	checks := map[string]*evenkeel.NetworkCheck{}
	status.RunningCheck = ""
	var ended []*evenkeel.NetworkCheck
	for i := range list.Items {
		check := &list.Items[i]
		checks[check.Name] = check
		if meta.IsStatusConditionTrue(check.Status.Conditions, evenkeel.ConditionComplete) {
			ended = append(ended, check)
		} else {
			status.RunningCheck = check.Name
		}
	}
	if err := c.pruneHistory(ctx, policy, ended); err != nil {
		return next, nil, err
	}
	s, problem := parseSchedule(policy.Spec.Triggers)
	var latest time.Time
	if s != nil {
		last := policy.CreationTimestamp.Time
		if status.LastScheduleTime != nil {
			last = status.LastScheduleTime.Time
		}
		latest, next = s.due(last, now)
	}
	if status.RunningCheck != "" || len(nodes) == 0 {
		return next, problem, nil // the end of the one that runs, and nodes that come, are events
	}
	if !latest.IsZero() {
		names := make([]string, 0, len(nodes))
		for _, n := range nodes {
			names = append(names, n.Name)
		}
		if _, err := c.ensureCheck(ctx, policy, status, scheduledName(policy.Name, latest), names, checks); err != nil {
			return next, problem, err
		}
		at := metav1.NewTime(latest)
		status.LastScheduleTime = &at
		return next, problem, nil
	}
	if until := resultsPendingUntil(ended, healths, nodes, now); !until.IsZero() {
		if next.IsZero() || until.Before(next) {
			next = until
		}
		return next, problem, nil
	}
	chosen, partners := selectDueNodes(nodes, healths, policy.Spec.Triggers.NewNodes != evenkeel.SwitchDisabled, wanted)
	if len(chosen) == 0 {
		return next, problem, nil
	}
	why := "new"
	if len(wanted) > 0 {
		why = "job"
	}
	retry, err := c.ensureCheck(ctx, policy, status, unscheduledName(policy.Name, why, nodes, healths, chosen), slices.Concat(chosen, partners), checks)
	if !retry.IsZero() && (next.IsZero() || retry.Before(next)) {
		next = retry
	}
	return next, problem, err
}

// ensureCheck creates a check, unless it exists. A check that was not runnable is created again at the time retry, since what it
// lacked may exist then.
func (c *Reconciler) ensureCheck(ctx context.Context, policy *evenkeel.NetworkCheckPolicy, status *evenkeel.NetworkCheckPolicyStatus, name string, nodes []string, checks map[string]*evenkeel.NetworkCheck) (retry time.Time, err error) {
	if had := checks[name]; had != nil {
		if !gate.NotRunnable(had) {
			return retry, nil
		}
		if retry = gate.RetryTime(had); c.Clock.Now().Before(retry) {
			return retry, nil
		}
		if err := c.client.Delete(ctx, had, client.Preconditions{UID: &had.UID}); client.IgnoreNotFound(err) != nil {
			return retry, fmt.Errorf("delete NetworkCheck %s: %w", name, err)
		}
	}
	slices.Sort(nodes)
	err = c.client.Create(ctx, newCheck(policy, c.Namespace, name, nodes[:min(len(nodes), maxNames)]))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return retry, fmt.Errorf("create NetworkCheck %s: %w", name, err)
	}
	status.RunningCheck = name
	return time.Time{}, nil
}

// pruneHistory deletes the oldest checks that have ended. Those of nodes that are new still, by their names, would be made again.
func (c *Reconciler) pruneHistory(ctx context.Context, policy *evenkeel.NetworkCheckPolicy, ended []*evenkeel.NetworkCheck) error {
	keep := defaultHistory
	if policy.Spec.History != nil {
		keep = int(*policy.Spec.History)
	}
	slices.SortFunc(ended, func(a, b *evenkeel.NetworkCheck) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(b.Name, a.Name))
	})
	for _, check := range ended[min(len(ended), keep):] {
		if err := c.client.Delete(ctx, check, client.Preconditions{UID: &check.UID}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete NetworkCheck %s: %w", check.Name, err)
		}
	}
	return nil
}
