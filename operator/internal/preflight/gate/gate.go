// Package gate decides whether a job may start: whether the network of the nodes that it may run on is proven. It is pure.
// A decision follows from the nodes, their health, the policies, the checks and the time.
package gate

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

const (
	defaultProfile = "default" // that of a policy's checks, if they name none
	// maxAttempts is the number of inconclusive checks of a node after which a job gives up on it. A job that waits
	// regardless has the node checked again after retryInterval.
	maxAttempts   = 2
	retryInterval = 5 * time.Minute
	// maxReassignments is the number of times that a job returns its nodes since one of them failed. After that it is treated
	// as if its time were up: whoever assigns nodes to it does not avoid the failed ones.
	maxReassignments = 5
	// spareShare is the share of the nodes that a job lacks that are checked to spare, one at least, as some may fail.
	spareShare = 8
)

// An Action says what happens to a job now.
type Action string

const (
	// Open lets the job start: its nodes are proven, or need not be.
	Open Action = "Open"
	// Check keeps it waiting while the nodes of Decision.Check are checked.
	Check Action = "Check"
	// Wait keeps it waiting. Nothing is to be checked at present.
	Wait Action = "Wait"
	// OpenUnproven lets it start although its nodes are not proven.
	OpenUnproven Action = "OpenUnproven"
	// Reassign returns the nodes that were assigned to it, since some of them failed.
	Reassign Action = "Reassign"
)

// Reasons, for Events.
const (
	ReasonProven         = "EvenkeelNetworkProven"
	ReasonNothingToCheck = "EvenkeelNothingToCheck"
	ReasonChecking       = "EvenkeelWaitingForCheck"
	ReasonWaiting        = "EvenkeelWaiting"
	ReasonNotProven      = "EvenkeelNetworkNotProven"
	ReasonUnhealthyHost  = "EvenkeelUnhealthyHost"
	ReasonDisabled       = "EvenkeelGateDisabled"
)

// A Job is a job at its gate.
type Job struct {
	// Profile is the NetworkProfile that it asked for.
	Profile string
	// Policy, if not empty, is the only policy that counts, whatever its trigger. Otherwise all policies count that have
	// triggers.jobStart and test the profile.
	Policy string
	// OptOut is set if its user turned the gate off after it was closed.
	OptOut bool
	// Since is when it began to wait.
	Since time.Time
	// Pods are the specs of its pods that may run on any node that they fit on, one for each pod or template.
	Pods []*corev1.PodSpec
	// counts has the number of pods of each template that has several.
	counts map[*corev1.PodSpec]int
	// Hosts are the host names of the nodes that were assigned to it.
	Hosts []string
	// Reassigned is the number of times that it has returned its nodes.
	Reassigned int
}

// maxPods bounds the number of a template's pods that are counted.
const maxPods = 1 << 16

// AddTemplate adds the spec of so many pods, one at least. However many there are, it is kept once: whoever makes a job may write any
// number.
func (j *Job) AddTemplate(spec *corev1.PodSpec, pods int) {
	j.Pods = append(j.Pods, spec)
	if pods <= 1 {
		return
	}
	if j.counts == nil {
		j.counts = map[*corev1.PodSpec]int{}
	}
	j.counts[spec] = min(pods, maxPods)
}

// Count is the number of pods of one of the job's specs.
func (j *Job) Count(spec *corev1.PodSpec) int { return max(1, j.counts[spec]) }

// A Decision says what happens to a job, and why.
type Decision struct {
	Action Action
	// Reason is a CamelCase word for Events. Message is one line for people.
	Reason, Message string
	// Check lists the nodes to be checked, by policy.
	Check map[string][]string
	// Running is the check that runs for it; empty: none.
	Running string
	// Next is when time alone may change the decision; zero: never.
	Next time.Time
	// Until is when the job starts regardless; zero: not by time alone.
	Until time.Time
	// Overdue is set after the timeout of a policy that keeps jobs waiting.
	Overdue bool
	// Attempt is the number of times, this one included, that the job returns its nodes.
	Attempt int
}

// Waits reports whether the decision keeps the job waiting.
func (d Decision) Waits() bool { return d.Action != Open && d.Action != OpenUnproven }

// AppliesTo reports whether the policy gates jobs of the profile.
func AppliesTo(p *evenkeel.NetworkCheckPolicy, profile string) bool {
	return p.DeletionTimestamp == nil && p.Spec.Triggers.JobStart == evenkeel.SwitchEnabled &&
		cmp.Or(p.Spec.Check.ProfileName, defaultProfile) == profile
}

