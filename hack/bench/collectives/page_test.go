package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/page"
)

// figures has 100 us and 200 us of Gloo at each size, and a share of that of Evenkeel.
func figures(elements []int, overTCP, overMemory func(n int) float64) map[string]map[int]figure {
	all := map[string]map[int]figure{tcp: {}, oneFlow: {}, shm: {}}
	for _, n := range elements {
		all[tcp][n] = figure{100 * overTCP(n), 200 * overTCP(n)}
		all[shm][n] = figure{100 * overMemory(n), 200 * overMemory(n)}
		for i, algorithm := range algorithms {
			if all[gloo(algorithm)] == nil {
				all[gloo(algorithm)] = map[int]figure{}
			}
			all[gloo(algorithm)][n] = figure{100 + float64(i), 200 + float64(i)}
		}
	}
	return all
}

func sample() *results {
	elements := []int{1, 1000, 100_000, starElements}
	r := &results{setting: setting{Rounds: 2, Length: time.Second, Elements: elements, Source: page.Source{Commit: "abc", Day: "2026-01-31"}}}
	for _, n := range processCounts {
		m := &measured{ranks: n}
		good := figures(elements, func(n int) float64 {
			if n >= 100_000 {
				return 0.9
			}
			return 0.6
		}, func(int) float64 { return 0.25 })
		worse := figures(elements, func(int) float64 { return 1.5 }, func(int) float64 { return 0.4 })
		m.rounds = append(m.rounds, worse, good)
		r.Local = append(r.Local, m)
	}
	return r
}

func goalsOf(r *results) map[string]string {
	all := map[string]string{}
	for _, row := range r.goals() {
		all[row.what+": "+row.goal] = row.reached + " " + row.measured
	}
	return all
}

func TestGoals(t *testing.T) {
	r := sample()
	slow := figures(r.Elements, func(n int) float64 { return 1.25 }, func(int) float64 { return 0.4 })
	r.Local[1].rounds = []map[string]map[int]figure{slow}
	bound := wireBound(starElements)
	r.Star.rounds = []map[string]map[int]figure{figures([]int{starElements}, func(int) float64 { return bound / 200 / 0.96 }, func(int) float64 { return 1 })}
	r.Threads.rounds = []threadsReport{{figure{10, 20}, 1}, {figure{9, 30}, 10_000}}
	got := goalsOf(r)
	for what, want := range map[string]string{
		"2 processes over TCP, minimum: at most Gloo's best at every size":                                                           "yes at 4 of 4",
		"2 processes over TCP, median: at most 0.7 of it at half of the sizes":                                                       "yes at 2 of 4",
		"2 processes through shared memory, minimum: at most 0.3 of Gloo's best over TCP up to 1,000 elements, 0.5 above":            "yes at 4 of 4",
		"4 processes over TCP, minimum: at most Gloo's best at every size":                                                           "no at 0 of 4; not at 1 (1.25), 1000 (1.25), 100000 (1.25), 5000000 (1.25)",
		"4 processes through shared memory, minimum: at most 0.3 of Gloo's best over TCP up to 1,000 elements, 0.5 above":            "no at 2 of 4; not at 1 (0.40), 1000 (0.40)",
		"4 hosts with links of 1gbit, 5000000 elements: 0.95 of the wire's bound for a ring":                                         "yes minimum 1.920, median 0.960",
		"64 ranks as threads of one process, 1 element: completes, with no more than one thread that waits for the network per core": "no 10000 such threads",
	} {
		if !strings.HasPrefix(got[what], want) {
			t.Errorf("%s: %q, not %q", what, got[what], want)
		}
	}
}

// The page of an interrupted run has what was measured, and says what was not.
func TestPageOfAnInterruptedRun(t *testing.T) {
	r, folder := sample(), t.TempDir()
	r.Local[1].rounds = nil
	if err := r.write(folder); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(folder, "collectives.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"commit abc, on 2026-01-31", "default blocking mode", "Goals are this project's own", "| 1000 | 100 / 200 (ring) | 60 / 120 | 0.60 / 0.60 | 25 / 50 | 0.25 / 0.25 |", "## 4 processes\n\nNot measured.", "| not measured |"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for _, name := range []string{minimumDrawing, medianDrawing} {
		if svg, err := os.ReadFile(filepath.Join(folder, name)); err != nil || !strings.Contains(string(svg), "Evenkeel, TCP, 2 processes") {
			t.Errorf("%s: %v, %s", name, err, svg)
		}
	}
	if _, err := os.Stat(filepath.Join(folder, starDrawing)); err == nil {
		t.Errorf("a drawing of what was not measured")
	}
}
