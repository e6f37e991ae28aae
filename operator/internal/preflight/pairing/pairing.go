// Package pairing decides which nodes are tested together, and what the results prove about each node and the fabric
// between them. It is pure. [Decide] derives everything from the check and the runs recorded so far, so that a
// restarted controller continues where it was. There is no clock, and no randomness but the seed.
//
// Round 1 tests all nodes in pairs, with one group of three if their number is odd. A node that passes in any run is
// proven. The others are suspects, and are tested again with proven partners. While no node is proven, nodes are paired
// again by the circle method, in which every two nodes meet once. A node fails after bad runs with two partners, at
// least one of them proven. So one bad pair, or one bad link, never fails a node.
//
// A verdict needs a comparison. A run is compared with a configured minimum, or with the median of the first round that
// has two runs of the pool, or with the pool's usual bandwidth. A run that can be compared with nothing proves no node,
// unless there is no other node of the pool that it could be compared with.
package pairing

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Reason for a verdict, a CamelCase word for conditions and metrics.
type Reason string

// The reasons.
const (
	// ReasonProven: a run with the node reached the threshold over the expected network.
	ReasonProven Reason = "Proven"
	// ReasonFallback, ReasonWrongData, ReasonBroken, ReasonSlow: the worst of the bad runs used another network, had wrong
	// data, did not finish, or was too slow; in this order.
	ReasonFallback  Reason = "FallbackNetwork"
	ReasonWrongData Reason = "WrongData"
	ReasonBroken    Reason = "Broken"
	ReasonSlow      Reason = "TooSlow"
	// ReasonFabricSuspect: the node's runs were bad, but so many others were too that the node is not the cause.
	ReasonFabricSuspect Reason = "FabricSuspect"
	// ReasonInfrastructure: all runs of the node were inconclusive.
	ReasonInfrastructure Reason = "InfrastructureFault"
	// ReasonInUse: another pod began to use the node.
	ReasonInUse Reason = "NodeInUse"
	// ReasonUnconfirmed: runs were bad, and no conclusive run confirmed it.
	ReasonUnconfirmed Reason = "Unconfirmed"
	// ReasonNothingToCompare: the node's runs were as they should be, but there is no measure of how fast they should be.
	ReasonNothingToCompare Reason = "NothingToCompare"
	// ReasonNoPartner: the pool has no other node.
	ReasonNoPartner Reason = "NoPartner"
	// ReasonUnfinished: rounds are still to come.
	ReasonUnfinished Reason = "Unfinished"
	// ReasonNoPairPassed and ReasonMostNodesFailed blame the fabric.
	ReasonNoPairPassed    Reason = "NoPairPassed"
	ReasonMostNodesFailed Reason = "MostNodesFailed"
)

// Node is a node to be tested.
type Node struct {
	Name string
	// Pool names the nodes that should be equally fast, such as those with the same GPU product. Nodes are tested within
	// their pool. Nodes that are alone in their pools are tested together.
	Pool string
}

// Outcome of a run.
type Outcome string

const (
	// Measured: the benchmark completed.
	Measured Outcome = "Measured"
	// Broken: the benchmark started and the network failed, such as by a lost connection.
	Broken Outcome = "Broken"
	// Fault: the run is inconclusive about the network: an image that cannot be pulled, an eviction, a timeout, a missing
	// driver, a log that cannot be read.
	Fault Outcome = "Fault"
)

// Run is the recorded result of one group of a round.
type Run struct {
	// Round and Nodes are the group's, as [Decide] returned them. Runs of other groups are ignored, and so is a second run
	// of the same group.
	Round   int
	Nodes   []string
	Outcome Outcome
	// BusBW is the bus bandwidth of a Measured run, GB/s. Wrong is the number of wrong elements.
	BusBW float64
	Wrong int64
	// LatencyUS is the time of a small message from one node to another, microseconds, or 0 if unknown.
	LatencyUS float64
	// Networks carried a Measured or Broken run. Empty if unknown.
	Networks []string
	// InUse are the run's nodes that another pod used meanwhile. Such a run counts for no node, and these nodes are
	// not tested again.
	InUse []string
	// Detail is text for people: the fault, or the end of the log.
	Detail string
}

// Thresholds define what is too slow, GB/s. The first known one counts: MinBusBW, the pool's own in PoolMinBusBW, the
// median of the pool's runs, the pool's usual bandwidth.
type Thresholds struct {
	MinBusBW     float64
	PoolMinBusBW map[string]float64
	// UsualBusBW is the bandwidth that other nodes of the pool reached in earlier checks.
	UsualBusBW map[string]float64
	// MinPercentOfMedian is the share of the pool's median that a run has to reach; 0 means 85. In pools with at least
	// five runs and a wider spread, three standard deviations (by the median absolute deviation) are allowed. Less than
	// half of the median never passes.
	//
	// A median cannot detect a fabric in which half or more of the nodes are equally slow. The other thresholds can.
	MinPercentOfMedian float64
}

