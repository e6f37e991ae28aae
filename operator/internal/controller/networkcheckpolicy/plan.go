package networkcheckpolicy

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/robfig/cron/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
	"evenkeel.dev/evenkeel/operator/internal/preflight/jobs"
)

// A schedule defines when all nodes are checked.
type schedule struct {
	cron.Schedule
	zone *time.Location
}

// parseSchedule parses the policy's schedule. It returns nil if there is none.
func parseSchedule(t evenkeel.TriggerSpec) (*schedule, error) {
	if t.Schedule == "" {
		return nil, nil
	}
	zone, err := time.LoadLocation(cmp.Or(t.TimeZone, "Etc/UTC"))
	if err != nil || t.TimeZone == "Local" {
		return nil, fmt.Errorf("triggers.timeZone %q is not a name of the time zone database, such as Europe/Berlin", t.TimeZone)
	}
	s, err := cron.ParseStandard(t.Schedule)
	if err != nil {
		return nil, fmt.Errorf("triggers.schedule %q: %w", t.Schedule, err)
	}
	return &schedule{s, zone}, nil
}

// due returns the latest time of the schedule between last and now, and the next one after now; zero for none. All
// missed times together cause one check.
func (s *schedule) due(last, now time.Time) (latest, next time.Time) {
	next = s.Next(last.In(s.zone))
	// After years without a check: times before the last day cannot be the latest.
	if day := now.Add(-24 * time.Hour); next.Before(day) {
		if later := s.Next(day.In(s.zone)); !later.IsZero() && !later.After(now) {
			next = later
		}
	}
	for !next.IsZero() && !next.After(now) {
		latest, next = next, s.Next(next)
	}
	return latest, next
}

// scheduledName is the name of the check for a time of the schedule. It is deterministic.
func scheduledName(policy string, at time.Time) string {
	return policy + "-" + strconv.FormatInt(at.Unix()/60, 10)
}

// A trigger is the reason for a check.
type trigger string

const (
	triggerSchedule trigger = "schedule"
	triggerNew      trigger = "new"
	triggerIdle     trigger = "idle"
	triggerJob      trigger = "job"
	// triggerRepair: a failed node may have been repaired.
	triggerRepair trigger = "repair"
	// triggerSuspicion: a job suspected the node's network while it ran, and has ended.
	triggerSuspicion trigger = "suspicion"
)

const (
	// maxJobChecks and maxOtherChecks are how many checks of a policy run at a time, for jobs that wait and for other
	// reasons.
	maxJobChecks   = 16
	maxOtherChecks = 4
	// settleDelay is how long to wait for more nodes that a job leaves, so that they are checked together.
	settleDelay = 5 * time.Second
	// inUseRetry is the pause after a check that another pod disturbed.
	inUseRetry = 30 * time.Second
	// firstBackoff is the pause after an inconclusive check of a node. Each further one doubles it, up to maxBackoff.
	firstBackoff = 5 * time.Minute
	maxBackoff   = 6 * time.Hour
	// minComparable is the minimum number of nodes of a pool for a check to compare its runs with each other.
	minComparable = 4
)

// view is the input of the plan of a policy's checks.
type view struct {
	policy *evenkeel.NetworkCheckPolicy
	// nodes are the policy's own.
	nodes  []*corev1.Node
	states map[string]*evenkeel.NodeNetworkHealthStatus
	use    nodeUse
	// returned is when a node was last given back that was drained or cordoned, or started again; zero: never, as far as is known.
	returned func(node string) time.Time
	// occupied are the nodes of checks that run, or whose results are not recorded yet.
	occupied map[string]bool
	// scheduled is the latest time of the schedule, or zero if there is none.
	scheduled time.Time
	now       time.Time
	// settle is the settleDelay to use.
	settle time.Duration

	next time.Time      // when time alone makes a check due
	size map[string]int // of pools
}

// poolOf returns the pool of the node. Nodes that are alone in their pools are tested together.
func (v *view) poolOf(n *corev1.Node) string {
	label := v.policy.Spec.Check.WithDefaults().PoolLabel
	if v.size == nil {
		v.size = map[string]int{}
		for _, n := range v.nodes {
			v.size[n.Labels[label]]++
		}
	}
	if pool := n.Labels[label]; v.size[pool] > 1 {
		return "=" + pool
	}
	return ""
}

