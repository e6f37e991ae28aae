package suspects

import (
	"fmt"
	"maps"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

// LeastCost is the share of its traffic that a fault has to cost a job, in %, for somebody to be named.
const LeastCost = 10

// Weigh sets what faults cost. A job may come into step while it is calm, so all jobs of a pattern are compared with
// what the middle one carries: they have the same hosts and cards. Of faults that cost less than [LeastCost], nobody
// has to be named, and the samples keep only whether the wrong one was. They keep the notes of what was not right.
func Weigh(samples []experiment.Sample, patternOf func(s experiment.Sample) Pattern) []experiment.Sample {
	type group struct {
		Pattern
		quick bool
	}
	of := func(s experiment.Sample) group { return group{patternOf(s), s.Quick} }
	calm := map[group][]float64{}
	for _, s := range samples {
		if value, ok := s.Value(Calm); ok {
			calm[of(s)] = append(calm[of(s)], value)
		}
	}
	var weighed []experiment.Sample
	for _, s := range samples {
		if s.Failure == "" {
			s = weigh(s, stats.Median(calm[of(s)]))
		}
		weighed = append(weighed, s)
	}
	return weighed
}

// weigh compares a job with one that carries so many MB/s while it is calm.
func weigh(s experiment.Sample, calm float64) experiment.Sample {
	s.Quantities = maps.Clone(s.Quantities)
	faulty, begun := s.Value(Faulty)
	costly := 1.0 // where somebody was named before
	if begun && calm > 0 {
		cost := 100 * (1 - faulty/calm)
		s.Quantities[Cost.Name] = experiment.Value{Value: cost, Unit: Cost.Unit}
		s.Note = fmt.Sprintf("%s (cost %.0f %%)", s.Note, cost)
		if cost < LeastCost {
			costly = 0
		}
	}
	s.Quantities[Costly.Name] = experiment.Value{Value: costly}
	right, _ := s.Value(Right)
	if wrong, _ := s.Value(Wrong); right == 1 || costly == 0 && wrong == 0 {
		s.Note = ""
	}
	if costly == 0 {
		for _, q := range []experiment.Quantity{Right, Nobody, OrCard, Named} {
			delete(s.Quantities, q.Name)
		}
	}
	return s
}
