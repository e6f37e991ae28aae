// Package health decides the health of nodes and the condition, label and taint that they should carry. It is pure:
// everything follows from the results of checks, the nodes, the policies and the time.
package health

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/nodeos"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// Defaults of a policy.
const (
	defaultFreshness   = 24 * time.Hour
	defaultGateTimeout = 30 * time.Minute
	defaultMaxPercent  = 20
	maxMessage         = 400
)

// Reasons of the node condition that are not reasons of results.
const (
	ReasonStale      = "Stale"
	ReasonNotChecked = "NotChecked"
	ReasonSuspected  = "Suspected"
)

// HasResult reports whether the status contains the check's result, or contained it before newer ones replaced it.
func HasResult(status *evenkeel.NodeNetworkHealthStatus, uid string, at time.Time) bool {
	for _, r := range status.History {
		if r.UID == uid {
			return true
		}
	}
	return len(status.History) == evenkeel.HistoryLength && !at.After(status.History[len(status.History)-1].Time.Time)
}

// AddResult returns the status with one more result. The health follows the newest conclusive result, and so do the
// message and what was measured.
func AddResult(status evenkeel.NodeNetworkHealthStatus, result evenkeel.HealthResult, measured evenkeel.MeasuredNetwork, message string) evenkeel.NodeNetworkHealthStatus {
	out := *status.DeepCopy()
	// At the front, so that of two results in the same second the later one counts.
	out.History = slices.Insert(out.History, 0, result)
	slices.SortStableFunc(out.History, func(a, b evenkeel.HealthResult) int { return b.Time.Compare(a.Time.Time) })
	out.History = out.History[:min(len(out.History), evenkeel.HistoryLength)]
	if result.Verdict != evenkeel.VerdictInconclusive && (out.ObservedTime == nil || !result.Time.Before(out.ObservedTime)) {
		at := result.Time
		out.Health, out.Reason, out.Message, out.ObservedTime = evenkeel.HealthHealthy, result.Reason, text.Clip(message, maxMessage), &at
		if result.Verdict == evenkeel.VerdictFail {
			out.Health = evenkeel.HealthUnhealthy
		}
		out.BusBandwidth, out.Measured = result.BusBandwidth, measured
	}
	if result.Verdict != evenkeel.VerdictInconclusive {
		out.Suspicions = dropDecided(out.Suspicions, result.Time)
	}
	if out.Health == "" {
		out.Health, out.Reason, out.Message = evenkeel.HealthUnknown, result.Reason, text.Clip(message, maxMessage)
	}
	out.Baseline = baseline(out.History)
	return out
}

// baseline is computed from the results that passed.
func baseline(history []evenkeel.HealthResult) evenkeel.Baseline {
	var values []float64
	for _, r := range history {
		if r.Verdict == evenkeel.VerdictPass && r.BusBandwidth != nil {
			values = append(values, r.BusBandwidth.AsApproximateFloat64())
		}
	}
	if len(values) == 0 {
		return evenkeel.Baseline{}
	}
	median, mad := pairing.MedianAndMAD(values)
	samples := int32(len(values))
	return evenkeel.Baseline{
		Samples:            &samples,
		MedianBusBandwidth: resource.NewQuantity(int64(median), resource.DecimalSI),
		MADBusBandwidth:    resource.NewQuantity(int64(mad), resource.DecimalSI),
	}
}

// Markers are the condition, label and taint that a node should carry.
type Markers struct {
	// Condition is nil if no policy selects the node.
	Condition *corev1.NodeCondition
	// Label is the value of the health label, empty for none.
	Label string
	// Taint is set if the node should have the taint.
	Taint bool
	// Unproven is set if the node keeps the startup taint that it may have registered with.
	Unproven bool
}

// PolicyCounts counts the nodes of a policy by their health.
type PolicyCounts struct {
	Nodes, Healthy, Unhealthy, Unknown int32
	// UnhealthyNames are the names of the unhealthy nodes. Unmarked counts the ones without label and taint,
	// because of maxUnhealthyPercent.
	UnhealthyNames []string
	Unmarked       int
	// Overlapping is the number of nodes that the policy selects and that belong to others, Others those policies' names,
	// sorted.
	Overlapping int32
	Others      []string
	// NextStale is when the next result becomes stale or the next startup taint has lasted its time; zero if none does.
	NextStale time.Time
}

// PolicyByNode returns the policy of each node: among the policies that select it, the one with the highest priority,
// then the first by name. Policies with an invalid selector select no node, and none selects a node with Windows.
func PolicyByNode(nodes []corev1.Node, policies []evenkeel.NetworkCheckPolicy) map[string]*evenkeel.NetworkCheckPolicy {
	under := map[string]*evenkeel.NetworkCheckPolicy{}
	assignNodes(nodes, policies, func(node string, p *evenkeel.NetworkCheckPolicy) {
		if under[node] == nil {
			under[node] = p
		}
	})
	return under
}

