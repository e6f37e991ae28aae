// Package gate decides whether a job may start: whether the network of the nodes that it may run on is proven. It is pure:
// nodes, what is known about them, policies, checks and the time in; a decision out.
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
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
)

const (
	defaultTimeout = 30 * time.Minute
	defaultProfile = "default" // that of a policy's checks, if they name none
	// A node is checked at most so often for a job, if the checks say nothing; one that is held regardless has it checked
	// again after a pause.
	maxTries = 2
	pause    = 5 * time.Minute
)

// An Action is what becomes of a job now.
type Action string

const (
	// Open lets it start: all is proven, or nothing has to be.
	Open Action = "Open"
	// Check holds it while the nodes of Decision.Check are checked.
	Check Action = "Check"
	// Wait holds it; nothing is to be checked at present.
	Wait Action = "Wait"
	// GiveUp lets it start although its nodes are not proven.
	GiveUp Action = "GiveUp"
	// Move gives back the nodes that were assigned to it, as some of them failed.
	Move Action = "Move"
)

// Reasons, for Events.
const (
	ReasonProven         = "EvenkeelNetworkProven"
	ReasonNothingToCheck = "EvenkeelNothingToCheck"
	ReasonChecking       = "EvenkeelWaitsForCheck"
	ReasonWaiting        = "EvenkeelWaits"
	ReasonNotProven      = "EvenkeelNetworkNotProven"
	ReasonUnhealthyHost  = "EvenkeelUnhealthyHost"
)

// A Job is what waits.
type Job struct {
	// Profile is the NetworkProfile that it asked for.
	Profile string
	// Policy, if not empty, is the one policy that counts, whatever its trigger. Otherwise all with triggers.jobStart count
	// whose checks test the profile.
	Policy string
	// Since is when it began to wait.
	Since time.Time
	// Pods are its kinds of pod that may run on any node that they fit on.
	Pods []*corev1.PodSpec
	// Hosts are the host names of nodes that were assigned to it.
	Hosts []string
}

// A Decision is what becomes of a job.
type Decision struct {
	Action Action
	// Reason is a word, Message a line for people.
	Reason, Message string
	// Check has the nodes to be checked, by policy.
	Check map[string][]string
	// Running is the check that runs for it; empty: none.
	Running string
	// Next is when time alone may change the decision; zero: never.
	Next time.Time
	// Until is when its time is up and it starts all the same; zero: not by time alone.
	Until time.Time
	// Overdue says that its time is up, and the policy holds it regardless.
	Overdue bool
}

// Holds reports whether the decision keeps the job waiting.
func (d Decision) Holds() bool { return d.Action != Open && d.Action != GiveUp }

// Applies reports whether the policy holds jobs of the profile.
func Applies(p *evenkeel.NetworkCheckPolicy, profile string) bool {
	return p.DeletionTimestamp == nil && p.Spec.Triggers.JobStart == evenkeel.SwitchEnabled &&
		cmp.Or(p.Spec.Check.ProfileName, defaultProfile) == profile
}

// Needed reports whether a job of the profile may have to wait, by what the policies say of themselves: if each that
// applies has a verdict on all of its nodes, none does.
func Needed(policies []evenkeel.NetworkCheckPolicy, profile string) bool {
	return slices.ContainsFunc(policies, func(p evenkeel.NetworkCheckPolicy) bool {
		s := &p.Status
		proven := s.ObservedGeneration == p.Generation && s.Unknown != nil && *s.Unknown == 0 &&
			meta.IsStatusConditionTrue(s.Conditions, evenkeel.ConditionReady)
		return Applies(&p, profile) && !proven
	})
}

// A World is what decisions are made from.
type World struct {
	nodes  []corev1.Node
	states map[string]*evenkeel.NodeNetworkHealthStatus
	marks  map[string]health.Mark
	under  map[string]*evenkeel.NetworkCheckPolicy
	// ready is how many nodes of each policy are.
	ready  map[string]int
	checks []evenkeel.NetworkCheck
	now    time.Time
}

// See makes a World. The checks are those of policies; others may be among them.
func See(nodes []corev1.Node, states map[string]*evenkeel.NodeNetworkHealthStatus, policies []evenkeel.NetworkCheckPolicy, checks []evenkeel.NetworkCheck, now time.Time) *World {
	marks, _ := health.Marks(nodes, states, policies, now)
	w := &World{nodes: nodes, states: states, marks: marks, under: health.Of(nodes, policies), ready: map[string]int{}, checks: checks, now: now}
	for i := range nodes {
		if p := w.under[nodes[i].Name]; p != nil && IsReady(&nodes[i]) {
			w.ready[p.Name]++
		}
	}
	return w
}

