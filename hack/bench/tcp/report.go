package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/plot"
)

// A report is all that was measured.
type report struct {
	Machine machine
	Quick   bool
	Notes   []string
	Cases   []caseResult
}

// A verdict is one goal beside what was reached.
type verdict struct {
	of                    quantity
	reference, seen, goal string // as they are printed; what there is not is empty
	reached               answer
}

// An answer is whether a goal was reached.
type answer string

const (
	yes     answer = "yes"
	no      answer = "no"
	unknown answer = "-"
)

// verdicts judges the plugin's runs of a case.
func (r caseResult) verdicts() []verdict {
	ours, measured := r.series(ourName)
	var all []verdict
	for _, g := range r.Case.goals {
		v := verdict{of: g.of, goal: g.of.format(g.figure), reached: unknown}
		want := g.figure
		if reference, ok := r.reference(); ok {
			v.reference = g.of.format(reference.value(g.of))
			if g.share > 0 {
				want = g.share * reference.value(g.of)
				v.goal = fmt.Sprintf("%s, %g of %s", g.of.format(want), g.share, reference.Name)
			}
		}
		if !measured {
			v.seen = "not measured: " + r.Case.missing
			all = append(all, v)
			continue
		}
		got, failed := ours.value(g.of), len(ours.Outcomes)-len(ours.good())
		v.seen = g.of.format(got)
		v.reached = no
		if failed == 0 && (g.of.lowIsGood() && got <= want || !g.of.lowIsGood() && got >= want) {
			v.reached = yes
		}
		if failed > 0 {
			v.seen += fmt.Sprintf(", and %d of %d runs failed", failed, len(ours.Outcomes))
		}
		all = append(all, v)
	}
	return all
}

// reference is what the plugin is measured against, where there is something.
func (r caseResult) reference() (series, bool) {
	if len(r.Case.rawFlows) == 0 {
		return series{}, false
	}
	return r.Contenders[0], true
}

func (q quantity) format(value float64) string {
	switch q {
	case processor:
		return fmt.Sprintf("%.2f s", value)
	case roundTrip:
		return fmt.Sprintf("%.1f us", value*1e6)
	case idleUse:
		return fmt.Sprintf("%.2f %%", value*100)
	case mostThread:
		return fmt.Sprintf("%.0f", value)
	default:
		return fmt.Sprintf("%.3f GB/s", value)
	}
}

func (r caseResult) series(name string) (series, bool) {
	for _, s := range r.Contenders {
		if s.Name == name {
			return s, true
		}
	}
	return series{}, false
}

// boundByProcessors reports whether the processors, and not the network that
// was to be measured, were the limit.
func (r caseResult) boundByProcessors() bool {
	if r.Case.limit() == 0 {
		return false // there they are meant to be
	}
	reference, _ := r.reference()
	return slices.ContainsFunc(reference.good(), func(o outcome) bool { return o.Busy >= boundBy })
}

