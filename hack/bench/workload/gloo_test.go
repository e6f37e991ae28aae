package workload

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

// stub prints the output of Gloo's benchmark in both layouts; only rank 0 prints a table.
const stub = `#!/bin/sh
while [ $# -gt 1 ]; do
	case $1 in
	--rank) rank=$2 ;;
	--elements) elements=$2 ;;
	esac
	shift
done
[ "$1" = allreduce_ring ] || exit 3
[ "$rank" = 0 ] || exit 0
echo "Device:      tcp, pci=, iface=lo, speed=0, addr=[127.0.0.1]"
if [ "$elements" = 1000 ]; then
	echo "   size (B)   elements   min (us)   p50 (us)   p99 (us)   max (us)   bandwidth (GB/s)   iterations"
	echo "       4000       1000        111        222        333        444              0.010         2345"
else
	echo "   elements   min (us)   p50 (us)   p99 (us)   max (us)    avg (GB/s)    samples"
	echo "        $elements         11         22         33         44         0.010       2345"
fi
`

func TestGloosOwnBenchmarkProgram(t *testing.T) {
	program := filepath.Join(t.TempDir(), "benchmark")
	w := Collective{Ranks: 2, Elements: []int{1000, 100}, Length: time.Second}
	if _, err := w.GlooBenchmark("other", program); err == nil || !strings.Contains(err.Error(), program) {
		t.Errorf("a program that is not there: %v", err)
	}
	if err := os.WriteFile(program, []byte(stub), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := w.GlooBenchmark("other", program); err == nil || !strings.Contains(err.Error(), "not a program") {
		t.Errorf("a file that is no program: %v", err)
	}
	if err := os.Chmod(program, 0o755); err != nil {
		t.Fatal(err)
	}
	all, err := w.GlooBenchmark("other", program)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, of := range all {
		names = append(names, of.Name)
	}
	if want := "other, ring; other, ring_chunked; other, halving_doubling; other, bcube; other, new_ring"; strings.Join(names, "; ") != want {
		t.Errorf("%q, not %s", names, want)
	}
	got, err := all[0].Run(t.Context(), experiment.Run{})
	want := outcome{w.Minimum().At(1000): 111, w.Median().At(1000): 222, w.Minimum().At(100): 11, w.Median().At(100): 22, FailedTries: 0}
	if err != nil || !maps.Equal(got.Values, want) {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := all[3].Run(t.Context(), experiment.Run{}); err == nil || len(got.Values) > 0 {
		t.Errorf("a run that fails has figures: %v", got)
	}
	if _, err := readGlooBenchmark("100 nothing here\n", 100); err == nil {
		t.Error("a table without figures has some")
	}
}

// A contender that never ends is left out after the tries of its first run, if it is one that may not end; else each
// run has its tries.
func TestContenderThatDoesNotEndIsLeftOut(t *testing.T) {
	for giveUp, want := range map[bool]int{true: glooTries, false: 2 * glooTries} {
		starts := 0
		stuck := Collective{}.tried("stuck", time.Millisecond, giveUp, func(ctx context.Context, _ experiment.Run) (experiment.Measured, error) {
			starts++
			<-ctx.Done()
			return experiment.Measured{}, context.Cause(ctx)
		})
		_, first := stuck.Run(t.Context(), experiment.Run{})
		_, second := stuck.Run(t.Context(), experiment.Run{})
		if starts != want || first == nil || !strings.Contains(first.Error(), "not done within 1ms") || second == nil || strings.Contains(second.Error(), "left out") != giveUp {
			t.Errorf("gives up: %t: started %d times: %v; %v", giveUp, starts, first, second)
		}
	}
}

func TestFailedTriesAreCounted(t *testing.T) {
	starts := 0
	once := Collective{}.tried("once", time.Minute, true, func(context.Context, experiment.Run) (experiment.Measured, error) {
		if starts++; starts == 1 {
			return experiment.Measured{}, errors.New("it broke")
		}
		return experiment.Measured{Values: outcome{}}, nil
	})
	for _, want := range []float64{1, 0} {
		if got, err := once.Run(t.Context(), experiment.Run{}); err != nil || got.Values[FailedTries] != want {
			t.Errorf("%v, %v; want %v failed tries", got, err, want)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	starts = 0
	if _, err := once.Run(ended, experiment.Run{}); err == nil || starts != 1 {
		t.Errorf("after the end there were %d tries: %v", starts, err)
	}
}
