package main

import (
	"bytes"
	"fmt"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

// markdown is the page.
func markdown(m measured, rounds int, source page.Source, host machine.Machine) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `# RDMA: the plugin against perftest

Written by `+"`make bench-rdma`"+`; do not edit.

%d rounds at %s. Machine: %s. %s
Soft-RoCE in a virtual machine with an emulated processor; two ports joined by a virtual Ethernet link (MTU 9000, RDMA MTU 4096).
Both programs run in each round, one after the other, each end on a processor of its own. Only the ratios mean something: neither
the processor nor the network card is real. Ratios are those of the medians; in brackets are the least and the greatest of the rounds.

%s

`, rounds, source, host, host.Quiet(), page.OwnGoals)
	cases := page.Table{Heading: []string{"case", "perftest", "Evenkeel", "ratio", "goal", "reached"}}
	var limits []string
	for _, r := range m.Results {
		ratio := stats.Median(r.Evenkeel) / stats.Median(r.Perftest)
		unit, goal, reached := "MB/s", fmt.Sprintf("at least %.1f", r.Case.Min), ratio >= r.Case.Min
		if r.Case.Latency {
			unit, goal, reached = "us", fmt.Sprintf("at most %.1f", r.Case.Max), ratio <= r.Case.Max
		}
		figure := func(values []float64) string { return stats.MedianAndRange(values) + " " + unit }
		cases.Add(r.Case.Name, figure(r.Perftest), figure(r.Evenkeel), fmt.Sprintf("%.2f", ratio), goal, page.YesNo(reached))
		writes, sends := r.Case.perftest()
		cases.Add(fmt.Sprintf("for comparison: `%s`", sends), figure(r.Sends), "", fmt.Sprintf("%.2f of `%s`", stats.Median(r.Sends)/stats.Median(r.Perftest), writes), "", "")
		if !reached {
			limits = append(limits, fmt.Sprintf("* %s: %s\n", r.Case.Name, r.Case.Limits))
		}
	}
	cases.Markdown(&b)
	if len(limits) > 0 {
		b.WriteString("\nWhat limits the cases that miss their goal:\n\n" + strings.Join(limits, ""))
	}
	b.WriteString("\n")
	passes := page.Table{Heading: []string{"case", "goal", "reached"}}
	for _, of := range checks {
		passes.Add(of.Name, of.Goal, page.YesNo(m.Passed[of.Name]))
	}
	passes.Markdown(&b)
	b.WriteString("\nperftest: `ib_write_bw` and `ib_write_lat`, the average and the typical value that they print. The receiver of `ib_write_bw` sleeps until the end,\n" +
		"that of `ib_write_lat` polls memory. Those of `ib_send_bw` and `ib_send_lat` poll for a completion of each message, as the plugin's does. Evenkeel:\n" +
		"`evenkeel-bench net --transport rdma`, through NCCL's interface: the receiver posts each buffer, and every message has its number, which is checked.\n" +
		"Idle pairs are 200, as the virtual machine opens and uses each over its emulated processor. Over TCP, [4,000](scale.md) are measured.\n" +
		"The cases without figures are tests of the plugin, in the same virtual machine; those of other ports run in one with two pairs:\n\n")
	for _, of := range checks {
		for _, test := range of.Tests {
			fmt.Fprintf(&b, "* `%s`\n", test)
		}
	}
	return b.Bytes()
}
