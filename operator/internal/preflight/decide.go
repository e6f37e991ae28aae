package preflight

import (
	"fmt"
	"slices"
	"strings"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// Options are what the check's spec asks for, with defaults applied.
type Options struct {
	Stages []evenkeel.Stage
	// Network is the network that has to carry the runs.
	Network    string
	Thresholds pairing.Thresholds
	// Rails is the number of devices that stage Rails tries.
	Rails int
	// Seed varies which nodes are paired.
	Seed uint64
}

// PlannedRun is one run of the benchmark. Stage, Round and Index identify it, and are the same whenever it is derived.
type PlannedRun struct {
	Stage        evenkeel.Stage
	Round, Index int
	Nodes        []string
	// Device is the rail to use; -1: the plugin chooses.
	Device int
}

// Name is short and can be part of an object's name: p1-12.
func (w PlannedRun) Name() string {
	letter := strings.ToLower(string(w.Stage[:1]))
	if w.Stage == evenkeel.StageRDMA {
		letter = "v" // for verbs, since Rails has the r
	}
	return fmt.Sprintf("%s%d-%d", letter, w.Round, w.Index)
}

// Reasons that package verdict does not define.
const (
	ReasonReady       = "Ready"
	ReasonLocalBroken = "LocalRunBroken"
	ReasonPlugin      = "PluginSuspect"
	ReasonGang        = "GangFailed"
	ReasonNoRDMA      = "NoRDMADevice"
	ReasonTransport   = "WrongTransport"
	ReasonMemoryLock  = "MemoryLockTooLow"
	ReasonInUse       = string(pairing.ReasonInUse)
	ReasonUncompared  = string(pairing.ReasonNothingToCompare)
	reasonFault       = string(pairing.ReasonInfrastructure)
	reasonFallback    = string(pairing.ReasonFallback)
	reasonWrongData   = string(pairing.ReasonWrongData)
	reasonUnfinished  = string(pairing.ReasonUnfinished)
	minGangNodes      = 3   // two are a pair, which was tried
	slowRail          = 0.5 // of the median of a node's rails
	messageUnfinished = "rounds are still to come"

	// TransportRDMA is the transport that a network reports that used RDMA.
	TransportRDMA = "rdma"
	// minLockedMemory is below what training over RDMA needs, and above the default of container runtimes.
	minLockedMemory = 64 << 20
)

// NodeResult is the verdict on a node.
type NodeResult struct {
	Node
	Stage evenkeel.Stage
	// BusBW is the best bus bandwidth of a run with the node over the expected network, GB/s; 0 without one.
	BusBW float64
	// LatencyUS is the least of such a run, microseconds, and Devices is as in [Run], or 0 if unknown.
	LatencyUS float64
	Devices   int
}

// FabricResult is the verdict on what connects the nodes of a pool.
type FabricResult struct {
	Pools   []string
	Verdict evenkeel.Verdict
	Reason  string
	Message string
	// MinBusBW is the minimum that its runs had to reach, GB/s, or 0 if there is none.
	MinBusBW float64
}

// Decision is what follows from the record.
type Decision struct {
	// Pending are the runs without a result; none when the verdicts are final.
	Pending []PlannedRun
	// Stage and Round of the pending runs, and the total number of runs in that round.
	Stage        evenkeel.Stage
	Round, Total int
	// Verdict is Fail if a node or a fabric failed, else Inconclusive if one of them is, else Pass.
	Verdict evenkeel.Verdict
	// Nodes are in the order of the record.
	Nodes   []NodeResult
	Fabrics []FabricResult
	// Median over the runs between nodes that passed, GB/s; 0 without any.
	Median float64
}

// Decide returns the runs to start now, or the final verdicts. Preliminary verdicts are in the decision too.
func Decide(o Options, r *Record) Decision {
	s := &state{Options: o, record: r, results: make([]NodeResult, len(r.Nodes)), done: make(map[runKey]bool, len(r.Runs))}
	for i := range r.Runs {
		s.done[runKey{r.Runs[i].Stage, r.Runs[i].Round, r.Runs[i].Index}] = true
	}
	for i, n := range r.Nodes {
		s.results[i] = NodeResult{Node: n, Stage: evenkeel.StageCapacity}
	}
	for _, stage := range []struct {
		name evenkeel.Stage
		do   func()
	}{{evenkeel.StageLocal, s.stageLocal}, {evenkeel.StageRDMA, s.stageRDMA}, {evenkeel.StagePairs, s.stagePairs}, {evenkeel.StageRails, s.stageRails}, {evenkeel.StageGang, s.stageGang}} {
		if s.has(stage.name) {
			stage.do()
		}
		if len(s.out.Pending) > 0 {
			s.out.Stage = stage.name
			break
		}
	}
	return s.finish()
}

// runKey identifies a planned run.
type runKey struct {
	stage        evenkeel.Stage
	round, index int
}

type state struct {
	Options
	record  *Record
	done    map[runKey]bool
	results []NodeResult
	pairing pairing.Decision
	out     Decision
}

func (s *state) has(stage evenkeel.Stage) bool { return slices.Contains(s.Stages, stage) }

// undecided returns the indexes of the nodes without a verdict.
func (s *state) undecided() []int {
	var open []int
	for i := range s.results {
		if s.results[i].Verdict == "" {
			open = append(open, i)
		}
	}
	return open
}

// planMissing adds the runs without a result to the pending ones, unless the check has ended. It reports whether all
// runs have a result.
func (s *state) planMissing(round int, planned []PlannedRun) bool {
	missing := slices.DeleteFunc(slices.Clone(planned), func(w PlannedRun) bool { return s.done[runKey{w.Stage, w.Round, w.Index}] })
	if s.record.Ended == "" && len(missing) > 0 {
		s.out.Pending, s.out.Round, s.out.Total = missing, round, len(planned)
	}
	return len(missing) == 0
}

func (s *state) setNode(at int, stage evenkeel.Stage, v evenkeel.Verdict, reason, message string) {
	n := &s.results[at]
	n.Stage, n.Verdict, n.Reason, n.Message = stage, v, reason, message
}

// eachRun calls visit for each recorded run of a stage.
func (s *state) eachRun(stage evenkeel.Stage, visit func(run *Run)) {
	for i := range s.record.Runs {
		if run := &s.record.Runs[i]; run.Stage == stage {
			visit(run)
		}
	}
}

// runProblem returns what is wrong with a run apart from its speed, as a reason and a message. Both are empty if
// nothing is.
func (s *state) runProblem(run *Run) (reason, message string) {
	_, networks := s.record.names(run)
	used, wanted := s.record.transports(run), s.record.Transport
	if run.Stage == evenkeel.StageRDMA {
		wanted = TransportRDMA
	}
	other := func(n string) bool { return s.Network != "" && !strings.EqualFold(n, s.Network) }
	detail := ""
	if run.Detail != "" {
		detail = " (" + run.Detail + ")"
	}
	switch {
	case len(run.InUse) > 0:
		return ReasonInUse, "the run is inconclusive" + detail
	case run.Outcome == pairing.Fault:
		return reasonFault, "the run is inconclusive" + detail
	case slices.ContainsFunc(networks, other):
		return reasonFallback, fmt.Sprintf("ran over %s, not %s", strings.Join(networks, " and "), s.Network)
	case run.Outcome == pairing.Broken:
		return ReasonLocalBroken, "the run broke" + detail
	case len(networks) == 0 && s.Network != "":
		return reasonFault, "the log does not name the network that carried the run"
	case wanted != "" && slices.Contains(used, ""):
		return reasonFault, fmt.Sprintf("the log does not say whether the run used %s", wanted)
	case wanted != "" && slices.ContainsFunc(used, func(t string) bool { return t != wanted }):
		return ReasonTransport, fmt.Sprintf("used %s, not %s", strings.Join(used, " and "), wanted)
	case run.Wrong > 0:
		return reasonWrongData, fmt.Sprintf("%d wrong elements", run.Wrong)
	}
	return "", ""
}

// stageLocal tests each node by itself.
func (s *state) stageLocal() { s.runInsideNodes(evenkeel.StageLocal, s.undecided()) }

// stageRDMA tests each node with the device by itself, over RDMA alone. If all runs have to use RDMA, a node without
// the device fails; otherwise it is left out.
func (s *state) stageRDMA() {
	var having []int
	for _, at := range s.undecided() {
		switch {
		case s.record.Nodes[at].RDMA:
			having = append(having, at)
		case s.record.Transport == TransportRDMA:
			s.setNode(at, evenkeel.StageRDMA, evenkeel.VerdictFail, ReasonNoRDMA, "the node does not offer the RDMA device that jobs get")
		}
	}
	s.runInsideNodes(evenkeel.StageRDMA, having)
}

// runInsideNodes runs a stage within each of the nodes. If most nodes fail, the plugin or the image is blamed and not
// the nodes.
func (s *state) runInsideNodes(stage evenkeel.Stage, indexes []int) {
	var works []PlannedRun
	for _, at := range indexes {
		works = append(works, PlannedRun{Stage: stage, Round: 1, Index: at, Nodes: []string{s.record.Nodes[at].Name}, Device: -1})
	}
	s.planMissing(1, works)
	tested, bad := 0, 0
	s.eachRun(stage, func(run *Run) {
		at := run.Nodes[0]
		if s.results[at].Verdict != "" {
			return
		}
		tested++
		reason, message := s.runProblem(run)
		if stage == evenkeel.StageRDMA && s.lockedMemoryTooLow(run) {
			reason, message = ReasonMemoryLock, fmt.Sprintf("pods may lock %d KiB of memory, and RDMA needs much more: set LimitMEMLOCK=infinity for the container runtime's service on the node", *run.LockedMemory>>10)
		}
		switch reason {
		case "":
		case reasonFault, ReasonInUse:
			s.setNode(at, stage, evenkeel.VerdictInconclusive, reason, message)
		default:
			bad++
			s.setNode(at, stage, evenkeel.VerdictFail, reason, "inside the node: "+message)
		}
	})
	if bad > 1 && 2*bad > tested {
		for i := range s.results {
			if n := &s.results[i]; n.Stage == stage && n.Verdict == evenkeel.VerdictFail && n.Reason != ReasonNoRDMA {
				n.Verdict, n.Reason, n.Message = evenkeel.VerdictInconclusive, ReasonPlugin, text.Clip(n.Message, maxDetail)+"; so many other nodes did too that this node is not the cause"
			}
		}
		s.out.Fabrics = append(s.out.Fabrics, FabricResult{Pools: []string{}, Verdict: evenkeel.VerdictFail, Reason: ReasonPlugin,
			Message: fmt.Sprintf("%d of %d nodes failed by themselves: the cause is more likely the plugin, the profile or the image", bad, tested)})
	}
}

// lockedMemoryTooLow reports whether the run's processes may lock less memory than RDMA needs. With the capability
// IPC_LOCK the limit does not apply.
func (s *state) lockedMemoryTooLow(run *Run) bool {
	exempt := s.record.Plugin[evenkeel.MemoryLockKey] != ""
	return !exempt && run.LockedMemory != nil && *run.LockedMemory >= 0 && *run.LockedMemory < minLockedMemory
}

func (s *state) stagePairs() {
	check := pairing.Check{Network: s.Network, Thresholds: s.Thresholds, Seed: s.Seed, Partial: map[string]bool{}}
	check.Thresholds.UsualBusBW = map[string]float64{}
	for name, pool := range s.record.Pools {
		check.Partial[name], check.Thresholds.UsualBusBW[name] = pool.Partial, pool.UsualBusBW
	}
	for i := range s.results {
		if n := &s.results[i]; n.Reason == ReasonInUse {
			check.Partial[n.Pool] = true
		}
	}
	places := map[string]int{}
	for _, at := range s.undecided() {
		n := s.record.Nodes[at]
		places[n.Name] = at
		check.Nodes = append(check.Nodes, pairing.Node{Name: n.Name, Pool: n.Pool})
	}
	s.eachRun(evenkeel.StagePairs, func(run *Run) {
		nodes, _ := s.record.names(run)
		networks := s.effectiveNetworks(run)
		var inUse []string
		for _, at := range run.InUse {
			inUse = append(inUse, s.record.Nodes[at].Name)
		}
		check.Runs = append(check.Runs, pairing.Run{InUse: inUse, Round: run.Round, Nodes: nodes, Outcome: run.Outcome, BusBW: run.BusBW, LatencyUS: run.LatencyUS, Wrong: run.Wrong, Networks: networks, Detail: run.Detail})
		for _, at := range run.Nodes {
			s.results[at].Devices = max(s.results[at].Devices, run.Devices)
		}
	})
	s.pairing = pairing.Decide(check)
	if next := s.pairing.Next; next != nil && s.record.Ended == "" {
		for _, g := range next.Groups {
			s.out.Pending = append(s.out.Pending, PlannedRun{Stage: evenkeel.StagePairs, Round: next.Number, Index: g.Index, Nodes: g.Nodes, Device: -1})
		}
		s.out.Round, s.out.Total = next.Number, next.Total
	}
	for _, n := range s.pairing.Nodes {
		at := places[n.Name]
		s.setNode(at, evenkeel.StagePairs, n.Verdict, string(n.Reason), n.Message)
		s.results[at].BusBW, s.results[at].LatencyUS = n.BusBW, n.LatencyUS
	}
	for _, f := range s.pairing.Fabrics {
		out := FabricResult{Pools: f.Pools, Verdict: f.Verdict, Reason: string(f.Reason), Message: f.Message}
		if len(f.Pools) == 1 {
			out.MinBusBW = s.pairing.Limits[f.Pools[0]].MinBusBW
		}
		if len(f.BadLinks) > 0 {
			out.Message += s.badLinksMessage(check.Runs, f.BadLinks)
		}
		if f.Reason == pairing.ReasonNoPairPassed && !slices.ContainsFunc(check.Runs, func(r pairing.Run) bool { return r.Outcome == pairing.Measured }) {
			out.Message += "; no pods of two nodes could communicate: does a NetworkPolicy of the checks' namespace deny it (chart value networkPolicy.enabled)?"
		}
		s.out.Fabrics = append(s.out.Fabrics, out)
	}
	var speeds []float64
	for i := range check.Runs {
		run := &check.Runs[i]
		passed := func(name string) bool { return s.results[places[name]].Verdict == evenkeel.VerdictPass }
		if run.Outcome == pairing.Measured && !slices.ContainsFunc(run.Nodes, func(n string) bool { return !passed(n) }) {
			speeds = append(speeds, run.BusBW)
		}
	}
	s.out.Median = pairing.Median(speeds)
}

// effectiveNetworks returns the networks that carried a run, for package pairing to compare with the expected network.
// A network with another transport than the expected one counts as another network. If a transport is unknown, so is
// the network.
func (s *state) effectiveNetworks(run *Run) []string {
	_, networks := s.record.names(run)
	wanted := s.record.Transport
	if wanted == "" {
		return networks
	}
	if slices.Contains(s.record.transports(run), "") {
		return nil
	}
	for i, at := range run.Networks {
		if used := s.record.Networks[at].Transport; used != wanted {
			networks[i] += " (" + used + ")"
		}
	}
	return networks
}

// badLinksMessage names bad runs between good nodes.
func (s *state) badLinksMessage(runs []pairing.Run, links []int) string {
	var all []string
	for i, at := range links {
		if i == 3 {
			all = append(all, "and more")
			break
		}
		all = append(all, strings.Join(runs[at].Nodes, " - "))
	}
	return "; bad between good nodes: " + strings.Join(all, ", ")
}

// stageRails tests each device of the nodes that failed, with a partner of their pool that passed.
func (s *state) stageRails() {
	type suspect struct{ at, partner int }
	var suspects []suspect
	var works []PlannedRun
	for at := range s.results {
		n := &s.results[at]
		if n.Stage != evenkeel.StagePairs || n.Verdict != evenkeel.VerdictFail || n.Reason == reasonFallback {
			continue
		}
		var partners []int
		for i := range s.results {
			if p := &s.results[i]; p.Verdict == evenkeel.VerdictPass && p.Pool == n.Pool {
				partners = append(partners, i)
			}
		}
		if len(partners) == 0 {
			continue
		}
		sus := suspect{at, partners[len(suspects)%len(partners)]}
		suspects = append(suspects, sus)
		for device := range s.Rails {
			works = append(works, PlannedRun{Stage: evenkeel.StageRails, Round: device + 1, Index: at, Device: device,
				Nodes: []string{n.Name, s.results[sus.partner].Name}})
		}
	}
	if !s.planMissing(1, works) {
		return
	}
	for _, sus := range suspects {
		if text := s.slowRails(sus.at); text != "" {
			n := &s.results[sus.at]
			n.Stage, n.Message = evenkeel.StageRails, text+"; "+n.Message
		}
	}
}

func (s *state) slowRails(at int) string {
	speeds := make([]float64, s.Rails)
	var known []float64
	s.eachRun(evenkeel.StageRails, func(run *Run) {
		device := run.Round - 1
		if run.Nodes[0] != at || device >= s.Rails || run.Outcome == pairing.Fault || len(run.InUse) > 0 {
			if run.Nodes[0] == at && device < s.Rails {
				speeds[device] = -1
			}
			return
		}
		speeds[device] = run.BusBW
		known = append(known, run.BusBW)
	})
	middle := pairing.Median(known)
	var slow []string
	for device, speed := range speeds {
		if speed >= 0 && (speed == 0 || speed < slowRail*middle) {
			slow = append(slow, fmt.Sprintf("rail %d reaches %.4g GB/s", device, speed))
		}
	}
	if len(slow) == 0 || len(slow) == s.Rails {
		return ""
	}
	return strings.Join(slow, ", ") + fmt.Sprintf(" of the rails' median %.4g", middle)
}

// stageGang runs all nodes of each pool that passed, together.
func (s *state) stageGang() {
	members := map[string][]string{}
	var pools []string
	for i := range s.results {
		if n := &s.results[i]; n.Verdict == evenkeel.VerdictPass {
			if members[n.Pool] == nil {
				pools = append(pools, n.Pool)
			}
			members[n.Pool] = append(members[n.Pool], n.Name)
		}
	}
	slices.Sort(pools)
	var works []PlannedRun
	for i, pool := range pools {
		if len(members[pool]) >= minGangNodes {
			works = append(works, PlannedRun{Stage: evenkeel.StageGang, Round: 1, Index: i, Nodes: members[pool], Device: -1})
		}
	}
	s.planMissing(1, works)
	s.eachRun(evenkeel.StageGang, func(run *Run) {
		pool := s.record.Nodes[run.Nodes[0]].Pool
		f := FabricResult{Pools: []string{pool}, Verdict: evenkeel.VerdictPass, Reason: string(pairing.ReasonProven), MinBusBW: s.pairing.Limits[pool].MinBusBW}
		f.Message = fmt.Sprintf("all %d nodes together reach %.4g GB/s", len(run.Nodes), run.BusBW)
		switch reason, message := s.runProblem(run); {
		case reason == reasonFault, reason == ReasonInUse:
			f.Verdict, f.Reason, f.Message = evenkeel.VerdictInconclusive, reason, "all nodes together: "+message
		case reason != "":
			f.Verdict, f.Reason, f.Message = evenkeel.VerdictFail, ReasonGang, fmt.Sprintf("all %d nodes together: %s; pairs of them pass", len(run.Nodes), message)
		case run.BusBW < f.MinBusBW:
			f.Verdict, f.Reason = evenkeel.VerdictFail, ReasonGang
			f.Message += fmt.Sprintf(", minimum %.4g; pairs of them pass", f.MinBusBW)
		}
		s.out.Fabrics = append(s.out.Fabrics, f)
	})
}

// finish gives verdicts to the undecided nodes, and the verdict on the whole.
func (s *state) finish() Decision {
	for i := range s.results {
		n := &s.results[i]
		if n.Verdict != "" {
			continue
		}
		switch {
		case s.record.Ended != "":
			n.Verdict, n.Reason, n.Message = evenkeel.VerdictInconclusive, reasonUnfinished, s.record.Ended
		case len(s.out.Pending) > 0:
			n.Verdict, n.Reason, n.Message = evenkeel.VerdictInconclusive, reasonUnfinished, messageUnfinished
		case s.has(evenkeel.StageRDMA) && n.RDMA:
			n.Stage, n.Verdict, n.Reason, n.Message = evenkeel.StageRDMA, evenkeel.VerdictPass, ReasonReady, "RDMA works inside the node"
		case s.has(evenkeel.StageLocal):
			n.Stage, n.Verdict, n.Reason, n.Message = evenkeel.StageLocal, evenkeel.VerdictPass, ReasonReady, "the plugin works inside the node"
		default:
			n.Verdict, n.Reason, n.Message = evenkeel.VerdictPass, ReasonReady, "the node is ready"
		}
	}
	if s.record.Ended != "" {
		for i := range s.results {
			if n := &s.results[i]; n.Reason == reasonUnfinished {
				n.Message = s.record.Ended
			}
		}
		for i := range s.out.Fabrics {
			if f := &s.out.Fabrics[i]; f.Reason == reasonUnfinished {
				f.Message = s.record.Ended
			}
		}
	}
	s.out.Nodes, s.out.Verdict = s.results, evenkeel.VerdictPass
	if len(s.results) == 0 {
		s.out.Verdict = evenkeel.VerdictInconclusive
	}
	for _, n := range s.out.Nodes {
		s.out.Verdict = evenkeel.Worst(s.out.Verdict, n.Verdict)
	}
	for _, f := range s.out.Fabrics {
		s.out.Verdict = evenkeel.Worst(s.out.Verdict, f.Verdict)
	}
	return s.out
}
