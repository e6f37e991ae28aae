package main

import (
	"bytes"
	"fmt"
	"slices"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

// A result is what a run has found.
type result struct {
	Fault fault
	// Found is the class and host that were named first; nobody if none was within the time.
	Found, Host string
	Text        string
	Right       bool
	Either      bool          // of a card: a path was named, or that card
	Early       bool          // somebody was named before the fault began
	Before      time.Duration // how long nobody had been named by the time that the fault began
	After       time.Duration
	Calm        float64 // what the job carried before the fault, in bytes a second
	Faulty      float64 // and with it
	Cost        float64 // the share of the job's traffic that is gone
}

// weigh sets what faults cost. A job may come into step while it is calm, so all jobs of a pattern are compared with what the middle one
// carries: they have the same hosts and cards.
func weigh(results []result) {
	calm := map[string][]float64{}
	for _, r := range results {
		if r.Calm > 0 {
			calm[r.Fault.Pattern] = append(calm[r.Fault.Pattern], r.Calm)
		}
	}
	for at := range results {
		if r := &results[at]; r.Calm > 0 {
			r.Cost = 1 - r.Faulty/stats.Median(calm[r.Fault.Pattern])
		}
	}
}

// leastCost is what a fault has to cost a job for somebody to be named.
const leastCost = 0.1

func (r result) isGood() bool  { return r.Right && !r.Early }
func (r result) matters() bool { return r.Cost >= leastCost || r.Early }

// name is that of the page. A run without faults has one of its own, so that it leaves the page of faults as it is.
func (o options) name() string {
	if o.faults == 0 {
		return "suspects-quiet.md"
	}
	return "suspects.md"
}

func markdown(r report, o options, source page.Source, host machine.Machine) []byte {
	var b bytes.Buffer
	if o.faults == 0 {
		fmt.Fprintf(&b, "# Who is named while nobody is to blame, and what it costs\n\nA longer run of `make bench-suspects`, without [faults](suspects.md), on %d pretend hosts with cards of %s.\n", o.hosts, cardRate)
	} else {
		fmt.Fprintf(&b, "# Who is named for a slow job\n\n")
	}
	if r.stopped != nil {
		fmt.Fprintf(&b, "**This run ended early, so parts are missing: %s.**\n\n", r.stopped)
	}
	if len(r.results) > 0 {
		writeFaults(&b, r.results, o)
	}
	if len(r.calm) > 0 {
		writeQuiet(&b, r.calm)
	}
	if len(r.spent.Watching) > 0 && r.stopped == nil {
		r.spent.write(&b)
	}
	if len(r.results) > 0 {
		writeWrong(&b, r.results)
	}
	fmt.Fprintf(&b, "\n## How\n\nMeasured at %s, on %s. The load of the machine before the runs was %.1f; %d jobs ran at a time.\n", source, host, host.Load, o.parallel)
	return b.Bytes()
}

func writeFaults(b *bytes.Buffer, results []result, o options) {
	costly, cheap := split(results, result.matters)
	fmt.Fprintf(b, "`make bench-suspects` injected %d faults, drawn from seed %d, into jobs of %d pretend hosts with cards of %s. Each fault\nbegins while the job runs, and a job gets up to five, one after the other. It is right if the first verdict names its host and its class. A card that has one peer at\nthe time cannot be told from the path to it. A verdict that names the path, or one of its cards, is right for these.\n\n", len(results), o.seed, o.hosts, cardRate)
	fmt.Fprintf(b, "**Of %d faults that cost the job at least %.0f %% of its traffic, %d are right**, %d wrong, and for %d nobody was named.\n", len(costly), 100*leastCost, count(costly, result.isGood), count(costly, result.isWrong), count(costly, result.isUnnamed))
	either := func(r result) bool { return r.isGood() && r.Either }
	inAllToAll, inRing := split(costly, func(r result) bool { return r.Fault.Pattern == allToAll })
	fmt.Fprintf(b, "Of these, %d in rings and %d in all-to-alls say of a card that it is a path, or one of its cards.\n", count(inRing, either), count(inAllToAll, either))
	var times []float64
	var before time.Duration
	for _, r := range results {
		before += r.Before
	}
	for _, r := range costly {
		if r.isGood() {
			times = append(times, r.After.Seconds())
		}
	}
	if len(times) > 0 {
		slices.Sort(times)
		fmt.Fprintf(b, "Time to the verdict, of those that are right: median %.1f s, 95 of 100 within %.1f s.\n", stats.Median(times), times[min(len(times)-1, len(times)*95/100)])
	}
	fmt.Fprintf(b, "Of the other %d, which cost less, %d were named rightly and %d wrongly.\n", len(cheap), count(cheap, result.isGood), count(cheap, result.isWrong))
	early := func(r result) bool { return r.Early }
	fmt.Fprintf(b, "Before the faults, the jobs ran for %.1f hours without one. %d times somebody was named then, which counts as wrong.\n\n", before.Hours(), count(results, early))
	fmt.Fprintf(b, "![Costly faults, and what was named](suspects.svg)\n\n")
	table := page.Table{Heading: []string{"Fault", "Job", "Cost less", "Costly", "Right", "Wrong", "Nobody named"}}
	for _, k := range kinds {
		for _, pattern := range patterns {
			these, _ := split(results, func(r result) bool { return r.Fault.Kind == k && r.Fault.Pattern == pattern })
			if len(these) == 0 {
				continue
			}
			costly, cheap := split(these, result.matters)
			table.Add(string(k), pattern, fmt.Sprint(len(cheap)), fmt.Sprint(len(costly)),
				fmt.Sprint(count(costly, result.isGood)), fmt.Sprint(count(costly, result.isWrong)), fmt.Sprint(count(costly, result.isUnnamed)))
		}
	}
	table.Markdown(b)
}

// writeWrong lists the faults for which the wrong place was named, or none that had to be.
func writeWrong(b *bytes.Buffer, results []result) {
	fmt.Fprintf(b, "\n## What was not right\n\n")
	wrong, _ := split(results, func(r result) bool { return r.matters() && !r.isGood() || r.isWrong() })
	if len(wrong) == 0 {
		fmt.Fprintf(b, "Nothing.\n")
	}
	for _, r := range wrong {
		fmt.Fprintf(b, "* %s, %s, cost %.0f %%: %s\n", r.Fault, r.Fault.Pattern, 100*r.Cost, r.said())
	}
}

func (r result) isUnnamed() bool { return r.Found == classNobody && !r.Early }
func (r result) isWrong() bool   { return !r.isGood() && !r.isUnnamed() }

func split(results []result, is func(result) bool) (yes, no []result) {
	for _, r := range results {
		if is(r) {
			yes = append(yes, r)
		} else {
			no = append(no, r)
		}
	}
	return yes, no
}

func (r result) said() string {
	switch {
	case r.Early:
		return "before the fault: " + r.Text
	case r.Found == classNobody:
		return "nobody was named: " + r.Text
	}
	return r.Text
}

func count(results []result, is func(result) bool) int {
	n := 0
	for _, r := range results {
		if is(r) {
			n++
		}
	}
	return n
}

// matrix draws how often each kind of fault was named as what, as SVG.
func matrix(results []result) []byte {
	results, _ = split(results, result.matters)
	columns := []string{classLate, classLink, classPath, classNobody}
	const cell, left, top = 92, 150, 60
	var b bytes.Buffer
	fmt.Fprintf(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" font-size=\"13\">\n", left+cell*len(columns)+20, top+44*len(kinds)+40)
	fmt.Fprintf(&b, "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n<text x=\"8\" y=\"20\">costly faults, and what was named (in brackets: with the right host)</text>\n")
	for i, name := range columns {
		fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", left+cell*i+cell/2, top-10, name)
	}
	for row, k := range kinds {
		y := top + 44*row
		fmt.Fprintf(&b, "<text x=\"8\" y=\"%d\">%s</text>\n", y+26, k)
		all := count(results, func(r result) bool { return r.Fault.Kind == k })
		for i, name := range columns {
			named := count(results, func(r result) bool { return r.Fault.Kind == k && r.Found == name })
			good := count(results, func(r result) bool { return r.Fault.Kind == k && r.Found == name && r.Right })
			shade := 0.0
			if all > 0 {
				shade = float64(named) / float64(all)
			}
			colour := "#c0392b"
			if good > 0 {
				colour = "#2e7d5b"
			}
			fmt.Fprintf(&b, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"40\" fill=\"%s\" fill-opacity=\"%.2f\" stroke=\"#ddd\"/>\n", left+cell*i, y, cell-4, colour, shade*0.8)
			fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%d (%d)</text>\n", left+cell*i+cell/2, y+26, named, good)
		}
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}
