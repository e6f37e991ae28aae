package main

import (
	"context"
	"fmt"

	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/bench/internal/sockets"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// plain is plain sockets with a number of connections.
type plain struct{ flows int }

func (p plain) name() string {
	if p.flows == 1 {
		return "plain socket"
	}
	return fmt.Sprintf("%d plain sockets", p.flows)
}

func (p plain) prepare(context.Context, *netns.Lab, benchCase) error { return nil }

func (p plain) run(ctx context.Context, lab *netns.Lab, c benchCase) (outcome, error) {
	o := sockets.Options{Flows: p.flows, Size: c.size, Depth: c.depth, Length: c.length, PingPong: c.pingPong}
	receiver, address, err := sockets.StartListening(ctx, lab, netns.H2, "receive", o)
	if err != nil {
		return outcome{}, err
	}
	o.Address = address
	sender, err := sockets.StartSide(ctx, lab, netns.H1, "send", o)
	if err != nil {
		return outcome{}, receiver.Kill(err)
	}
	measuring := receiver
	if c.pingPong {
		measuring = sender
	}
	text, err := proc.WaitBoth(receiver, sender, measuring)
	if err != nil {
		return outcome{}, err
	}
	report, err := sockets.ReadReport(text)
	if err != nil {
		return outcome{}, err
	}
	bytes := float64(report.Bytes)
	return outcome{
		Rate: bytes / report.Seconds / 1e9, P50: report.P50,
		Send: sender.CPUPerGB(bytes), Receive: receiver.CPUPerGB(bytes), Own: proc.CPUShare(sender, receiver),
	}, nil
}
