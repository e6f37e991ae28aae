//go:build e2e

package main

import (
	"context"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// TestMain lets the test binary be a side of plain sockets, as the program is.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && strings.HasPrefix(os.Args[1], "raw-") {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func measureOnce(t *testing.T, c benchCase) outcome {
	t.Helper()
	b := &bencher{options: options{runs: 1}, out: io.Discard}
	c.name, c.missing = "test", "it is not what is tested"
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

func TestPlainSocketsFillALink(t *testing.T) {
	c := benchCase{
		lab:  netns.Config{Links: netns.Links(100 * netns.Mbit)},
		size: 64 << 10, depth: 2, length: 2 * time.Second, rawFlows: []int{3},
	}
	// The queue and the bucket let more than the rate through at first.
	if got := measureOnce(t, c); got.Rate <= 0 || got.Rate > 1.2*c.limit() || got.Send <= 0 || got.Receive <= 0 {
		t.Errorf("%+v; the link carries %.4f GB/s", got, c.limit())
	}
	c.lab, c.pingPong, c.size, c.rawFlows = netns.Config{}, true, 8, []int{1}
	if got := measureOnce(t, c); got.P50 <= 0 {
		t.Errorf("%+v: no round trip", got)
	}
}

func TestAFaultIsSeen(t *testing.T) {
	c := benchCase{
		lab:  netns.Config{Links: netns.Links(400*netns.Mbit, 100*netns.Mbit)},
		size: 64 << 10, depth: 2, length: 5 * time.Second, rawFlows: []int{8},
		fault: &fault{before: time.Second, lasts: 2 * time.Second, recovery: 500 * time.Millisecond},
	}
	got := measureOnce(t, c)
	before := meanRate(got.Trace, 0, c.fault.before)
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

// TestTheLinkOfSomeFlowsIsLost is what the plugin is for: the rest of the network goes on, and every byte is right.
func TestTheLinkOfSomeFlowsIsLost(t *testing.T) {
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	library, driver, err := build(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	b, err := newBencher(options{runs: 1, library: library, driver: driver}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	c := benchCase{
		name: "test", lab: netns.Config{Links: netns.Links(200*netns.Mbit, 200*netns.Mbit, 200*netns.Mbit)},
		size: 64 << 10, depth: 8, connections: 1, length: 9 * time.Second, rawFlows: []int{4},
		fault: &fault{before: 2 * time.Second, lasts: 4 * time.Second, recovery: 2 * time.Second},
	}
	got, err := b.measure(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	ours, _ := got.series(ourName)
	// The driver checks all bytes, and fails when one is wrong or a connection breaks.
	if o := ours.Outcomes[0]; o.Failure != "" {
		t.Error(o.Failure)
	} else if before := meanRate(o.Trace, 0, c.fault.before); o.Rate < before/4 {
		t.Errorf("%.4f GB/s while one of three links was lost, %.4f before", o.Rate, before)
	}
}
