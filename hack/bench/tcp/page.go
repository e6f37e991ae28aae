package main

import (
	"bytes"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

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
	notes    []string
	costs    page.Table // see idleCosts
	cases    []caseResult
}

// staticNote says what static mode is, and what it is not.
const staticNote = "`" + staticName + "` is Evenkeel's own static mode (`" + staticSetting + "=" + staticValue + "`): it assigns chunks to connections in turn, with re-pathing\n" +
	"and the caller's inline write off. It is not the behaviour of NCCL's own sockets, nor of bagua-net. Contenders with the name of another library are that\n" +
	"library's own code, built outside of this repository as a plugin for the same driver (`--plugin NAME=PATH`); the name says the version.\n"

// otherPages says where the rest of what is measured of TCP is.
const otherPages = "Other pages: [thousands of connections that are open](scale.md), [a driver that polls as NCCL's proxy does](polling.md),\n" +
	"[half an hour of faults](soak.md), [a real collective library](rccl.md).\n"

// write writes the page and its drawings, and prints the table of goals.
func (r report) write(out io.Writer, folder string) error {
	files := map[string][]byte{"tcp.md": r.markdown()}
	for _, c := range r.cases {
		if !c.testCase.idle { // a plot of two small numbers adds nothing
			files[c.plotFile()] = c.plot()
		}
	}
	if err := page.Write(folder, files); err != nil {
		return err
	}
	table := page.Table{Heading: []string{"case", "of", "plain sockets", "measured", "goal", "reached"}}
	for _, c := range r.cases {
		for _, v := range c.goalResults() {
			table.Add(c.Name, string(v.of), v.reference, v.measured, v.goal, v.reached)
		}
	}
	fmt.Fprintln(out)
	if err := table.Text(out); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\n%s has all of it\n", filepath.Join(folder, "tcp.md"))
	return err
}

func (r caseResult) plotFile() string { return "tcp-" + r.Name + ".svg" }

func (r report) markdown() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# TCP results\n\nWritten by `make bench`; do not edit.\n\n")
	fmt.Fprintf(&b, "One machine plays both hosts: %s", r.machine)
	if r.quick {
		b.WriteString("; quick runs")
	}
	b.WriteString(".\nEach case has a network of its own (`go run ./hack/lab/net --help`); in each round all contenders run one after the other.\n" +
		"GB/s are 10^9 bytes of payload. Processor time is that of both programs with their system calls.\n" +
		"Where the processors are the limit, the plugins' driver asks for completions as NCCL's proxy does, and never sleeps. Where the network is, it sleeps after\n" +
		"100 rounds in which nothing moves, so that less of the processor time is the polling's. Sockets that are `polled` are moved by that driver, without a plugin.\n" +
		"With `equal shares`, each message is cut into equal parts, one for each socket, as NCCL's own sockets do: the slowest path sets the pace of all.\n" +
		"Other plain sockets have a thread and messages of their own each, and none waits for another.\n" +
		"Processors differ: on a machine with AVX2 only, 8 bytes there and back take 30 us over plain sockets instead of 16, and nothing here was measured again on it.\n\n" + staticNote + "\n" + page.OwnGoals + "\n")
	var asGood []string
	for _, c := range r.cases {
		if text, ok := c.plainIsAsGood(); ok {
			asGood = append(asGood, text)
		}
	}
	if len(asGood) > 0 {
		fmt.Fprintf(&b, "Plain sockets equal or beat Evenkeel in %d of %d cases: %s.\n", len(asGood), len(r.cases), strings.Join(asGood, "; "))
	}
	if r.outdated != "" {
		fmt.Fprintf(&b, "\n%s\n", r.outdated)
	}
	for _, note := range r.notes {
		fmt.Fprintf(&b, "\n%s\n", note)
	}
	table := page.Table{Heading: []string{"case", "of", "wire limit", "plain sockets", "Evenkeel", "goal", "reached"}}
	for _, c := range r.cases {
		title := c.testCase.title
		for _, v := range c.goalResults() {
			table.Add(title, string(v.of), c.testCase.wireLimit(v.of), v.reference, v.measured, v.goal, v.reached)
			title = "" // as in the line above
		}
	}
	b.WriteString("\n")
	table.Markdown(&b)
	r.limits(&b)
	writeIdleCosts(&b, r.costs)
	b.WriteString("\n" + otherPages)
	for _, c := range r.cases {
		c.details(&b)
	}
	return b.Bytes()
}

