// Package pairing decides which nodes to test with which, and what the results say about each node and about the
// fabric between them. It is pure: [Decide] derives everything from the check and the runs recorded so far, so that a
// controller that restarts goes on where it was. There is no clock, and no chance but the seed.
//
// Nodes are tested in pairs (three together where they are odd in number), all of them in round 1. Who passes in any
// run is proven. The others, suspects, are tried again with proven partners. As long as nobody is proven, nodes are paired
// anew by the circle method, in which every two nodes meet once. A node fails after bad runs with two partners, of whom
// one at least is proven: one bad pair, or one bad link, never fails a node.
package pairing

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Reason for a verdict, a word for conditions and metrics.
type Reason string

// The reasons.
const (
	// ReasonProven: a run with the node reached the threshold over the wanted network.
	ReasonProven Reason = "Proven"
	// ReasonSlow, ReasonBroken, ReasonWrongData, ReasonFallback: the bad runs were, the worst of them first in this
	// order: over another network, with wrong data, not finished, too slow.
	ReasonFallback  Reason = "FallbackNetwork"
	ReasonWrongData Reason = "WrongData"
	ReasonBroken    Reason = "Broken"
	ReasonSlow      Reason = "TooSlow"
	// ReasonFabricSuspect: the node's runs were bad, and so were too many others' for the node to be the cause.
	ReasonFabricSuspect Reason = "FabricSuspect"
	// ReasonInfrastructure: no run of the node said anything about the network.
	ReasonInfrastructure Reason = "InfrastructureFault"
	// ReasonUnconfirmed: runs were bad, and none that would confirm it could be had.
	ReasonUnconfirmed Reason = "Unconfirmed"
	// ReasonNoPartner: there is no other node in the pool.
	ReasonNoPartner Reason = "NoPartner"
	// ReasonUnfinished: rounds are still to come.
	ReasonUnfinished Reason = "Unfinished"
	// ReasonNoPairPassed and ReasonMostNodesFailed blame the fabric.
	ReasonNoPairPassed    Reason = "NoPairPassed"
	ReasonMostNodesFailed Reason = "MostNodesFailed"
)

// Node is one to be tested.
type Node struct {
	Name string
	// Pool has the nodes that should be equally fast, such as those with the same GPU product. Nodes are tested within
	// their pool; those that are alone in theirs are tested together.
	Pool string
}

// Outcome of a run.
type Outcome string

const (
	// Measured: the benchmark ran to its end.
	Measured Outcome = "Measured"
	// Broken: the benchmark began and the network failed it, as by a connection that was lost.
	Broken Outcome = "Broken"
	// Fault: what happened says nothing about the network: an image that cannot be pulled, an eviction, a timeout, a
	// missing driver, a log that cannot be read.
	Fault Outcome = "Fault"
)

// Run is the recorded result of one group of a round.
type Run struct {
	// Round and Nodes are the group's, as [Decide] gave them. Runs of groups that it did not give are ignored, and so is
	// a second run of the same group.
	Round   int
	Nodes   []string
	Outcome Outcome
	// BusBW is what a Measured run reached, GB/s, and Wrong its wrong elements.
	BusBW float64
	Wrong int64
	// Networks carried a Measured or Broken run; none where that is not known.
	Networks []string
	// Detail is for people: the fault, the log's last words.
	Detail string
}

// Thresholds say what is too slow, GB/s. The first that is set counts: MinBusBW, the pool's own in PoolMinBusBW, the pool's median.
type Thresholds struct {
	MinBusBW     float64
	PoolMinBusBW map[string]float64
	// MinPercentOfMedian is the share of the pool's median that is enough; 0 means 85. In pools with at least five
	// runs whose spread is wider than that, three standard deviations (by the median absolute deviation) are allowed,
	// but never less than half of the median is enough.
	//
	// A median says nothing where half of the runs or more are slow alike; a fabric that is slow as a whole is
	// only found with the other thresholds.
	MinPercentOfMedian float64
}

