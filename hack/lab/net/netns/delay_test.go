//go:build e2e

package netns

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The time of a connection's handshake shows the delay, and a flow that ran before survives it.
func TestDelayOfAStarsHost(t *testing.T) {
	l := labUp(t, Config{Star: []Rate{40 * Mbit, 40 * Mbit, 40 * Mbit}})
	running := flows(t, l, 1)[0]
	const delay = 100 * time.Millisecond
	stop, err := l.Delay(t.Context(), 0, delay)
	must(t, err)
	if rtt := minRTT(t, flows(t, l, 1)[0]); rtt < delay {
		t.Errorf("a connection of the delayed host has a round trip of %s: want at least %s", rtt, delay)
	}
	awaitBytes(t, running, 1<<20)
	must(t, stop())
	if rtt := minRTT(t, flows(t, l, 1)[0]); rtt >= delay {
		t.Errorf("the round trip is %s after the delay of %s has ended", rtt, delay)
	}
	awaitBytes(t, running, 1<<20)
	for name, f := range map[string]func() (func() error, error){
		"host":  func() (func() error, error) { return l.Delay(t.Context(), 3, delay) },
		"delay": func() (func() error, error) { return l.Delay(t.Context(), 0, 0) },
	} {
		if _, err := f(); err == nil {
			t.Errorf("no error for a wrong %s", name)
		}
	}
}

// minRTT is the least round trip that a flow has seen.
func minRTT(t *testing.T, f *Flow) time.Duration {
	t.Helper()
	raw, err := f.from.SyscallConn()
	must(t, err)
	var least uint32
	must(t, raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			least = info.Min_rtt
		}
	}))
	if least == 0 {
		t.Fatal("no round trip was measured")
	}
	return time.Duration(least) * time.Microsecond
}