// limits says of the cases that miss a goal what limits them.
func (r report) limits(b *bytes.Buffer) {
	titles := map[string][]string{}
	var order []string
	for _, c := range r.cases {
		for _, v := range c.goalResults() {
			if v.reached != page.YesNo(false) || v.limit == "" {
				continue
			}
			if titles[v.limit] == nil {
				order = append(order, v.limit)
			}
			if title := c.testCase.title; !slices.Contains(titles[v.limit], title) {
				titles[v.limit] = append(titles[v.limit], title)
			}
		}
	}
	if len(order) > 0 {
		b.WriteString("\nWhat limits the cases that miss a goal:\n\n")
	}
	for _, text := range order {
		fmt.Fprintf(b, "* %s: %s.\n", strings.Join(titles[text], "; "), text)
	}
}

// wireLimit is the network's limit of a quantity; empty where only the processors limit it.
func (c benchCase) wireLimit(of quantity) string {
	switch {
	case of.lowerIsBetter() || c.limit() == 0:
		return ""
	case c.fault != nil:
		return of.format(c.fault.remaining)
	}
	return of.format(c.limit())
}

// quantity is what the case's table and drawing show.
func (c benchCase) quantity() quantity {
	switch {
	case c.idle:
		return idleUse
	case c.pingPong:
		return roundTrip
	}
	return medianRate
}

// limitedByProcessors reports whether the processors, and not the network that was to be measured, were the limit.
func (r caseResult) limitedByProcessors() bool {
	if r.testCase.limit() == 0 {
		return false // there they are meant to be
	}
	reference, _ := r.reference(medianRate)
	return slices.ContainsFunc(reference.good(), func(o outcome) bool { return o.Busy >= busyShare })
}

// details writes the section of a case.
func (r caseResult) details(b *bytes.Buffer) {
	r.heading(b)
	fmt.Fprintf(b, " %d rounds at %s.\n\n%s\n", r.Rounds, r.Source, r.Machine.Quiet())
	r.runs(b)
	if r.limitedByProcessors() {
		b.WriteString("\n**The processors were all in use while plain sockets ran: these figures may say more of them than of the network.**\n")
	}
	if !r.testCase.idle {
		fmt.Fprintf(b, "\n![%s](%s)\n", r.testCase.title, r.plotFile())
	}
}

// heading begins the section of a case: its name, and a sentence about its network and load.
func (r caseResult) heading(b *bytes.Buffer) {
	c := r.testCase
	fmt.Fprintf(b, "\n## %s\n\n%s; %s.", page.Capital(c.title), page.Capital(c.lab.String()), c)
}

