//go:build e2e

package main

import (
	"context"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/options"
	"evenkeel.dev/evenkeel/hack/bench/internal/sockets"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// TestMain lets the test binary run a side of plain sockets, as the program does.
func TestMain(m *testing.M) {
	if sockets.IsCommand(os.Args) {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// measurePlain measures plain sockets once.
func measurePlain(t *testing.T, c benchCase) outcome {
	t.Helper()
	b := &bench{config: config{Options: options.Options{Rounds: 1}}, out: io.Discard}
	c.name, c.missing = "test", "the plugin is not what is tested"
	got, err := b.measure(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	o := got.Contenders[0].Outcomes[0]
	if o.Failure != "" {
		t.Fatal(o.Failure)
	}
	return o
}

// measurePlugin measures the plugin of this checkout once, with plain sockets and its own static mode.
func measurePlugin(t *testing.T, c benchCase) caseResult {
	t.Helper()
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	o := config{Options: options.Options{Rounds: 1}}
	if err := o.BuildMissing(t.Context(), root, true); err != nil {
		t.Fatal(err)
	}
	b, err := newBench(o, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	c.name = "test"
	got, err := b.measure(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// only returns the outcome of a contender's one run.
func only(t *testing.T, r caseResult, name string) outcome {
	t.Helper()
	s, ok := r.series(name)
	if !ok || len(s.Outcomes) != 1 {
		t.Fatalf("no run of %q in %+v", name, r.Contenders)
	}
	if failure := s.Outcomes[0].Failure; failure != "" {
		t.Fatalf("%s: %s", name, failure)
	}
	return s.Outcomes[0]
}

func TestPlainSocketsFillALink(t *testing.T) {
	c := benchCase{
		lab:  netns.Config{Links: netns.Links(100 * netns.Mbit)},
		size: 64 << 10, depth: 2, length: 2 * time.Second, plainFlows: []int{3},
	}
	// The queue and the token bucket let more than the rate through at first.
	if got := measurePlain(t, c); got.Rate <= 0 || got.Rate > 1.2*c.limit() || got.Send <= 0 || got.Receive <= 0 {
		t.Errorf("%+v; the link carries %.4f GB/s", got, c.limit())
	}
	c.lab, c.pingPong, c.size, c.plainFlows = netns.Config{}, true, 8, []int{1}
	if got := measurePlain(t, c); got.P50 <= 0 {
		t.Errorf("%+v: no round trip", got)
	}
}

func TestFaultIsMeasured(t *testing.T) {
	c := benchCase{
		lab:  netns.Config{Links: netns.Links(400*netns.Mbit, 100*netns.Mbit)},
		size: 64 << 10, depth: 2, length: 5 * time.Second, plainFlows: []int{8},
		fault: &fault{start: time.Second, length: 2 * time.Second, recovery: 500 * time.Millisecond},
	}
	got := measurePlain(t, c)
	before := meanRate(got.Trace, 0, c.fault.start)
	if before == 0 || got.Rate >= before/2 {
		t.Errorf("%.4f GB/s, and %.4f while the faster of two links was lost", before, got.Rate)
	}
	if _, err := netns.Open("bench"); err == nil {
		t.Error("the lab is still up")
		if err := netns.Remove(context.Background(), "bench"); err != nil {
			t.Error(err)
		}
	}
}

// The plugin keeps the other links in use, and every byte is right. Two of three equal links are left, which carry two thirds of
// what there was before; both are needed for the half that is asked for.
func TestFailoverUsesTheRemainingLinks(t *testing.T) {
	c := benchCase{
		lab:  netns.Config{Links: netns.Links(200*netns.Mbit, 200*netns.Mbit, 200*netns.Mbit)},
		size: 64 << 10, depth: 8, connections: 1, length: 9 * time.Second, plainFlows: []int{4},
		fault: &fault{start: 2 * time.Second, length: 4 * time.Second, recovery: 2 * time.Second},
	}
	// The driver checks all bytes, and fails when one is wrong or a connection breaks.
	got := only(t, measurePlugin(t, c), ourName)
	if before := meanRate(got.Trace, 0, c.fault.start); before == 0 || got.Rate < before/2 {
		t.Errorf("%.4f GB/s while one of three links was lost, %.4f before", got.Rate, before)
	}
}

// On paths of unequal rates, equal shares take as long as the slowest path, and shares by rate do not: 13/4 of the rate here. Half
// of that advantage is asked for. Both are measured in the same network, whose caps any machine exceeds.
func TestFairnessOnUnequalPathsBeatsEqualShares(t *testing.T) {
	c := benchCase{
		lab:  netns.Config{FlowRates: []netns.Rate{80 * netns.Mbit, 80 * netns.Mbit, 80 * netns.Mbit, 20 * netns.Mbit}},
		size: 1 << 20, depth: 4, connections: 1, length: 3 * time.Second, plainFlows: []int{4},
	}
	r := measurePlugin(t, c)
	shared, equal := only(t, r, ourName), only(t, r, staticName)
	if shared.Rate < 1.6*equal.Rate {
		t.Errorf("%.4f GB/s; equal shares (%s=%s) get %.4f", shared.Rate, staticSetting, staticValue, equal.Rate)
	}
}

// The rows of openssl's programs have their processor time, as those of the plugin: both ends of the connection, and the one process
// that only encrypts.
func TestEncryptionMeasuresProcessorShareOfOpenssl(t *testing.T) {
	b := &bench{config: config{Options: options.Options{Rounds: 1}}, out: io.Discard, more: []contender{openssl{strings.Repeat("a1", 32)}, cipher{}}}
	got, err := b.measure(t.Context(), benchCase{name: "test", size: 64 << 10, depth: 2, connections: 1, length: time.Second, missing: "the plugin is not what is tested"})
	if err != nil {
		t.Fatal(err)
	}
	for name, ends := range map[string]int{opensslName: 2, cipherName: 1} {
		o := only(t, got, name)
		// In cores: each process has one thread, and beside other programs less than a core.
		if used := o.Own * float64(runtime.NumCPU()); used <= 0 || used > float64(ends)+0.1 || o.Rate <= 0 || o.Send <= 0 {
			t.Errorf("%s: %+v, want the processor time of at most %d processes", name, o, ends)
		}
	}
}
