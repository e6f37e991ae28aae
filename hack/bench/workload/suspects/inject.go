package suspects

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

// inject begins the fault. The job and its network are gone after it, so the result ends only what goes on by itself;
// it is nil if nothing does.
func (f fault) inject(ctx context.Context, j *job) (end func() error, err error) {
	left := netns.Rate(float64(CardRate) * f.Amount)
	switch f.Kind {
	case egress, ingress:
		return nil, j.lab.SetStarRate(ctx, f.Host, f.Kind == egress, left)
	case delay:
		return j.lab.Delay(ctx, f.Host, time.Duration(f.Amount)*time.Millisecond)
	case loss:
		return nil, j.lose(ctx, f.Host, f.Amount)
	case path:
		return nil, j.shapePath(ctx, f.Host, f.Peer, left)
	case stopped:
		return nil, j.processes[f.Host].Cmd.Process.Signal(syscall.SIGSTOP)
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
			_, err := j.lab.Exec(context.WithoutCancel(ctx), switchHost, "ip", "link", "set", "dev", switchPort(f.Host), state)
			return err
		}), nil
	case behind:
		return nil, j.compute(f.Host, fmt.Sprintf("%.0f", f.Amount))
	case two:
		first, err := f.Both[0].inject(ctx, j)
		if err != nil {
			return first, err
		}
		second, err := f.Both[1].inject(ctx, j)
		return func() error { return errors.Join(stop(first), stop(second)) }, err
	}
	return nil, fmt.Errorf("unknown fault %q", f.Kind)
}

// stop ends what a fault has begun, if anything goes on.
func stop(end func() error) error {
	if end == nil {
		return nil
	}
	return end()
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
		{"tc", "class", "add", "dev", port, "parent", "1:", "classid", "1:9", "htb", "rate", CardRate.String(), "burst", "32768"},
		{"tc", "class", "add", "dev", port, "parent", "1:9", "classid", "1:1", "htb", "rate", (CardRate - rate).String(), "ceil", CardRate.String(), "burst", "32768"},
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

func faultTable(host int) string { return fmt.Sprintf("fault%d", host) }

// lose drops a share of what a host sends. At the switch, since the host's TCP would notice a packet that its own host
// drops; and packets, not segments of 64 KiB.
func (j *job) lose(ctx context.Context, host int, share float64) error {
	if _, err := j.lab.Exec(ctx, netns.StarHost(host), "ip", "link", "set", "dev", netns.DataInterface, "gso_max_segs", "1"); err != nil {
		return err
	}
	_, err := j.lab.Exec(ctx, switchHost, "nft", fmt.Sprintf("table netdev %s { chain lose { type filter hook ingress device %s priority 0; numgen random mod 1000 < %d drop; }; }",
		faultTable(host), switchPort(host), int(share*1000)))
	return err
}
