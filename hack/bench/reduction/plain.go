package main

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/bench/internal/sockets"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// plainLength is how long plain sockets are measured.
const plainLength = 2 * time.Second

// A plainStar is the result of plain sockets: one connection from each client to each server, both directions at the same time,
// and nothing is summed. It is the maximum of what this machine can do.
type plainStar struct {
	Rate float64 // of a client, in the slower direction, GB/s
	Busy float64 // share of all processors' time
}

// plainExchange measures clients and servers that send and receive as much as they can.
func plainExchange(ctx context.Context, lab *netns.Lab, c starCase) (plainStar, error) {
	o := sockets.Options{Size: 256 << 10, Depth: 4, Length: plainLength}
	before := machine.ReadCPUTime()
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
	return plainStar{Rate: min(rate(hubs), rate(spokes)), Busy: before.BusySince()}, nil
}

// plainRound is the median time of the messages of a small all-reduce, in seconds: all clients send a message to a server, which
// answers when it has received all of them.
func plainRound(ctx context.Context, lab *netns.Lab, c starCase) (float64, error) {
	_, spokes, err := runStar(ctx, lab, c, sockets.Options{Size: smallBytes, Depth: 1, Length: plainLength / 2, PingPong: true})
	if err != nil {
		return 0, err
	}
	return spokes[0].P50, nil
}

// runStar runs a hub on each server and a spoke on each client, and returns their reports. Hubs of a ping-pong have none.
func runStar(ctx context.Context, lab *netns.Lab, c starCase, o sockets.Options) (hubs, spokes []sockets.Report, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, proc.Timeout, fmt.Errorf("not done within %s", proc.Timeout))
	defer cancel() // which kills those that still run
	o.Flows = c.Clients
	var all []*proc.Process
	var addresses []netip.AddrPort
	for link := range c.Servers {
		p, address, err := sockets.StartListening(ctx, lab, netns.StarHost(c.Clients+link), "hub", o)
		if err != nil {
			return nil, nil, err
		}
		all, addresses = append(all, p), append(addresses, address)
	}
	o.Hubs = addresses
	for link := range c.Clients {
		p, err := sockets.StartSide(ctx, lab, netns.StarHost(link), "spoke", o)
		if err != nil {
			return nil, nil, err
		}
		all = append(all, p)
	}
	for i, p := range all {
		text, err := p.Wait()
		if err != nil {
			return nil, nil, fmt.Errorf("plain sockets: %w", err)
		}
		if len(text) == 0 {
			continue
		}
		r, err := sockets.ReadReport(text)
		if err != nil {
			return nil, nil, err
		}
		if i < c.Servers {
			hubs = append(hubs, r)
		} else {
			spokes = append(spokes, r)
		}
	}
	return hubs, spokes, nil
}
