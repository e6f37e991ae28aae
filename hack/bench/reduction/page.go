package main

import (
	"bytes"
	"fmt"
	"io"
	"path/filepath"
	"slices"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/plot"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

// A report is the page.
type report struct {
	machine  machine.Machine
	quick    bool
	outdated string // see page.Outdated
	results  []caseResult
}

// otherProcessor says what a machine of another kind gives.
const otherProcessor = `**Another processor gives other figures.** On a machine with AVX2 only, 8 bytes there and back take 30 us over plain sockets instead of 16.
There an older version of this code reached 0.74 of the link and 1.29 of the ring with 4 clients and 4 servers at 1 Gbit/s, and 0.82 of the
link at 250 Mbit/s. Its clients took 11 s/GB of processor time, and 29 at 250 Mbit/s. It was not measured again on such a machine.
`

func (r report) markdown() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# Reduction servers' results\n\nWritten by `make bench-reduction`; do not edit.\n\n")
	fmt.Fprintf(&b, "One machine plays all hosts: %s", r.machine)
	if r.quick {
		b.WriteString("; quick runs")
	}
	b.WriteString(`.
Each client and server is a network namespace with a link of its own to a switch (` + "`go run ./hack/lab/net --help`" + `). In each round
all contenders run one after the other: ranks all-reduce a vector of float32 through the plugin, and check every element once.
They ask for completions, and sleep after 100 rounds in which nothing moves, as many ranks share this machine's processors. A contender that is polled as NCCL polls only yields (` + "`evenkeel-bench reduction --driver nccl`" + `).
algbw is bytes of the vector per time, 10^9 bytes a second; figures are medians. The ring is ` + "`evenkeel-bench`" + `'s own, over the same
plugin and links; no ring of NCCL's is measured here. Processors in use are those of the whole run, its start and its checks included.
Plain sockets are a blocking connection from each client to each server. All send and receive as much as they can in both directions,
and nothing is summed: the maximum of what the machine can do.

` + otherProcessor + "\n" + page.OwnGoals + "\n\n")
	if r.outdated != "" {
		b.WriteString(r.outdated + "\n\n")
	}
	table := page.Table{Heading: heading}
	for _, row := range r.rows() {
		table.Add(row.cells()...)
	}
	table.Markdown(&b)
	for _, result := range r.results {
		result.details(&b)
	}
	return b.Bytes()
}

// details writes the section of a case.
func (r caseResult) details(b *bytes.Buffer) {
	from := fmt.Sprintf("%d rounds at %s. %s", r.Rounds, r.Source, r.Machine.Quiet())
	switch {
	case r.Star != nil:
		r.Star.details(b, from)
	case len(r.Small) > 0:
		fmt.Fprintf(b, "\n## All-reduce of 1 KiB\n\n%s\n\nIn each round, three medians: of operations of %d bytes, one after the other; of messages of that size there and back;\n"+
			"and, over plain sockets, of the messages of an all-reduce: one from each client to a server, which answers when it has both.\n\n", from, smallBytes)
		table := page.Table{Heading: []string{"all-reduce", "two messages", "ratio", "over plain sockets", "processors in use"}}
		for _, round := range r.Small {
			table.Add(fmt.Sprintf("%.1f us", round.AllReduce*1e6), fmt.Sprintf("%.1f us", round.TwoMessages*1e6),
				fmt.Sprintf("%.2f", round.AllReduce/round.TwoMessages), fmt.Sprintf("%.1f us", round.Plain*1e6), fmt.Sprintf("%.0f %%", 100*round.Busy))
		}
		table.Markdown(b)
	case len(r.Kernels) > 0:
		fmt.Fprintf(b, "\n## Sums\n\nAt %s, with %s on one core. %s GB/s that are read and written. The add is of two arrays of float32 into a third, over as much\n"+
			"memory, in the same place. Loads are the sources converted to float32, as if they were one buffer, and neither summed nor stored: about the maximum.\n\n",
			r.Source, r.Kernels[0].Instructions, r.Machine.Quiet())
		table := page.Table{Heading: []string{"all buffers", "sources", "add", "float32", "of the add", "float16", "of float32", "bfloat16", "of float32",
			"fp8 e4m3", "int32", "loads: float32", "float16", "bfloat16"}}
		for _, k := range r.Kernels {
			cells := []string{k.Total, fmt.Sprint(k.Sources), fmt.Sprintf("%.1f", k.Add)}
			for _, v := range []struct{ rate, reference float64 }{{k.Float32, k.Add}, {k.Float16, k.Float32}, {k.Bfloat16, k.Float32}} {
				cells = append(cells, fmt.Sprintf("%.1f", v.rate), fmt.Sprintf("%.2f", v.rate/v.reference))
			}
			for _, v := range []float64{k.Float8, k.Int32, k.LoadFloat32, k.LoadFloat16, k.LoadBfloat16} {
				cells = append(cells, fmt.Sprintf("%.1f", v))
			}
			table.Add(cells...)
		}
		table.Markdown(b)
	}
}

