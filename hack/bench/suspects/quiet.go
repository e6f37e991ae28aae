package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// A load is a job in which nobody is to blame, however uneven it is.
type load struct {
	Pattern, Detail string
	// computing is how long a rank computes before each operation, as [job.compute] takes it.
	computing func(rank int) string
	// unwatched is set where nobody looks for suspects.
	unwatched bool
	// all is set where all cards change to half of their rate and back, together.
	all bool
	// saves is set where rank 0 does something else for a second once a minute, as one that writes a checkpoint does.
	saves bool
}

func (l load) String() string { return l.Pattern + ", " + l.Detail }

const (
	// swayPeriod is how often all cards change their rate.
	swayPeriod = 30 * time.Second
	// savePeriod is how often rank 0 pauses as for a checkpoint.
	savePeriod = time.Minute
)

var (
	even   = func(int) string { return "20" }
	drawn  = func(int) string { return "0-200" }
	stages = func(rank int) string { return fmt.Sprint(20 * rank) }
)

// loads are the jobs that run without a fault.
var loads = []load{
	{Pattern: ring, Detail: "nobody computes"},
	{Pattern: ring, Detail: "all compute for 20 ms", computing: even},
	{Pattern: ring, Detail: "each computes for 0 to 200 ms, drawn anew each time", computing: drawn},
	{Pattern: ring, Detail: "each computes for 20 ms more than the one before", computing: stages},
	{Pattern: ring, Detail: "all cards go to half of their rate and back, together", all: true},
	{Pattern: ring, Detail: "rank 0 pauses for a second once a minute", computing: even, saves: true},
	{Pattern: allToAll, Detail: "nobody computes"},
	{Pattern: allToAll, Detail: "each computes for 0 to 200 ms, drawn anew each time", computing: drawn},
	{Pattern: allToAll, Detail: "each computes for 20 ms more than the one before", computing: stages},
	{Pattern: allToAll, Detail: "rank 0 pauses for a second once a minute", computing: even, saves: true},
	{Pattern: broadcast, Detail: "all compute for 20 ms", computing: even},
	{Pattern: gather, Detail: "all compute for 20 ms", computing: even},
}

// A quiet run is a load, and who was named in it.
type quiet struct {
	load

	Length time.Duration
	Named  []string
}

// undisturbed runs each load, and returns those that have run by the time that something failed.
func undisturbed(ctx context.Context, out io.Writer, o options, chosen []load) ([]quiet, error) {
	runs := make([]*quiet, len(chosen))
	err := slots(ctx, o.parallel, len(chosen), func(ctx context.Context, slot, number int) error {
		q, err := undisturbedLoad(ctx, o, slot, chosen[number])
		if err != nil {
			return fmt.Errorf("without a fault, %s: %w", chosen[number], err)
		}
		runs[number] = &q
		fmt.Fprintf(out, "without a fault, %s: named %q\n", chosen[number], q.Named)
		return nil
	})
	var done []quiet
	for _, q := range runs {
		if q != nil {
			done = append(done, *q)
		}
	}
	return done, err
}

func undisturbedLoad(ctx context.Context, o options, slot int, l load) (_ quiet, err error) {
	q := quiet{load: l, Length: o.quiet}
	j, err := begin(ctx, o, slot, l)
	if err != nil {
		return q, err
	}
	defer func() { err = errors.Join(err, j.close(context.WithoutCancel(ctx))) }()
	if l.all {
		end := toggle(ctx, swayPeriod, 0.5, func(half bool) error { return j.sway(ctx, o.hosts, half) })
		defer func() { err = errors.Join(err, end()) }()
	}
	last := ""
	saved, saves, failed := time.Now().Add(-savePeriod/2), 0, error(nil)
	_, _, err = await(ctx, o.quiet, func() bool {
		if l.saves && time.Since(saved) >= savePeriod {
			saved = time.Now()
			saves++
			if failed = j.pause(0); failed != nil {
				return true
			}
		}
		if v, named := j.suspected(); !named {
			last = ""
		} else if name := v.Suspects[0].Class + " " + v.Suspects[0].Host; name != last {
			last = name
			q.Named = append(q.Named, v.Text)
		}
		return false
	})
	if err = errors.Join(err, failed); err == nil && l.saves && saves == 0 {
		err = fmt.Errorf("no pause within %s: --quiet %s or more", o.quiet, savePeriod)
	}
	return q, err
}

// sway sets the rate of all cards, in both directions.
func (j *job) sway(ctx context.Context, hosts int, half bool) error {
	ctx = context.WithoutCancel(ctx)
	rate := netns.Rate(cardRate)
	if half {
		rate /= 2
	}
	var all []error
	for host := range hosts {
		all = append(all, j.lab.SetStarRate(ctx, host, true, rate), j.lab.SetStarRate(ctx, host, false, rate))
	}
	return errors.Join(all...)
}

// writeQuiet writes who was named without a fault.
func writeQuiet(b *bytes.Buffer, runs []quiet) {
	table := page.Table{Heading: []string{"Job", "", "Time", "False verdicts"}}
	var sum time.Duration
	named := 0
	for _, q := range runs {
		sum += q.Length
		named += len(q.Named)
		table.Add(q.Pattern, q.Detail, q.Length.Round(time.Second).String(), fmt.Sprint(len(q.Named)))
	}
	fmt.Fprintf(b, "\n## Without a fault\n\n%.1f hours of jobs in which nobody is to blame had %d false verdicts.\n\n", sum.Hours(), named)
	table.Markdown(b)
	for _, q := range runs {
		for _, text := range q.Named {
			fmt.Fprintf(b, "\n* %s: %s", q, text)
		}
	}
	b.WriteString("\n")
}