// Check is the input of [Decide].
type Check struct {
	Nodes []Node
	Runs  []Run
	// Network has to carry the runs, such as "Evenkeel"; "" accepts any.
	Network    string
	Thresholds Thresholds
	// Seed varies which nodes are paired.
	Seed uint64
	// Partial are the pools with nodes that are not in the check, and could be tested at another time.
	Partial map[string]bool
	// MaxRounds is the maximum number of rounds, or 0 for no limit.
	MaxRounds int
}

// Group is a set of nodes to be tested together. A node is in at most one group of a round.
type Group struct {
	// Index is the group's position in its round, the same whenever it is derived. With the round it identifies the run.
	Index int
	Nodes []string
}

// Round is what is to be run now.
type Round struct {
	// Number counts from 1.
	Number int
	// Groups are the groups without a recorded run. Total counts all groups of the round.
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
	// BusBW is the best bus bandwidth of a run with the node over the expected network, GB/s; 0 without one.
	BusBW float64
	// LatencyUS is the least of such a run, microseconds, or 0 if unknown.
	LatencyUS float64
	// Evidence lists the node's runs by round, as indexes into Check.Runs.
	Evidence []int
}

// Fabric is the verdict on what connects the nodes of a pool.
type Fabric struct {
	// Pools has one pool, or all pools with a single node.
	Pools   []string
	Verdict evenkeel.Verdict
	Reason  Reason
	Message string
	// BadLinks are the indexes of bad runs among nodes that all passed.
	BadLinks []int
}

// Limit is the threshold of a pool.
type Limit struct {
	// MinBusBW is the minimum that passes, GB/s. If it is 0, there is nothing to compare with, and any speed passes.
	MinBusBW float64
	// Median and MAD (median absolute deviation) are over the runs that the limit was computed from, GB/s; 0 if the limit
	// was configured.
	Median, MAD float64
}

// Decision is what follows from the runs so far.
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

// Decide returns the next round, or the final verdicts. Preliminary verdicts are in the decision too.
func Decide(c Check) Decision {
	s := replay(&c)
	d := Decision{Next: s.pending, Verdict: evenkeel.VerdictPass, Limits: s.limits}
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
		out.Message = fmt.Sprintf("%d of %d nodes failed again with proven partners; suspect the fabric, not the nodes", f.failed, judged)
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
	case f.uncompared:
		out.Verdict, out.Reason, out.Message = evenkeel.VerdictInconclusive, ReasonNothingToCompare, "nothing says how fast its runs should be: at least four nodes of a pool can be compared with each other, or set a minimum"
	case f.bad > 0:
		out.Verdict, out.Reason, out.Message = evenkeel.VerdictInconclusive, ReasonUnconfirmed, "runs were bad, and there were too few to find the cause"
	default:
		out.Verdict, out.Reason, out.Message = evenkeel.VerdictInconclusive, ReasonInfrastructure, "all runs were inconclusive"
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
	out := NodeResult{Name: n.name, Evidence: n.runs, BusBW: n.bestBusBW(s), LatencyUS: n.leastLatency(s), Verdict: evenkeel.VerdictInconclusive}
	blamed := n.fabric.blamed()
	switch bad := n.worstClass(s); {
	case n.proven:
		out.Verdict, out.Reason = evenkeel.VerdictPass, ReasonProven
		out.Message = n.describeRuns(s, classPass)
	case bad != classNone && blamed:
		out.Reason = ReasonFabricSuspect
		out.Message = n.describeRuns(s, bad) + "; so many others were too that this node is not the cause"
	case n.failed:
		out.Verdict, out.Reason = evenkeel.VerdictFail, bad.reason()
		out.Message = n.describeRuns(s, bad)
	case n.inUse:
		out.Reason, out.Message = ReasonInUse, n.describeRuns(s, classFault)
	case !n.fabric.done:
		out.Reason, out.Message = ReasonUnfinished, "rounds are still to come"
	case bad != classNone:
		out.Reason = ReasonUnconfirmed
		out.Message = n.describeRuns(s, bad) + "; it could not be confirmed"
	case n.hasRun(s, classUncompared):
		out.Reason, out.Message = ReasonNothingToCompare, n.describeRuns(s, classUncompared)
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

// describeRuns describes the runs of one class, at most two of them.
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
			text += "inconclusive"
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
				text += fmt.Sprintf(", minimum %.4g", limit)
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

func (n *node) hasRun(s *state, class class) bool {
	return slices.ContainsFunc(n.runs, func(i int) bool { return s.class[i] == class })
}

// worstClass is the worst class of the node's bad runs.
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
		if s.class[i].measured() {
			best = max(best, s.check.Runs[i].BusBW)
		}
	}
	return best
}

func (n *node) leastLatency(s *state) float64 {
	var least float64
	for _, i := range n.runs {
		if us := s.check.Runs[i].LatencyUS; s.class[i].measured() && us > 0 && (least == 0 || us < least) {
			least = us
		}
	}
	return least
}

func (r *Run) others(name string) []string {
	others := slices.DeleteFunc(slices.Clone(r.Nodes), func(other string) bool { return other == name })
	slices.SortFunc(others, cmp.Compare[string])
	return others
}