// nodeUse reports who uses a node.
type nodeUse interface {
	User(node string) string
	Left(node string) time.Time
}

// testable reports whether a check can test the node now: pods can run on it, and nobody uses it.
func (v *view) testable(n *corev1.Node) bool {
	if v.occupied[n.Name] {
		return false
	}
	if v.policy.Spec.Check.WithDefaults().BusyNodes == evenkeel.BusyNodesSkip && v.use.User(n.Name) != "" {
		return false
	}
	why, _ := preflight.Unschedulable(n, jobs.Tolerations(v.policy.Spec.Check.Runner.Tolerations))
	return why == ""
}

// wait notes that something is due at the time. It reports whether it is due now.
func (v *view) wait(at time.Time) bool {
	if !at.After(v.now) {
		return true
	}
	if v.next.IsZero() || at.Before(v.next) {
		v.next = at
	}
	return false
}

// due returns the nodes that are to be checked now, by the trigger that they are due by.
func (v *view) due() map[trigger][]*corev1.Node {
	due, inPool := map[trigger][]*corev1.Node{}, map[string]int{}
	var testable []*corev1.Node
	for _, n := range v.nodes {
		if v.testable(n) {
			testable = append(testable, n)
			inPool[v.poolOf(n)]++
		}
	}
	for _, n := range testable {
		s := v.states[n.Name]
		if s == nil {
			s = &evenkeel.NodeNetworkHealthStatus{}
		}
		reason, since := v.reason(n, s)
		if reason == triggerSuspicion && len(s.History) > 0 && s.History[0].Time.Time.Before(since) {
			s = &evenkeel.NodeNetworkHealthStatus{} // results from before say nothing about it
		}
		if reason != "" && v.wait(since) && v.wait(nextAttempt(s, inPool[v.poolOf(n)] >= minComparable)) {
			due[reason] = append(due[reason], n)
		}
	}
	return due
}

// reason returns why a testable node is due, and since when. It is empty if the node is not due.
func (v *view) reason(n *corev1.Node, s *evenkeel.NodeNetworkHealthStatus) (why trigger, since time.Time) {
	triggers := v.policy.Spec.Triggers
	older := func(than time.Time) bool { return s.ObservedTime == nil || s.ObservedTime.Time.Before(than) }
	suspected := health.SuspicionDue(s)
	failed, returned := s.ObservedTime != nil && s.Health == evenkeel.HealthUnhealthy && triggers.Repairs != evenkeel.SwitchDisabled, readySince(n)
	if given := v.returned(n.Name); given.After(returned) {
		returned = given
	}
	switch left := v.use.Left(n.Name); {
	// Times are stored in whole seconds. A result of the same second came before the job's end: a later one would have
	// decided.
	case !suspected.IsZero() && triggers.Suspicions != evenkeel.SwitchDisabled && older(suspected.Add(time.Nanosecond)):
		return triggerSuspicion, suspected.Add(v.settle)
	case failed && older(returned): // such as after a reboot, or when it is uncordoned
		return triggerRepair, returned.Add(v.settle)
	case s.ObservedTime == nil && triggers.NewNodes != evenkeel.SwitchDisabled:
		return triggerNew, time.Time{}
	// A node that came later is decided by its own triggers.
	case !v.scheduled.IsZero() && older(v.scheduled) && !n.CreationTimestamp.After(v.scheduled):
		return triggerSchedule, time.Time{}
	case !left.IsZero() && triggers.JobEnd != evenkeel.SwitchDisabled && older(left) && older(v.now.Add(-health.Freshness(v.policy)/2)):
		return triggerIdle, left.Add(v.settle)
	case failed: // a cable leaves no trace on the node
		return triggerRepair, s.ObservedTime.Add(health.Freshness(v.policy))
	}
	return "", time.Time{}
}

