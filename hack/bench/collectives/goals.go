package main

import (
	"fmt"
	"runtime"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/internal/page"
)

// A goal is a row of the table of goals.
type goal struct{ what, goal, reached, measured string }

// goals are all goals, and whether they were reached.
func (r *results) goals() []goal {
	var rows []goal
	add := func(done bool, what, aim string, compare func() (bool, string)) {
		row := goal{what, aim, "not measured", ""}
		if done {
			var reached bool
			reached, row.measured = compare()
			row.reached = page.YesNo(reached)
		}
		rows = append(rows, row)
	}
	minimum := func(f figure) float64 { return f.min }
	median := func(f figure) float64 { return f.median }
	for _, m := range r.Local {
		done, where := m.rounds != nil, fmt.Sprintf("%d processes", m.ranks)
		for _, which := range []struct {
			name string
			of   func(figure) float64
		}{{"minimum", minimum}, {"median", median}} {
			if m.ranks > 2 && which.name == "median" {
				continue // those medians are mostly the scheduler's
			}
			ratio := func(name string) func(int) float64 {
				return func(n int) float64 { return which.of(m.ratio(name, n)) }
			}
			add(done, where+" over TCP, "+which.name, "at most Gloo's best at every size", func() (bool, string) {
				return r.everywhere(ratio(tcp), func(int) float64 { return 1 })
			})
			add(done, where+" over TCP, "+which.name, "at most 0.7 of it at half of the sizes", func() (bool, string) {
				reached := 0
				for _, n := range r.Elements {
					if ratio(tcp)(n) <= 0.7 {
						reached++
					}
				}
				return 2*reached >= len(r.Elements), fmt.Sprintf("at %d of %d", reached, len(r.Elements))
			})
			add(done, where+" through shared memory, "+which.name, "at most 0.3 of Gloo's best over TCP up to 1,000 elements, 0.5 above", func() (bool, string) {
				return r.everywhere(ratio(shm), shmShare)
			})
		}
	}
	add(r.Star.rounds != nil, fmt.Sprintf("%d hosts with links of %s, %d elements", hosts, linkRate, starElements), "0.95 of the wire's bound for a ring", func() (bool, string) {
		f, bound := r.Star.of(tcp, starElements), wireBound(starElements)
		return bound/f.median >= 0.95, fmt.Sprintf("minimum %.3f, median %.3f", bound/f.min, bound/f.median)
	})
	add(r.Threads.rounds != nil, fmt.Sprintf("%d ranks as threads of one process, 1 element", threads), "completes, with no more than one thread that waits for the network per core", func() (bool, string) {
		best := r.Threads.rounds[0]
		for _, f := range r.Threads.rounds[1:] {
			best.figure = figure{min(best.min, f.min), min(best.median, f.median)}
			best.ioThreads = max(best.ioThreads, f.ioThreads)
		}
		cores := runtime.NumCPU()
		return best.ioThreads <= cores, fmt.Sprintf("%d such threads, %d cores; minimum %.0f us, median %.0f us", best.ioThreads, cores, best.min, best.median)
	})
	return rows
}

// shmShare is the goal of shared memory, relative to Gloo's time over TCP.
func shmShare(elements int) float64 {
	if elements <= 1000 {
		return 0.3
	}
	return 0.5
}

// everywhere reports whether a ratio is at most its limit at every size, and lists the sizes where it is not.
func (r *results) everywhere(ratio, limit func(elements int) float64) (bool, string) {
	var missed []string
	for _, n := range r.Elements {
		if f := ratio(n); f > limit(n) {
			missed = append(missed, fmt.Sprintf("%d (%.2f)", n, f))
		}
	}
	measured := fmt.Sprintf("at %d of %d", len(r.Elements)-len(missed), len(r.Elements))
	if missed != nil {
		measured += "; not at " + strings.Join(missed, ", ")
	}
	return missed == nil, measured
}
