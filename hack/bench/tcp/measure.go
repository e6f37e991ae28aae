package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	ourName    = "Evenkeel"
	staticName = "Evenkeel, chunks dealt in turn"
	// staticSetting makes the plugin do what NCCL and others do.
	staticSetting = "EVENKEEL_SCHEDULE"
	staticValue   = "static"

	// boundBy is the share of all processors' time, in the runs of plain
	// sockets, from which on it is the processors that are measured. The plugin's
	// driver does not tell: like NCCL, it asks again instead of sleeping.
	boundBy = 0.9
)

// A bencher measures cases.
type bencher struct {
	options options
	out     io.Writer
	ours    *plugin
	others  []*plugin // as well as the plugin with other settings
	notes   []string
}

func newBencher(o options, out io.Writer) (*bencher, error) {
	if _, err := exec.LookPath(o.driver); err != nil {
		return nil, fmt.Errorf("--driver: %w", err)
	}
	b := &bencher{options: o, out: out}
	add := func(label, library string, environment ...string) (*plugin, error) {
		library, err := filepath.Abs(library)
		if err != nil {
			return nil, err
		}
		return &plugin{label: label, library: library, environment: environment, driver: o.driver, speed: map[string]float64{}}, nil
	}
	var err error
	if b.ours, err = add(ourName, o.library); err != nil {
		return nil, err
	}
	has, err := mentions(o.library, staticSetting)
	if err != nil {
		return nil, err
	}
	if has {
		static, err := add(staticName, o.library, staticSetting+"="+staticValue)
		if err != nil {
			return nil, err
		}
		b.others = append(b.others, static)
	} else {
		b.notes = append(b.notes, "The plugin has no setting "+staticSetting+": dealing chunks in turn is not measured.")
	}
	for _, given := range o.plugins {
		label, path, ok := strings.Cut(given, "=")
		if !ok || label == "" || path == "" {
			return nil, fmt.Errorf("--plugin %q: NAME=PATH, such as bagua=/opt/libnccl-net-bagua.so", given)
		}
		if _, err := mentions(path, ""); err != nil {
			return nil, fmt.Errorf("--plugin %s: %w", label, err)
		}
		other, err := add(label, path)
		if err != nil {
			return nil, err
		}
		b.others = append(b.others, other)
	}
	return b, nil
}

// A caseResult is what all runs of a case gave.
type caseResult struct {
	Name       string
	Case       benchCase    `json:"-"`
	Lab        netns.Config // as it came up
	Commit     string
	Machine    machine
	Runs       int
	Contenders []series
}

// A series is one contender's runs.
type series struct {
	Name     string
	Outcomes []outcome
}

// measure brings a case's network up and lets the contenders run in turn.
func (b *bencher) measure(ctx context.Context, c benchCase) (_ caseResult, err error) {
	c.lab.Name, c.lab.Congestion = "bench", b.options.congestion
	lab, err := netns.Up(ctx, c.lab)
	if err != nil {
		return caseResult{}, err
	}
	defer func() { err = errors.Join(err, lab.Down(ctx)) }()
	c.lab = lab.Config()
	fmt.Fprintf(b.out, "\n%s: %s (%s)\n", c.name, c.title, lab.Config())
	var contenders []contender
	for _, flows := range c.rawFlows {
		contenders = append(contenders, plain{flows})
	}
	if c.missing == "" {
		contenders = append(contenders, b.ours)
		for _, other := range b.others {
			contenders = append(contenders, other)
		}
	} else {
		fmt.Fprintf(b.out, "  %s is not measured: %s\n", ourName, c.missing)
	}
	result := caseResult{Name: c.name, Case: c, Lab: c.lab, Contenders: make([]series, len(contenders))}
	for round := range b.options.runs {
		for i, contender := range contenders {
			got := b.once(ctx, lab, c, contender)
			if ctx.Err() != nil {
				return caseResult{}, errors.New("interrupted")
			}
			result.Contenders[i].Name = contender.name()
			result.Contenders[i].Outcomes = append(result.Contenders[i].Outcomes, got)
			fmt.Fprintf(b.out, "  %2d of %d  %-32s %s\n", round+1, b.options.runs, contender.name(), got.line(c))
		}
	}
	return result, nil
}

// once is one run; its failure is a result.
func (b *bencher) once(ctx context.Context, lab *netns.Lab, c benchCase, who contender) outcome {
	limit := patience + 10*c.length
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done within %s", limit))
	defer cancel()
	before := readTicks()
	var trace []point
	var faulted error
	var watching sync.WaitGroup
	watch, stop := context.WithCancel(ctx)
	if c.fault != nil {
		watching.Go(func() { trace, faulted = c.fault.happen(watch, lab) })
	}
	got, err := who.run(ctx, lab, c)
	stop()
	watching.Wait()
	got.Busy = before.busySince()
	if err = errors.Join(err, faulted); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause // the rest is what came of it
		}
		got.Failure = strings.ReplaceAll(err.Error(), "\n", "; ")
		return got
	}
	if c.fault != nil {
		got.Trace = trace
		got.Rate = c.fault.rate(trace)
	}
	return got
}

// line is for people who wait.
func (o outcome) line(c benchCase) string {
	if o.Failure != "" {
		return "FAILED: " + o.Failure
	}
	text := fmt.Sprintf("%7.3f GB/s", o.Rate)
	switch {
	case c.idle:
		return fmt.Sprintf("%.2f %% of a core, %d threads", o.Idle*100, o.Threads)
	case c.pingPong:
		text = fmt.Sprintf("%7.1f us", o.P50*1e6)
	default:
		text += fmt.Sprintf("  %5.2f + %4.2f CPU s/GB", o.Send, o.Receive)
	}
	if c.fault != nil {
		text += "  " + c.fault.story(o.Trace)
	}
	return fmt.Sprintf("%s  processors %.0f %%, own %.0f %%", text, o.Busy*100, o.Own*100)
}

// good are the runs that did not fail.
func (s series) good() []outcome {
	return slices.DeleteFunc(slices.Clone(s.Outcomes), func(o outcome) bool { return o.Failure != "" })
}

// of lists a quantity's values over the runs that did not fail.
func (s series) of(q quantity) []float64 {
	var all []float64
	for _, o := range s.good() {
		switch q {
		case processor:
			all = append(all, o.Send+o.Receive)
		case roundTrip:
			all = append(all, o.P50)
		case idleUse:
			all = append(all, o.Idle)
		case mostThread:
			all = append(all, float64(o.Threads))
		default:
			all = append(all, o.Rate)
		}
	}
	slices.Sort(all)
	return all
}

// value is a quantity over all runs: the worst, or the median.
func (s series) value(q quantity) float64 {
	all := s.of(q)
	if len(all) == 0 {
		return 0
	}
	switch q {
	case worstRate:
		return all[0]
	case idleUse, mostThread:
		return all[len(all)-1]
	}
	return median(all)
}

// median of values in order; of an even number, the mean of the middle two.
func median(sorted []float64) float64 {
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// A point of a trace is how much had arrived by then.
type point struct {
	At    time.Duration // since the first byte
	Bytes uint64
}