// Required reports whether jobs of the profile need a gate, by the status of the policies. They need none if each policy
// that applies has a fresh verdict on all of its nodes.
func Required(policies []evenkeel.NetworkCheckPolicy, profile string) bool {
	return slices.ContainsFunc(policies, func(p evenkeel.NetworkCheckPolicy) bool {
		s := &p.Status
		proven := s.ObservedGeneration == p.Generation && s.Unknown != nil && *s.Unknown == 0 &&
			meta.IsStatusConditionTrue(s.Conditions, evenkeel.ConditionReady)
		return AppliesTo(&p, profile) && !proven
	})
}

// Mandatory returns the first policy, by priority and then by name, that gates jobs of the profile and lets none of them do without; nil: there is none.
func Mandatory(policies []evenkeel.NetworkCheckPolicy, profile string) *evenkeel.NetworkCheckPolicy {
	var first *evenkeel.NetworkCheckPolicy
	for i := range policies {
		p := &policies[i]
		if AppliesTo(p, profile) && p.Spec.Gate.OptOut == evenkeel.GateOptOutForbidden && (first == nil || health.ComparePolicies(p, first) < 0) {
			first = p
		}
	}
	return first
}

// A Snapshot is the state of the cluster that decisions are made from.
type Snapshot struct {
	nodes    []*corev1.Node // by name
	states   map[string]*evenkeel.NodeNetworkHealthStatus
	markers  map[string]health.Markers
	policies []evenkeel.NetworkCheckPolicy
	policyOf map[string]*evenkeel.NetworkCheckPolicy
	// ready is the number of ready nodes of each policy that nobody uses.
	ready map[string]int
	// running are the checks that have not ended. Order is negative for nodes that those for jobs test, and positive for others'.
	running []*evenkeel.NetworkCheck
	order   map[string]int
	// refused is the first check of a policy's node that could not be run.
	refused map[policyNode]*evenkeel.NetworkCheck
	use     NodeUse
	now     time.Time
	// hasAccelerators says whether a node has accelerators that a ResourceClaim may be for.
	hasAccelerators func(*corev1.Node) bool

	reaches map[string]*reach
	// claims is the room on nodes that jobs which were decided about before will take, and claimed its sum for each node.
	claims  []claim
	claimed map[string]int
}

type policyNode struct{ policy, node string }

// NodeUse says who uses the accelerators of a node.
type NodeUse interface {
	// User returns the name of a pod that does; empty: none.
	User(node string) string
	// Used returns how many of each accelerator are requested.
	Used(node string) map[corev1.ResourceName]int64
}

