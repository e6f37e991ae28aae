package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const demoFlows = 8

// demo measures plain TCP connections on a lab of its own.
func demo(ctx context.Context, out io.Writer, name string, length time.Duration) (err error) {
	config := netns.Config{Name: name, Links: netns.Links(netns.Gbit, netns.Gbit, netns.Gbit, 200*netns.Mbit)}
	lab, err := netns.Up(ctx, config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lab.Down(ctx)) }()
	fmt.Fprintln(out, lab.Config())
	var flows []*netns.Flow
	for range demoFlows {
		f, err := lab.OpenFlow(ctx)
		if err != nil {
			return err
		}
		defer f.Close()
		flows = append(flows, f)
	}
	if err := show(ctx, out, "all links up", lab, flows, length); err != nil {
		return err
	}
	if err := lab.SetState(ctx, 0, netns.LinkSilent); err != nil {
		return err
	}
	return show(ctx, out, "link 0 silent", lab, flows, length)
}

// show measures the rate of each connection and each link, and prints them.
func show(ctx context.Context, out io.Writer, title string, lab *netns.Lab, flows []*netns.Flow, length time.Duration) error {
	start := time.Now()
	links, err := lab.Sent()
	if err != nil {
		return err
	}
	before := make([]uint64, len(flows))
	for i, f := range flows {
		before[i] = f.Received()
	}
	select {
	case <-time.After(length):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	seconds := time.Since(start).Seconds()
	mbit := func(bytes uint64) float64 { return float64(bytes) * 8 / 1e6 / seconds }
	fmt.Fprintf(out, "\n%s\n", title)
	for i, f := range flows {
		link, err := lab.Path(ctx, f)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "  connection %d on link %d: %7.1f Mbit/s\n", i, link, mbit(f.Received()-before[i]))
	}
	after, err := lab.Sent()
	if err != nil {
		return err
	}
	for i := range links {
		fmt.Fprintf(out, "  link %d (%s) carried %7.1f Mbit/s\n", i, lab.Config().Links[i].Rate, mbit(after[i]-links[i]))
	}
	return nil
}
