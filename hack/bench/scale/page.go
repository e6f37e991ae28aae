package main

import (
	"bytes"
	"fmt"
	"slices"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

// idleSeconds is how long connections are watched while nothing is sent.
const idleSeconds = 3

// The cases that goals are about.
var (
	ours   = benchCase{pairs: 1024}
	nccl   = benchCase{pairs: 1024, plainSockets: 2} // as many sockets as NCCL's own have for a connection
	few    = benchCase{pairs: 256}
	idlest = benchCase{pairs: 4000}
	// most are shared by pairs of processes, since a process may not have that many descriptors.
	most = benchCase{pairs: 3334, processes: 3}
)

var cases = []benchCase{
	ours, {pairs: 1024, flows: 1}, {pairs: 1024, plainSockets: 4}, nccl, {pairs: 1024, plainSockets: 1},
	few, idlest, {pairs: 4000, plainSockets: 4}, most, {pairs: 3334, plainSockets: 4, processes: 3},
}

// Goals.
const (
	maxOpenRatio     = 1.2 // time to open and to close, over that of plain sockets
	maxDescriptors   = 8.01
	maxMemory        = 64  // KiB of a pair
	maxIdle          = 0.5 // per cent of a processor
	maxGrowthPerPair = 1.5 // time for each of many pairs, over that for each of few
)

// A report is the page.
type report struct {
	machine machine.Machine
	source  page.Source
	rounds  int
	cases   []caseResult
}

type caseResult struct {
	of   benchCase
	runs []outcome
}

// values lists a figure of all runs.
func (r caseResult) values(figure func(outcome) float64) []float64 {
	var all []float64
	for _, o := range r.runs {
		all = append(all, figure(o))
	}
	return all
}

func (r caseResult) median(figure func(outcome) float64) float64 {
	return stats.Median(r.values(figure))
}

// The figures.
func opening(o outcome) float64     { return o.Listen + o.Open }
func openClose(o outcome) float64   { return o.Listen + o.Open + o.Close }
func closing(o outcome) float64     { return o.Close }
func descriptors(o outcome) float64 { return o.Descriptors }
func memory(o outcome) float64      { return o.Memory }
func idle(o outcome) float64        { return o.Idle }
func wakeups(o outcome) float64     { return o.Wakeups }

func (r report) result(of benchCase) caseResult {
	return r.cases[slices.IndexFunc(r.cases, func(c caseResult) bool { return c.of == of })]
}

func (r report) markdown() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `# Connections at scale

Written by %s; do not edit.

What many connections of two processes cost while they carry nothing, over the loopback interface. Each has carried one message
of 1 KiB, and is idle for %d s. A pair is both ends of a connection, so descriptors, memory, time of a processor and wake-ups
are those of both processes together. One row is one command:

%s
evenkeel-bench scale --plugin ./libnccl-net-evenkeel.so --connections 1024
evenkeel-bench scale --plain-sockets 2 --connections 1024     # as many sockets as NCCL's own have
%s

%s. %d rounds at %s; in each, all contenders run one after the other.
%s
%s
%s
Figures are medians, with the least and the greatest of the rounds in brackets.

`, "`make bench-scale`", idleSeconds, "```", "```", r.machine, r.rounds, r.source, r.source.Since("plugin/crates"), r.machine.Quiet(), page.OneProcessor)
	table := page.Table{Heading: []string{"contender", "listen and open, s", "close, s", "descriptors of a pair", "memory of a pair, KiB", "idle: % of a processor", "wake-ups a second"}}
	for _, c := range r.cases {
		cell := func(format string, figure func(outcome) float64) string {
			all := c.values(figure)
			return fmt.Sprintf(format+" ("+format+" to "+format+")", stats.Median(all), slices.Min(all), slices.Max(all))
		}
		table.Add(c.of.String(), cell("%.2f", opening), cell("%.2f", closing), fmt.Sprintf("%.1f", c.median(descriptors)),
			cell("%.1f", memory), cell("%.2f", idle), cell("%.1f", wakeups))
	}
	table.Markdown(&b)
	fmt.Fprintf(&b, "\nWhere several pairs of processes share the connections, times, descriptors and memory are those of the worst of them, and idle figures\n"+
		"are sums. The listening socket is one more descriptor for each process, and not counted. Beyond some 14,000 flows between two addresses, the\n"+
		"kernel takes longer and longer to find a free port, for plain sockets as well.\n\n%s\n\n", page.OwnGoals)
	goals := page.Table{Heading: []string{"goal", "reached", "measured"}}
	for _, g := range r.goals() {
		goals.Add(g.text, page.YesNo(g.reached), g.measured)
	}
	goals.Markdown(&b)
	b.WriteString("\nWhat a connection takes in system calls, and why opening costs more than plain sockets, is on the page about [system calls](polling.md#opening).\n")
	return b.Bytes()
}

// A goal is what many connections may cost.
type goal struct {
	text, measured string
	reached        bool
}

func (r report) goals() []goal {
	own, plain := r.result(ours), r.result(nccl)
	ratio := own.median(openClose) / plain.median(openClose)
	each := func(c benchCase) float64 { return r.result(c).median(openClose) / float64(c.pairs*max(c.processes, 1)) }
	growth := each(most) / each(few)
	var heaviest, busiest float64
	for _, c := range r.cases {
		if c.of.plainSockets == 0 {
			heaviest = max(heaviest, c.median(memory))
		}
	}
	busiest = r.result(idlest).median(idle)
	return []goal{
		{fmt.Sprintf("opening and closing 1,024 pairs takes at most %g times as long as 2 plain sockets for each", maxOpenRatio), fmt.Sprintf("%.1f times", ratio), ratio <= maxOpenRatio},
		{fmt.Sprintf("time grows with the number of pairs: each of 10,002 takes at most %g times as long as each of 256", maxGrowthPerPair), fmt.Sprintf("%.1f times", growth), growth <= maxGrowthPerPair},
		{"a pair with 4 flows has 8 descriptors", fmt.Sprintf("%.2f", own.median(descriptors)), own.median(descriptors) <= maxDescriptors},
		{fmt.Sprintf("an idle pair takes at most %d KiB", maxMemory), fmt.Sprintf("%.0f KiB in the worst row", heaviest), heaviest <= maxMemory},
		{fmt.Sprintf("4,000 idle pairs use at most %g %% of a processor, both processes together", maxIdle), fmt.Sprintf("%.2f %%", busiest), busiest <= maxIdle},
	}
}