// Check is what is to be decided.
type Check struct {
	Nodes []Node
	Runs  []Run
	// Network is the one that must carry the runs, such as "Evenkeel"; "" accepts any.
	Network    string
	Thresholds Thresholds
	// Seed varies who meets whom.
	Seed uint64
	// MaxRounds ends the check after so many; 0: never before it knows.
	MaxRounds int
}

// Group is nodes to be tested together. A node is in at most one group of a round.
type Group struct {
	// Index is the group's place in its round, the same whenever it is derived: with the round, a name for its run.
	Index int
	Nodes []string
}

// Round is what is to be run now.
type Round struct {
	// Number counts from 1.
	Number int
	// Groups that have no recorded run yet; Total counts those that have, too.
	Groups []Group
	Total  int
}

// NodeResult is the verdict on a node.
type NodeResult struct {
	Name    string
	Verdict evenkeel.Verdict
	Reason  Reason
	// Message is one line for people.
	Message string
	// BusBW is the best that a run with the node reached over the wanted network, GB/s; 0 if none did.
	BusBW float64
	// Evidence has the node's runs, as indexes into Check.Runs, by round.
	Evidence []int
}

// Fabric is the verdict on what connects the nodes of a pool.
type Fabric struct {
	// Pools has one, or those with a single node each.
	Pools   []string
	Verdict evenkeel.Verdict
	Reason  Reason
	Message string
	// BadLinks are the indexes of bad runs among nodes that have all passed.
	BadLinks []int
}

// Limit is what a pool's runs were measured against.
type Limit struct {
	// MinBusBW is the least that passes, GB/s; 0: there was nothing to compare with, and any speed passes.
	MinBusBW float64
	// Median and MAD (median absolute deviation) are over the runs that gave the limit, GB/s; 0 if it was given.
	Median, MAD float64
}

// Decision is what the runs so far amount to.
type Decision struct {
	// Next is what to run now, nil when the verdicts are final.
	Next *Round
	// Verdict is Fail if a node or a fabric failed, else Inconclusive if one of them is, else Pass.
	Verdict evenkeel.Verdict
	// Nodes are in the order of Check.Nodes, without repetitions.
	Nodes   []NodeResult
	Fabrics []Fabric
	Limits  map[string]Limit
}

// Decide gives the next round, or the final verdicts; verdicts that are not final are there too.
func Decide(c Check) Decision {
	s := replay(&c)
	d := Decision{Next: s.pending, Verdict: evenkeel.VerdictPass, Limits: s.limits.known}
	for _, f := range s.fabrics {
		d.Fabrics = append(d.Fabrics, f.verdict(s))
	}
	for _, n := range s.nodes {
		d.Nodes = append(d.Nodes, n.verdict(s))
	}
	for i := range d.Fabrics {
		d.Verdict = evenkeel.Worst(d.Verdict, d.Fabrics[i].Verdict)
	}
	for i := range d.Nodes {
		d.Verdict = evenkeel.Worst(d.Verdict, d.Nodes[i].Verdict)
	}
	return d
}

func (f *fabric) verdict(s *state) Fabric {
	out := Fabric{Pools: f.pools, Verdict: evenkeel.VerdictPass, Reason: ReasonProven}
	judged := f.proven + f.failed
	switch {
	case f.blamed():
		out.Verdict, out.Reason = evenkeel.VerdictFail, ReasonMostNodesFailed
		out.Message = fmt.Sprintf("%d of %d nodes stay bad with proven partners: more likely the fabric than the nodes", f.failed, judged)
		if f.proven == 0 {
			out.Reason = ReasonNoPairPassed
			out.Message = fmt.Sprintf("none of %d runs among %d nodes passed", f.runs, len(f.nodes))
		}
		if f.fallbacks == f.bad {
			out.Reason = ReasonFallback
			out.Message += fmt.Sprintf("; every bad run used another network than %s", s.check.Network)
		}
	case !f.done:
		out.Verdict, out.Reason, out.Message = evenkeel.VerdictInconclusive, ReasonUnfinished, "rounds are still to come"
	case f.proven > 0:
		out.Message = fmt.Sprintf("%d of %d nodes are proven", f.proven, len(f.nodes))
	case len(f.nodes) < 2:
		out.Verdict, out.Reason, out.Message = evenkeel.VerdictInconclusive, ReasonNoPartner, "its pool has no second node"
	case f.bad > 0:
		out.Verdict, out.Reason, out.Message = evenkeel.VerdictInconclusive, ReasonUnconfirmed, "runs were bad, and too few could be had to say why"
	default:
		out.Verdict, out.Reason, out.Message = evenkeel.VerdictInconclusive, ReasonInfrastructure, "no run said anything about the network"
	}
	for _, n := range f.nodes {
		for _, i := range n.runs {
			if run := &s.check.Runs[i]; run.Nodes[0] == n.name && s.class[i].bad() && s.allProven(run.Nodes) {
				out.BadLinks = append(out.BadLinks, i)
			}
		}
	}
	slices.Sort(out.BadLinks)
	return out
}

