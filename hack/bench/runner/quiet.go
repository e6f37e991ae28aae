package runner

import (
	"context"
	"time"

	"k8s.io/utils/clock"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
)

const (
	// quietShare is the share of the processors' time from which on other programs disturb a measurement.
	quietShare = 0.1
	// probeLength is how long other programs are watched before a run.
	probeLength = 300 * time.Millisecond
	// maxWait bounds the time that one run waits for a quiet machine.
	maxWait = 20 * time.Second
)

// A Probe measures the share of the processors' time that all programs use. It takes some time.
type Probe func(ctx context.Context) (busy float64, err error)

// Busy is the probe of this machine.
func Busy(ctx context.Context) (float64, error) {
	before := machine.ReadCPUTime()
	timer := time.NewTimer(probeLength)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	case <-timer.C:
		return before.BusySince(), nil
	}
}

// A quiet waits for a machine on which other programs do little.
type quiet struct {
	probe Probe
	clock clock.PassiveClock
	left  time.Duration // that all runs together may still wait
}

// await waits until the machine is quiet, or the time is up. It returns how busy the machine was in the end.
func (q *quiet) await(ctx context.Context) (busy float64, isQuiet bool, err error) {
	start := q.clock.Now()
	for {
		if busy, err = q.probe(ctx); err != nil {
			return 0, false, err
		}
		waited := q.clock.Since(start)
		if isQuiet = busy < quietShare; isQuiet || waited >= min(maxWait, q.left) {
			q.left = max(q.left-waited, 0)
			return busy, isQuiet, nil
		}
	}
}
