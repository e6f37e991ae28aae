package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	traceStep = 50 * time.Millisecond
	// begun is how much has passed when a run has begun in earnest: more than
	// what a driver tries first.
	begun = 32 << 20
	// recoveredShare is the share of what is left that counts as recovered,
	// over recoveredOver.
	recoveredShare = 0.9
	recoveredOver  = 200 * time.Millisecond
)

// happen watches a run until ctx ends, and lets the fault happen to the link
// that is used most by then. It leaves the link up.
func (f *fault) happen(ctx context.Context, lab *netns.Lab) (trace []point, err error) {
	link, state := -1, netns.LinkUp
	defer func() {
		if link >= 0 {
			err = errors.Join(err, lab.SetState(context.WithoutCancel(ctx), link, netns.LinkUp))
		}
	}()
	zero, err := lab.Sent()
	if err != nil {
		return nil, err
	}
	earlier := zero
	tick := time.NewTicker(traceStep)
	defer tick.Stop()
	var start time.Time
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
		moved, _ := growth(zero, now)
		if start.IsZero() {
			if moved < begun {
				continue
			}
			start = time.Now()
		}
		at := time.Since(start)
		trace = append(trace, point{At: at, Bytes: moved})
		want := netns.LinkUp
		if at >= f.before && at < f.before+f.lasts {
			want = netns.LinkSilent
		}
		if want != state {
			if link < 0 {
				_, link = growth(earlier, now)
			}
			if err := lab.SetState(context.WithoutCancel(ctx), link, want); err != nil {
				return nil, err
			}
			state = want
		}
		earlier = now
	}
}

// growth is how much all links carried between two counts, and which carried
// most.
func growth(from, to []uint64) (sum uint64, busiest int) {
	for link := range to {
		sum += to[link] - from[link]
		if to[link]-from[link] > to[busiest]-from[busiest] {
			busiest = link
		}
	}
	return sum, busiest
}

// rate is the mean rate, in GB/s, while the link was lost, but for the time
// that is there for recovery.
func (f *fault) rate(trace []point) float64 {
	return meanRate(trace, f.before+f.recovery, f.before+f.lasts)
}

// recovered is how long after the fault the rate was that of what is left;
// ok is false if it never was while the fault lasted.
func (f *fault) recovered(trace []point) (after time.Duration, ok bool) {
	for _, p := range trace {
		end := p.At + recoveredOver
		if p.At < f.before || end > f.before+f.lasts {
			continue
		}
		if meanRate(trace, p.At, end) >= recoveredShare*f.left {
			return end - f.before, true
		}
	}
	return 0, false
}

// story says in a few words how a run took the fault.
func (f *fault) story(trace []point) string {
	if len(trace) == 0 || trace[len(trace)-1].At < f.before+f.lasts {
		return "ended before the fault did"
	}
	before := meanRate(trace, f.before/2, f.before)
	after, ok := f.recovered(trace)
	if !ok {
		return fmt.Sprintf("(%.3f before) never recovered", before)
	}
	return fmt.Sprintf("(%.3f before) recovered after %.2f s", before, after.Seconds())
}

// meanRate is the rate between two moments of a trace, in GB/s.
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
