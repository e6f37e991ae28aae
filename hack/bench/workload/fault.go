package workload

import (
	"context"
	"errors"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// A Fault makes the busiest link silent for a while. The rate of such a run is that during the fault, less the time
// allowed for recovery.
type Fault struct {
	Start, Length time.Duration
	Recovery      time.Duration
	Remaining     float64 // GB/s that the network can carry meanwhile
}

func (f *Fault) end() time.Duration { return f.Start + f.Length }

const (
	traceStep = 50 * time.Millisecond
	// startBytes is the traffic after which a run counts as started: more than what a driver sends first.
	startBytes = 32 << 20
	// recoveredShare is the share of the remaining capacity that counts as recovered, over recoveredOver.
	recoveredShare = 0.9
	recoveredOver  = 200 * time.Millisecond
)

// inject traces a run until ctx ends, and injects the fault into the link that is busiest by then. It leaves the link
// up.
func (f *Fault) inject(ctx context.Context, lab *netns.Lab) (trace []point, err error) {
	link, state := -1, netns.LinkUp
	defer func() {
		if link >= 0 {
			err = errors.Join(err, lab.SetState(context.WithoutCancel(ctx), link, netns.LinkUp))
		}
	}()
	return traceLinks(ctx, lab, traceStep, startBytes, func(at time.Duration, before, now []uint64) error {
		want := netns.LinkUp
		if at >= f.Start && at < f.end() {
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
func (f *Fault) rate(trace []point) float64 { return meanRate(trace, f.Start+f.Recovery, f.end()) }

// recovered is how long after the fault began the rate was that of the remaining capacity. It is not ok if it never was
// during the fault.
func (f *Fault) recovered(trace []point) (after time.Duration, ok bool) {
	for _, p := range trace {
		end := p.At + recoveredOver
		if p.At < f.Start || end > f.end() {
			continue
		}
		if meanRate(trace, p.At, end) >= recoveredShare*f.Remaining {
			return end - f.Start, true
		}
	}
	return 0, false
}

// read reads what a run did around the fault. A run that was over before the fault is an error.
func (f *Fault) read(trace []point, got outcome) error {
	if len(trace) == 0 || trace[len(trace)-1].At < f.end() {
		return errors.New("the run ended before the fault did")
	}
	got[Rate], got[Before] = f.rate(trace), meanRate(trace, f.Start/2, f.Start)
	if after, ok := f.recovered(trace); ok {
		got[Recovery] = after.Seconds()
	}
	return nil
}