// ComparePolicies orders policies as they count: the one with the highest priority first, and of equal ones the first
// by name.
func ComparePolicies(a, b *evenkeel.NetworkCheckPolicy) int {
	priority := func(p *evenkeel.NetworkCheckPolicy) int32 {
		if p.Spec.Priority == nil {
			return 0
		}
		return *p.Spec.Priority
	}
	return cmp.Or(cmp.Compare(priority(b), priority(a)), cmp.Compare(a.Name, b.Name))
}

// assignNodes calls visit for each policy and each node that it selects, the policies in the order in which they count.
func assignNodes(nodes []corev1.Node, policies []evenkeel.NetworkCheckPolicy, visit func(node string, p *evenkeel.NetworkCheckPolicy)) {
	sorted := make([]*evenkeel.NetworkCheckPolicy, len(policies))
	for i := range policies {
		sorted[i] = &policies[i]
	}
	slices.SortFunc(sorted, ComparePolicies)
	for _, p := range sorted {
		if p.DeletionTimestamp != nil {
			continue
		}
		selector := labels.Everything()
		if p.Spec.NodeSelector != nil {
			var err error
			if selector, err = metav1.LabelSelectorAsSelector(p.Spec.NodeSelector); err != nil {
				continue
			}
		}
		for i := range nodes {
			if selector.Matches(labels.Set(nodes[i].Labels)) && !nodeos.IsWindows(&nodes[i]) {
				visit(nodes[i].Name, p)
			}
		}
	}
}

// Evaluate decides the markers of each node, and counts nodes by policy. Unhealthy nodes that have the label keep it.
// Others get it in the order of their names, as long as the policy's maxUnhealthyPercent allows.
func Evaluate(nodes []corev1.Node, healths map[string]*evenkeel.NodeNetworkHealthStatus, policies []evenkeel.NetworkCheckPolicy, now time.Time) (map[string]Markers, map[string]*PolicyCounts) {
	under, marks, counts := PolicyByNode(nodes, policies), map[string]Markers{}, map[string]*PolicyCounts{}
	for i := range policies {
		counts[policies[i].Name] = &PolicyCounts{}
	}
	assignNodes(nodes, policies, func(node string, p *evenkeel.NetworkCheckPolicy) {
		if other := under[node]; other.Name != p.Name {
			c := counts[p.Name]
			c.Overlapping++
			if at, found := slices.BinarySearch(c.Others, other.Name); !found {
				c.Others = slices.Insert(c.Others, at, other.Name)
			}
		}
	})
	unhealthy, suspected := map[string][]*corev1.Node{}, map[string][]*corev1.Node{}
	for i := range nodes {
		node := &nodes[i]
		p := under[node.Name]
		if p == nil {
			marks[node.Name] = Markers{}
			continue
		}
		c := counts[p.Name]
		c.Nodes++
		mark, stale := markersOf(healths[node.Name], p, now)
		if hasStartupTaint(node) && mark.Label == "" && mark.Condition.Reason == ReasonNotChecked {
			mark.Unproven, stale = unproven(node, p, now)
		}
		if !stale.IsZero() && (c.NextStale.IsZero() || stale.Before(c.NextStale)) {
			c.NextStale = stale
		}
		switch mark.Label {
		case evenkeel.HealthyValue:
			c.Healthy++
		case evenkeel.UnhealthyValue:
			c.Unhealthy++
			c.UnhealthyNames = append(c.UnhealthyNames, node.Name)
			unhealthy[p.Name] = append(unhealthy[p.Name], node)
			mark.Label = ""
		default:
			c.Unknown++
			if mark.Condition.Reason == ReasonSuspected {
				suspected[p.Name] = append(suspected[p.Name], node)
			}
		}
		marks[node.Name] = mark
	}
	for i := range policies {
		p := &policies[i]
		c, bad := counts[p.Name], unhealthy[p.Name]
		slices.Sort(c.UnhealthyNames)
		slices.SortFunc(bad, func(a, b *corev1.Node) int {
			return cmp.Or(cmp.Compare(labeledFirst(a), labeledFirst(b)), cmp.Compare(a.Name, b.Name))
		})
		percent := int32(defaultMaxPercent)
		if m := p.Spec.OnFail.MaxUnhealthyPercent; m != nil {
			percent = *m
		}
		allowed := max(1, int(c.Nodes*percent/100))
		for _, node := range beyond(suspected[p.Name], healths, allowed) {
			why := fmt.Sprintf("a job suspects it, and it is not avoided, as more than %d percent of the nodes would be; ", percent)
			marks[node.Name] = proven(healths[node.Name], why)
			c.Unknown--
			c.Healthy++
		}
		for place, node := range bad {
			mark := marks[node.Name]
			if place >= allowed && labeledFirst(node) > 0 {
				c.Unmarked++
				mark.Condition.Message = text.Clip("not labeled, as more than "+fmt.Sprint(percent)+" percent of the nodes would be; "+mark.Condition.Message, maxMessage)
			} else {
				mark.Label, mark.Taint = evenkeel.UnhealthyValue, p.Spec.OnFail.Taint == evenkeel.SwitchEnabled
				mark.Unproven = hasStartupTaint(node)
			}
			marks[node.Name] = mark
		}
	}
	return marks, counts
}