// write writes the page and its plots, and prints the table of goals.
func (r report) write(out io.Writer, folder string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("results: %w", err)
	}
	for _, c := range r.Cases {
		if c.Case.idle {
			continue // a plot of two small numbers says no more
		}
		if err := os.WriteFile(filepath.Join(folder, c.plotFile()), c.plot(), 0o644); err != nil {
			return fmt.Errorf("results: %w", err)
		}
	}
	page := filepath.Join(folder, "tcp.md")
	if err := os.WriteFile(page, r.markdown(), 0o644); err != nil {
		return fmt.Errorf("results: %w", err)
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(table, "\ncase\tof\tplain sockets\tseen\tgoal\treached\n")
	for _, c := range r.Cases {
		for _, v := range c.verdicts() {
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\n", c.Case.name, v.of, v.reference, v.seen, v.goal, v.reached)
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\n%s has all of it\n", page)
	return err
}

func (c caseResult) plotFile() string { return "tcp-" + c.Case.name + ".svg" }

func (r report) markdown() []byte {
	var b bytes.Buffer
	m := r.Machine
	fmt.Fprintf(&b, "# TCP results\n\nWritten by `make bench`; do not edit.\n\n")
	fmt.Fprintf(&b, "One machine plays both hosts: %d cores (%s), %s", m.Cores, m.Processor, m.Kernel)
	if r.Quick {
		b.WriteString("; quick runs")
	}
	b.WriteString(".\nEach case has a network of its own (`go run ./hack/lab/net --help`); in each round all contenders run one after the other.\n" +
		"GB/s are 10^9 bytes of payload. Processor time is that of both programs with their system calls;\n" +
		"the plugins' driver, like NCCL, asks again and again instead of sleeping, so that it uses whatever time nobody else wants.\n")
	for _, note := range r.Notes {
		fmt.Fprintf(&b, "\n%s\n", note)
	}
	b.WriteString("\n| case | of | wire limit | plain sockets | Evenkeel | goal | reached |\n| --- | --- | --- | --- | --- | --- | --- |\n")
	for _, c := range r.Cases {
		title := c.Case.title
		for _, v := range c.verdicts() {
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s |\n", title, v.of, c.Case.wireLimit(v.of), v.reference, v.seen, v.goal, v.reached)
			title = "" // as in the line above
		}
	}
	for _, c := range r.Cases {
		c.details(&b)
	}
	return b.Bytes()
}

// wireLimit is what the network allows of a quantity; empty where it is the
// processors that set the limit.
func (c benchCase) wireLimit(of quantity) string {
	switch {
	case of.lowIsGood() || c.limit() == 0:
		return ""
	case c.fault != nil:
		return of.format(c.fault.left)
	}
	return of.format(c.limit())
}

// details writes all of a case.
func (r caseResult) details(b *bytes.Buffer) {
	c := r.Case
	fmt.Fprintf(b, "\n## %s\n\n%s; %s. %d rounds at commit %s.\n", capital(c.title), capital(c.lab.String()), c, r.Runs, r.Commit)
	if r.Machine.Load > busyLoad {
		fmt.Fprintf(b, "\n**The machine was not quiet: its load was %.1f when the run began.** Other programs are part of these figures.\n\n", r.Machine.Load)
	}
	if c.fault != nil {
		fmt.Fprintf(b, "The link used most falls silent %s after the start, for %s: it loses everything, and the routers go on using it.\n"+
			"The rate is the mean from %s after that until the link is back.\n", c.fault.before, c.fault.lasts, c.fault.recovery)
	}
	b.WriteString("\n")
	of, heading := medianRate, "| contender | median | worst | best | spread | CPU s/GB, sender + receiver | processors: own share, in all |\n| --- | --- | --- | --- | --- | --- | --- |\n"
	switch {
	case c.idle:
		of, heading = idleUse, "| contender | use of a core, median | worst | best | spread | most threads |\n| --- | --- | --- | --- | --- | --- |\n"
	case c.pingPong:
		of, heading = roundTrip, "| contender | median round trip | worst | best | spread | processors: own share, in all |\n| --- | --- | --- | --- | --- | --- |\n"
	}
	b.WriteString(heading)
	for _, s := range r.Contenders {
		all := s.of(of)
		if len(all) == 0 {
			fmt.Fprintf(b, "| %s | all runs failed |\n", s.Name)
			continue
		}
		worst, best := all[0], all[len(all)-1]
		if of.lowIsGood() {
			worst, best = best, worst
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s |", s.Name, of.format(median(all)), of.format(worst), of.format(best), spread(all))
		if c.idle {
			fmt.Fprintf(b, " %s |\n", mostThread.format(s.value(mostThread)))
			continue
		}
		var busy, own, send, receive []float64
		for _, o := range s.good() {
			busy, own, send, receive = append(busy, o.Busy), append(own, o.Own), append(send, o.Send), append(receive, o.Receive)
		}
		if !c.pingPong {
			fmt.Fprintf(b, " %.2f + %.2f |", medianOf(send), medianOf(receive))
		}
		fmt.Fprintf(b, " %.0f %%, %.0f %% |\n", 100*medianOf(own), 100*medianOf(busy))
	}
	for _, s := range r.Contenders {
		for i, o := range s.Outcomes {
			if o.Failure != "" {
				fmt.Fprintf(b, "\n%s, run %d failed: %s\n", s.Name, i+1, o.Failure)
			} else if c.fault != nil {
				fmt.Fprintf(b, "\n%s, run %d: %s\n", s.Name, i+1, c.fault.story(o.Trace))
			}
		}
	}
	if r.boundByProcessors() {
		b.WriteString("\n**The processors were all in use while plain sockets ran: these figures may say more of them than of the network.**\n")
	}
	if !c.idle {
		fmt.Fprintf(b, "\n![%s](%s)\n", c.title, r.plotFile())
	}
}

// plot draws a case: each run a dot, or, where there is a fault, each run a line.
func (r caseResult) plot() []byte {
	c := r.Case
	if c.fault != nil {
		chart := plot.Lines{Title: capital(c.title), X: "seconds", Y: "GB/s", Marks: []plot.Mark{
			{At: c.limit(), Label: "4 links"}, {At: c.fault.left, Label: "3 links"},
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
	chart := plot.Dots{Title: capital(c.title), X: "GB/s"}
	scale, of := 1.0, medianRate
	if c.pingPong {
		chart.X, scale, of = "round trip, us", 1e6, roundTrip
	}
	if limit := c.limit(); limit > 0 {
		chart.Marks = []plot.Mark{{At: limit, Label: "wire limit"}}
	}
	for _, s := range r.Contenders {
		var values []float64
		for _, v := range s.of(of) {
			values = append(values, v*scale)
		}
		chart.Add(s.Name, values)
	}
	return chart.SVG()
}

// rateLine is a trace's rate over time, up to an end, each value over a few
// steps.
func rateLine(trace []point, end time.Duration) [][2]float64 {
	const over = 4
	var line [][2]float64
	for i := over; i < len(trace) && trace[i].At <= end; i++ {
		from, to := trace[i-over], trace[i]
		line = append(line, [2]float64{to.At.Seconds(), float64(to.Bytes-from.Bytes) / (to.At - from.At).Seconds() / 1e9})
	}
	return line
}

// spread is how far apart values in order are, relative to their median.
func spread(sorted []float64) string {
	if median(sorted) == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f %%", 100*(sorted[len(sorted)-1]-sorted[0])/median(sorted))
}

// medianOf is the median of values in any order.
func medianOf(values []float64) float64 { return median(slices.Sorted(slices.Values(values))) }

func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }
