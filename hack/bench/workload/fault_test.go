package workload

import (
	"testing"
	"time"
)

func TestFaultRateAndRecovery(t *testing.T) {
	f := Fault{Start: 2 * time.Second, Length: 4 * time.Second, Recovery: time.Second, Remaining: 0.3}
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