// beyond returns the suspected nodes beyond the allowed number. The first suspected ones stay within it, so that no
// later job decides about them.
func beyond(suspected []*corev1.Node, healths map[string]*evenkeel.NodeNetworkHealthStatus, allowed int) []*corev1.Node {
	slices.SortFunc(suspected, func(a, b *corev1.Node) int {
		return cmp.Or(standing(healths[a.Name]).Since.Compare(standing(healths[b.Name]).Since.Time), cmp.Compare(a.Name, b.Name))
	})
	return suspected[min(allowed, len(suspected)):]
}

// proven returns the markers of a node that passed.
func proven(status *evenkeel.NodeNetworkHealthStatus, note string) Markers {
	return Markers{Label: evenkeel.HealthyValue, Condition: &corev1.NodeCondition{
		Type: evenkeel.ConditionNodeHealthy, Status: corev1.ConditionTrue, Reason: cmp.Or(status.Reason, string(status.Health)), Message: text.Clip(note+status.Message, maxMessage),
	}}
}

func hasStartupTaint(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == evenkeel.HealthKey && t.Value == evenkeel.UnprovenValue })
}

// unproven reports whether a node without a verdict keeps its startup taint, and until when: as long as a job would
// wait for it, and only where the policy checks new nodes.
func unproven(node *corev1.Node, p *evenkeel.NetworkCheckPolicy, now time.Time) (keeps bool, until time.Time) {
	switch {
	case p.Spec.Triggers.NewNodes == evenkeel.SwitchDisabled:
		return false, until
	case p.Spec.Gate.OnTimeout == evenkeel.GateWait:
		return true, until
	}
	until = node.CreationTimestamp.Add(GateTimeout(p.Spec.Gate))
	if !now.Before(until) {
		return false, time.Time{}
	}
	return true, until
}

// labeledFirst sorts nodes that have the label first.
func labeledFirst(node *corev1.Node) int {
	if node.Labels[evenkeel.HealthKey] == evenkeel.UnhealthyValue {
		return 0
	}
	return 1
}

// Freshness is how long a node that passed counts as healthy.
func Freshness(p *evenkeel.NetworkCheckPolicy) time.Duration {
	if s := p.Spec.FreshnessSeconds; s != nil {
		return time.Duration(*s) * time.Second
	}
	return defaultFreshness
}

// GateTimeout is how long a job waits for its nodes to be proven, and a node with a startup taint for its first
// verdict.
func GateTimeout(g evenkeel.GateSpec) time.Duration {
	if s := g.TimeoutSeconds; s != nil {
		return time.Duration(*s) * time.Second
	}
	return defaultGateTimeout
}

// markersOf returns the markers of a node without regard to other nodes, and when its result becomes stale.
func markersOf(status *evenkeel.NodeNetworkHealthStatus, p *evenkeel.NetworkCheckPolicy, now time.Time) (mark Markers, stale time.Time) {
	condition := &corev1.NodeCondition{Type: evenkeel.ConditionNodeHealthy, Status: corev1.ConditionUnknown, Reason: ReasonNotChecked, Message: "no conclusive check of the node's network yet"}
	mark.Condition = condition
	if status == nil || status.ObservedTime == nil {
		return mark, stale
	}
	condition.Reason, condition.Message = cmp.Or(status.Reason, string(status.Health)), status.Message
	switch status.Health {
	case evenkeel.HealthUnhealthy:
		// It stays unhealthy until a check clears it, however long that takes.
		condition.Status, mark.Label = corev1.ConditionFalse, evenkeel.UnhealthyValue
	case evenkeel.HealthHealthy:
		stale = status.ObservedTime.Add(Freshness(p))
		if !now.Before(stale) {
			condition.Reason, condition.Message = ReasonStale, fmt.Sprintf("the node passed, but that was at %s", status.ObservedTime.UTC().Format(time.RFC3339))
			return mark, time.Time{}
		}
		if s := standing(status); s != nil && p.Spec.OnSuspicion.Avoid == evenkeel.SwitchEnabled {
			condition.Reason = ReasonSuspected
			condition.Message = text.Clip(fmt.Sprintf("the node passed its last check, but %s %s/%s has reported it as slow since %s: %s", s.Job.Kind, s.Job.Namespace, s.Job.Name, s.Since.UTC().Format(time.RFC3339), s.Message), maxMessage)
			return mark, stale
		}
		return proven(status, ""), stale
	}
	return mark, stale
}