// NewSnapshot makes a Snapshot. The checks may include some that belong to no policy.
func NewSnapshot(nodes []corev1.Node, states map[string]*evenkeel.NodeNetworkHealthStatus, policies []evenkeel.NetworkCheckPolicy, checks []evenkeel.NetworkCheck, use NodeUse, now time.Time) *Snapshot {
	marks, _ := health.Evaluate(nodes, states, policies, now)
	w := &Snapshot{
		states: states, markers: marks, policies: policies, policyOf: health.PolicyByNode(nodes, policies), ready: map[string]int{},
		order: map[string]int{}, refused: map[policyNode]*evenkeel.NetworkCheck{}, use: use, now: now,
		reaches: map[string]*reach{}, claimed: map[string]int{}, hasAccelerators: accelerator.Has,
	}
	for i := range nodes {
		w.nodes = append(w.nodes, &nodes[i])
		if p := w.policyOf[nodes[i].Name]; p != nil && IsReady(&nodes[i]) && w.canTest(&nodes[i], p) {
			w.ready[p.Name]++
		}
	}
	slices.SortFunc(w.nodes, func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
	if !slices.ContainsFunc(w.nodes, accelerator.Has) { // a DRA driver need not label its nodes
		w.hasAccelerators = func(*corev1.Node) bool { return true }
	}
	for i := range checks {
		w.addCheck(&checks[i])
	}
	return w
}

func (w *Snapshot) addCheck(c *evenkeel.NetworkCheck) {
	if !isComplete(c) {
		place := 1
		if c.Labels[evenkeel.TriggerKey] == "job" {
			place = -1
		}
		for _, name := range c.Spec.Nodes.Names {
			w.order[name] = place
		}
		w.running = append(w.running, c)
		return
	}
	if !NotRunnable(c) {
		return
	}
	for _, name := range c.Spec.Nodes.Names {
		if of := (policyNode{c.Labels[evenkeel.PolicyKey], name}); w.refused[of] == nil {
			w.refused[of] = c
		}
	}
}

// canTest reports whether a check could test the node now.
func (w *Snapshot) canTest(node *corev1.Node, p *evenkeel.NetworkCheckPolicy) bool {
	return p.Spec.Check.BusyNodes == evenkeel.BusyNodesTest || w.use.User(node.Name) == ""
}

// needed returns those of the unproven nodes that have to be proven before the job starts: the assigned ones, and as many others
// as make room for its pods, and some to spare. If none of those others can be proven now, the job is stuck, and it returns all of
// them, as why not is to be said of all.
func (w *Snapshot) needed(job Job, g gang, r *reach) (chosen []string, stuck bool) {
	chosen = slices.Clone(r.assigned)
	missing := g.count - r.proven
	if missing <= 0 {
		return chosen, false
	}
	missing += max(1, missing/spareShare)
	var others []string
	for _, name := range r.unproven[r.firstUnproven:] {
		room := r.spots[name].room
		if room == 0 {
			continue
		}
		if missing <= 0 {
			return chosen, false
		}
		if problem, again := w.provingProblem(name, w.policyOf[name], job.Since); problem != "" && (again.IsZero() || w.now.Before(again)) {
			others = append(others, name)
			continue
		}
		chosen = append(chosen, name)
		missing -= room
	}
	if len(chosen) == len(r.assigned) {
		return append(chosen, others...), len(others) > 0
	}
	return chosen, false
}

// claim notes the room that the job will take, so that the next job does not count on it.
func (w *Snapshot) claim(g gang, r *reach, d Decision) {
	count := g.count
	take := func(names []string) {
		for _, name := range names {
			if count <= 0 {
				return
			}
			if s := r.spots[name]; s.room > 0 {
				taken := min(count, s.room)
				w.claims = append(w.claims, claim{name, taken})
				w.claimed[name] += taken
				count -= taken
			}
		}
	}
	take(r.healthy[r.firstHealthy:])
	for _, names := range d.Check {
		take(names)
	}
}

// Decide says what happens to the job now. Jobs that are decided about later do not count on the room that it will take. One that is
// stuck may never take any: it does not keep others from the proven nodes.
func (w *Snapshot) Decide(job Job) Decision {
	g := newGang(job)
	r := w.reachOf(job, g)
	d := w.decide(job, g, r)
	if stuck := d.Action == Wait && len(r.unlabeled) == 0; !stuck {
		w.claim(g, r, d)
	}
	return d
}

func (w *Snapshot) decide(job Job, g gang, r *reach) Decision {
	switch {
	case job.OptOut && Mandatory(w.policies, job.Profile) == nil:
		return Decision{Action: Open, Reason: ReasonDisabled, Message: "the annotation evenkeel.dev/gate of the job is Disabled"}
	case len(r.gone) > 0:
		verb := " is gone"
		if len(r.gone) > 1 {
			verb = " are gone"
		}
		return reassign(job, r, joinNames(r.gone)+verb, "")
	case r.nowhere:
		return Decision{Action: Open, Reason: ReasonNothingToCheck, Message: "no node that it may run on is there: it waits for a node, and not for its gate"}
	case r.policy == nil:
		return Decision{Action: Open, Reason: ReasonNothingToCheck, Message: "none of the nodes that it may run on now is under a NetworkCheckPolicy that gates it"}
	case len(r.assignedUnhealthy) > 0:
		return reassign(job, r, "the network of "+joinNames(r.assignedUnhealthy)+" failed a check", w.evidence(r.assignedUnhealthy))
	}
	proving := w.prove(job, g, r)
	switch {
	case len(r.unlabeled) > 0 || proving.needed:
	case r.proven > 0 || len(r.healthy) > 0 && r.busy() == 0:
		others := len(r.unproven)+r.inUse > 0
		return Decision{Action: Open, Reason: ReasonProven, Message: provenMessage(r, others)}
	case r.claimed > 0: // those jobs have no pods yet, so that its own would be on these nodes at once
	case len(r.healthy)+r.busy() > 0:
		return Decision{Action: Open, Reason: ReasonNothingToCheck, Message: "none of the nodes that it may run on has room for it now, so that none can be checked"}
	}
	d := Decision{Action: Wait, Reason: ReasonWaiting}
	if proving.needed {
		d = proving.decision
	}
	switch {
	case d.Action == OpenUnproven:
	case proving.needed:
	case len(r.unlabeled) > 0:
		d.Message = "waits until " + joinNames(r.unlabeled) + " are labeled unhealthy"
	case r.claimed > 0:
		d.Message = "waits until jobs that wait already have their nodes: none is left that could be checked for it"
	default:
		d.Message = "the network of every node that it may run on has failed a check: " + joinNames(r.unhealthy) + w.evidence(r.unhealthy)
	}
	return applyTimeout(d, r, job, w.now, cmp.Or(proving.why, d.Message))
}

// A proving says how the unproven nodes that a job needs are proven.
type proving struct {
	// needed is set if there are such nodes.
	needed   bool
	decision Decision
	// why says what prevents checks of some of them.
	why string
}

// A stuckKey is what the proving of stuck jobs of one reach follows from.
type stuckKey struct {
	since int64 // times of the API have whole seconds
	free  int
}

// prove finds the nodes that the job needs proven. For jobs that are stuck, it looks at all nodes once, and not again for each of a
// thousand that began to wait in the same second.
func (w *Snapshot) prove(job Job, g gang, r *reach) proving {
	key := stuckKey{job.Since.Unix(), r.free}
	if known, ok := r.stuck[key]; ok && g.count > r.proven {
		return known
	}
	needed, stuck := w.needed(job, g, r)
	if len(needed) == 0 {
		return proving{}
	}
	p := proving{needed: true}
	p.decision, p.why = w.checkUnproven(job, r, needed)
	if stuck {
		r.stuck[key] = p
	}
	return p
}

// maxEvidence is the length of evidence in a message, bytes.
const maxEvidence = 300

// evidence is what was measured of the first of the nodes, with whom, to follow a message that names them.
func (w *Snapshot) evidence(nodes []string) string {
	if len(nodes) == 0 {
		return ""
	}
	first := slices.Min(nodes)
	if state := w.states[first]; state != nil && state.Message != "" {
		return text.Clip(fmt.Sprintf("; %s: %s: %s", first, state.Reason, state.Message), maxEvidence)
	}
	return ""
}

// reassign returns the job's nodes, or lets it start if that did not help and its policy allows it.
func reassign(job Job, r *reach, failed, evidence string) Decision {
	if job.Reassigned >= maxReassignments && r.policy.Spec.Gate.OnTimeout != evenkeel.GateWait {
		return Decision{Action: OpenUnproven, Reason: ReasonNotProven, Message: fmt.Sprintf("starts although %s, as it was given such nodes %d times%s", failed, job.Reassigned+1, evidence)}
	}
	attempt := job.Reassigned + 1
	return Decision{Action: Reassign, Reason: ReasonUnhealthyHost, Message: fmt.Sprintf("%s: other nodes are needed (attempt %d)%s", failed, attempt, evidence), Attempt: attempt}
}

// checkUnproven says which of the unproven nodes that it needs are to be checked, and what prevents checks of the others.
func (w *Snapshot) checkUnproven(job Job, r *reach, needed []string) (d Decision, why string) {
	d = Decision{Action: Check, Reason: ReasonChecking, Check: map[string][]string{}}
	stuck := 0
	for _, name := range needed {
		p := w.policyOf[name]
		problem, again := w.provingProblem(name, p, job.Since)
		if problem != "" {
			stuck++
			why = problem
			if again.IsZero() || w.now.Before(again) {
				if !again.IsZero() && (d.Next.IsZero() || again.Before(d.Next)) {
					d.Next = again
				}
				continue
			}
		}
		d.Check[p.Name] = append(d.Check[p.Name], name)
	}
	d.Message = fmt.Sprintf("waits until the network of %s is checked", joinNames(needed))
	for _, c := range w.running {
		if len(d.Check[c.Labels[evenkeel.PolicyKey]]) > 0 {
			d.Running = c.Name
			d.Message += fmt.Sprintf("; NetworkCheck %s runs", c.Name)
		}
	}
	if len(d.Check) == 0 {
		d.Action, d.Reason, d.Message = Wait, ReasonWaiting, why
	}
	if stuck == len(needed) && r.policy.Spec.Gate.OnTimeout != evenkeel.GateWait {
		return Decision{Action: OpenUnproven, Reason: ReasonNotProven, Message: "starts although the network of " + joinNames(needed) + " is not proven: " + why}, why
	}
	return d, why
}

// provingProblem says why a node could not be proven, if enough attempts were made while the job waited, and when to try
// again. A node that passed while a running job suspects it stays unproven: one more check would say the same.
func (w *Snapshot) provingProblem(node string, p *evenkeel.NetworkCheckPolicy, since time.Time) (what string, again time.Time) {
	if w.ready[p.Name] < 2 {
		return fmt.Sprintf("NetworkCheckPolicy %s has no second node that is ready to test %s with", p.Name, node), time.Time{}
	}
	since = since.Truncate(time.Second) // times of the API have whole seconds
	tries := 0
	suspected := w.markers[node].Condition.Reason == health.ReasonSuspected
	if s := w.states[node]; s != nil {
		for i := range s.History {
			r := &s.History[i]
			if r.Time.Time.Before(since) {
				continue
			}
			if r.Verdict == evenkeel.VerdictPass && suspected {
				return w.markers[node].Condition.Message, r.Time.Add(retryInterval)
			}
			if r.Verdict != evenkeel.VerdictInconclusive {
				continue
			}
			if tries++; tries == 1 {
				what, again = fmt.Sprintf("NetworkCheck %s was inconclusive for %s: %s", r.Check, node, cmp.Or(r.Reason, "no reason")), r.Time.Add(retryInterval)
			}
		}
	}
	if tries >= maxAttempts {
		return what, again
	}
	if c := w.refused[policyNode{p.Name, node}]; c != nil {
		return fmt.Sprintf("NetworkCheck %s could not be run: %s", c.Name, c.Status.Message), RetryTime(c)
	}
	return "", time.Time{}
}

// applyTimeout ends the wait after its timeout, unless the policy keeps jobs waiting.
func applyTimeout(d Decision, r *reach, job Job, now time.Time, why string) Decision {
	if d.Action == OpenUnproven {
		return d
	}
	g := r.policy.Spec.Gate
	limit := health.GateTimeout(g)
	until := job.Since.Add(limit)
	if g.OnTimeout != evenkeel.GateWait {
		d.Until = until
	}
	switch {
	case now.Before(until):
		if d.Next.IsZero() || until.Before(d.Next) {
			d.Next = until
		}
	case g.OnTimeout == evenkeel.GateWait:
		d.Overdue = true
	default:
		return Decision{Action: OpenUnproven, Reason: ReasonNotProven, Message: fmt.Sprintf("starts although its nodes are not proven, as it waited for %s: %s", limit, why)}
	}
	return d
}

// NotRunnable reports whether the check ended without a run, because something that it needs is missing.
func NotRunnable(c *evenkeel.NetworkCheck) bool {
	return isComplete(c) && c.Status.ReportName == ""
}

// RetryTime is when a check that was not runnable may be made again.
func RetryTime(c *evenkeel.NetworkCheck) time.Time {
	if c.Status.CompletionTime == nil {
		return c.CreationTimestamp.Add(retryInterval)
	}
	return c.Status.CompletionTime.Add(retryInterval)
}

func isComplete(c *evenkeel.NetworkCheck) bool {
	return meta.IsStatusConditionTrue(c.Status.Conditions, evenkeel.ConditionComplete)
}

func provenMessage(r *reach, others bool) string {
	if others {
		return fmt.Sprintf("the network of %d nodes that it may run on is proven; it does not wait for the others", len(r.healthy))
	}
	if len(r.unhealthy) > 0 {
		return fmt.Sprintf("the network of %d nodes that it may run on is proven, that of %s failed", len(r.healthy), joinNames(r.unhealthy))
	}
	return fmt.Sprintf("the network of all %d nodes that it may run on is proven", len(r.healthy))
}

// A ChangeTracker remembers the last decision reported to each job. The list of nodes still to be checked shrinks with every
// result; that alone is no change.
type ChangeTracker struct{ recorded map[types.UID]reported }

type reported struct {
	reason, running string
	attempt         int
}

// Changed reports whether the decision differs from the last one that was recorded for the job.
func (n *ChangeTracker) Changed(job types.UID, d Decision) bool {
	before, known := n.recorded[job]
	return !known || d.Reason != before.reason || d.Attempt != before.attempt || d.Running != before.running && d.Running != ""
}

// Record records the decision as reported.
func (n *ChangeTracker) Record(job types.UID, d Decision) {
	if n.recorded == nil {
		n.recorded = map[types.UID]reported{}
	}
	n.recorded[job] = reported{d.Reason, d.Running, d.Attempt}
}

// Forget drops jobs that no longer wait.
func (n *ChangeTracker) Forget(waits func(types.UID) bool) {
	maps.DeleteFunc(n.recorded, func(job types.UID, _ reported) bool { return !waits(job) })
}

// maxNames is the maximum number of nodes named in a message.
const maxNames = 8

func joinNames(list []string) string {
	slices.Sort(list)
	if len(list) <= maxNames {
		return strings.Join(list, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(list[:maxNames], ", "), len(list)-maxNames)
}