// A findings sorts the nodes that a job may run on by what is known about them.
type findings struct {
	healthy, unhealthy, unproven []string
	// late are unhealthy nodes that do not carry the label yet by which pods keep off them.
	late []string
	// lost are unhealthy nodes that were assigned to it.
	lost []string
	// policy is the first by name that they are under.
	policy *evenkeel.NetworkCheckPolicy
}

func (w *World) find(job Job) findings {
	var f findings
	fits := Fitting(job.Pods)
	for i := range w.nodes {
		node := &w.nodes[i]
		p := w.under[node.Name]
		switch {
		case p == nil:
			continue
		case job.Policy != "" && p.Name != job.Policy, job.Policy == "" && !Applies(p, job.Profile):
			continue
		}
		assigned := slices.Contains(job.Hosts, cmp.Or(node.Labels[corev1.LabelHostname], node.Name))
		if !assigned && !fits(node) {
			continue
		}
		if f.policy == nil || p.Name < f.policy.Name {
			f.policy = p
		}
		mark := w.marks[node.Name]
		if assigned && mark.Condition.Status == corev1.ConditionFalse {
			f.lost = append(f.lost, node.Name)
		}
		switch {
		case mark.Label == evenkeel.HealthyValue:
			f.healthy = append(f.healthy, node.Name)
		case mark.Label == evenkeel.UnhealthyValue && node.Labels[evenkeel.HealthKey] != mark.Label:
			f.late = append(f.late, node.Name)
		case mark.Condition.Status == corev1.ConditionFalse:
			f.unhealthy = append(f.unhealthy, node.Name)
		default:
			f.unproven = append(f.unproven, node.Name)
		}
	}
	return f
}

// Decide says what becomes of the job now.
func (w *World) Decide(job Job) Decision {
	f := w.find(job)
	switch {
	case f.policy == nil:
		return Decision{Action: Open, Reason: ReasonNothingToCheck, Message: "none of the nodes that it may run on now is under a NetworkCheckPolicy that holds it"}
	case len(f.lost) > 0:
		return Decision{Action: Move, Reason: ReasonUnhealthyHost, Message: "the network of " + names(f.lost) + " failed a check: other nodes are needed"}
	case len(f.late) == 0 && len(f.unproven) == 0 && len(f.healthy) > 0:
		return Decision{Action: Open, Reason: ReasonProven, Message: proven(f)}
	}
	d := Decision{Action: Wait, Reason: ReasonWaiting}
	why := ""
	if len(f.unproven) > 0 {
		d, why = w.check(job, f)
	}
	switch {
	case d.Action == GiveUp:
	case len(f.unproven) > 0:
	case len(f.late) > 0:
		d.Message = "waits until " + names(f.late) + " are marked as unhealthy"
	default:
		d.Message = "the network of every node that it may run on has failed a check: " + names(f.unhealthy)
	}
	return timeout(d, f, job, w.now, cmp.Or(why, d.Message))
}

