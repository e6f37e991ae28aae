package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/plot"
)

// Contenders' names.
const (
	tcp     = "Evenkeel, TCP"
	oneFlow = "Evenkeel, TCP, one flow"
	shm     = "Evenkeel, shared memory"
)

func gloo(algorithm string) string { return "Gloo, " + algorithm }

// Drawings beside the page.
const (
	leastDrawing  = "collectives-least.svg"
	medianDrawing = "collectives-median.svg"
	starDrawing   = "collectives-hosts.svg"
)

// results are all that was measured.
type results struct {
	Rounds             int
	Length, StarLength time.Duration
	Elements           []int
	Quick              bool
	Machine, Commit    string
	Gloo               string // which one
	Took               time.Duration
	Local              []*measured
	Star               measured
	Threads            threaded
}

// measured is what everybody took, by name and number of elements, in each round.
type measured struct {
	ranks  int
	rounds []map[string]map[int]figure
	failed []string // whose runs ended with an error and were repeated
}

// threaded is what ranks took that are threads of one process.
type threaded struct{ rounds []threadsReport }

// threadsReport is what one run of them gave.
type threadsReport struct {
	figure
	movers int // threads that wait for the network
}

// of is the least time of all rounds, and the median of the round with the least median.
func (m *measured) of(name string, elements int) figure {
	best := m.rounds[0][name][elements]
	for _, round := range m.rounds[1:] {
		f := round[name][elements]
		best = figure{min(best.least, f.least), min(best.median, f.median)}
	}
	return best
}

// algorithms are those of Gloo's that were measured.
func (m *measured) algorithms() []string {
	return slices.DeleteFunc(slices.Clone(algorithms), func(name string) bool { return m.rounds[0][gloo(name)] == nil })
}

// algorithms are those of Gloo's that were measured in any case.
func (r *results) algorithms() []string {
	for _, m := range append(slices.Clone(r.Local), &r.Star) {
		if m.rounds != nil {
			return m.algorithms()
		}
	}
	return algorithms
}

// best is Gloo's best at a size: the least time of all algorithms, and the
// least median with the algorithm that it is of.
func (m *measured) best(elements int) (figure, string) {
	var best figure
	var name string
	for _, algorithm := range m.algorithms() {
		f := m.of(gloo(algorithm), elements)
		if name == "" || f.median < best.median {
			best.median, name = f.median, algorithm
		}
		if best.least == 0 || f.least < best.least {
			best.least = f.least
		}
	}
	return best, name
}

// ratio is how much of Gloo's best somebody took.
func (m *measured) ratio(name string, elements int) figure {
	its, _ := m.best(elements)
	own := m.of(name, elements)
	return figure{own.least / its.least, own.median / its.median}
}

