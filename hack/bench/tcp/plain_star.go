package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/sockets"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// plainLength is how long plain sockets are measured.
const plainLength = 2 * time.Second

// A plainStar is what plain sockets, one connection from each client to each
// server, move at the same time in both directions where nothing is added up:
// the most that this machine could do.
type plainStar struct {
	Rate float64 // of a client, in the slower direction, GB/s
	Busy float64 // share of all processors' time
}

// plainExchange measures clients and servers that send and take as much as they
// can.
func plainExchange(ctx context.Context, lab *netns.Lab, c reductionCase) (plainStar, error) {
	o := sockets.Options{Size: 256 << 10, Depth: 4, Length: plainLength}
	before := readTicks()
	hubs, spokes, err := runStar(ctx, lab, c, o)
	if err != nil {
		return plainStar{}, err
	}
	rate := func(reports []sockets.Report) (sum float64) {
		for _, r := range reports {
			sum += float64(r.Bytes) / r.Seconds / 1e9
		}
		return sum / float64(c.Clients)
	}
	return plainStar{Rate: min(rate(hubs), rate(spokes)), Busy: before.busySince()}, nil
}

// plainRound is the median time of what a small all-reduce does, in seconds: all
// clients send a message to a server, which answers when it has all of them.
func plainRound(ctx context.Context, lab *netns.Lab, c reductionCase) (float64, error) {
	_, spokes, err := runStar(ctx, lab, c, sockets.Options{Size: smallBytes, Depth: 1, Length: plainLength / 2, PingPong: true})
	if err != nil {
		return 0, err
	}
	return spokes[0].P50, nil
}

// runStar runs a hub on each server and a spoke on each client; gives what each
// reported, hubs of a ping-pong nothing.
func runStar(ctx context.Context, lab *netns.Lab, c reductionCase, o sockets.Options) (hubs, spokes []sockets.Report, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not done within %s", patience))
	// Ends what is left of them, too.
	defer cancel()
	o.Flows = c.Clients
	var all []*process
	for link := range c.Servers {
		host := netns.StarHost(c.Clients + link)
		o.Address = netip.AddrPortFrom(lab.Address(host), 0)
		p, err := start(ctx, lab, host, []string{sockets.Environment}, self, "raw-hub", asJSON(o))
		if err != nil {
			return nil, nil, err
		}
		all = append(all, p)
		line, err := p.out.ReadString('\n')
		if err != nil {
			return nil, nil, p.end(errors.New("a hub did not start"))
		}
		hub, err := netip.ParseAddrPort(strings.TrimSpace(line))
		if err != nil {
			return nil, nil, p.end(err)
		}
		o.Hubs = append(o.Hubs, hub)
	}
	for link := range c.Clients {
		p, err := start(ctx, lab, netns.StarHost(link), []string{sockets.Environment}, self, "raw-spoke", asJSON(o))
		if err != nil {
			return nil, nil, err
		}
		all = append(all, p)
	}
	for i, p := range all {
		text, err := io.ReadAll(p.out)
		if waited := p.cmd.Wait(); waited != nil {
			err = p.explain(waited)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("plain sockets: %w", err)
		}
		if len(text) == 0 {
			continue
		}
		var r sockets.Report
		if err := json.Unmarshal(text, &r); err != nil {
			return nil, nil, fmt.Errorf("what plain sockets reported: %q", text)
		}
		if i < c.Servers {
			hubs = append(hubs, r)
		} else {
			spokes = append(spokes, r)
		}
	}
	return hubs, spokes, nil
}