func (n *node) verdict(s *state) NodeResult {
	out := NodeResult{Name: n.name, Evidence: n.runs, BusBW: n.bestBusBW(s), Verdict: evenkeel.VerdictInconclusive}
	blamed := n.fabric.blamed()
	switch bad := n.worstClass(s); {
	case n.proven:
		out.Verdict, out.Reason = evenkeel.VerdictPass, ReasonProven
		out.Message = n.describeRuns(s, classPass)
	case bad != classNone && blamed:
		out.Reason = ReasonFabricSuspect
		out.Message = n.describeRuns(s, bad) + "; so were too many others for this node to be the cause"
	case n.failed:
		out.Verdict, out.Reason = evenkeel.VerdictFail, bad.reason()
		out.Message = n.describeRuns(s, bad)
	case !n.fabric.done:
		out.Reason, out.Message = ReasonUnfinished, "rounds are still to come"
	case bad != classNone:
		out.Reason = ReasonUnconfirmed
		out.Message = n.describeRuns(s, bad) + "; it could not be confirmed"
	case len(n.runs) > 0:
		out.Reason = ReasonInfrastructure
		out.Message = n.describeRuns(s, classFault)
	default:
		out.Reason, out.Message = ReasonNoPartner, "no other node of its pool to test it with"
		if len(n.fabric.nodes) > 1 {
			out.Reason, out.Message = ReasonUnfinished, "the check ended before its first run"
		}
	}
	return out
}

// describeRuns says what the runs of one class were, at most two of them.
func (n *node) describeRuns(s *state, class class) string {
	var all []string
	for _, i := range n.runs {
		if s.class[i] != class {
			continue
		}
		if len(all) == 2 {
			all = append(all, "and more")
			break
		}
		run := &s.check.Runs[i]
		text := "with " + strings.Join(run.others(n.name), " and ") + ": "
		switch class {
		case classFault:
			text += "fault"
			if run.Outcome != Fault {
				text += ": the result cannot be used"
			}
		case classFallback:
			text += fmt.Sprintf("ran over %s, not %s", strings.Join(run.Networks, " and "), s.check.Network)
		case classWrong:
			text += fmt.Sprintf("%d wrong elements", run.Wrong)
		case classBroken:
			text += "the run broke"
		default:
			text += fmt.Sprintf("%.4g GB/s", run.BusBW)
			if limit := s.limits.limitFor(s, run.Nodes); limit > 0 {
				text += fmt.Sprintf(", at least %.4g wanted", limit)
			} else {
				text += ", nothing to compare it with"
			}
		}
		if run.Detail != "" {
			text += " (" + run.Detail + ")"
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}

// worstClass is the gravest class of the node's bad runs.
func (n *node) worstClass(s *state) class {
	worst := classNone
	for _, i := range n.runs {
		if c := s.class[i]; c.bad() {
			worst = max(worst, c)
		}
	}
	return worst
}

func (n *node) bestBusBW(s *state) float64 {
	var best float64
	for _, i := range n.runs {
		if c := s.class[i]; c == classPass || c == classSlow {
			best = max(best, s.check.Runs[i].BusBW)
		}
	}
	return best
}

func (r *Run) others(name string) []string {
	others := slices.DeleteFunc(slices.Clone(r.Nodes), func(other string) bool { return other == name })
	slices.SortFunc(others, cmp.Compare[string])
	return others
}
