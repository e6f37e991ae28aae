package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	ourName    = "Evenkeel"
	staticName = "Evenkeel, static mode"
	// staticSetting makes the plugin assign chunks to connections in turn, whatever their speed.
	staticSetting = "EVENKEEL_SCHEDULE"
	staticValue   = "static"

	// busyShare is the share of all processors' time, in the runs of plain sockets, from which on the processors are what is
	// measured. Runs of the plugin do not show it: like NCCL, its driver polls instead of sleeping.
	busyShare = 0.9
)

// An outcome is the result of one run.
type outcome struct {
	Rate    float64 // GB/s, 10^9 bytes
	P50     float64 // of a ping-pong's round trips, seconds
	Send    float64 // processor seconds for each GB, system calls included
	Receive float64
	Own     float64 // share of all processors' time that the two programs used
	Busy    float64 // and that all programs used
	Trace   []point // of a fault
	// Rise is how long a cold run takes to reach the wire limit, see rise; zero if it never does.
	Rise    time.Duration
	Idle    float64 // share of one processor that idle connections use, on the worse side
	Threads int     // of the plugin, on the side that has more
	Failure string
}

// A contender sends a case's messages from H1 to H2.
type contender interface {
	// name is for tables.
	name() string
	// prepare does what is not part of the runs.
	prepare(ctx context.Context, lab *netns.Lab, c benchCase) error
	// run sends messages for about as long as the case says.
	run(ctx context.Context, lab *netns.Lab, c benchCase) (outcome, error)
}

// A bench measures cases.
type bench struct {
	config config
	out    io.Writer
	ours   *plugin
	others []*plugin // as well as the plugin with other settings
	more   []contender
	notes  []string
}