// runs writes what a case is beside its load, the table of its contenders, and what is to say of single runs.
func (r caseResult) runs(b *bytes.Buffer) {
	c := r.testCase
	if c.loss > 0 {
		fmt.Fprintf(b, "\nEach link loses %g %% of the packets at random, in both directions. It carries single packets instead of segments of up to 64 KiB, which takes processor time.\n", c.loss*100)
	}
	if c.fault != nil {
		fmt.Fprintf(b, "\nThe busiest link falls silent %s after the start, for %s: it loses everything, and the routers continue to use it.\n"+
			"The rate is the mean from %s after that until the link is back.\n", c.fault.start, c.fault.length, c.fault.recovery)
	}
	if c.cold {
		fmt.Fprintf(b, "\nNothing is sent before a run. The rise time is that from the first byte on the links until the end of the first %s in which they carry %.0f %% of\n"+
			"the wire limit. It is read from the links' counters, which count repeated bytes too.\n", riseOver, riseShare*100)
	}
	if c.bothWays {
		b.WriteString("\nBoth hosts send and receive at the same time. Rates are those of both directions together.\n")
	}
	b.WriteString("\n")
	of := c.quantity()
	heading := []string{"contender", "median", "worst", "best", "spread", "CPU s/GB, sender + receiver", "processors: own share, in all"}
	switch {
	case c.idle:
		heading = []string{"contender", "use of a core, median", "worst", "best", "spread", string(maxThreads)}
	case c.pingPong:
		heading = []string{"contender", "median round trip", "worst", "best", "spread", "processors: own share, in all"}
	case c.cold:
		heading = append(heading, "rise time, median (worst)")
	}
	table := page.Table{Heading: heading}
	for _, s := range r.Contenders {
		all := s.values(of)
		if len(all) == 0 {
			table.Add(s.Name, "all runs failed")
			continue
		}
		worst, best := all[0], all[len(all)-1]
		if of.lowerIsBetter() {
			worst, best = best, worst
		}
		cells := []string{s.Name, of.format(stats.Median(all)), of.format(worst), of.format(best), stats.Spread(all)}
		if c.idle {
			table.Add(append(cells, maxThreads.format(s.value(maxThreads)))...)
			continue
		}
		var busy, own, send, receive []float64
		for _, o := range s.good() {
			busy, own, send, receive = append(busy, o.Busy), append(own, o.Own), append(send, o.Send), append(receive, o.Receive)
		}
		if !c.pingPong {
			cells = append(cells, fmt.Sprintf("%.2f + %.2f", stats.Median(send), stats.Median(receive)))
		}
		cells = append(cells, fmt.Sprintf("%.0f %%, %.0f %%", 100*stats.Median(own), 100*stats.Median(busy)))
		if c.cold {
			times := s.values(riseTime)
			cells = append(cells, fmt.Sprintf("%s (%s)", riseTime.format(stats.Median(times)), riseTime.format(times[len(times)-1])))
		}
		table.Add(cells...)
	}
	table.Markdown(b)
	for _, s := range r.Contenders {
		for i, o := range s.Outcomes {
			if o.Failure != "" {
				fmt.Fprintf(b, "\n%s, run %d failed: %s\n", s.Name, i+1, o.Failure)
			} else if c.fault != nil {
				fmt.Fprintf(b, "\n%s, run %d: %s\n", s.Name, i+1, c.fault.summary(o.Trace))
			}
		}
	}
}

// plot draws a case: each run a dot, or, where there is a fault, each run a line.
func (r caseResult) plot() []byte {
	c := r.testCase
	if c.fault != nil {
		chart := plot.Lines{Title: page.Capital(c.title), X: "seconds", Y: "GB/s", References: []plot.Reference{
			{At: c.limit(), Label: "4 links"}, {At: c.fault.remaining, Label: "3 links"},
		}}
		for _, s := range r.Contenders {
			for i, o := range s.good() {
				name := s.Name
				if i > 0 {
					name = "" // as the one before
				}
				chart.Add(name, rateLine(o.Trace, c.length))
			}
		}
		return chart.SVG()
	}
	chart := plot.Dots{Title: page.Capital(c.title), X: "GB/s"}
	scale, of := 1.0, c.quantity()
	if c.pingPong {
		chart.X, scale = "round trip, us", 1e6
	}
	if limit := c.limit(); limit > 0 {
		chart.References = []plot.Reference{{At: limit, Label: "wire limit"}}
	}
	for _, s := range r.Contenders {
		var values []float64
		for _, v := range s.values(of) {
			values = append(values, v*scale)
		}
		chart.Add(s.Name, values)
	}
	return chart.SVG()
}

// rateLine is a trace's rate over time, up to an end; each value is the mean of a few steps.
func rateLine(trace []point, end time.Duration) [][2]float64 {
	const steps = 4
	var line [][2]float64
	for i := steps; i < len(trace) && trace[i].At <= end; i++ {
		from, to := trace[i-steps], trace[i]
		line = append(line, [2]float64{to.At.Seconds(), float64(to.Bytes-from.Bytes) / (to.At - from.At).Seconds() / 1e9})
	}
	return line
}