// readySince returns when the node became ready. It is zero if the node is not ready or does not report since when.
func readySince(n *corev1.Node) time.Time {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return c.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

// nextAttempt is when a node may be checked again after inconclusive results, the newest of which come first.
// Comparable: there are enough nodes now to compare it with.
func nextAttempt(s *evenkeel.NodeNetworkHealthStatus, comparable bool) time.Time {
	if len(s.History) == 0 || s.History[0].Verdict != evenkeel.VerdictInconclusive {
		return time.Time{}
	}
	if s.History[0].Reason == preflight.ReasonInUse {
		return s.History[0].Time.Add(inUseRetry)
	}
	pause := firstBackoff
	if comparable && s.History[0].Reason == preflight.ReasonUncompared {
		return s.History[0].Time.Add(pause)
	}
	for _, r := range s.History[1:] {
		if r.Verdict != evenkeel.VerdictInconclusive || pause >= maxBackoff {
			break
		}
		if r.Reason != preflight.ReasonInUse {
			pause *= 2
		}
	}
	return s.History[0].Time.Add(min(pause, maxBackoff))
}

// partners returns nodes to test the chosen ones of one pool with: the healthy ones first, and of these the ones whose
// latest check is the oldest, so that all have their turn. Many nodes need few, since they prove each other.
func (v *view) partners(chosen []*corev1.Node) []*corev1.Node {
	count := max(minComparable-len(chosen), len(chosen)/8)
	taken := map[*corev1.Node]bool{}
	for _, n := range chosen {
		taken[n] = true
	}
	type candidate struct {
		node  *corev1.Node
		order int
		last  time.Time
		place uint64
	}
	var all []candidate
	for _, n := range v.nodes {
		if v.poolOf(n) != v.poolOf(chosen[0]) || taken[n] || !v.testable(n) {
			continue
		}
		c := candidate{node: n, order: 1, place: placeOf(n.Name, v.now)}
		if s := v.states[n.Name]; s != nil {
			c.order = healthOrder(s)
			if len(s.History) > 0 {
				c.last = s.History[0].Time.Time
			}
		}
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.order, b.order), a.last.Compare(b.last), cmp.Compare(a.place, b.place))
	})
	var partners []*corev1.Node
	for _, c := range all[:min(len(all), count)] {
		partners = append(partners, c.node)
	}
	return partners
}

// placeOf orders nodes anew at any time.
func placeOf(name string, now time.Time) uint64 {
	h := fnv.New64a()
	_, _ = fmt.Fprint(h, now.UnixNano(), name) // a hash never fails to write
	return h.Sum64()
}

func healthOrder(s *evenkeel.NodeNetworkHealthStatus) int {
	return max(0, slices.Index([]evenkeel.Health{evenkeel.HealthHealthy, evenkeel.HealthUnknown, evenkeel.HealthUnhealthy}, s.Health))
}

// anyOccupied reports whether checks test nodes of the pool: when they end, there are more to compare with.
func (v *view) anyOccupied(pool string) bool {
	return slices.ContainsFunc(v.nodes, func(n *corev1.Node) bool { return v.occupied[n.Name] && v.poolOf(n) == pool })
}

// A plannedCheck is a check to create.
type plannedCheck struct {
	trigger trigger
	// chosen are the nodes to check, and partners the other nodes that the check needs.
	chosen, partners []*corev1.Node
}

