package sockets

import (
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
)

// TestMain lets the test binary be one side, as the program can be. Sides change their process's scheduling, so they
// cannot run in the test's own.
func TestMain(m *testing.M) {
	if !IsCommand(os.Args) {
		os.Exit(m.Run())
	}
	root := &cobra.Command{SilenceUsage: true, SilenceErrors: true}
	root.AddCommand(Commands()...)
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// run runs sides that listen and as many that connect to them, and returns the reports of those that measure.
func run(t *testing.T, count int, listening, connecting string, o Options) []Report {
	t.Helper()
	var all []*proc.Process
	listen := o
	for range count {
		p, address, err := StartListening(t.Context(), nil, "", listening, listen)
		if err != nil {
			t.Fatal(err)
		}
		o.Address, o.Hubs, all = address, append(o.Hubs, address), append(all, p)
	}
	for range count {
		p, err := StartSide(t.Context(), nil, "", connecting, o)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	var reports []Report
	for _, p := range all {
		text, err := p.Wait()
		if err != nil {
			t.Fatal(err)
		}
		if len(text) == 0 {
			continue
		}
		r, err := ReadReport(text)
		if err != nil {
			t.Fatal(err)
		}
		reports = append(reports, r)
	}
	return reports
}

func TestStream(t *testing.T) {
	for _, flows := range []int{1, 5} {
		r := run(t, 1, "receive", "send", Options{Flows: flows, Size: 8 << 10, Depth: 2, Length: 200 * time.Millisecond})
		if len(r) != 1 || r[0].Bytes == 0 || r[0].Seconds != 0.2 {
			t.Errorf("%d flows: %+v", flows, r)
		}
	}
}

func TestPingPong(t *testing.T) {
	r := run(t, 1, "receive", "send", Options{Flows: 1, Size: 8, Depth: 1, Length: 200 * time.Millisecond, PingPong: true})
	if len(r) != 1 || r[0].Bytes == 0 || r[0].P50 <= 0 || r[0].P50 > 0.2 {
		t.Errorf("%+v", r)
	}
}

func TestStar(t *testing.T) {
	reports := run(t, 2, "hub", "spoke", Options{Flows: 2, Size: 8 << 10, Depth: 2, Length: 200 * time.Millisecond})
	if len(reports) != 4 {
		t.Fatalf("%+v", reports)
	}
	for _, r := range reports {
		if r.Bytes == 0 || r.Seconds < 0.1 || r.Seconds > 0.2 {
			t.Errorf("%+v", r)
		}
	}
	reports = run(t, 2, "hub", "spoke", Options{Flows: 2, Size: 8, Depth: 1, Length: 200 * time.Millisecond, PingPong: true})
	if len(reports) != 2 {
		t.Fatalf("%+v: only spokes measure", reports)
	}
	for _, r := range reports {
		if r.Bytes == 0 || r.P50 <= 0 || r.P50 > 0.2 {
			t.Errorf("%+v", r)
		}
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{
		{Flows: 0, Size: 1, Depth: 1, Length: 1},
		{Flows: 1, Size: 0, Depth: 1, Length: 1},
		{Flows: 1, Size: 1, Depth: 0, Length: 1},
		{Flows: 1, Size: 1, Depth: 1},
	} {
		if err := Receive(o, io.Discard); err == nil {
			t.Errorf("Receive accepted %+v", o)
		}
		if err := Send(o, io.Discard); err == nil {
			t.Errorf("Send accepted %+v", o)
		}
		if err := Hub(o, io.Discard); err == nil {
			t.Errorf("Hub accepted %+v", o)
		}
	}
}
