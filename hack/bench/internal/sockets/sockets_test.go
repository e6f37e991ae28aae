package sockets

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// sideVariable makes the test binary one of the two sides. Both change their process's scheduling, so they cannot run in the test's
// own process.
const sideVariable = "SOCKETS_TEST_SIDE"

func TestMain(m *testing.M) {
	text := os.Getenv(sideVariable)
	if text == "" {
		os.Exit(m.Run())
	}
	var s side
	err := json.Unmarshal([]byte(text), &s)
	if err == nil {
		err = s.work()(s.Options, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

type side struct {
	Star     bool // a hub or a spoke
	Receives bool // or is a hub
	Options  Options
}

func (s side) work() func(Options, io.Writer) error {
	switch {
	case s.Star && s.Receives:
		return Hub
	case s.Star:
		return Spoke
	case s.Receives:
		return Receive
	}
	return Send
}

func start(t *testing.T, s side) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), Environment, sideVariable+"="+string(text))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, bufio.NewReader(out)
}

// run runs both sides and returns the report.
func run(t *testing.T, o Options) Report {
	t.Helper()
	o.Address = netip.MustParseAddrPort("127.0.0.1:0")
	receiver, received := start(t, side{Receives: true, Options: o})
	line, err := received.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	if o.Address, err = netip.ParseAddrPort(strings.TrimSpace(line)); err != nil {
		t.Fatal(err)
	}
	sender, sent := start(t, side{Options: o})
	var reports []string
	for _, out := range []io.Reader{received, sent} {
		text, err := io.ReadAll(out)
		if err != nil {
			t.Fatal(err)
		}
		if len(text) > 0 {
			reports = append(reports, string(text))
		}
	}
	for _, cmd := range []*exec.Cmd{receiver, sender} {
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	if len(reports) != 1 {
		t.Fatalf("reports: %q", reports)
	}
	var r Report
	if err := json.Unmarshal([]byte(reports[0]), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestStream(t *testing.T) {
	for _, flows := range []int{1, 5} {
		r := run(t, Options{Flows: flows, Size: 8 << 10, Depth: 2, Length: 200 * time.Millisecond})
		if r.Bytes == 0 || r.Seconds != 0.2 {
			t.Errorf("%d flows: %+v", flows, r)
		}
	}
}

func TestPingPong(t *testing.T) {
	r := run(t, Options{Flows: 1, Size: 8, Depth: 1, Length: 200 * time.Millisecond, PingPong: true})
	if r.Bytes == 0 || r.P50 <= 0 || r.P50 > 0.2 {
		t.Errorf("%+v", r)
	}
}

// star runs two spokes and two hubs, and returns their reports.
func star(t *testing.T, o Options) []Report {
	t.Helper()
	o.Flows, o.Address = 2, netip.MustParseAddrPort("127.0.0.1:0")
	var all []*exec.Cmd
	var outs []*bufio.Reader
	for range 2 {
		cmd, out := start(t, side{Star: true, Receives: true, Options: o})
		line, err := out.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		hub, err := netip.ParseAddrPort(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		o.Hubs, all, outs = append(o.Hubs, hub), append(all, cmd), append(outs, out)
	}
	for range 2 {
		cmd, out := start(t, side{Star: true, Options: o})
		all, outs = append(all, cmd), append(outs, out)
	}
	var reports []Report
	for i, out := range outs {
		text, err := io.ReadAll(out)
		if err != nil {
			t.Fatal(err)
		}
		if err := all[i].Wait(); err != nil {
			t.Fatal(err)
		}
		var r Report
		if len(text) == 0 {
			continue
		}
		if err := json.Unmarshal(text, &r); err != nil {
			t.Fatal(err)
		}
		reports = append(reports, r)
	}
	return reports
}

func TestStar(t *testing.T) {
	reports := star(t, Options{Size: 8 << 10, Depth: 2, Length: 200 * time.Millisecond})
	if len(reports) != 4 {
		t.Fatalf("%+v", reports)
	}
	for _, r := range reports {
		if r.Bytes == 0 || r.Seconds < 0.1 || r.Seconds > 0.2 {
			t.Errorf("%+v", r)
		}
	}
	reports = star(t, Options{Size: 8, Depth: 1, Length: 200 * time.Millisecond, PingPong: true})
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
