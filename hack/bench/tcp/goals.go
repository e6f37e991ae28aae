package main

import (
	"fmt"
	"math"

	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

// A goalResult is a goal and its measurement.
type goalResult struct {
	of                        quantity
	reference, measured, goal string // as they are printed; empty where there is none
	reached                   string // yes, no or unknown
	limit                     string // what is known of why it is missed
}

// unknown is the answer where the plugin was not measured.
const unknown = "-"

// goalResults compares the plugin's runs of a case with its goals.
func (r caseResult) goalResults() []goalResult {
	ours, measured := r.series(ourName)
	var all []goalResult
	for _, g := range r.testCase.goals {
		v := goalResult{of: g.of, goal: g.of.format(g.figure), reached: unknown, limit: g.limit}
		want := g.figure
		if reference, ok := r.reference(g.of); ok {
			v.reference = g.of.format(reference.value(g.of))
			if g.share > 0 {
				want = g.share * reference.value(g.of)
				v.goal = fmt.Sprintf("%s, %g of %s", g.of.format(want), g.share, reference.Name)
			}
		}
		if !measured {
			v.measured = "not measured: " + r.testCase.missing
			all = append(all, v)
			continue
		}
		got, failed := ours.value(g.of), len(ours.Outcomes)-len(ours.good())
		v.measured = g.of.format(got)
		v.reached = page.YesNo(failed == 0 && (g.of.lowerIsBetter() && got <= want || !g.of.lowerIsBetter() && got >= want))
		if failed > 0 {
			v.measured += fmt.Sprintf(", and %d of %d runs failed", failed, len(ours.Outcomes))
		}
		all = append(all, v)
	}
	return all
}

// plain are the contenders of plain sockets.
func (r caseResult) plain() []series {
	return r.Contenders[:min(len(r.testCase.plainFlows)+len(r.testCase.polled), len(r.Contenders))]
}

// reference is the contender of plain sockets with the best median, where there is one.
func (r caseResult) reference(of quantity) (series, bool) {
	var best series
	for _, s := range r.plain() {
		if len(s.good()) == 0 {
			continue
		}
		if value := stats.Median(s.values(of)); len(best.Outcomes) == 0 || of.lowerIsBetter() == (value < stats.Median(best.values(of))) {
			best = s
		}
	}
	return best, len(best.Outcomes) > 0
}

func (q quantity) format(value float64) string {
	switch q {
	case processor:
		return fmt.Sprintf("%.2f s", value)
	case roundTrip:
		return fmt.Sprintf("%.1f us", value*1e6)
	case riseTime:
		if math.IsInf(value, 1) {
			return "never"
		}
		return fmt.Sprintf("%.2f s", value)
	case idleUse:
		return fmt.Sprintf("%.2f %%", value*100)
	case maxThreads:
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

// plainIsAsGood compares the medians of plain sockets and of the plugin. Where the former are at least as good, it returns the
// case and both figures.
func (r caseResult) plainIsAsGood() (string, bool) {
	of := r.testCase.quantity()
	ours, measured := r.series(ourName)
	if of == idleUse || !measured || len(ours.good()) == 0 {
		return "", false
	}
	own := ours.value(of)
	for _, s := range r.plain() {
		theirs := s.value(of)
		if len(s.good()) > 0 && (of.lowerIsBetter() && theirs <= own || !of.lowerIsBetter() && theirs >= own) {
			return fmt.Sprintf("%s (%s: %s, %s: %s)", r.testCase.title, s.Name, of.format(theirs), ourName, of.format(own)), true
		}
	}
	return "", false
}
