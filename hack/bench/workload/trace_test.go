package workload

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

func TestRiseTimeIsTheEndOfTheFirstFullWindow(t *testing.T) {
	// A queue that is empty lets more than the limit through at first.
	burst := traceOf(0.2, 0.2)
	for i := range burst[1:] {
		burst[i+1].Bytes += 20e6
	}
	for name, test := range map[string]struct {
		trace []point
		want  time.Duration
	}{
		"at once":   {traceOf(0.4, 0.4), riseOver},
		"later":     {traceOf(0.2, 0.4), time.Second + riseOver},
		"almost":    {traceOf(0.37, 0.37), 0},
		"burst":     {burst, 0},
		"too short": {traceOf(0.4)[:3], 0},
		"none":      {nil, 0},
	} {
		// The window may begin with a step of the time before.
		if got := rise(test.trace, 0.4); got > test.want || got < test.want-traceStep {
			t.Errorf("%s: %s, want %s", name, got, test.want)
		}
	}
}

func TestTraceFindsTheBusiestLink(t *testing.T) {
	sum, busiest := increase([]uint64{9, 5, 0}, []uint64{10, 9, 3})
	if sum != 8 || busiest != 1 {
		t.Errorf("%d bytes, most on link %d; want 8, and link 1", sum, busiest)
	}
}