// write writes the page and its drawings into a folder; without one, nothing.
func (r *results) write(folder string) error {
	if folder == "" {
		return nil
	}
	files := map[string][]byte{"collectives.md": r.page()}
	if r.Local[0].rounds != nil {
		files[leastDrawing] = r.drawing("least times", func(f figure) float64 { return f.least })
		files[medianDrawing] = r.drawing("medians", func(f figure) float64 { return f.median })
	}
	if r.Star.rounds != nil {
		files[starDrawing] = r.starDrawing()
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(folder, name), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

const heading = `# Collectives beside Gloo

Written by ` + "`make bench-collectives`" + `; do not edit.

Commit %s. %s. %d rounds, %s for each figure, %.1f minutes in all%s.

An all-reduce (sum of float32) by Evenkeel, which chooses the algorithm, and by %s over TCP with each of its algorithms (%s), of which the best
one at each size is the measure. In each round everybody is measured once, one after the other, in another order than in the last one. Figures are the
least time of all rounds, and the median of the round with the least median, in microseconds, on rank 0. All processes share one machine: with more of
them than cores, the medians are mostly those of the scheduler.

| case | goal | reached | |
| --- | --- | --- | --- |
`

const limits = `
What to know when reading it: where there are more processes than cores they take turns on them, and the least time is the one with the fewest turns in
it. Between hosts each connection of Evenkeel's has four flows, which are for networks with several paths; here they share one link, and ` + "`EVENKEEL_FLOWS=1`" + `
is shown beside them.
`

// page is the page's text.
func (r *results) page() []byte {
	var b bytes.Buffer
	quick := ""
	if r.Quick {
		quick = "; a quick run"
	}
	fmt.Fprintf(&b, heading, r.Commit, r.Machine, r.Rounds, r.Length, r.Took.Minutes(), quick, r.Gloo, strings.Join(r.algorithms(), ", "))
	for _, row := range r.goals() {
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", row.what, row.goal, row.verdict, row.seen)
	}
	b.WriteString(limits)
	failed := slices.Clone(r.Star.failed)
	for _, m := range r.Local {
		failed = append(failed, m.failed...)
	}
	if len(failed) > 0 {
		fmt.Fprintf(&b, "\nEnded with an error and were done again: %s.\n", strings.Join(failed, "; "))
	}
	if r.Local[0].rounds != nil {
		fmt.Fprintf(&b, "\n![ratios of the least times](%s)\n\n![ratios of the medians](%s)\n", leastDrawing, medianDrawing)
	}
	for _, m := range r.Local {
		m.table(&b, r.Elements)
	}
	r.between(&b)
	return b.Bytes()
}

// A goal is a line of the table of goals.
type goal struct{ what, goal, verdict, seen string }

// goals are those that were set, and what became of them.
func (r *results) goals() []goal {
	var rows []goal
	add := func(done bool, what, aim string, judge func() (bool, string)) {
		row := goal{what, aim, "not measured", ""}
		if done {
			var reached bool
			reached, row.seen = judge()
			row.verdict = "no"
			if reached {
				row.verdict = "yes"
			}
		}
		rows = append(rows, row)
	}
	least := func(f figure) float64 { return f.least }
	median := func(f figure) float64 { return f.median }
	for _, m := range r.Local {
		done, where := m.rounds != nil, fmt.Sprintf("%d processes", m.ranks)
		for _, which := range []struct {
			name string
			of   func(figure) float64
		}{{"least", least}, {"median", median}} {
			if m.ranks > 2 && which.name == "median" {
				continue // the scheduler's
			}
			ratio := func(name string) func(int) float64 {
				return func(n int) float64 { return which.of(m.ratio(name, n)) }
			}
			add(done, where+" over TCP, "+which.name, "at most Gloo's best at every size", func() (bool, string) {
				return r.everywhere(ratio(tcp), func(int) float64 { return 1 })
			})
			add(done, where+" over TCP, "+which.name, "at most 0.7 of it at half of the sizes", func() (bool, string) {
				reached := 0
				for _, n := range r.Elements {
					if ratio(tcp)(n) <= 0.7 {
						reached++
					}
				}
				return 2*reached >= len(r.Elements), fmt.Sprintf("at %d of %d", reached, len(r.Elements))
			})
			add(done, where+" through shared memory, "+which.name, "at most 0.3 of Gloo's best over TCP up to 1,000 elements, 0.5 above", func() (bool, string) {
				return r.everywhere(ratio(shm), shmShare)
			})
		}
	}
	add(r.Star.rounds != nil, fmt.Sprintf("%d hosts with links of %s, %d elements", hosts, linkRate, starElements), "0.95 of the wire's bound for a ring", func() (bool, string) {
		f, bound := r.Star.of(tcp, starElements), wireBound(starElements)
		return bound/f.median >= 0.95, fmt.Sprintf("least %.3f, median %.3f", bound/f.least, bound/f.median)
	})
	add(r.Threads.rounds != nil, fmt.Sprintf("%d ranks as threads of one process, 1 element", threads), "completes, with no more than one thread that waits for the network per core", func() (bool, string) {
		best := r.Threads.rounds[0]
		for _, f := range r.Threads.rounds[1:] {
			best.figure = figure{min(best.least, f.least), min(best.median, f.median)}
			best.movers = max(best.movers, f.movers)
		}
		cores := runtime.NumCPU()
		return best.movers <= cores, fmt.Sprintf("%d such threads, %d cores; least %.0f us, median %.0f us", best.movers, cores, best.least, best.median)
	})
	return rows
}

// shmShare is what shared memory may take of Gloo's time over TCP.
func shmShare(elements int) float64 {
	if elements <= 1000 {
		return 0.3
	}
	return 0.5
}

// everywhere reports whether a ratio is at most its limit at every size, and where it is not.
func (r *results) everywhere(ratio, limit func(elements int) float64) (bool, string) {
	var missed []string
	for _, n := range r.Elements {
		if f := ratio(n); f > limit(n) {
			missed = append(missed, fmt.Sprintf("%d (%.2f)", n, f))
		}
	}
	seen := fmt.Sprintf("at %d of %d", len(r.Elements)-len(missed), len(r.Elements))
	if missed != nil {
		seen += "; not at " + strings.Join(missed, ", ")
	}
	return missed == nil, seen
}

func (m *measured) table(b *bytes.Buffer, elements []int) {
	fmt.Fprintf(b, "\n## %d processes\n\n", m.ranks)
	if m.rounds == nil {
		fmt.Fprintln(b, "Not measured.")
		return
	}
	fmt.Fprintln(b, "Least / median.")
	fmt.Fprintln(b)
	fmt.Fprintln(b, "| elements | Gloo's best (of the median) | Evenkeel, TCP | ratio | Evenkeel, shared memory | ratio |")
	fmt.Fprintln(b, "| --: | --: | --: | --: | --: | --: |")
	for _, n := range elements {
		its, name := m.best(n)
		over, through := m.of(tcp, n), m.of(shm, n)
		a, c := m.ratio(tcp, n), m.ratio(shm, n)
		fmt.Fprintf(b, "| %d | %.0f / %.0f (%s) | %.0f / %.0f | %.2f / %.2f | %.0f / %.0f | %.2f / %.2f |\n", n,
			its.least, its.median, name, over.least, over.median, a.least, a.median, through.least, through.median, c.least, c.median)
	}
}

// names are those who were measured between hosts.
func (r *results) names() []string {
	all := []string{tcp, oneFlow}
	for _, algorithm := range r.Star.algorithms() {
		all = append(all, gloo(algorithm))
	}
	return all
}

// between is the part of the page about several hosts.
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
	fmt.Fprintln(b, "| who | least | median | share of the bound |")
	fmt.Fprintln(b, "| --- | --: | --: | --: |")
	for _, name := range r.names() {
		f := r.Star.of(name, starElements)
		fmt.Fprintf(b, "| %s | %.0f ms | %.0f ms | %.3f / %.3f |\n", name, f.least/1e3, f.median/1e3, bound/f.least, bound/f.median)
	}
	fmt.Fprintf(b, "\n![medians of the rounds between hosts](%s)\n", starDrawing)
}

func (r *results) drawing(what string, of func(figure) float64) []byte {
	drawing := plot.Lines{
		Title: "All-reduce: " + what + " beside Gloo's best over TCP",
		X:     "elements (float32)",
		Y:     "ratio",
		Marks: []plot.Mark{{At: 1, Label: "as Gloo"}},
		LogX:  true,
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
		Title: fmt.Sprintf("All-reduce of %d elements between %d hosts with links of %s", starElements, hosts, linkRate),
		X:     "median of each round, ms",
		Marks: []plot.Mark{{At: wireBound(starElements) / 1e3, Label: "a ring's bound"}},
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
