package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// The lab's two ports, as perftest and the plugin name them.
const (
	client, server = "rxe0", "rxe1"
	serverAddress  = "10.77.0.2"
	gidIndex       = "1"
)

// Each end runs on a processor of its own, with perftest and with the plugin: the placement of the two ends matters more than
// what they do.
const receiverCPU, senderCPU = "0", "1"

// latencyRepeats is the number of latency measurements in a round: single runs differ by a factor of two, depending on the
// processors of soft-RoCE's own threads.
const latencyRepeats = 3

// caseTimeout is for one measurement of one program.
const caseTimeout = 2 * time.Minute

// programs are the plugin, its driver, and its test binaries by the names of their targets.
type programs struct {
	Library, Driver string
	Tests           map[string]string
}

// A result has the figures of a case, one for each round.
type result struct {
	Case     benchCase
	Perftest []float64
	// Sends are perftest's figures by its other program, whose receiver polls for a completion of each message, as the
	// plugin's does.
	Sends    []float64
	Evenkeel []float64
}

// measured are all results, and whether each check passed, by name.
type measured struct {
	Results []result `json:",omitempty"`
	Passed  map[string]bool
}

// measure runs the cases and checks of a topology. The cases belong to the default one.
func (c programs) measure(ctx context.Context, progress io.Writer, rounds int, topology vm.Topology) (measured, error) {
	m := measured{Passed: map[string]bool{}}
	if topology == vm.Pair {
		var err error
		if m.Results, err = c.compare(ctx, progress, rounds); err != nil {
			return measured{}, err
		}
	}
	for _, of := range checks {
		if of.topology() != topology {
			continue
		}
		passed := true
		for _, test := range of.Tests {
			output, err := c.test(ctx, of.Target, test)
			if err != nil {
				passed = false
				fmt.Fprintf(progress, "%s: %v\n%s", test, err, output)
			}
		}
		m.Passed[of.Name] = passed
	}
	return m, nil
}

// test runs one test, and returns its output.
func (c programs) test(ctx context.Context, target, name string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, caseTimeout)
	defer cancel()
	output, err := exec.CommandContext(ctx, c.Tests[target], "--exact", "--include-ignored", name).CombinedOutput()
	if err == nil && !bytes.Contains(output, []byte("1 passed")) {
		err = errors.New("no such test")
	}
	return output, err
}

// compare measures each case with perftest and with the plugin, in turn.
func (c programs) compare(ctx context.Context, progress io.Writer, rounds int) ([]result, error) {
	results := make([]result, len(cases))
	for round := range rounds {
		for i, of := range cases {
			results[i].Case = of
			times := 1
			if of.Latency {
				times = latencyRepeats
			}
			for range times {
				if err := c.runOnce(ctx, &results[i]); err != nil {
					return nil, fmt.Errorf("%s: %w", of.Name, err)
				}
			}
			perftest, ours := results[i].Perftest, results[i].Evenkeel
			fmt.Fprintf(progress, "round %d of %d, %s: perftest %.1f, Evenkeel %.1f\n", round+1, rounds, of.Name, perftest[len(perftest)-times:], ours[len(ours)-times:])
		}
	}
	return results, nil
}

// runOnce measures a case with all programs, one after the other.
func (c programs) runOnce(ctx context.Context, r *result) error {
	writes, sends := r.Case.perftest()
	for _, by := range []struct {
		program string
		values  *[]float64
	}{{sends, &r.Sends}, {writes, &r.Perftest}} {
		value, err := runPerftest(ctx, r.Case, by.program)
		if err != nil {
			return fmt.Errorf("%s: %w", by.program, err)
		}
		*by.values = append(*by.values, value)
	}
	ours, err := c.runPlugin(ctx, r.Case)
	if err != nil {
		return fmt.Errorf("evenkeel-bench: %w", err)
	}
	r.Evenkeel = append(r.Evenkeel, ours)
	return nil
}