func newBench(o config, out io.Writer) (*bench, error) {
	if _, err := exec.LookPath(o.Driver); err != nil {
		return nil, fmt.Errorf("--driver: %w", err)
	}
	b := &bench{config: o, out: out}
	add := func(label, library string, environment ...string) (*plugin, error) {
		library, err := filepath.Abs(library)
		if err != nil {
			return nil, err
		}
		return &plugin{label: label, library: library, environment: environment, driver: o.Driver, speed: map[string]float64{}}, nil
	}
	var err error
	if b.ours, err = add(ourName, o.Library); err != nil {
		return nil, err
	}
	has, err := contains(o.Library, staticSetting)
	if err != nil {
		return nil, err
	}
	if has {
		static, err := add(staticName, o.Library, staticSetting+"="+staticValue)
		if err != nil {
			return nil, err
		}
		b.others = append(b.others, static)
	} else {
		b.notes = append(b.notes, "The plugin has no setting "+staticSetting+": its static mode is not measured.")
	}
	for _, given := range o.plugins {
		label, path, ok := strings.Cut(given, "=")
		if !ok || label == "" || path == "" {
			return nil, fmt.Errorf("--plugin %q: NAME=PATH, such as bagua=/opt/libnccl-net-bagua.so", given)
		}
		if _, err := contains(path, ""); err != nil {
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

// A caseResult has all runs of a case.
type caseResult struct {
	Name       string
	Lab        netns.Config // as it came up
	Load       string       // of the case, in words
	Source     page.Source
	Machine    machine.Machine
	Rounds     int
	Contenders []series

	testCase benchCase
}

// A series is one contender's runs.
type series struct {
	Name     string
	Outcomes []outcome
}

// measure brings a case's network up and runs the contenders in turn.
func (b *bench) measure(ctx context.Context, c benchCase) (_ caseResult, err error) {
	c.lab.Name, c.lab.Congestion = "bench", b.config.Congestion
	lab, err := netns.Up(ctx, c.lab)
	if err != nil {
		return caseResult{}, err
	}
	defer func() { err = errors.Join(err, lab.Down(ctx)) }()
	c.lab = lab.Config()
	if c.loss > 0 {
		for link := range c.lab.Links {
			if err := lab.SetLoss(ctx, link, c.loss); err != nil {
				return caseResult{}, err
			}
		}
	}
	fmt.Fprintf(b.out, "\n%s: %s (%s)\n", c.name, c.title, lab.Config())
	var contenders []contender
	for _, flows := range c.plainFlows {
		contenders = append(contenders, plain{flows})
	}
	for _, sockets := range c.polled {
		contenders = append(contenders, &plugin{label: sockets.label(), sockets: &sockets, driver: b.config.Driver, speed: map[string]float64{}})
	}
	if c.missing == "" {
		contenders = append(contenders, b.ours)
		for _, other := range b.others {
			contenders = append(contenders, other)
		}
	} else {
		fmt.Fprintf(b.out, "  %s is not measured: %s\n", ourName, c.missing)
	}
	contenders = append(contenders, b.more...)
	result := caseResult{Name: c.name, testCase: c, Lab: c.lab, Load: c.String(), Contenders: make([]series, len(contenders))}
	for round := range b.config.Rounds {
		for i, contender := range contenders {
			got := b.runOnce(ctx, lab, c, contender)
			if ctx.Err() != nil {
				return caseResult{}, errors.New("interrupted")
			}
			result.Contenders[i].Name = contender.name()
			result.Contenders[i].Outcomes = append(result.Contenders[i].Outcomes, got)
			fmt.Fprintf(b.out, "  %2d of %d  %-32s %s\n", round+1, b.config.Rounds, contender.name(), got.line(c))
		}
	}
	return result, nil
}

// runOnce is one run of a contender; a failure is part of the result.
func (b *bench) runOnce(ctx context.Context, lab *netns.Lab, c benchCase, contender contender) outcome {
	limit := proc.Timeout + 10*c.length
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done within %s", limit))
	defer cancel()
	got, err := traced(ctx, lab, c, contender)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause // the other errors follow from it
		}
		got.Failure = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return got
}

// traced is one run, with a trace where the case needs one.
func traced(ctx context.Context, lab *netns.Lab, c benchCase, contender contender) (outcome, error) {
	if err := contender.prepare(ctx, lab, c); err != nil {
		return outcome{}, err
	}
	before := machine.ReadCPUTime()
	var trace []point
	var traceErr error
	var tracing sync.WaitGroup
	during, stop := context.WithCancel(ctx)
	switch {
	case c.fault != nil:
		tracing.Go(func() { trace, traceErr = c.fault.inject(during, lab) })
	case c.cold:
		nothing := func(time.Duration, []uint64, []uint64) error { return nil }
		tracing.Go(func() { trace, traceErr = traceLinks(during, lab, riseStep, riseBytes, nothing) })
	}
	got, err := contender.run(ctx, lab, c)
	stop()
	tracing.Wait()
	got.Busy = before.BusySince()
	switch {
	case c.fault != nil:
		got.Trace, got.Rate = trace, c.fault.rate(trace)
	case c.cold:
		got.Rise = rise(trace, c.limit())
	}
	return got, errors.Join(err, traceErr)
}

// line is one line of progress.
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
		text += "  " + c.fault.summary(o.Trace)
	}
	if c.cold {
		text += "  rise time " + riseTime.format(o.rise())
	}
	return fmt.Sprintf("%s  processors %.0f %%, own %.0f %%", text, o.Busy*100, o.Own*100)
}

// rise is the rise time in seconds; infinite where the run never rose.
func (o outcome) rise() float64 {
	if o.Rise == 0 {
		return math.Inf(1)
	}
	return o.Rise.Seconds()
}

// good are the runs that did not fail.
func (s series) good() []outcome {
	return slices.DeleteFunc(slices.Clone(s.Outcomes), func(o outcome) bool { return o.Failure != "" })
}

// values lists a quantity over the runs that did not fail, in order.
func (s series) values(q quantity) []float64 {
	var all []float64
	for _, o := range s.good() {
		switch q {
		case processor:
			all = append(all, o.Send+o.Receive)
		case roundTrip:
			all = append(all, o.P50)
		case riseTime:
			all = append(all, o.rise())
		case idleUse:
			all = append(all, o.Idle)
		case maxThreads:
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
	all := s.values(q)
	if len(all) == 0 {
		return 0
	}
	switch q {
	case worstRate:
		return all[0]
	case idleUse, maxThreads:
		return all[len(all)-1]
	}
	return stats.Median(all)
}
