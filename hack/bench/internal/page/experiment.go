package page

import (
	"bytes"
	_ "embed"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/plot"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

//go:embed page.md.tmpl
var pageTemplate string

// busyShare is the share of the processors from which on they are what is measured, in runs of references over a
// limited network.
const busyShare = 0.9

// Files are the page and its drawings, by name.
func (r Results) Files() (map[string][]byte, error) {
	parsed, err := template.New("page").Funcs(template.FuncMap{"table": table, "capital": Capital}).Parse(pageTemplate)
	if err != nil {
		return nil, fmt.Errorf("page: %w", err)
	}
	var text bytes.Buffer
	if err := parsed.Execute(&text, r.view()); err != nil {
		return nil, fmt.Errorf("page: %w", err)
	}
	files := map[string][]byte{r.of.Name + ".md": text.Bytes()}
	for _, c := range r.sections() {
		files[r.drawing(c)] = c.draw()
		if _, own := c.ownDrawing(); own != "" {
			files[r.ownDrawing(c)] = []byte(own)
		}
	}
	return files, nil
}

// Text writes the goals, and how the subject compares with the others, for a terminal.
func (r Results) Text(out io.Writer) error {
	if goals := r.goalTable(); len(goals.Rows) > 0 {
		if err := goals.Text(out); err != nil {
			return err
		}
	}
	for _, line := range r.losses() {
		if _, err := fmt.Fprintln(out, line); err != nil {
			return err
		}
	}
	return nil
}

func (r Results) drawing(c caseResult) string { return r.of.Name + "-" + c.Name + ".svg" }

// ownDrawing is the file with what a run has drawn itself.
func (r Results) ownDrawing(c caseResult) string { return r.of.Name + "-" + c.Name + "-run.svg" }

// ownDrawing is the first drawing of a case's runs, and the contender.
func (c caseResult) ownDrawing() (contender, svg string) {
	for _, s := range c.series {
		for _, run := range s.runs {
			if run.Drawing != "" {
				return s.name, run.Drawing
			}
		}
	}
	return "", ""
}

// A view is what the template shows.
type view struct {
	experiment.Experiment
	Subject  string
	Measured []string // what was measured when, on what
	Quiet    string
	Losses   []string
	Goals    Table
	Limits   []string
	Cases    []caseView
	OwnGoals string
}

type caseView struct {
	Title, Load, Drawing string
	RunDrawing, Runner   string // what one run has drawn itself, and whose
	Notes, Failures      []string
	Sweeps               []sweepTable
	Said                 []string // of runs
	Runs                 Table
	ProcessorsAreLimit   bool
}

func (r Results) view() view {
	v := view{
		Experiment: r.of, Subject: r.of.SubjectName(), Measured: r.measured(), Quiet: r.quiet(),
		Losses: r.losses(), Goals: r.goalTable(), Limits: r.limits(), OwnGoals: OwnGoals,
	}
	for _, c := range r.sections() {
		load := []string{}
		for _, s := range c.series {
			if network := s.runs[0].Network; network != "" && len(load) == 0 {
				load = append(load, Capital(network))
			}
		}
		if c.Load != "" {
			load = append(load, c.Load)
		}
		if versions := c.versions(); len(versions) > 0 {
			load = append(load, "with "+strings.Join(versions, ", "))
		}
		runner, file := c.ownDrawing()
		if file != "" {
			file = r.ownDrawing(c)
		}
		v.Cases = append(v.Cases, caseView{
			RunDrawing: file, Runner: runner,
			Title: c.Title, Load: strings.Join(load, "; "), Drawing: r.drawing(c), Notes: c.Notes,
			Sweeps: c.sweepTables(), Runs: c.table(), ProcessorsAreLimit: c.processorsAreLimit(),
			Failures: c.said(" failed", func(run experiment.Sample) string { return run.Failure }),
			Said:     c.said("", func(run experiment.Sample) string { return run.Note }),
		})
	}
	return v
}

// versions lists the libraries that the runs used, with their versions.
func (c caseResult) versions() []string {
	var all []string
	for _, s := range c.series {
		for _, run := range s.runs {
			if run.Versions != "" && !slices.Contains(all, run.Versions) {
				all = append(all, run.Versions)
			}
		}
	}
	return all
}

// measured lists the settings of the samples: with how many rounds, when, and of which cases.
func (r Results) measured() []string {
	type group struct {
		experiment.Setting
		command string
	}
	type facts struct {
		cases, days []string
		rounds      int
	}
	found := map[group]*facts{}
	var order []group
	for _, s := range r.samples {
		g := group{s.Setting, s.Command}
		f := found[g]
		if f == nil {
			f = &facts{}
			found[g], order = f, append(order, g)
		}
		if !slices.Contains(f.cases, s.Case) {
			f.cases = append(f.cases, s.Case)
		}
		if day := s.Start.Format(time.DateOnly); !slices.Contains(f.days, day) {
			f.days = append(f.days, day)
		}
		f.rounds = max(f.rounds, s.Round+1)
	}
	var lines []string
	for _, g := range order {
		f := found[g]
		commit, _, _ := strings.Cut(g.Commit, ",")
		quick := ""
		if g.Quick {
			quick = "quick runs, "
		}
		lines = append(lines, fmt.Sprintf("%s: %s%s at commit %s, on %s, by `%s`. Machine: %s. Since then: `git log --oneline %s.. -- plugin/crates`",
			strings.Join(f.cases, ", "), quick, count(f.rounds, "round"), g.Commit, strings.Join(f.days, " and "), g.command, g.Machine, commit))
	}
	return lines
}

// quiet says whether the machine was.
func (r Results) quiet() string {
	disturbed := 0
	for _, s := range r.samples {
		if s.NotQuiet {
			disturbed++
		}
	}
	if disturbed == 0 {
		return "The machine was quiet before each run."
	}
	return fmt.Sprintf("**The machine was not quiet before %d of %s.** Other programs are part of these figures.", disturbed, count(len(r.samples), "run"))
}

// losses names the cases that the subject loses, and then the cases that have no verdict.
func (r Results) losses() []string {
	var lost, unknown []string
	compared, swept := 0, ""
	for _, c := range r.cases {
		ours := c.find(c.subject)
		for i, q := range c.Headlines() {
			rival, ok := c.bestRival(q)
			if !ok || len(ours.values(q)) == 0 {
				continue
			}
			compared++
			if c.Sweep != nil {
				swept = ", each point of a sweep counted as one"
			}
			ratio := ours.over(rival, q)
			text := fmt.Sprintf("%s (%s: %s, %s: %s, ratio %s)", c.Title+c.at(i), rival.name, q.Format(rival.middle(q)),
				c.subject, q.Format(ours.middle(q)), ratio)
			switch ratio.Verdict(q.LowerIsBetter) {
			case stats.Worse:
				lost = append(lost, text)
			case stats.CannotTell:
				unknown = append(unknown, text)
			}
		}
	}
	var lines []string
	if compared > 0 {
		lines = append(lines, fmt.Sprintf("%s loses to the best of the others in %d of %s%s", r.of.SubjectName(), len(lost), count(compared, "case"), swept)+list(lost))
	}
	if len(unknown) > 0 {
		lines = append(lines, fmt.Sprintf("It cannot be told which is better in %s", count(len(unknown), "case"))+list(unknown))
	}
	return lines
}

func list(items []string) string {
	if len(items) == 0 {
		return "."
	}
	return ": " + strings.Join(items, "; ") + "."
}

func (r Results) goalTable() Table {
	t := Table{Heading: []string{"case", "of", "wire limit", "reference", r.of.SubjectName(), "goal", "reached"}}
	last := ""
	for _, v := range r.goals() {
		name := v.Case
		if name == last {
			name = "" // as in the line above
		}
		last = v.Case
		t.Add(name, v.Of, v.WireLimit, v.Reference, v.Measured, v.Goal, v.Reached)
	}
	return t
}

// limits says of the cases that miss a goal what limits them, each limit once.
func (r Results) limits() []string {
	titles := map[string][]string{}
	var order, lines []string
	for _, v := range r.goals() {
		if v.Reached != YesNo(false) || v.Limit == "" {
			continue
		}
		if titles[v.Limit] == nil {
			order = append(order, v.Limit)
		}
		if !slices.Contains(titles[v.Limit], v.Case) {
			titles[v.Limit] = append(titles[v.Limit], v.Case)
		}
	}
	for _, limit := range order {
		lines = append(lines, strings.Join(titles[limit], "; ")+": "+limit)
	}
	return lines
}

// table has a row for each contender. The ratio is the subject's to it. The headline of a sweep has tables of its own.
func (c caseResult) table() Table {
	q := c.Headline
	t := Table{Heading: []string{"contender"}}
	if c.Sweep == nil {
		t.Heading = append(t.Heading, q.Title+", "+statistics[q.Statistic], "worst", "best", "spread")
	}
	rows := c.series
	if len(c.together) > 0 {
		t.Heading[0] = "case"
		rows = append(slices.Clone(rows), series{name: "all", runs: c.together})
	}
	compare := c.Sweep == nil && len(c.series) > 1 && len(c.find(c.subject).runs) > 0
	if compare {
		t.Heading = append(t.Heading, c.subject+" over it", c.subject+" is")
	}
	bases := c.Sweep == nil && slices.ContainsFunc(c.series, func(s series) bool { return s.base != "" })
	if bases {
		t.Heading = append(t.Heading, "over its base")
	}
	for _, more := range c.More {
		t.Heading = append(t.Heading, more.Title+summaries[more.Statistic])
	}
	t.Heading = append(t.Heading, "processors in all")
	for _, s := range rows {
		if s.failures() == len(s.runs) {
			t.Add(s.name, "all runs failed")
			continue
		}
		cells := []string{s.name}
		if c.Sweep == nil {
			cells = append(cells, s.headline(q)...)
		}
		if compare {
			ratio, verdict := "", ""
			if s.name != c.subject {
				r := c.find(c.subject).over(s, q)
				ratio, verdict = r.String(), string(r.Verdict(q.LowerIsBetter))
			}
			cells = append(cells, ratio, verdict)
		}
		if bases {
			ratio := ""
			if s.base != "" {
				ratio = s.over(c.find(s.base), q).String() + ", " + s.base
			}
			cells = append(cells, ratio)
		}
		for _, more := range c.More {
			cells = append(cells, s.summary(more))
		}
		t.Add(append(cells, fmt.Sprintf("%.0f %%", 100*stats.Median(s.busy())))...)
	}
	return t
}

// The statistics in words: of the headline, and of other quantities.
var (
	statistics = map[experiment.Statistic]string{experiment.Median: "median", experiment.Mean: "mean"}
	summaries  = map[experiment.Statistic]string{experiment.Median: ", median (worst)", experiment.Mean: ", mean (worst)"}
)

// headline is the middle, the worst and the best of the runs, and how far these are from each other.
func (s series) headline(q experiment.Quantity) []string {
	values := s.values(q)
	if len(values) == 0 {
		return []string{"-", "", "", ""}
	}
	low, high := slices.Min(values), slices.Max(values)
	if q.LowerIsBetter {
		low, high = high, low
	}
	return []string{q.Format(s.middle(q)), q.Format(low), q.Format(high), stats.Spread(values)}
}

// summary is a quantity in one cell.
func (s series) summary(q experiment.Quantity) string {
	values := s.values(q)
	switch {
	case len(values) == 0:
		return ""
	case q.Statistic == experiment.Share:
		are := 0
		for _, value := range values {
			if value == 1 {
				are++
			}
		}
		return stats.Share(are, len(values))
	}
	return fmt.Sprintf("%s (%s)", q.Format(s.middle(q)), q.Format(worst(q, values)))
}

// busy is how busy all processors were in the runs that did not fail.
func (s series) busy() []float64 {
	var all []float64
	for _, run := range s.runs {
		if run.Failure == "" {
			all = append(all, run.Busy)
		}
	}
	return all
}

// said lists what a field of the runs says, where it says something: once for the runs of a contender that say the same.
func (c caseResult) said(what string, of func(experiment.Sample) string) []string {
	var all []string
	for _, s := range c.series {
		var texts []string
		runs := map[string][]string{}
		for _, run := range s.runs {
			text := of(run)
			if text == "" {
				continue
			}
			if runs[text] == nil {
				texts = append(texts, text)
			}
			runs[text] = append(runs[text], strconv.Itoa(run.Round+1))
		}
		for _, text := range texts {
			which := "run " + runs[text][0]
			if len(runs[text]) > 1 {
				which = "runs " + strings.Join(runs[text], ", ")
			}
			all = append(all, fmt.Sprintf("%s, %s%s: %s", s.name, which, what, text))
		}
	}
	return all
}

// processorsAreLimit reports whether the processors, and not the network that was to be measured, limited the best
// reference.
func (c caseResult) processorsAreLimit() bool {
	best, ok := c.best(c.Headline, func(s series) bool { return s.reference })
	return ok && c.Limit > 0 && slices.Max(best.busy()) >= busyShare
}

// draw draws a case: each run a dot, or each run a line over time.
func (c caseResult) draw() []byte {
	if c.Sweep != nil {
		return c.drawSweep()
	}
	if len(c.Traces) > 0 {
		chart := plot.Lines{Title: Capital(c.Title), X: "seconds", Y: c.Headline.Unit}
		for _, level := range c.Traces {
			chart.References = append(chart.References, plot.Reference(level))
		}
		for _, s := range c.series {
			for i, run := range s.runs {
				name := s.name
				if i > 0 {
					name = "" // as the one before
				}
				chart.Add(name, run.Trace)
			}
		}
		return chart.SVG()
	}
	chart := plot.Dots{Title: Capital(c.Title), X: c.Headline.Title + ", " + c.Headline.Unit}
	if c.Limit > 0 {
		chart.References = []plot.Reference{{At: c.Limit, Label: "wire limit"}}
	}
	for _, s := range c.series {
		if values := s.values(c.Headline); len(values) > 0 || s.failures() > 0 {
			chart.Add(s.name, values)
		}
	}
	return chart.SVG()
}

// table is a table in Markdown.
func table(t Table) string {
	var b bytes.Buffer
	t.Markdown(&b)
	return strings.TrimSuffix(b.String(), "\n")
}

// count is a number of things.
func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func trim(value float64) string { return strconv.FormatFloat(value, 'g', -1, 64) }
