package main

import (
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
)

// uniform is a report in which every run of a case took the same.
func uniform(seconds func(benchCase) float64) report {
	r := report{machine: machine.Machine{Cores: 2, Processor: "P", Kernel: "K"}, rounds: 2}
	for _, c := range cases {
		o := outcome{Open: seconds(c), Descriptors: 8, Memory: 40, Idle: 0.1}
		r.cases = append(r.cases, caseResult{of: c, runs: []outcome{o, o}})
	}
	return r
}

func reached(r report) (all []bool) {
	for _, g := range r.goals() {
		all = append(all, g.reached)
	}
	return all
}

func TestGoalsCompareWithPlainSocketsAndFewPairs(t *testing.T) {
	perPair := func(c benchCase) float64 { return float64(c.pairs*max(c.processes, 1)) / 1024 }
	for name, test := range map[string]struct {
		seconds func(benchCase) float64
		want    []bool
	}{
		"linear, as fast as plain sockets": {perPair, []bool{true, true, true, true, true}},
		"slower than plain sockets": {func(c benchCase) float64 {
			if c.plainSockets > 0 {
				return perPair(c) / 2
			}
			return perPair(c)
		}, []bool{false, true, true, true, true}},
		"quadratic": {func(c benchCase) float64 { return perPair(c) * perPair(c) }, []bool{true, false, true, true, true}},
	} {
		got := reached(uniform(test.seconds))
		for i, want := range test.want {
			if got[i] != want {
				t.Errorf("%s: goal %d reached: %t, want %t", name, i, got[i], want)
			}
		}
	}
}

func TestPageShowsMedianAndRange(t *testing.T) {
	r := uniform(func(benchCase) float64 { return 1 })
	r.source = page.Source{Commit: "abc", Command: "go run ./hack/bench/scale"}
	r.cases[0].runs = []outcome{{Open: 1}, {Open: 3}, {Open: 2}}
	text := string(r.markdown())
	for _, want := range []string{"| Evenkeel, 1024 pairs | 2.00 (1.00 to 3.00) |", "at commit abc, by `go run ./hack/bench/scale`;", "`git log --oneline abc.. -- plugin/crates`"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}