// check says which of the nodes that are not proven are to be checked, and what is in the way of checking the others.
func (w *World) check(job Job, f findings) (d Decision, why string) {
	d = Decision{Action: Check, Reason: ReasonChecking, Check: map[string][]string{}}
	stuck := 0
	for _, name := range f.unproven {
		p := w.under[name]
		problem, again := w.problem(name, p, job.Since)
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
	d.Message = fmt.Sprintf("waits until the network of %s is checked", names(f.unproven))
	for _, c := range w.checks {
		if policy := c.Labels[evenkeel.PolicyKey]; len(d.Check[policy]) > 0 && !ended(&c) {
			d.Running = c.Name
			d.Message += fmt.Sprintf("; NetworkCheck %s runs", c.Name)
		}
	}
	if len(d.Check) == 0 {
		d.Action, d.Reason, d.Message = Wait, ReasonWaiting, why
	}
	if stuck == len(f.unproven) && f.policy.Spec.Gate.OnTimeout != evenkeel.GateHold {
		return Decision{Action: GiveUp, Reason: ReasonNotProven, Message: "starts although the network of " + names(f.unproven) + " is not proven: " + why}, why
	}
	return d, why
}

// problem says why a node could not be proven, if enough was tried since the job waits, and when to try again.
func (w *World) problem(node string, p *evenkeel.NetworkCheckPolicy, since time.Time) (what string, again time.Time) {
	if w.ready[p.Name] < 2 {
		return fmt.Sprintf("NetworkCheckPolicy %s has no second node that is ready to test %s with", p.Name, node), time.Time{}
	}
	since = since.Truncate(time.Second) // the API's times have no finer steps
	tries := 0
	if s := w.states[node]; s != nil {
		for i := range s.History {
			r := &s.History[i]
			if r.Verdict != evenkeel.VerdictInconclusive || r.Time.Time.Before(since) {
				continue
			}
			if tries++; tries == 1 {
				what, again = fmt.Sprintf("NetworkCheck %s said nothing about %s: %s", r.Check, node, cmp.Or(r.Reason, "no reason")), r.Time.Add(pause)
			}
		}
	}
	if tries >= maxTries {
		return what, again
	}
	for i := range w.checks {
		c := &w.checks[i]
		if c.Labels[evenkeel.PolicyKey] == p.Name && Refused(c) && slices.Contains(c.Spec.Nodes.Names, node) {
			return fmt.Sprintf("NetworkCheck %s could not be run: %s", c.Name, c.Status.Message), RetryRefused(c)
		}
	}
	return "", time.Time{}
}

// timeout ends the wait when its time is up, unless the policy says to hold on.
func timeout(d Decision, f findings, job Job, now time.Time, why string) Decision {
	if d.Action == GiveUp {
		return d
	}
	g := f.policy.Spec.Gate
	limit := limit(g)
	until := job.Since.Add(limit)
	if g.OnTimeout != evenkeel.GateHold {
		d.Until = until
	}
	switch {
	case now.Before(until):
		if d.Next.IsZero() || until.Before(d.Next) {
			d.Next = until
		}
	case g.OnTimeout == evenkeel.GateHold:
		d.Overdue = true
	default:
		return Decision{Action: GiveUp, Reason: ReasonNotProven, Message: fmt.Sprintf("starts although its nodes are not proven, as it waited for %s: %s", limit, why)}
	}
	return d
}

func limit(g evenkeel.GateSpec) time.Duration {
	if g.TimeoutSeconds == nil {
		return defaultTimeout
	}
	return time.Duration(*g.TimeoutSeconds) * time.Second
}

// Refused reports whether the check ended without a run, as something that it needs is missing.
func Refused(c *evenkeel.NetworkCheck) bool {
	return ended(c) && c.Status.ReportName == ""
}

// RetryRefused is when what a refused check lacked may be looked for again.
func RetryRefused(c *evenkeel.NetworkCheck) time.Time {
	if c.Status.CompletionTime == nil {
		return c.CreationTimestamp.Add(pause)
	}
	return c.Status.CompletionTime.Add(pause)
}

func ended(c *evenkeel.NetworkCheck) bool {
	return meta.IsStatusConditionTrue(c.Status.Conditions, evenkeel.ConditionComplete)
}

func proven(f findings) string {
	text := fmt.Sprintf("the network of all %d nodes that it may run on is proven", len(f.healthy))
	if len(f.unhealthy) > 0 {
		text = fmt.Sprintf("the network of %d nodes that it may run on is proven, that of %s failed", len(f.healthy), names(f.unhealthy))
	}
	return text
}

// A News remembers what jobs were told last. What is still to be checked changes with every result: that is no news.
type News struct{ told map[types.UID]topic }

type topic struct{ reason, running string }

// Is reports whether the decision is news to the job.
func (n *News) Is(job types.UID, d Decision) bool {
	before, known := n.told[job]
	return !known || d.Reason != before.reason || d.Running != before.running && d.Running != ""
}

// Told notes it.
func (n *News) Told(job types.UID, d Decision) {
	if n.told == nil {
		n.told = map[types.UID]topic{}
	}
	n.told[job] = topic{d.Reason, d.Running}
}

// Forget forgets jobs that wait no more.
func (n *News) Forget(waits func(types.UID) bool) {
	maps.DeleteFunc(n.told, func(job types.UID, _ topic) bool { return !waits(job) })
}

// maxNames are named in a message.
const maxNames = 8

func names(list []string) string {
	slices.Sort(list)
	if len(list) <= maxNames {
		return strings.Join(list, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(list[:maxNames], ", "), len(list)-maxNames)
}
