package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// A fault makes the busiest link silent for a while. The rate of such a run is that during the fault, less the time allowed
// for recovery.
type fault struct {
	start, length time.Duration
	recovery      time.Duration
	remaining     float64 // GB/s that the network can carry meanwhile
}

func (f *fault) end() time.Duration { return f.start + f.length }

const (
	traceStep = 50 * time.Millisecond
	// startBytes is the traffic after which a run counts as started: more than what a driver sends first.
	startBytes = 32 << 20
	// recoveredShare is the share of the remaining capacity that counts as recovered, over recoveredOver.
	recoveredShare = 0.9
	recoveredOver  = 200 * time.Millisecond
)

// inject traces a run until ctx ends, and injects the fault into the link that is busiest by then. It leaves the link up.
func (f *fault) inject(ctx context.Context, lab *netns.Lab) (trace []point, err error) {
	link, state := -1, netns.LinkUp
	defer func() {
		if link >= 0 {
			err = errors.Join(err, lab.SetState(context.WithoutCancel(ctx), link, netns.LinkUp))
		}
	}()
	return traceLinks(ctx, lab, traceStep, startBytes, func(at time.Duration, before, now []uint64) error {
		want := netns.LinkUp
		if at >= f.start && at < f.end() {
			want = netns.LinkSilent
		}
		if want == state {
			return nil
		}
		if link < 0 {
			_, link = increase(before, now)
		}
		state = want
		return lab.SetState(context.WithoutCancel(ctx), link, want)
	})
}

// rate is the mean rate during the fault, in GB/s, less the time allowed for recovery.
func (f *fault) rate(trace []point) float64 { return meanRate(trace, f.start+f.recovery, f.end()) }

// recovered is how long after the fault began the rate was that of the remaining capacity. It is not ok if it never was
// during the fault.
func (f *fault) recovered(trace []point) (after time.Duration, ok bool) {
	for _, p := range trace {
		end := p.At + recoveredOver
		if p.At < f.start || end > f.end() {
			continue
		}
		if meanRate(trace, p.At, end) >= recoveredShare*f.remaining {
			return end - f.start, true
		}
	}
	return 0, false
}

// summary is a run's recovery in a few words.
func (f *fault) summary(trace []point) string {
	if len(trace) == 0 || trace[len(trace)-1].At < f.end() {
		return "the run ended before the fault did"
	}
	before := meanRate(trace, f.start/2, f.start)
	after, ok := f.recovered(trace)
	if !ok {
		return fmt.Sprintf("(%.3f before) never recovered", before)
	}
	return fmt.Sprintf("(%.3f before) recovered after %.2f s", before, after.Seconds())
}
