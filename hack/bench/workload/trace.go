package workload

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// A point of a trace is the number of bytes that the links had carried at a time.
type point struct {
	At    time.Duration // since the start
	Bytes uint64
}

const (
	// riseStep is the time between the points of a trace from which a rise time is read.
	riseStep = 10 * time.Millisecond
	// riseBytes is the traffic after which a cold run counts as started: more than what opens the connections.
	riseBytes = 256 << 10
	// riseShare is the share of the wire limit that counts as risen, over riseOver.
	riseShare = 0.95
	riseOver  = 250 * time.Millisecond
)

// traceLinks counts the bytes that all links carry, once each step, until ctx ends. The trace starts with the last step
// before more than startBytes had passed. From then on each is called with the time since the start, and with the bytes
// of each link at the step before and now.
func traceLinks(ctx context.Context, lab *netns.Lab, step time.Duration, startBytes uint64, each func(at time.Duration, before, now []uint64) error) ([]point, error) {
	first, err := lab.Sent()
	if err != nil {
		return nil, err
	}
	before, start := first, time.Now()
	tick := time.NewTicker(step)
	defer tick.Stop()
	var trace []point
	for {
		select {
		case <-ctx.Done():
			return trace, nil
		case <-tick.C:
		}
		now, err := lab.Sent()
		if err != nil {
			return nil, err
		}
		moved, _ := increase(first, now)
		if trace == nil && moved <= startBytes {
			before, start = now, time.Now()
			continue
		}
		if trace == nil {
			moved, _ := increase(first, before)
			trace = append(trace, point{Bytes: moved})
		}
		at := time.Since(start)
		trace = append(trace, point{At: at, Bytes: moved})
		if err := each(at, before, now); err != nil {
			return nil, err
		}
		before = now
	}
}

// increase is the traffic of all links between two counts, and the link that carried the most.
func increase(from, to []uint64) (sum uint64, busiest int) {
	for link := range to {
		sum += to[link] - from[link]
		if to[link]-from[link] > to[busiest]-from[busiest] {
			busiest = link
		}
	}
	return sum, busiest
}

// rise is the end of the first window of riseOver in which the mean rate is riseShare of the limit, in GB/s. It is zero
// where there is none. A window is longer than what the links' queues and token buckets let through at once.
func rise(trace []point, limit float64) time.Duration {
	to := 0
	for _, from := range trace {
		for to < len(trace) && trace[to].At < from.At+riseOver {
			to++
		}
		if to == len(trace) {
			return 0
		}
		end := trace[to]
		if rate := float64(end.Bytes-from.Bytes) / (end.At - from.At).Seconds() / 1e9; rate >= riseShare*limit {
			return end.At
		}
	}
	return 0
}

// meanRate is the rate between two times of a trace, in GB/s.
func meanRate(trace []point, from, to time.Duration) float64 {
	var first, last *point
	for i := range trace {
		if trace[i].At < from {
			continue
		}
		if trace[i].At > to {
			break
		}
		if first == nil {
			first = &trace[i]
		}
		last = &trace[i]
	}
	if first == nil || last.At == first.At {
		return 0
	}
	return float64(last.Bytes-first.Bytes) / (last.At - first.At).Seconds() / 1e9
}

// rateSteps is the number of steps whose mean rate is a point of a drawing.
const rateSteps = 4

// rateLine is a trace's rate over time, up to an end: seconds and GB/s, to the precision of a drawing.
func rateLine(trace []point, end time.Duration) [][2]float64 {
	round := func(value float64) float64 { return math.Round(value*1e3) / 1e3 }
	var line [][2]float64
	for i := rateSteps; i < len(trace) && trace[i].At <= end; i++ {
		from, to := trace[i-rateSteps], trace[i]
		line = append(line, [2]float64{round(to.At.Seconds()), round(float64(to.Bytes-from.Bytes) / (to.At - from.At).Seconds() / 1e9)})
	}
	return line
}

// traced is one run, with what is read from a trace where the transfer needs one.
func (t Transfer) traced(ctx context.Context, lab *netns.Lab, run func() (outcome, error)) (experiment.Measured, error) {
	var trace []point
	var traceErr error
	var tracing sync.WaitGroup
	during, stop := context.WithCancel(ctx)
	switch {
	case t.Fault != nil:
		tracing.Go(func() { trace, traceErr = t.Fault.inject(during, lab) })
	case t.Cold:
		nothing := func(time.Duration, []uint64, []uint64) error { return nil }
		tracing.Go(func() { trace, traceErr = traceLinks(during, lab, riseStep, riseBytes, nothing) })
	}
	got, err := run()
	stop()
	tracing.Wait()
	if err := errors.Join(err, traceErr); err != nil {
		return experiment.Measured{}, err
	}
	m := experiment.Measured{Values: got}
	switch {
	case t.Fault != nil:
		if err := t.Fault.read(trace, got); err != nil {
			return experiment.Measured{}, err
		}
		m.Trace = rateLine(trace, t.Length)
	case t.Cold:
		if after := rise(trace, t.Limit); after > 0 {
			got[RiseTime] = after.Seconds()
		}
	}
	return m, nil
}
