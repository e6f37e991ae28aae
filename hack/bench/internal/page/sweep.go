package page

import (
	"cmp"
	"fmt"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/plot"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

// at names a point of a case's sweep, after the case; it is empty where there is no sweep.
func (c caseResult) at(point int) string {
	if c.Sweep == nil {
		return ""
	}
	return ", " + experiment.Point(c.Sweep.Points[point]) + " " + c.Sweep.Of
}

// sweepGoal compares the runs with what was asked for at the points of a sweep.
func (r Results) sweepGoal(c caseResult, g experiment.Goal) goalResult {
	v := goalResult{Case: c.Title, Of: goalOf(g), Goal: g.Of.Format(g.Figure), Limit: g.Limit, Reached: "-", Measured: "not measured"}
	if g.Contender != "" {
		v.Case += ", " + g.Contender
	}
	if g.Share > 0 {
		v.Reference, v.Goal = "the best at each", trim(g.Share)+" of the reference"
		if g.Reference != (experiment.Reference{}) {
			v.Reference = "the same at each"
		}
	}
	if g.Points > 0 {
		v.Goal += fmt.Sprintf(", at %.0f %% of the points", 100*g.Points)
	} else {
		v.Goal += ", at every point"
	}
	if g.From > 0 {
		v.Of += ", from " + experiment.Point(g.From) + " " + c.Sweep.Of
	}
	if g.To > 0 {
		v.Of += ", up to " + experiment.Point(g.To) + " " + c.Sweep.Of
	}
	asked, measured, reached := 0, 0, 0
	var missed []string
	for _, point := range c.Sweep.Points {
		if point < g.From || g.To > 0 && point > g.To {
			continue
		}
		asked++
		of := g
		of.Of = g.Of.At(point)
		switch here := r.goal(c, of); here.Reached {
		case YesNo(true):
			measured, reached = measured+1, reached+1
		case YesNo(false):
			measured++
			missed = append(missed, fmt.Sprintf("%s (%s, goal %s)", experiment.Point(point), here.Measured, here.Goal))
		default:
			missed = append(missed, experiment.Point(point)+" ("+here.Measured+")")
		}
	}
	if measured == 0 {
		return v
	}
	v.Measured = fmt.Sprintf("at %d of %d", reached, asked)
	if len(missed) > 0 {
		v.Measured += "; not at " + strings.Join(missed, ", ")
	}
	v.Reached = YesNo(float64(reached) >= cmp.Or(g.Points, 1)*float64(asked))
	return v
}

// bestRival is the best at a quantity of those with which the subject is compared.
func (c caseResult) bestRival(q experiment.Quantity) (best series, ok bool) {
	return c.best(q, func(s series) bool { return s.rival && s.name != c.subject })
}

// compared are the series with a column, and a line, of their own: those that are no rivals.
func (c caseResult) compared() []series {
	var all []series
	for _, s := range c.series {
		if !s.rival || s.name == c.subject {
			all = append(all, s)
		}
	}
	return all
}

// A sweepTable is a quantity at each point of a sweep.
type sweepTable struct {
	Quantity string
	Points   Table
}

// sweepTables have a row for each point. Ratios are to the best of the rivals at that point.
func (c caseResult) sweepTables() []sweepTable {
	if c.Sweep == nil {
		return nil
	}
	var all []sweepTable
	for _, q := range append([]experiment.Quantity{c.Headline}, c.Sweep.More...) {
		t := Table{Heading: []string{c.Sweep.Of, "best of the others"}}
		for _, s := range c.compared() {
			t.Heading = append(t.Heading, s.name, "over the best", "it is")
		}
		for _, point := range c.Sweep.Points {
			at := q.At(point)
			rival, known := c.bestRival(at)
			cells := []string{experiment.Point(point), "-"}
			if known {
				cells[1] = at.Format(stats.Median(rival.values(at))) + ", " + rival.name
			}
			for _, s := range c.compared() {
				values := s.values(at)
				if len(values) == 0 {
					cells = append(cells, "not measured", "", "")
					continue
				}
				ratio := s.over(rival, at)
				verdict := ""
				if known {
					verdict = string(ratio.Verdict(q.LowerIsBetter))
				}
				cells = append(cells, at.Format(stats.Median(values)), ratio.String(), verdict)
			}
			t.Add(cells...)
		}
		all = append(all, sweepTable{q.Title + ", median of the rounds", t})
	}
	return all
}

// drawSweep has a line for each quantity of each contender that has a column: its ratio to the best of the rivals at
// each point. Without rivals the headline is drawn.
func (c caseResult) drawSweep() []byte {
	chart := plot.Lines{Title: Capital(c.Title), X: c.Sweep.Of, Y: c.Headline.Unit, LogX: true}
	quantities := append([]experiment.Quantity{c.Headline}, c.Sweep.More...)
	rivals := false
	for _, q := range c.Headlines() {
		_, ok := c.bestRival(q)
		rivals = rivals || ok
	}
	if rivals {
		chart.Y, chart.References = "ratio to the best of the others", []plot.Reference{{At: 1, Label: "the best of the others"}}
	} else {
		quantities = quantities[:1]
	}
	for _, s := range c.compared() {
		for _, q := range quantities {
			var points [][2]float64
			for _, point := range c.Sweep.Points {
				at := q.At(point)
				values := s.values(at)
				y := stats.Median(values)
				if rivals {
					rival, _ := c.bestRival(at)
					ratio := s.over(rival, at)
					if ratio.Pairs == 0 {
						continue
					}
					y = ratio.Median
				}
				if len(values) > 0 {
					points = append(points, [2]float64{point, y})
				}
			}
			chart.Add(s.name+", "+q.Title, points)
		}
	}
	return chart.SVG()
}
