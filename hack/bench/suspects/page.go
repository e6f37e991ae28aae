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
	Early       bool // somebody was named before the fault began
	After       time.Duration
}

// A quiet run has no fault.
type quiet struct {
	Pattern string
	Length  time.Duration
	Named   []string
}

func markdown(results []result, calm []quiet, o options, source page.Source, host machine.Machine) []byte {
	var b bytes.Buffer
	right := count(results, func(r result) bool { return r.Right && !r.Early })
	fmt.Fprintf(&b, "# Who is named for a slow job\n\n")
	fmt.Fprintf(&b, "%d faults, drawn from seed %d, in jobs of %d pretend hosts with cards of %s. Each fault begins while the job runs. A fault is\nright if the first verdict names its host and its class.\n", len(results), o.seed, o.hosts, cardRate)
	fmt.Fprintf(&b, "In a ring each card has one peer, so a verdict that names the path from or to it counts as right there.\n\n")
	fmt.Fprintf(&b, "![Faults, and what was named](suspects.svg)\n\n")
	table := page.Table{Heading: []string{"Fault", "Job", "Runs", "Right", "Wrong", "Nobody named"}}
	for _, k := range kinds {
		for _, pattern := range []string{ring, allToAll} {
			these := slices.DeleteFunc(slices.Clone(results), func(r result) bool { return r.Fault.Kind != k || r.Fault.Pattern != pattern })
			if len(these) == 0 {
				continue
			}
			good := count(these, func(r result) bool { return r.Right && !r.Early })
			none := count(these, func(r result) bool { return r.Found == classNobody && !r.Early })
			table.Add(string(k), pattern, fmt.Sprint(len(these)), fmt.Sprint(good), fmt.Sprint(len(these)-good-none), fmt.Sprint(none))
		}
	}
	table.Markdown(&b)
	var times []float64
	for _, r := range results {
		if r.Right && !r.Early {
			times = append(times, r.After.Seconds())
		}
	}
	fmt.Fprintf(&b, "\n%d of %d are right.", right, len(results))
	if len(times) > 0 {
		slices.Sort(times)
		fmt.Fprintf(&b, " Time to the verdict, of those: median %.1f s, 95 of 100 within %.1f s.", stats.Median(times), times[min(len(times)-1, len(times)*95/100)])
	}
	fmt.Fprintf(&b, "\n\n## Without a fault\n\n")
	table = page.Table{Heading: []string{"Job", "Time", "False verdicts"}}
	for _, q := range calm {
		table.Add(q.Pattern, q.Length.Round(time.Second).String(), fmt.Sprint(len(q.Named)))
	}
	table.Markdown(&b)
	fmt.Fprintf(&b, "\n## What was not right\n\n")
	for _, r := range results {
		if !r.Right || r.Early {
			fmt.Fprintf(&b, "* %s of %s (%g), %s: %s\n", r.Fault.Kind, hostName(r.Fault.Host), r.Fault.Amount, r.Fault.Pattern, r.said())
		}
	}
	fmt.Fprintf(&b, "\n## How\n\nMeasured at %s, on %s. The load of the machine before the runs was %.1f.\n", source, host, host.Load)
	return b.Bytes()
}

func (r result) said() string {
	text := r.Text
	if text == "" {
		text = "nobody was named"
	}
	if r.Early {
		text = "before the fault: " + text
	}
	return text
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
	columns := []string{classLate, classLink, classPath, classNobody}
	const cell, left, top = 92, 150, 60
	var b bytes.Buffer
	fmt.Fprintf(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" font-size=\"13\">\n", left+cell*len(columns)+20, top+44*len(kinds)+40)
	fmt.Fprintf(&b, "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n<text x=\"8\" y=\"20\">fault, and what was named (in brackets: with the right host)</text>\n")
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
