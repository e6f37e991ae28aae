// Package networkcheckpolicy creates the checks that NetworkCheckPolicies ask for, and counts their nodes by health.
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
	"k8s.io/apimachinery/pkg/labels"
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
	"evenkeel.dev/evenkeel/operator/internal/nodeuse"
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
	// Use reports which nodes are in use.
	Use   *nodeuse.Tracker
	Clock clock.PassiveClock
	// Delays scales how long changes are collected, and the nodes that jobs leave.
	Delays debounce.Scale

	client  client.Client
	returns returns
}

// SetupWithManager starts the controller with the manager.
func (c *Reconciler) SetupWithManager(mgr manager.Manager) error {
	c.client, c.returns.clock = mgr.GetClient(), c.Clock
	every := handler.EnqueueRequestsFromMapFunc(c.allPolicies)
	return builder.ControllerManagedBy(mgr).Named("networkcheckpolicy").
		For(&evenkeel.NetworkCheckPolicy{}).
		Watches(&corev1.Node{}, every, builder.WithPredicates(c.returns.watch(nodenetworkhealth.NodeChanged))).
		Watches(&evenkeel.NodeNetworkHealth{}, debounce.Handler(c.Delays.Of(debounceDelay), every)).
		Watches(&evenkeel.NetworkCheck{}, handler.EnqueueRequestsFromMapFunc(policyOfCheck)).
		WatchesRawSource(source.Channel(c.Requests.changed, every)).
		WatchesRawSource(c.Use.Source(c.allPolicies)).
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
	under := health.PolicyByNode(nodes, policies)
	for i := range nodes {
		if p := under[nodes[i].Name]; p != nil && p.Name == policy.Name {
			mine = append(mine, &nodes[i])
		}
	}
	slices.SortFunc(mine, func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
	wanted := c.Requests.forPolicy(policy.Name)
	for i := range wanted {
		// The requester may not have seen yet that there is a verdict.
		wanted[i] = slices.DeleteFunc(slices.Clone(wanted[i]), func(name string) bool {
			mark := marks[name]
			return mark.Condition != nil && mark.Condition.Status != corev1.ConditionUnknown
		})
	}
	next, problem, err := c.createDueChecks(ctx, policy, status, mine, healths, wanted, now)
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

// createDueChecks creates the checks that are due, and deletes old ones. It records in the status what it did, and
// returns when the schedule or a node is due next. The problem, if any, is an error in the policy.
func (c *Reconciler) createDueChecks(ctx context.Context, policy *evenkeel.NetworkCheckPolicy, status *evenkeel.NetworkCheckPolicyStatus, nodes []*corev1.Node, healths map[string]*evenkeel.NodeNetworkHealthStatus, wanted [][]string, now time.Time) (next time.Time, problem, err error) {
	var list evenkeel.NetworkCheckList
	if err := c.client.List(ctx, &list, client.InNamespace(c.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return next, nil, fmt.Errorf("list NetworkChecks: %w", err)
	}
	checks, occupied := map[string]*evenkeel.NetworkCheck{}, map[string]bool{}
	var running []*evenkeel.NetworkCheck
	var ended []*evenkeel.NetworkCheck
	var notBefore time.Time
	runningJobs := 0
	for i := range list.Items {
		check := &list.Items[i]
		complete, mine := meta.IsStatusConditionTrue(check.Status.Conditions, evenkeel.ConditionComplete), check.Labels[evenkeel.PolicyKey] == policy.Name
		if !complete {
			occupy(occupied, check, nodes)
		}
		switch {
		case !mine:
		case !complete:
			running = append(running, check)
			if check.Labels[evenkeel.TriggerKey] == string(triggerJob) {
				runningJobs++
			}
		default:
			ended = append(ended, check)
			if retry := gate.RetryTime(check); gate.NotRunnable(check) && retry.After(now) && retry.After(notBefore) {
				notBefore = retry
			}
		}
		if mine {
			checks[check.Name] = check
		}
	}
	if err := c.pruneHistory(ctx, policy, ended); err != nil {
		return next, nil, err
	}
	s, problem := parseSchedule(policy.Spec.Triggers)
	if s != nil {
		last := policy.CreationTimestamp.Time
		if status.LastScheduleTime != nil {
			last = status.LastScheduleTime.Time
		}
		var latest time.Time
		if latest, next = s.due(last, now); !latest.IsZero() {
			at := metav1.NewTime(latest)
			status.LastScheduleTime = &at
		}
	}
	pending, until := pendingResults(ended, healths, nodes, now)
	for _, name := range pending {
		occupied[name] = true
	}
	v := &view{policy: policy, nodes: nodes, states: healths, use: c.Use, returned: c.returns.of, occupied: occupied, now: now, settle: c.Delays.Of(settleDelay)}
	if status.LastScheduleTime != nil && s != nil {
		v.scheduled = status.LastScheduleTime.Time
	}
	if notBefore.IsZero() { // what all checks lack may exist then
		for _, planned := range v.plan(wanted, runningJobs, len(running)-runningJobs) {
			created, err := c.createCheck(ctx, policy, planned, v, checks)
			if err != nil {
				return next, problem, err
			}
			if created != nil {
				running = append(running, created)
			}
		}
	}
	count := int32(len(running))
	status.RunningChecks, status.RunningCheck = &count, ""
	for _, check := range running {
		if status.RunningCheck == "" || check.Name < status.RunningCheck {
			status.RunningCheck = check.Name
		}
	}
	for _, at := range []time.Time{until, notBefore, v.next} {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next, problem, nil
}

// occupy marks the nodes of a check that runs.
func occupy(occupied map[string]bool, check *evenkeel.NetworkCheck, nodes []*corev1.Node) {
	for _, name := range check.Spec.Nodes.Names {
		occupied[name] = true
	}
	if check.Spec.Nodes.Selector == nil {
		return
	}
	selector, err := metav1.LabelSelectorAsSelector(check.Spec.Nodes.Selector)
	if err != nil {
		return // it selects no node
	}
	for _, n := range nodes {
		if selector.Matches(labels.Set(n.Labels)) {
			occupied[n.Name] = true
		}
	}
}

// createCheck creates a planned check, unless it exists. One that could not be run is created again.
func (c *Reconciler) createCheck(ctx context.Context, policy *evenkeel.NetworkCheckPolicy, planned plannedCheck, v *view, checks map[string]*evenkeel.NetworkCheck) (*evenkeel.NetworkCheck, error) {
	name := ""
	if planned.trigger == triggerSchedule {
		name = scheduledName(policy.Name, v.scheduled)
	}
	if name == "" || checks[name] != nil && !gate.NotRunnable(checks[name]) {
		name = unscheduledName(policy.Name, planned.trigger, v.states, planned.chosen)
	}
	if had := checks[name]; had != nil {
		if !gate.NotRunnable(had) {
			return nil, nil
		}
		if err := c.client.Delete(ctx, had.DeepCopy(), client.Preconditions{UID: &had.UID}); client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("delete NetworkCheck %s: %w", name, err)
		}
	}
	var names []string
	for _, n := range slices.Concat(planned.chosen, planned.partners) {
		names = append(names, n.Name)
	}
	names = names[:min(len(names), maxNames)]
	slices.Sort(names)
	check := newCheck(policy, c.Namespace, name, planned.trigger, names)
	if err := c.client.Create(ctx, check); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create NetworkCheck %s: %w", name, err)
	}
	return check, nil
}

// pruneHistory deletes the oldest checks that have ended, of each trigger.
func (c *Reconciler) pruneHistory(ctx context.Context, policy *evenkeel.NetworkCheckPolicy, ended []*evenkeel.NetworkCheck) error {
	keep := defaultHistory
	if policy.Spec.History != nil {
		keep = int(*policy.Spec.History)
	}
	slices.SortFunc(ended, func(a, b *evenkeel.NetworkCheck) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(b.Name, a.Name))
	})
	kept := map[string]int{}
	for _, check := range ended {
		why := check.Labels[evenkeel.TriggerKey]
		if kept[why]++; kept[why] <= keep {
			continue
		}
		if err := c.client.Delete(ctx, check.DeepCopy(), client.Preconditions{UID: &check.UID}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete NetworkCheck %s: %w", check.Name, err)
		}
	}
	return nil
}
