package page

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

// Results are an experiment's samples, by case and contender. They are a pure function of the record and of the
// experiment's table.
type Results struct {
	of      experiment.Experiment
	samples []experiment.Sample
	cases   []caseResult
}

// A caseResult is a measured case.
type caseResult struct {
	experiment.Case
	subject string
	series  []series
	// together are the subject's runs in all cases of a group.
	together []experiment.Sample
}

// A series is the runs of a contender, by round.
type series struct {
	name      string
	reference bool   // see experiment.Contender
	rival     bool   // a reference, or another plugin that was given
	base      string // see experiment.Contender
	runs      []experiment.Sample
}

// NewResults sorts the samples. Cases that have none are left out, and so are samples of cases that the table no longer
// has.
func NewResults(e experiment.Experiment, samples []experiment.Sample) Results {
	r := Results{of: e}
	if e.Derive != nil {
		samples = e.Derive(samples)
	}
	for _, quick := range []bool{false, true} {
		for _, c := range e.Cases(quick) {
			result := caseResult{Case: c, subject: e.SubjectName()}
			for _, of := range c.Contenders {
				result.series = append(result.series, series{name: of.Name, reference: of.Reference, rival: of.Reference, base: of.Base})
			}
			measured := 0
			for _, s := range samples {
				if s.Case != c.Name || s.Quick != quick {
					continue
				}
				at := slices.IndexFunc(result.series, func(of series) bool { return of.name == s.Contender })
				if at < 0 {
					at = len(result.series)
					result.series = append(result.series, series{name: s.Contender, rival: true})
				}
				result.series[at].runs = append(result.series[at].runs, s)
				r.samples = append(r.samples, s)
				measured++
			}
			if measured == 0 {
				continue
			}
			result.series = slices.DeleteFunc(result.series, func(of series) bool { return len(of.runs) == 0 })
			for _, of := range result.series {
				slices.SortFunc(of.runs, func(a, b experiment.Sample) int { return a.Round - b.Round })
			}
			r.cases = append(r.cases, result)
		}
	}
	return r
}

// find returns a contender's series; it has no runs if it was not measured.
func (c caseResult) find(name string) series {
	for _, s := range c.series {
		if s.name == name {
			return s
		}
	}
	return series{name: name}
}

// values are a quantity of the runs that did not fail, in order of rounds.
func (s series) values(q experiment.Quantity) []float64 {
	var all []float64
	for _, run := range s.runs {
		if value, ok := run.Value(q); ok {
			all = append(all, value)
		}
	}
	return all
}

// middle is what stands for the runs that did not fail.
func (s series) middle(q experiment.Quantity) float64 {
	if q.Statistic == experiment.Median {
		return stats.Median(s.values(q))
	}
	return stats.Mean(s.values(q))
}

func (s series) failures() int {
	failed := 0
	for _, run := range s.runs {
		if run.Failure != "" {
			failed++
		}
	}
	return failed
}

// worst is the worst of values.
func worst(q experiment.Quantity, values []float64) float64 {
	if q.LowerIsBetter {
		return slices.Max(values)
	}
	return slices.Min(values)
}

// sections are the cases, with those of a group as one: each series is a row.
func (r Results) sections() []caseResult {
	var all []caseResult
	groups := map[string]int{}
	for _, c := range r.cases {
		at, begun := groups[c.Group]
		switch {
		case c.Group == "":
			all = append(all, c)
			continue
		case !begun:
			at = len(all)
			groups[c.Group] = at
			group := caseResult{Case: c.Case, subject: c.subject}
			group.Name, group.Title = strings.ReplaceAll(c.Group, " ", "-"), c.Group
			all = append(all, group)
		}
		for _, s := range c.series {
			if s.name == c.subject {
				s.name = c.Title
				all[at].together = append(all[at].together, s.runs...)
			} else {
				s.name = c.Title + ", " + s.name
			}
			all[at].series = append(all[at].series, s)
		}
	}
	return all
}

// over compares a series with another by the rounds in which both ran.
func (s series) over(other series, q experiment.Quantity) stats.Ratio {
	var own, theirs []float64
	for _, run := range s.runs {
		at := slices.IndexFunc(other.runs, func(o experiment.Sample) bool { return o.Round == run.Round })
		if at < 0 {
			continue
		}
		a, haveA := run.Value(q)
		b, haveB := other.runs[at].Value(q)
		if haveA && haveB {
			own, theirs = append(own, a), append(theirs, b)
		}
	}
	return stats.PairedRatio(own, theirs)
}

