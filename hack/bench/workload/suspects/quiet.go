package suspects

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// A Load is a job in which nobody is to blame, however uneven it is.
type Load struct {
	Name    string // letters and dashes
	Pattern Pattern
	Detail  string // in words
	// computing is how long a rank computes before each operation, as [job.compute] takes it.
	computing func(rank int) string
	// all is set where all cards change to half of their rate and back, together.
	all bool
	// saves is set where rank 0 does something else for a second once a minute, as one that writes a checkpoint does.
	saves bool
}

// Title is the load in words.
func (l Load) Title() string { return l.Pattern.Title() + ": " + l.Detail }

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

// Loads are the jobs that run without a fault.
var Loads = []Load{
	{Name: "ring-plain", Pattern: Ring, Detail: "nobody computes"},
	{Name: "ring-even", Pattern: Ring, Detail: "all compute for 20 ms", computing: even},
	{Name: "ring-drawn", Pattern: Ring, Detail: "each computes for 0 to 200 ms, drawn anew each time", computing: drawn},
	{Name: "ring-stages", Pattern: Ring, Detail: "each computes for 20 ms more than the one before", computing: stages},
	{Name: "ring-cards", Pattern: Ring, Detail: "all cards go to half of their rate and back, together", all: true},
	{Name: "ring-saves", Pattern: Ring, Detail: "rank 0 pauses for a second once a minute", computing: even, saves: true},
	{Name: "all-to-all-plain", Pattern: AllToAll, Detail: "nobody computes"},
	{Name: "all-to-all-drawn", Pattern: AllToAll, Detail: "each computes for 0 to 200 ms, drawn anew each time", computing: drawn},
	{Name: "all-to-all-stages", Pattern: AllToAll, Detail: "each computes for 20 ms more than the one before", computing: stages},
	{Name: "all-to-all-saves", Pattern: AllToAll, Detail: "rank 0 pauses for a second once a minute", computing: even, saves: true},
	{Name: "broadcast-even", Pattern: broadcast, Detail: "all compute for 20 ms", computing: even},
	{Name: "gather-even", Pattern: gather, Detail: "all compute for 20 ms", computing: even},
}

// FalseVerdicts counts each change of who is named.
var FalseVerdicts = experiment.Quantity{
	Name: "false_verdicts", Title: "false verdicts", Unit: "/h", Digits: 1, LowerIsBetter: true, Statistic: experiment.Mean,
}

// QuietTimeout is for a job of a length, for starting it, and for its network.
func QuietTimeout(length time.Duration) time.Duration { return length + startTime + time.Minute }

// Quiet runs the job for a time, and counts who is named.
func (l Load) Quiet(name string, length time.Duration) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		named, err := l.watch(ctx, r, length)
		return experiment.Measured{
			Values: map[experiment.Quantity]float64{FalseVerdicts: float64(len(named)) / length.Hours()}, Note: strings.Join(named, "; "),
		}, err
	}}
}

// watch runs the job for a time, and returns what the verdicts on somebody said.
func (l Load) watch(ctx context.Context, r experiment.Run, length time.Duration) (said []string, err error) {
	j, err := begin(ctx, r, l)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, j.close()) }()
	if l.all {
		end := toggle(ctx, swayPeriod, 0.5, func(half bool) error { return j.sway(ctx, half) })
		defer func() { err = errors.Join(err, end()) }()
	}
	last := ""
	saved, saves, failed := time.Now().Add(-savePeriod/2), 0, error(nil)
	_, err = await(ctx, length, func() bool {
		if l.saves && time.Since(saved) >= savePeriod {
			saved = time.Now()
			saves++
			if failed = j.pauseOnce(0); failed != nil {
				return true
			}
		}
		if v, named := j.suspected(); !named {
			last = ""
		} else if name := v.Suspects[0].Class + " " + v.Suspects[0].Host; name != last {
			last = name
			said = append(said, v.Text)
		}
		return false
	})
	if err = errors.Join(err, failed); err == nil && l.saves && saves == 0 {
		err = fmt.Errorf("rank 0 has not paused within %s: a run of %s or more is needed", length, savePeriod)
	}
	return said, err
}

// sway sets the rate of all cards, in both directions.
func (j *job) sway(ctx context.Context, half bool) error {
	ctx = context.WithoutCancel(ctx)
	rate := netns.Rate(CardRate)
	if half {
		rate /= 2
	}
	var all []error
	for host := range Hosts {
		all = append(all, j.lab.SetStarRate(ctx, host, true, rate), j.lab.SetStarRate(ctx, host, false, rate))
	}
	return errors.Join(all...)
}
