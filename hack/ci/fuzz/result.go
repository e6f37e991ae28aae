package main

import (
	"fmt"
	"regexp"
	"strings"
)

// result is what a run of a target has printed.
type result struct {
	target     string
	executions string
	// covered is the number of places in the code that an input has reached, of which there are places. Most are in
	// libraries.
	covered, places string
	// inputs is the number of inputs that are kept: each reaches something that the others do not.
	inputs string
	failed bool
	// failure is the last of what the target has printed, and input the file with the input that has failed.
	failure, input string
}

const lastLines = 25

var (
	header     = fmt.Sprintf("%-16s %12s %16s %8s  %s", "target", "executions", "coverage", "inputs", "result")
	executions = regexp.MustCompile(`(?m)^stat::number_of_executed_units: +(\d+)`)
	places     = regexp.MustCompile(`\((\d+) inline 8-bit counters\)`)
	covered    = regexp.MustCompile(`(?m)^#\d+\t.* cov: (\d+) .* corp: (\d+)/`)
	artifact   = regexp.MustCompile(`(?m)Test unit written to (.+)$`)
)

// parse reads libFuzzer's output.
func parse(target, out string, failed bool) result {
	last := func(all [][]string, group int) string {
		if len(all) == 0 {
			return "-"
		}
		return all[len(all)-1][group]
	}
	progress := covered.FindAllStringSubmatch(out, -1)
	r := result{
		target: target, failed: failed,
		executions: last(executions.FindAllStringSubmatch(out, -1), 1),
		places:     last(places.FindAllStringSubmatch(out, -1), 1),
		covered:    last(progress, 1),
		inputs:     last(progress, 2),
	}
	if failed {
		lines := strings.Split(strings.TrimSpace(out), "\n")
		r.failure = strings.Join(lines[max(0, len(lines)-lastLines):], "\n")
		// The last one: inputs that were only slow are written as well.
		if found := artifact.FindAllStringSubmatch(out, -1); found != nil {
			r.input = strings.TrimSpace(last(found, 1))
		}
	}
	return r
}

// String is the line of a run, and what a failed one has printed.
func (r result) String() string {
	outcome := "ok"
	if r.failed {
		outcome = "FAILED\n" + r.failure
		if r.input != "" {
			outcome += fmt.Sprintf("\nagain: make fuzz TARGET=%s INPUT=%s", r.target, r.input)
		}
	}
	return fmt.Sprintf("%-16s %12s %16s %8s  %s", r.target, r.executions, r.covered+"/"+r.places, r.inputs, outcome)
}