// best is the series with the best median of those that a function selects; not ok where none has a value.
func (c caseResult) best(q experiment.Quantity, selected func(series) bool) (best series, ok bool) {
	for _, s := range c.series {
		if len(s.values(q)) == 0 || !selected(s) {
			continue
		}
		if !ok || q.Better(s.middle(q), best.middle(q)) {
			best, ok = s, true
		}
	}
	return best, ok
}

// A goalResult is a goal and its measurement, as they are printed.
type goalResult struct {
	Case, Of, WireLimit, Reference, Measured, Goal, Reached, Limit string
}

// goals compares the runs with what was asked for.
func (r Results) goals() []goalResult {
	var all []goalResult
	for _, c := range r.cases {
		for _, g := range c.Goals {
			all = append(all, r.goal(c, g))
		}
	}
	return all
}

func (r Results) goal(c caseResult, g experiment.Goal) goalResult {
	if c.Sweeps(g.Of) {
		return r.sweepGoal(c, g)
	}
	q := g.Of
	v := goalResult{Case: c.Title, Of: goalOf(g), Goal: q.Format(g.Figure), Limit: g.Limit, Reached: "-", Measured: "not measured"}
	if q == c.Headline && c.Limit > 0 {
		v.WireLimit = q.Format(c.Limit)
	}
	want := g.Figure
	reference, known := r.reference(c, g)
	if known {
		middle := reference.middle(q)
		v.Reference = q.Format(middle)
		if g.Share > 0 {
			want = g.Share * middle
			v.Goal = q.Format(want) + ", " + trim(g.Share) + " of " + reference.name
		}
	} else if g.Share > 0 {
		v.Goal = trim(g.Share) + " of a reference that was not measured"
	}
	name := g.Contender
	if name == "" {
		name = c.subject
	} else {
		v.Case += ", " + name
	}
	ours := c.find(name)
	values, failed := ours.values(q), ours.failures()
	if len(values) > 0 {
		got := ours.middle(q)
		if g.Worst {
			got = worst(q, values)
		}
		v.Measured = q.Format(got)
		if g.Share == 0 || known {
			v.Reached = YesNo(failed == 0 && !q.Better(want, got) && !math.IsInf(got, 0))
		}
	}
	if failed > 0 {
		v.Measured, v.Reached = fmt.Sprintf("%s, and %d of %s failed", v.Measured, failed, count(len(ours.runs), "run")), YesNo(false)
	}
	return v
}

func goalOf(g experiment.Goal) string {
	if g.Worst {
		return "worst " + g.Of.Title
	}
	return g.Of.Title
}

// reference is what a goal compares with.
func (r Results) reference(c caseResult, g experiment.Goal) (series, bool) {
	if g.Reference == (experiment.Reference{}) {
		return c.best(g.Of, func(s series) bool { return s.reference })
	}
	name, title := g.Reference.Contender, ""
	if name == "" {
		name = c.subject
	}
	if g.Reference.Case != "" {
		at := slices.IndexFunc(r.cases, func(of caseResult) bool { return of.Name == g.Reference.Case })
		if at < 0 {
			return series{}, false
		}
		c = r.cases[at]
		title = " with " + c.Title
	}
	s := c.find(name)
	s.name += title
	return s, len(s.values(g.Of)) > 0
}

// A Comparison is a row of two builds.
type Comparison struct {
	Case    string
	Ratio   stats.Ratio
	Verdict stats.Verdict
}

// Against compares the subject with another contender in all cases, by each case's headline, in a sweep at each point.
func (r Results) Against(name string) []Comparison {
	var all []Comparison
	for _, c := range r.cases {
		for i, q := range c.Headlines() {
			ratio := c.find(c.subject).over(c.find(name), q)
			all = append(all, Comparison{c.Name + c.at(i), ratio, ratio.Verdict(q.LowerIsBetter)})
		}
	}
	return all
}

// Headline is the subject and the best of the others by a case's headline, and the ratio of one to the other with its
// verdict, as they are printed. It is not ok if the record lacks either. Of a sweep it is that at the first point.
func (r Results) Headline(name string) (subject, others, ratio string, ok bool) {
	at := slices.IndexFunc(r.cases, func(c caseResult) bool { return c.Name == name })
	if at < 0 {
		return "", "", "", false
	}
	c := r.cases[at]
	q := c.Headlines()[0]
	ours := c.find(c.subject)
	rival, known := c.bestRival(q)
	if !known || len(ours.values(q)) == 0 {
		return "", "", "", false
	}
	over := ours.over(rival, q)
	return q.Format(ours.middle(q)), q.Format(rival.middle(q)) + ", " + rival.name, over.String() + ", " + string(over.Verdict(q.LowerIsBetter)), true
}
