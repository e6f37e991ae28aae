package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// measure runs all contenders in each round, in rotating order. It keeps complete rounds.
func (m *measured) measure(ctx context.Context, contenders []contender, rounds int, t task) error {
	for round := range rounds {
		all := map[string]map[int]figure{}
		for i := range contenders {
			c := contenders[(i+round)%len(contenders)]
			if slices.Contains(m.without, c.name) {
				continue
			}
			start := time.Now()
			figures, err := c.attempt(ctx, t)
			for attempt := 1; err != nil && attempt < c.tries && ctx.Err() == nil; attempt++ {
				fmt.Fprintf(os.Stderr, "%s, %d processes over %s: %v; repeated\n", c.name, t.ranks, t.network.device, err)
				m.failed = append(m.failed, c.name)
				figures, err = c.attempt(ctx, t)
			}
			if err != nil && c.limit > 0 && ctx.Err() == nil {
				fmt.Fprintf(os.Stderr, "%s, %d processes over %s: %v; left out\n", c.name, t.ranks, t.network.device, err)
				m.without = append(m.without, c.name)
				continue
			}
			if err != nil {
				return fmt.Errorf("%s, %d processes over %s: %w", c.name, t.ranks, t.network.device, err)
			}
			all[c.name] = figures
			fmt.Fprintf(os.Stderr, "%d processes over %s, round %d of %d, %d of %d: %s, %.1f s\n",
				t.ranks, t.network.device, round+1, rounds, i+1, len(contenders), c.name, time.Since(start).Seconds())
		}
		m.rounds = append(m.rounds, all)
	}
	return nil
}

// measureStar measures between hosts, each in a network namespace of its own.
func measureStar(ctx context.Context, m *measured, contenders []contender, rounds int, length time.Duration) (err error) {
	lab, err := netns.Up(ctx, netns.Config{Name: "gloo", Star: slices.Repeat([]netns.Rate{linkRate}, hosts)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lab.Down(ctx)) }()
	between := network{netns.DataInterface, func(ctx context.Context, rank int, argv ...string) (*exec.Cmd, error) {
		return lab.Command(ctx, netns.StarHost(rank), argv...)
	}}
	return m.measure(ctx, contenders, rounds, task{hosts, length, []int{starElements}, between})
}

// measure measures ranks as threads of one process, with one element.
func (t *threaded) measure(ctx context.Context, bench string, rounds int, length time.Duration) error {
	for round := range rounds {
		start := time.Now()
		report, err := inProcess(ctx, bench, threads, length)
		if err != nil {
			return fmt.Errorf("%d threads: %w", threads, err)
		}
		t.rounds = append(t.rounds, report)
		fmt.Fprintf(os.Stderr, "%d ranks as threads of one process, round %d of %d: %.1f s\n", threads, round+1, rounds, time.Since(start).Seconds())
	}
	return nil
}

// wireBound is the minimum time of a ring, in microseconds: each host sends all but one of its parts twice.
func wireBound(elements int) float64 {
	payload := 2 * float64(4*elements) * float64(hosts-1) / float64(hosts)
	return payload / netns.PayloadLimit(linkRate) / 1e3
}
