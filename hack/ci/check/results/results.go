// Package results holds what tests report. Its parsers read the output of Go's tests, Rust's and Python's.
package results

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// An Outcome is how a test ended.
type Outcome string

// Outcomes. Elsewhere is a test that another test or another stage runs; it is not counted.
const (
	Passed    Outcome = "passed"
	Failed    Outcome = "failed"
	Skipped   Outcome = "skipped"
	Elsewhere Outcome = "elsewhere"
)

// A Result is one test that ended.
type Result struct {
	Stage   string
	Program string // a Go package, a Rust test program or a folder of Python tests
	Name    string
	Outcome Outcome
	// Duration is the whole test's, Self is without its subtests.
	Duration, Self time.Duration
	Reason         string // of a skipped test
	Output         string // of a failed or skipped test
	SetUp          bool   // it is no test but what comes before tests; it is counted only if it failed
}

// ID names a test in a run.
func (r Result) ID() string {
	id := r.Stage
	for _, part := range []string{r.Program, r.Name} {
		if part != "" {
			id += " " + part
		}
	}
	return id
}

// Counts are numbers of tests.
type Counts struct{ Passed, Failed, Skipped int }

// Add counts a result.
func (c *Counts) Add(r Result) {
	switch {
	case r.Outcome == Failed:
		c.Failed++
	case r.SetUp:
	case r.Outcome == Passed:
		c.Passed++
	case r.Outcome == Skipped:
		c.Skipped++
	}
}

// Count counts results.
func Count(all []Result) Counts {
	var c Counts
	for _, r := range all {
		c.Add(r)
	}
	return c
}

func (c Counts) String() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped", c.Passed, c.Failed, c.Skipped)
}

// Slowest returns the n slowest tests and set-ups, each without its subtests. It leaves out what takes no time that
// could be seen.
func Slowest(all []Result, n int) []Result {
	const shortest = 10 * time.Millisecond
	slow := slices.DeleteFunc(slices.Clone(all), func(r Result) bool { return r.Self < shortest })
	slices.SortStableFunc(slow, func(a, b Result) int { return cmp.Compare(b.Self, a.Self) })
	return slow[:min(n, len(slow))]
}

// A Parser reads the output of one test program.
type Parser interface {
	// Line takes a line of the program's standard output.
	Line(line string)
	// End takes how the program ended. It reports tests that did not end.
	End(err error)
}

// A Receiver takes what a parser has read.
type Receiver struct {
	Result func(Result)
	// Line takes lines that belong to no test.
	Line func(line string)
	// Program, if it is not nil, takes the end of each of several programs that one parser reads.
	Program func(program string, took time.Duration)
}

// tail keeps the last lines of a text.
type tail struct{ lines []string }

const tailLines = 200

func (t *tail) add(line string) {
	if t.lines = append(t.lines, line); len(t.lines) >= 2*tailLines {
		t.lines = slices.Delete(t.lines, 0, len(t.lines)-tailLines)
	}
}

func (t *tail) String() string {
	return strings.Join(t.lines[max(0, len(t.lines)-tailLines):], "")
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
