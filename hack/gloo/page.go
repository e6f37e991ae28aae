package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/plot"
)

const folder = "docs/results"

// Contenders' names.
const (
	tcp = "Evenkeel, TCP"
	shm = "Evenkeel, shared memory"
)

func gloo(algorithm string) string { return "Gloo, " + algorithm }

// results are all that was measured.
type results struct {
	Rounds   int
	Length   time.Duration
	Elements []int
	Machine  string
	Local    []local
	Star     map[string]map[int]figure
}

// local is what was measured with that many processes on one machine.
type local struct {
	ranks   int
	figures map[string]map[int]figure
}

const heading = `# Collectives beside Gloo

` + "`make bench-collectives`" + ` measures this: an all-reduce (sum of float32) by Evenkeel, which chooses the algorithm, and by Debian's libgloo over TCP with
each of its algorithms that suits, of which the best one at each size is shown. Everybody takes a turn in each round, with the other order in the next.
Figures are the least time of all rounds, and the median of the round with the least median, in microseconds, on rank 0. Everything is on one machine:
processes share its cores, so that with more processes than cores the medians are mostly those of the scheduler.

%s; %d rounds, %s for each figure.

![ratios of the least times](collectives.svg)
`

// write writes the page and its drawing; if quick, the page's text only, for people.
func (r results) write(quick bool) error {
	var text strings.Builder
	fmt.Fprintf(&text, heading, r.Machine, r.Rounds, r.Length)
	for _, l := range r.Local {
		l.table(&text, r.Elements)
	}
	r.between(&text)
	if quick {
		_, err := os.Stdout.WriteString(text.String())
		return err
	}
	if err := os.WriteFile(filepath.Join(folder, "collectives.svg"), r.drawing(), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, "collectives.md"), []byte(text.String()), 0o644)
}

// best is Gloo's best at a size: the least time of all algorithms, and the
// least median with the algorithm that it is of.
func best(figures map[string]map[int]figure, n int) (figure, string) {
	var f figure
	var name string
	for _, algorithm := range algorithms {
		its := figures[gloo(algorithm)][n]
		if name == "" || its.median < f.median {
			f.median, name = its.median, algorithm
		}
		if f.least == 0 || its.least < f.least {
			f.least = its.least
		}
	}
	return f, name
}

// within reports whether both figures are at most that share of another's.
func (f figure) within(share float64, other figure) bool {
	return f.least <= share*other.least && f.median <= share*other.median
}

func (l local) table(text *strings.Builder, elements []int) {
	fmt.Fprintf(text, "\n## %d processes\n\n", l.ranks)
	fmt.Fprintln(text, "| elements | Gloo, least / median (algorithm) | Evenkeel, TCP | ratio | Evenkeel, shared memory | ratio |")
	fmt.Fprintln(text, "|--:|--:|--:|--:|--:|--:|")
	reached, most, shared := 0, 0, 0
	for _, n := range elements {
		its, name := best(l.figures, n)
		over, through := l.figures[tcp][n], l.figures[shm][n]
		if over.within(1, its) {
			reached++
		}
		if over.within(0.7, its) {
			most++
		}
		share := 0.5
		if n <= 1000 {
			share = 0.3
		}
		if through.within(share, its) {
			shared++
		}
		fmt.Fprintf(text, "| %d | %.0f / %.0f (%s) | %.0f / %.0f | %.2f / %.2f | %.0f / %.0f | %.2f / %.2f |\n", n,
			its.least, its.median, name, over.least, over.median, over.least/its.least, over.median/its.median,
			through.least, through.median, through.least/its.least, through.median/its.median)
	}
	fmt.Fprintf(text, `
Over TCP, least and median are no more than Gloo's best at %d of %d sizes, and no more than 0.7 of it at %d. Through shared memory they are no more than
0.3 of Gloo's best over TCP up to 1,000 elements, and 0.5 above, at %d of %d sizes.
`, reached, len(elements), most, shared, len(elements))
}

// between is the part of the page about several hosts.
func (r results) between(text *strings.Builder) {
	bound := wireBound(starElements)
	fmt.Fprintf(text, `
## Between hosts

%d processes, each in a network namespace of its own, with a link of %s to a switch; %d elements. A ring cannot take less than %.0f ms
on these links: each host sends %.1f times the elements, in packets of %d bytes.

| who | least | median | share of the bound |
|---|--:|--:|--:|
`, hosts, linkRate, starElements, bound/1e3, 2*float64(hosts-1)/float64(hosts), 1500)
	names := []string{tcp}
	for _, algorithm := range algorithms {
		names = append(names, gloo(algorithm))
	}
	for _, name := range names {
		f := r.Star[name][starElements]
		fmt.Fprintf(text, "| %s | %.0f ms | %.0f ms | %.2f / %.2f |\n", name, f.least/1e3, f.median/1e3, bound/f.least, bound/f.median)
	}
}

func (r results) drawing() []byte {
	drawing := plot.Lines{
		Title: "All-reduce: least time beside Gloo's best over TCP",
		X:     "elements (float32)",
		Y:     "ratio",
		Marks: []plot.Mark{{At: 1, Label: "as Gloo"}},
		LogX:  true,
	}
	for _, l := range r.Local {
		for _, name := range []string{tcp, shm} {
			var points [][2]float64
			for _, n := range r.Elements {
				its, _ := best(l.figures, n)
				points = append(points, [2]float64{float64(n), l.figures[name][n].least / its.least})
			}
			drawing.Add(fmt.Sprintf("%s, %d processes", name, l.ranks), points)
		}
	}
	return drawing.SVG()
}
