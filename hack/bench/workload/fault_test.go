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

func TestFaultNeedsARunThatOutlastsIt(t *testing.T) {
	f := Fault{Start: 2 * time.Second, Length: 2 * time.Second, Recovery: time.Second, Remaining: 0.3}
	if err := f.read(traceOf(0.4, 0.4, 0.3), outcome{}); err == nil {
		t.Error("no error though the run ended during the fault")
	}
	got := outcome{}
	if err := f.read(traceOf(0.4, 0.4, 0, 0.3, 0.4), got); err != nil {
		t.Fatal(err)
	}
	if !near(got[Rate], 0.3) || !near(got[Before], 0.4) || got[Recovery] < 1 || got[Recovery] > 1.3 {
		t.Errorf("%v", got)
	}
	delete(got, Recovery)
	if err := f.read(traceOf(0.4, 0.4, 0, 0, 0.4), got); err != nil {
		t.Fatal(err)
	}
	if _, ok := got[Recovery]; ok {
		t.Errorf("%v, though it never recovered", got)
	}
}

func TestRateLineEndsWithTheRun(t *testing.T) {
	line := rateLine(traceOf(0.2, 0.4, 0.4), 2*time.Second)
	if first, last := line[0], line[len(line)-1]; first != [2]float64{0.2, 0.2} || last != [2]float64{2, 0.4} {
		t.Errorf("from %v to %v, want from 0.2 GB/s after 0.2 s to 0.4 after 2 s", first, last)
	}
}
