package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	// flapPeriod is how often a flapping card goes down, and slowPeriod how often a slow process is stopped.
	flapPeriod = 2 * time.Second
	slowPeriod = 100 * time.Millisecond
)

// inject begins the fault. The result ends it.
func (f fault) inject(ctx context.Context, j *job) (end func() error, err error) {
	late := context.WithoutCancel(ctx)
	left := netns.Rate(float64(cardRate) * f.Amount)
	switch f.Kind {
	case egress, ingress:
		sends := f.Kind == egress
		return func() error { return j.lab.SetStarRate(late, f.Host, sends, cardRate) }, j.lab.SetStarRate(ctx, f.Host, sends, left)
	case delay:
		return j.lab.Delay(ctx, f.Host, time.Duration(f.Amount)*time.Millisecond)
	case loss:
		return func() error { return j.loseNothing(late, f.Host) }, j.lose(ctx, f.Host, f.Amount)
	case path:
		return func() error { return j.unshapePath(late, f.Host, f.Peer) }, j.shapePath(ctx, f.Host, f.Peer, left)
	case stopped:
		process := j.processes[f.Host].Cmd.Process
		return func() error { return process.Signal(syscall.SIGCONT) }, process.Signal(syscall.SIGSTOP)
	case slow:
		process := j.processes[f.Host].Cmd.Process
		return toggle(ctx, slowPeriod, f.Amount, func(on bool) error {
			if on {
				return process.Signal(syscall.SIGSTOP)
			}
			return process.Signal(syscall.SIGCONT)
		}), nil
	case flapping:
		return toggle(ctx, flapPeriod, f.Amount, func(down bool) error {
			state := "up"
			if down {
				state = "down"
			}
			_, err := j.lab.Exec(late, switchHost, "ip", "link", "set", "dev", switchPort(f.Host), state)
			return err
		}), nil
	case behind:
		return func() error { return j.compute(f.Host, "0") }, j.compute(f.Host, fmt.Sprintf("%.0f", f.Amount))
	case two:
		first, err := f.Both[0].inject(ctx, j)
		if err != nil {
			return nil, err
		}
		second, err := f.Both[1].inject(ctx, j)
		if err != nil {
			return nil, errors.Join(err, first())
		}
		return func() error { return errors.Join(first(), second()) }, nil
	}
	return nil, fmt.Errorf("unknown fault %q", f.Kind)
}

// toggle switches something on for a share of each period, until it is ended. It is off then.
func toggle(ctx context.Context, period time.Duration, share float64, set func(on bool) error) (end func() error) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		next := time.NewTicker(period)
		defer next.Stop()
		for {
			if err := set(true); err != nil {
				done <- err
				return
			}
			on := time.NewTimer(time.Duration(share * float64(period)))
			select {
			case <-ctx.Done():
			case <-on.C:
			}
			on.Stop()
			if err := set(false); err != nil || ctx.Err() != nil {
				done <- err
				return
			}
			select {
			case <-ctx.Done():
				done <- nil
				return
			case <-next.C:
			}
		}
	}()
	return func() error {
		cancel()
		if err := <-done; !errors.Is(err, os.ErrProcessDone) {
			return err
		}
		return nil // the process has ended
	}
}

func switchPort(host int) string { return fmt.Sprintf("p%d", host) }

// shapePath sets the rate from one host to another.
func (j *job) shapePath(ctx context.Context, from, to int, rate netns.Rate) error {
	port := switchPort(to)
	for _, command := range [][]string{
		{"tc", "qdisc", "replace", "dev", port, "root", "handle", "1:", "htb", "default", "1"},
		{"tc", "class", "add", "dev", port, "parent", "1:", "classid", "1:9", "htb", "rate", cardRate.String(), "burst", "32768"},
		{"tc", "class", "add", "dev", port, "parent", "1:9", "classid", "1:1", "htb", "rate", (cardRate - rate).String(), "ceil", cardRate.String(), "burst", "32768"},
		{"tc", "class", "add", "dev", port, "parent", "1:9", "classid", "1:2", "htb", "rate", rate.String(), "burst", "32768"},
		{"nft", fmt.Sprintf("table ip %s { chain path { type filter hook forward priority 0; oifname %s meta priority set ip saddr map { %s : 1:2 }; }; }",
			faultTable(from), port, j.lab.Address(netns.StarHost(from)))},
	} {
		if _, err := j.lab.Exec(ctx, switchHost, command...); err != nil {
			return err
		}
	}
	return nil
}

func (j *job) unshapePath(ctx context.Context, from, to int) error {
	_, err := j.lab.Exec(ctx, switchHost, "nft", "delete", "table", "ip", faultTable(from))
	_, removed := j.lab.Exec(ctx, switchHost, "tc", "qdisc", "del", "dev", switchPort(to), "root")
	return errors.Join(err, removed, j.lab.SetStarRate(ctx, to, false, cardRate))
}

func faultTable(host int) string { return fmt.Sprintf("fault%d", host) }

// lose drops a share of what a host sends. At the switch, since the host's TCP would notice a packet that its own host drops; and
// packets, not segments of 64 KiB.
func (j *job) lose(ctx context.Context, host int, share float64) error {
	if _, err := j.lab.Exec(ctx, netns.StarHost(host), "ip", "link", "set", "dev", netns.DataInterface, "gso_max_segs", "1"); err != nil {
		return err
	}
	_, err := j.lab.Exec(ctx, switchHost, "nft", fmt.Sprintf("table netdev %s { chain lose { type filter hook ingress device %s priority 0; numgen random mod 1000 < %d drop; }; }",
		faultTable(host), switchPort(host), int(share*1000)))
	return err
}

func (j *job) loseNothing(ctx context.Context, host int) error {
	_, err := j.lab.Exec(ctx, switchHost, "nft", "delete", "table", "netdev", faultTable(host))
	_, whole := j.lab.Exec(ctx, netns.StarHost(host), "ip", "link", "set", "dev", netns.DataInterface, "gso_max_segs", "65535")
	return errors.Join(err, whole)
}
