package main

import (
	"math"
	"testing"
	"time"
)

// traceOf has a point each traceStep. Each rate, in GB/s, is that of one second.
func traceOf(rates ...float64) []point {
	var trace []point
	var bytes float64
	for i := 0; i <= len(rates)*int(time.Second/traceStep); i++ {
		at := time.Duration(i) * traceStep
		trace = append(trace, point{At: at, Bytes: uint64(bytes)})
		second := min(int(at/time.Second), len(rates)-1)
		bytes += rates[second] * 1e9 * traceStep.Seconds()
	}
	return trace
}

func near(a, b float64) bool { return math.Abs(a-b) < 0.01*max(math.Abs(b), 0.001) }

func TestFaultRateAndRecovery(t *testing.T) {
	f := fault{start: 2 * time.Second, length: 4 * time.Second, recovery: time.Second, remaining: 0.3}
	for name, test := range map[string]struct {
		trace []point
		rate  float64
		after time.Duration // negative: never
	}{
		"at once":   {traceOf(0.4, 0.4, 0.3, 0.3, 0.3, 0.3, 0.4), 0.3, recoveredOver},
		"in time":   {traceOf(0.4, 0.4, 0.1, 0.3, 0.3, 0.3, 0.4), 0.3, time.Second + recoveredOver},
		"late":      {traceOf(0.4, 0.4, 0, 0, 0.3, 0.3, 0.4), 0.2, 2*time.Second + recoveredOver},
		"never":     {traceOf(0.4, 0.4, 0, 0, 0, 0, 0.4), 0, -1},
		"too short": {traceOf(0.4), 0, -1},
		"none":      {nil, 0, -1},
	} {
		if got := f.rate(test.trace); !near(got, test.rate) {
			t.Errorf("%s: rate %.3f, want %.3f", name, got, test.rate)
		}
		after, ok := f.recovered(test.trace)
		// The window may begin with a step of the time before.
		if ok != (test.after >= 0) || ok && (after-test.after).Abs() > 2*traceStep {
			t.Errorf("%s: recovered after %s, %v; want %s", name, after, ok, test.after)
		}
	}
}

func TestFaultFindsTheBusiestLink(t *testing.T) {
	sum, busiest := increase([]uint64{9, 5, 0}, []uint64{10, 9, 3})
	if sum != 8 || busiest != 1 {
		t.Errorf("%d bytes, most on link %d; want 8, and link 1", sum, busiest)
	}
}