func (r starResult) details(b *bytes.Buffer, from string) {
	c := r.Case
	fmt.Fprintf(b, "\n## %s\n\nVectors of %d MiB. %s\n\n", page.Capital(c.title()), r.Size>>20, from)
	table := page.Table{Heading: []string{"contender", "algbw", "worst", "best", "of the link", "of the ring", "clients' CPU s/GB", "processors in use"}}
	byRing, limited := r.of(ring, algbw), false
	add := func(name string, rates []float64, cpu string, busy float64) {
		got := stats.Median(rates)
		table.Add(name, fmt.Sprintf("%.4f GB/s", got), fmt.Sprintf("%.4f", slices.Min(rates)), fmt.Sprintf("%.4f", slices.Max(rates)),
			fmt.Sprintf("%.2f", got/c.limit()), fmt.Sprintf("%.2f", got/byRing), cpu, fmt.Sprintf("%.0f %%", 100*busy))
	}
	for _, contender := range contenders {
		var rates []float64
		for _, run := range r.Runs[contender.Name] {
			rates = append(rates, run.Algbw)
		}
		use := r.of(contender, busy)
		limited = limited || !contender.polls && use >= busyShare
		add(contender.Name, rates, fmt.Sprintf("%.2f", r.of(contender, cpu)), use)
	}
	if len(r.Plain) > 0 {
		var rates, use []float64
		for _, run := range r.Plain {
			rates, use = append(rates, run.Rate), append(use, run.Busy)
		}
		add(plainName, rates, "", stats.Median(use))
	}
	table.Markdown(b)
	if limited {
		b.WriteString("\n**The processors were all in use: these figures say more of them than of the links.**\n")
	}
	fmt.Fprintf(b, "\n![%s](%s)\n", c.title(), r.plotFile())
	if r.Timeline != "" {
		fmt.Fprintf(b, "\nWhere each piece of one all-reduce was, at the servers and at the clients:\n\n![pieces at servers and ranks](%s)\n", r.timelineFile())
	}
}

func (r starResult) plotFile() string     { return "reduction-" + r.Case.Name + ".svg" }
func (r starResult) timelineFile() string { return "reduction-" + r.Case.Name + "-timeline.svg" }

// plot draws all runs.
func (r starResult) plot() []byte {
	chart := plot.Dots{Title: page.Capital(r.Case.title()), X: "algbw, GB/s", References: []plot.Reference{{At: r.Case.limit(), Label: "link"}}}
	for _, c := range contenders {
		var values []float64
		for _, run := range r.Runs[c.Name] {
			values = append(values, run.Algbw)
		}
		chart.Add(c.Name, slices.Sorted(slices.Values(values)))
	}
	return chart.SVG()
}

// write writes the page and its drawings, and prints the table of goals.
func (r report) write(out io.Writer, folder string) error {
	files := map[string][]byte{"reduction.md": r.markdown()}
	for _, result := range r.results {
		if result.Star == nil {
			continue
		}
		files[result.Star.plotFile()] = result.Star.plot()
		if result.Star.Timeline != "" {
			files[result.Star.timelineFile()] = []byte(result.Star.Timeline)
		}
	}
	if err := page.Write(folder, files); err != nil {
		return err
	}
	table := page.Table{Heading: heading}
	for _, row := range r.rows() {
		table.Add(row.cells()...)
	}
	fmt.Fprintln(out)
	if err := table.Text(out); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\n%s has all of it\n", filepath.Join(folder, "reduction.md"))
	return err
}
