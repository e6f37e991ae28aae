package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/plot"
)

// Drawings of the page.
const (
	minimumDrawing = "collectives-minimum.svg"
	medianDrawing  = "collectives-median.svg"
	starDrawing    = "collectives-hosts.svg"
)

// write writes the page and its drawings into a folder; without one, it does nothing.
func (r *results) write(folder string) error {
	if folder == "" {
		return nil
	}
	files := map[string][]byte{"collectives.md": r.markdown()}
	if r.Local[0].rounds != nil {
		files[minimumDrawing] = r.drawing("minimum times", func(f figure) float64 { return f.min })
		files[medianDrawing] = r.drawing("medians", func(f figure) float64 { return f.median })
	}
	if r.Star.rounds != nil {
		files[starDrawing] = r.starDrawing()
	}
	return page.Write(folder, files)
}

const heading = `# Collectives against Gloo

Written by ` + "`make bench-collectives`" + `; do not edit.

%s

An all-reduce (sum of float32) by Evenkeel, which chooses the algorithm, and by %s over TCP with each of its algorithms (%s). The best algorithm at each
size is what Evenkeel is compared with. In each round all contenders run once, one after the other, in rotating order. Figures are the minimum time of all
rounds, and the median of the round with the lowest median, in microseconds, on rank 0. All processes share one machine: with more of them than cores, the
medians are mostly those of the scheduler.

Gloo runs in its default blocking mode: the driver sets neither ` + "`setSync` nor `busyPoll`" + `, which are its modes for low latency. Evenkeel's caller
polls for 2 ms before it sleeps. So the ratios at small sizes compare a polling waiter with a sleeping one. Evenkeel's shared memory is compared with Gloo
over TCP, as Gloo has no transport over shared memory.

`

const limits = `
Where there are more processes than cores they share them, and the minimum time is that of the run with the fewest context switches. Between hosts each
connection of Evenkeel has four flows, which are for networks with several paths; here they share one link, and ` + "`EVENKEEL_FLOWS=1`" + ` is shown for
comparison.
`

// taken says when, where and how long the figures were taken.
func (s setting) taken() string {
	quick := ""
	if s.Quick {
		quick = "; a quick run"
	}
	return fmt.Sprintf("Taken at %s. Machine: %s. %s %d rounds, %s for each figure, %.1f minutes in all%s.",
		s.Source, s.Machine, s.Machine.Quiet(), s.Rounds, s.Length, s.Took.Minutes(), quick)
}

// markdown is the page.
func (r *results) markdown() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, heading, r.taken(), r.Gloo, strings.Join(r.algorithms(), ", "))
	b.WriteString(page.OneProcessor + "\n\n" + page.OwnGoals + "\n\n")
	goals := page.Table{Heading: []string{"case", "goal", "reached", "measured"}}
	for _, row := range r.goals() {
		goals.Add(row.what, row.goal, row.reached, row.measured)
	}
	goals.Markdown(&b)
	b.WriteString(limits)
	failed := slices.Clone(r.Star.failed)
	for _, m := range r.Local {
		failed = append(failed, m.failed...)
	}
	listFailed(&b, failed)
	if r.Local[0].rounds != nil {
		fmt.Fprintf(&b, "\n![ratios of the minimum times](%s)\n\n![ratios of the medians](%s)\n", minimumDrawing, medianDrawing)
	}
	for _, m := range r.Local {
		m.table(&b, r.Elements)
	}
	r.between(&b)
	return b.Bytes()
}

// listFailed lists the runs that failed, if any.
func listFailed(b *bytes.Buffer, failed []string) {
	if len(failed) > 0 {
		fmt.Fprintf(b, "\nRuns that failed and were repeated: %s.\n", strings.Join(failed, "; "))
	}
}

func (m *measured) table(b *bytes.Buffer, elements []int) {
	fmt.Fprintf(b, "\n## %d processes\n\n", m.ranks)
	if m.rounds == nil {
		fmt.Fprintln(b, "Not measured.")
		return
	}
	fmt.Fprintln(b, "Minimum / median.")
	fmt.Fprintln(b)
	fmt.Fprintln(b, "| elements | Gloo's best (of the median) | Evenkeel, TCP | ratio | Evenkeel, shared memory | ratio |")
	fmt.Fprintln(b, "| --: | --: | --: | --: | --: | --: |")
	for _, n := range elements {
		gloos, name := m.best(n)
		over, through := m.of(tcp, n), m.of(shm, n)
		a, c := m.ratio(tcp, n), m.ratio(shm, n)
		fmt.Fprintf(b, "| %d | %.0f / %.0f (%s) | %.0f / %.0f | %.2f / %.2f | %.0f / %.0f | %.2f / %.2f |\n", n,
			gloos.min, gloos.median, name, over.min, over.median, a.min, a.median, through.min, through.median, c.min, c.median)
	}
}

// names are the contenders between hosts.
func (r *results) names() []string {
	all := []string{tcp, oneFlow}
	for _, algorithm := range r.Star.algorithms() {
		all = append(all, gloo(algorithm))
	}
	return all
}

// between writes the section about several hosts.
func (r *results) between(b *bytes.Buffer) {
	bound := wireBound(starElements)
	fmt.Fprintf(b, `
## Between hosts

%d processes, each in a network namespace of its own, with a link of %s to a switch; %d elements, %s for each figure. A ring cannot take
less than %.0f ms on these links: each host sends %.1f times the elements, in packets of %d bytes, whose headers count.

`, hosts, linkRate, starElements, r.StarLength, bound/1e3, 2*float64(hosts-1)/float64(hosts), 1500)
	if r.Star.rounds == nil {
		fmt.Fprintln(b, "Not measured.")
		return
	}
	fmt.Fprintln(b, "| contender | minimum | median | share of the bound |")
	fmt.Fprintln(b, "| --- | --: | --: | --: |")
	for _, name := range r.names() {
		f := r.Star.of(name, starElements)
		fmt.Fprintf(b, "| %s | %.0f ms | %.0f ms | %.3f / %.3f |\n", name, f.min/1e3, f.median/1e3, bound/f.min, bound/f.median)
	}
	fmt.Fprintf(b, "\n![medians of the rounds between hosts](%s)\n", starDrawing)
}

func (r *results) drawing(what string, of func(figure) float64) []byte {
	drawing := plot.Lines{
		Title:      "All-reduce: " + what + " relative to Gloo's best over TCP",
		X:          "elements (float32)",
		Y:          "ratio",
		References: []plot.Reference{{At: 1, Label: "Gloo"}},
		LogX:       true,
	}
	for _, m := range r.Local {
		if m.rounds == nil {
			continue
		}
		for _, name := range []string{tcp, shm} {
			var points [][2]float64
			for _, n := range r.Elements {
				points = append(points, [2]float64{float64(n), of(m.ratio(name, n))})
			}
			drawing.Add(fmt.Sprintf("%s, %d processes", name, m.ranks), points)
		}
	}
	return drawing.SVG()
}

func (r *results) starDrawing() []byte {
	drawing := plot.Dots{
		Title:      fmt.Sprintf("All-reduce of %d elements between %d hosts with links of %s", starElements, hosts, linkRate),
		X:          "median of each round, ms",
		References: []plot.Reference{{At: wireBound(starElements) / 1e3, Label: "a ring's bound"}},
	}
	for _, name := range r.names() {
		var values []float64
		for _, round := range r.Star.rounds {
			values = append(values, round[name][starElements].median/1e3)
		}
		slices.Sort(values)
		drawing.Add(name, values)
	}
	return drawing.SVG()
}
