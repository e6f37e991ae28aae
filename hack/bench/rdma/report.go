package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
)

// markdown is the page of results.
func markdown(m measured, rounds int, commit, load string) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `# RDMA: the plugin beside perftest

Measured by `+"`go run ./hack/bench/rdma --rounds %d`"+` at commit %s: soft-RoCE in a virtual machine with an emulated
processor, two ports joined by a virtual Ethernet link (MTU 9000, RDMA MTU 4096), both programs in each round, one after the
other, each end on a processor of its own. Only the ratios mean something: neither the processor nor the network card is real. Ratios are those of the medians;
in brackets the least and the greatest of the rounds.
`, rounds, commit)
	if load != "" {
		fmt.Fprintf(&b, "Load of the machine around it at the end, its own included: %s.\n", load)
	}
	b.WriteString("\n| case | perftest | Evenkeel | ratio | goal | reached |\n|---|---|---|---|---|---|\n")
	var limits []string
	for _, r := range m.Results {
		ratio := median(r.Evenkeel) / median(r.Perftest)
		unit, goal, reached := "MB/s", fmt.Sprintf("at least %.1f", r.Case.Least), ratio >= r.Case.Least
		if r.Case.Latency {
			unit, goal, reached = "us", fmt.Sprintf("at most %.1f", r.Case.Most), ratio <= r.Case.Most
		}
		fmt.Fprintf(&b, "| %s | %s %s | %s %s | %.2f | %s | %s |\n", r.Case.Name,
			spread(r.Perftest), unit, spread(r.Evenkeel), unit, ratio, goal, yes(reached))
		writes, sends := r.Case.programs()
		fmt.Fprintf(&b, "| beside it: `%s` | %s %s | | %.2f of `%s` | | |\n", sends, spread(r.Sends), unit, median(r.Sends)/median(r.Perftest), writes)
		if !reached {
			limits = append(limits, fmt.Sprintf("* %s: %s\n", r.Case.Name, r.Case.Limits))
		}
	}
	if len(limits) > 0 {
		b.WriteString("\nWhat limits those that are not reached:\n\n" + strings.Join(limits, ""))
	}
	b.WriteString("\n| case | goal | reached |\n|---|---|---|\n")
	for _, of := range checks {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", of.Name, of.Goal, yes(m.Passed[of.Name]))
	}
	b.WriteString(`
perftest: ` + "`ib_write_bw` and `ib_write_lat`" + `, the average and the typical value that they print. ` +
		"The receiver of `ib_write_bw` sleeps until all is over, that of `ib_write_lat` looks at memory; those of `ib_send_bw` and `ib_send_lat` look for a completion of each message, as the plugin's does." + ` Evenkeel: ` +
		"`evenkeel-bench net --transport rdma`" + `, through NCCL's interface: the receiver posts each buffer, every message says
which one it is, and that is checked. The cases without figures are tests of the plugin's, run in the same machine, those of other ports in one with two pairs:
`)
	for _, of := range checks {
		for _, test := range of.Tests {
			fmt.Fprintf(&b, "`%s`\n", test)
		}
	}
	return b.Bytes()
}

func yes(reached bool) string {
	if reached {
		return "yes"
	}
	return "**no**"
}

func spread(values []float64) string {
	return fmt.Sprintf("%.1f (%.1f to %.1f)", median(values), slices.Min(values), slices.Max(values))
}

// median of values, of which there must be some.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}
