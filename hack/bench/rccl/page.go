package main

import (
	"bytes"
	"fmt"
	"slices"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// markdown is the page about these cases.
func markdown(cases []benchCase, rates result, rounds int, source page.Source, host machine.Machine) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `# RCCL over Evenkeel and over its own sockets

Written by `+"`make bench-rccl`"+`; do not edit.

%d rounds at %s. Machine: %s. %s
%s
%s

RCCL is real: Debian's 2.13.4. The GPUs are not: memory is the host's, and the kernels run on the same processors as the network
([how](../../hack/lab/rccl/README.md)). So the page shows how the two networks share links under a real library's traffic. It cannot show
GPU memory, GPUDirect, or the time of a GPU's kernels.

All-reduces of %d MiB between two hosts of one rank each, every element checked. In GB/s: the size divided by the time of the slower rank;
the median of the rounds, and in brackets the least and the greatest. A round has new processes and so new ports, which the links are
chosen by. The last column compares the medians of Evenkeel and of the better sockets.

`, rounds, source, host, host.Quiet(), source.Since("plugin/crates", "hack/lab/rccl"), page.OneProcessor, allReduceBytes>>20)
	table := page.Table{Heading: []string{"network", "links' limit"}}
	for _, c := range contenders {
		table.Heading = append(table.Heading, c.name)
	}
	table.Heading = append(table.Heading, "ratio")
	for i, c := range cases {
		limit := "-"
		if c.links != nil {
			var all []netns.Rate
			for _, link := range c.links {
				all = append(all, link.Rate)
			}
			limit = fmt.Sprintf("%.2f", netns.PayloadLimit(all...))
		}
		row, sockets, ours := []string{c.title, limit}, 0.0, 0.0
		for k, of := range contenders {
			values := rates[i][k]
			row = append(row, fmt.Sprintf("%.3f (%.3f to %.3f)", stats.Median(values), slices.Min(values), slices.Max(values)))
			if of.sockets {
				sockets = max(sockets, stats.Median(values))
			} else {
				ours = stats.Median(values)
			}
		}
		table.Add(append(row, fmt.Sprintf("%.2f", ours/sockets))...)
	}
	table.Markdown(&b)
	b.WriteString(`
An all-reduce of two ranks sends as many bytes each way as it has, at most at the links' limit. RCCL's sockets send a message over one
connection, or divide it over several in equal parts, and wait for the slowest. "16 for each connection" is the most that RCCL takes:
` + "`NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4`" + `.

An all-reduce of 40 MB over Evenkeel once took 4.6 s on a busy machine, instead of 0.2 to 0.6 s. No cause was found. To see it again, four
ranks on two cores at a load of 8 to 10 ran 100 all-reduces of 40 MB over each network, with the same RCCL. The longest took 0.65 s over
Evenkeel and 0.47 s over RCCL's sockets. These runs were made once, by hand; the commands here do not repeat them.
`)
	return b.Bytes()
}
