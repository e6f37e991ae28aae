package main

import (
	"slices"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
)

// Names of the contenders.
const (
	tcp     = "Evenkeel, TCP"
	oneFlow = "Evenkeel, TCP, one flow"
	shm     = "Evenkeel, shared memory"
)

func gloo(algorithm string) string { return "Gloo, " + algorithm }

// A setting is what all figures of a page have in common.
type setting struct {
	Rounds             int
	Length, StarLength time.Duration
	Elements           []int
	Quick              bool
	Machine            machine.Machine
	Source             page.Source
	Gloo               string // its label
	Took               time.Duration
}

// results are all measurements.
type results struct {
	setting
	Local   []*measured
	Star    measured
	Threads threaded
}

// measured has the figures of all contenders, by name and number of elements, in each round.
type measured struct {
	ranks   int
	rounds  []map[string]map[int]figure
	failed  []string // contenders whose runs failed and were repeated
	without []string // contenders that were left out from then on, as all tries failed
}

// threaded are the results of ranks as threads of one process.
type threaded struct{ rounds []threadsReport }

// threadsReport is the result of one such run.
type threadsReport struct {
	figure
	ioThreads int // threads that wait for the network
}

// of is the minimum time of all rounds, and the median of the round with the lowest median.
func (m *measured) of(name string, elements int) figure {
	best := m.rounds[0][name][elements]
	for _, round := range m.rounds[1:] {
		f := round[name][elements]
		best = figure{min(best.min, f.min), min(best.median, f.median)}
	}
	return best
}

// algorithms are the algorithms of Gloo that were measured.
func (m *measured) algorithms() []string {
	return slices.DeleteFunc(slices.Clone(algorithms), func(name string) bool { return m.rounds[0][gloo(name)] == nil })
}

// algorithms are the algorithms of Gloo that were measured in any case.
func (r *results) algorithms() []string {
	for _, m := range append(slices.Clone(r.Local), &r.Star) {
		if m.rounds != nil {
			return m.algorithms()
		}
	}
	return algorithms
}

// best is Gloo's best at a size: the minimum time of all algorithms, and the lowest median with its algorithm.
func (m *measured) best(elements int) (figure, string) {
	var best figure
	var name string
	for _, algorithm := range m.algorithms() {
		f := m.of(gloo(algorithm), elements)
		if name == "" || f.median < best.median {
			best.median, name = f.median, algorithm
		}
		if best.min == 0 || f.min < best.min {
			best.min = f.min
		}
	}
	return best, name
}

// ratio is a contender's time relative to Gloo's best.
func (m *measured) ratio(name string, elements int) figure {
	gloos, _ := m.best(elements)
	own := m.of(name, elements)
	return figure{own.min / gloos.min, own.median / gloos.median}
}