// plan returns the checks to make now: of the nodes that jobs wait for, one for each job, and one of all others that
// are due. Running are the numbers of checks that run already.
func (v *view) plan(wanted [][]string, runningJobs, runningOthers int) []plannedCheck {
	byName := make(map[string]*corev1.Node, len(v.nodes))
	for _, n := range v.nodes {
		byName[n.Name] = n
	}
	var planned []plannedCheck
	// add plans a check. It leaves out the nodes of pools of which too few can be tested now.
	add := func(why trigger, wanted []*corev1.Node) bool {
		p := plannedCheck{trigger: why}
		byPool := map[string][]*corev1.Node{}
		for _, n := range wanted {
			byPool[v.poolOf(n)] = append(byPool[v.poolOf(n)], n)
		}
		for _, pool := range slices.Sorted(maps.Keys(byPool)) {
			chosen := byPool[pool]
			partners := v.partners(chosen)
			if together := len(chosen) + len(partners); together < 2 || together < minComparable && v.anyOccupied(pool) {
				continue
			}
			p.chosen, p.partners = append(p.chosen, chosen...), append(p.partners, partners...)
		}
		for _, n := range slices.Concat(p.chosen, p.partners) {
			v.occupied[n.Name] = true
		}
		if len(p.chosen) > 0 {
			planned = append(planned, p)
		}
		return len(p.chosen) > 0
	}
	for _, names := range wanted {
		var chosen []*corev1.Node
		for _, name := range names {
			if n := byName[name]; n != nil && v.testable(n) {
				chosen = append(chosen, n)
			}
		}
		if runningJobs < maxJobChecks && add(triggerJob, chosen) {
			runningJobs++
		}
	}
	due := v.due()
	var chosen []*corev1.Node
	var why trigger
	for _, t := range []trigger{triggerIdle, triggerRepair, triggerNew, triggerSchedule, triggerSuspicion} {
		if len(due[t]) > 0 {
			why, chosen = t, append(chosen, due[t]...)
		}
	}
	if runningOthers < maxOtherChecks {
		add(why, chosen)
	}
	return planned
}

// resultsTimeout is the maximum time to wait until the results of a check are recorded on its nodes.
const resultsTimeout = 5 * time.Minute

// pendingResults returns the nodes of ended checks whose results are not recorded yet, and when to stop waiting for
// them, or zero if all are recorded. Until then a node that was just checked may appear due. A node that is younger
// than the check gets no result from it, because the check ran on an earlier node of that name.
func pendingResults(ended []*evenkeel.NetworkCheck, states map[string]*evenkeel.NodeNetworkHealthStatus, nodes []*corev1.Node, now time.Time) (pending []string, until time.Time) {
	byName := make(map[string]*corev1.Node, len(nodes))
	for _, n := range nodes {
		byName[n.Name] = n
	}
	for _, check := range ended {
		if check.Status.CompletionTime == nil || check.Status.ReportName == "" {
			continue
		}
		end := check.Status.CompletionTime.Add(resultsTimeout)
		if !now.Before(end) {
			continue
		}
		for _, name := range check.Spec.Nodes.Names {
			node := byName[name]
			if node == nil || check.Status.StartTime != nil && check.Status.StartTime.Before(&node.CreationTimestamp) {
				continue
			}
			if s := states[name]; s == nil || !health.HasResult(s, string(check.UID), check.Status.CompletionTime.Time) {
				pending = append(pending, name)
				if until.IsZero() || end.Before(until) {
					until = end
				}
			}
		}
	}
	return pending, until
}

// unscheduledName is derived from the nodes and their last results, so that nothing is checked twice for the same
// reason.
func unscheduledName(policy string, why trigger, states map[string]*evenkeel.NodeNetworkHealthStatus, chosen []*corev1.Node) string {
	hash := sha256.New()
	for _, n := range chosen {
		fmt.Fprintln(hash, n.UID)
		if s := states[n.Name]; s != nil && len(s.History) > 0 {
			fmt.Fprintln(hash, s.History[0].UID)
		}
	}
	return fmt.Sprintf("%s-%.4s-%x", policy, why, hash.Sum(nil)[:5])
}

// newCheck returns a check of the policy.
func newCheck(p *evenkeel.NetworkCheckPolicy, namespace, name string, why trigger, nodes []string) *evenkeel.NetworkCheck {
	no := false
	return &evenkeel.NetworkCheck{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, Labels: map[string]string{evenkeel.PolicyKey: p.Name, evenkeel.TriggerKey: string(why)},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: evenkeel.GroupVersion.String(), Kind: "NetworkCheckPolicy", Name: p.Name, UID: p.UID, BlockOwnerDeletion: &no,
			}},
		},
		Spec: evenkeel.NetworkCheckSpec{Nodes: evenkeel.NodeSet{Names: nodes}, CheckOptions: *p.Spec.Check.DeepCopy()},
	}
}
