package netns

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
)

// A State is whether a link carries packets.
type State string

const (
	// LinkUp carries packets.
	LinkUp State = "up"
	// LinkDown is known to be down to the routers, which use the other links.
	LinkDown State = "down"
	// LinkSilent loses everything, and the routers continue to use it: an undetected fault.
	LinkSilent State = "silent"
)

// States are all states of a link.
var States = []State{LinkUp, LinkDown, LinkSilent}

// SetRate sets a link's rate in both directions.
func (l *Lab) SetRate(ctx context.Context, link int, rate Rate) error {
	return l.atBothEnds(link, func(router Host) error {
		return l.shape(ctx, router, linkName(link), rate)
	})
}

// SetStarRate sets the rate of what a star's host sends, or of what the switch sends to it.
func (l *Lab) SetStarRate(ctx context.Context, link int, sends bool, rate Rate) error {
	switch {
	case link < 0 || link >= len(l.config.Star):
		return fmt.Errorf("no host %d in a star of %d", link, len(l.config.Star))
	case sends:
		return l.shape(ctx, StarHost(link), DataInterface, rate)
	default:
		return l.shape(ctx, s1, linkName(link), rate)
	}
}

// SetState takes a link down or up.
func (l *Lab) SetState(ctx context.Context, link int, state State) error {
	cable, rule := "up", ""
	switch state {
	case LinkUp:
	case LinkDown:
		cable = "down"
	case LinkSilent:
		rule = "drop"
	default:
		return fmt.Errorf("link state %q: %s, %s or %s", state, LinkUp, LinkDown, LinkSilent)
	}
	return l.atBothEnds(link, func(router Host) error {
		if err := l.fill(ctx, router, fmt.Sprintf("out%d", link), rule); err != nil {
			return err
		}
		return l.run(ctx, router, "ip -batch -", fmt.Sprintf("link set dev %s %s", linkName(link), cable))
	})
}

// SetLoss makes a link lose a share of its packets, from 0 to 1, in both directions, at random.
func (l *Lab) SetLoss(ctx context.Context, link int, share float64) error {
	if !(share >= 0 && share <= 1) {
		return fmt.Errorf("loss of %v: a share from 0 to 1", share)
	}
	const whole = 1_000_000
	segments, rule := 65535, ""
	if parts := int(math.Round(share * whole)); parts > 0 {
		// Segments are cut to packets first, as whole segments would be lost otherwise. Only this link does so, as it takes
		// processor time.
		segments, rule = 1, fmt.Sprintf("numgen random mod %d <= %d drop", whole, parts-1)
	}
	return l.atBothEnds(link, func(router Host) error {
		if err := l.run(ctx, router, "ip -batch -", fmt.Sprintf("link set dev %s gso_max_segs %d", linkName(link), segments)); err != nil {
			return err
		}
		return l.fill(ctx, router, fmt.Sprintf("in%d", link), rule)
	})
}

// A Match selects packets to or from an address, a TCP port, or both. A zero field matches all.
type Match struct {
	Address netip.Addr
	Port    uint16
}

// SetBlackhole makes the routers silently drop packets that match any of these, and no others. Without any, nothing is
// dropped.
func (l *Lab) SetBlackhole(ctx context.Context, matches ...Match) error {
	if err := l.hasLinks(); err != nil {
		return err
	}
	var rules []string
	for _, m := range matches {
		for _, end := range []struct{ address, port string }{{"saddr", "sport"}, {"daddr", "dport"}} {
			rule := ""
			if m.Address.IsValid() {
				rule += fmt.Sprintf("ip %s %s ", end.address, m.Address)
			}
			if m.Port != 0 {
				rule += fmt.Sprintf("tcp %s %d ", end.port, m.Port)
			}
			rules = append(rules, rule+"drop")
		}
	}
	for _, router := range []Host{s1, s2} {
		if err := l.fill(ctx, router, "hole", rules...); err != nil {
			return err
		}
	}
	return nil
}

// fill replaces a chain's rules in one step; it skips empty ones.
func (l *Lab) fill(ctx context.Context, router Host, chain string, rules ...string) error {
	lines := []string{"flush chain inet lab " + chain}
	for _, rule := range rules {
		if rule != "" {
			lines = append(lines, "add rule inet lab "+chain+" "+rule)
		}
	}
	return l.run(ctx, router, "nft -f -", lines...)
}

// Sent returns the bytes that each link has carried from H1's side to H2's. Headers count once for each segment of up
// to 64 KiB, so for a bulk transfer this is close to its payload.
func (l *Lab) Sent() ([]uint64, error) {
	if err := l.hasLinks(); err != nil {
		return nil, err
	}
	sent := make([]uint64, len(l.config.Links))
	counters, err := l.namespaces[s1].counters()
	for link := range sent {
		sent[link] = counters[linkName(link)].sent
	}
	return sent, err
}

// Traffic returns the bytes that a host has received and sent in the network under test, counted as by [Lab.Sent].
func (l *Lab) Traffic(host Host) (received, sent uint64, err error) {
	s, err := l.host(host)
	if err != nil {
		return 0, 0, err
	}
	counters, err := s.counters()
	return counters[DataInterface].received, counters[DataInterface].sent, err
}

type counter struct{ received, sent uint64 }

// counters returns the byte counters of each interface.
func (s namespace) counters() (map[string]counter, error) {
	all := map[string]counter{}
	err := s.do(func() error {
		// The thread's own entry: /proc/net shows the process's first thread's.
		text, err := os.ReadFile("/proc/thread-self/net/dev")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			name, columns, ok := strings.Cut(strings.TrimSpace(line), ":")
			// The first eight columns are of received packets.
			fields := strings.Fields(columns)
			if !ok || len(fields) <= 8 {
				continue // a heading
			}
			received, err1 := strconv.ParseUint(fields[0], 10, 64)
			sent, err2 := strconv.ParseUint(fields[8], 10, 64)
			if err := errors.Join(err1, err2); err != nil {
				return err
			}
			all[name] = counter{received, sent}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read interfaces' counters: %w", err)
	}
	return all, nil
}

var deviceOfRoute = regexp.MustCompile(`\bdev p(\d+)\b`)

// Path returns the link that a flow takes.
func (l *Lab) Path(ctx context.Context, f *Flow) (int, error) {
	from, to := f.Ports()
	return l.path(ctx, from, to)
}

func (l *Lab) path(ctx context.Context, from, to uint16) (int, error) {
	if err := l.hasLinks(); err != nil {
		return 0, err
	}
	cmd := l.namespaces[s1].command(ctx, "ip", "route", "get", l.Address(H2).String(), "from", l.Address(H1).String(),
		"iif", "host", "ipproto", "tcp", "sport", fmt.Sprint(from), "dport", fmt.Sprint(to))
	text, err := output(cmd, s1, "ip route get")
	if err != nil {
		return 0, err
	}
	m := deviceOfRoute.FindStringSubmatch(text)
	if m == nil {
		return 0, fmt.Errorf("ip route get: no link in %q", text)
	}
	return strconv.Atoi(m[1])
}

func (l *Lab) hasLinks() error {
	if len(l.config.Links) == 0 {
		return errors.New("this lab has no links between routers")
	}
	return nil
}

func (l *Lab) atBothEnds(link int, f func(router Host) error) error {
	if err := l.hasLinks(); err != nil {
		return err
	}
	if link < 0 || link >= len(l.config.Links) {
		return fmt.Errorf("no link %d: the lab has 0 to %d", link, len(l.config.Links)-1)
	}
	for _, router := range []Host{s1, s2} {
		if err := f(router); err != nil {
			return err
		}
	}
	return nil
}
