package suspects

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

const (
	// pairTime is how long a job runs with somebody who looks, and without.
	pairTime = 15 * time.Second
	// ticksPerSecond is the unit of /proc/PID/stat, the same on all of Linux's processors.
	ticksPerSecond = 100
	// watchThread is the name of the plugin's thread that watches.
	watchThread = "evenkeel-watch"
)

// Quantities of [Pattern.Cost].
var (
	// Carried is what all hosts send, and Processor the processor time of all ranks for that.
	Carried   = experiment.Quantity{Name: "carried", Title: "it carries", Unit: "MB/s", Digits: 2}
	Processor = experiment.Quantity{Name: "cpu", Title: "processor time for each GB", Unit: "s", Digits: 2, LowerIsBetter: true}
	// Watching is the share of a processor that a rank's thread takes that watches.
	Watching = experiment.Quantity{Name: "watching", Title: "of a processor, a rank's thread that watches", Unit: "%", Digits: 3, LowerIsBetter: true}
)

// Cost measures a job, with or without ranks that look for suspects.
func (p Pattern) Cost(name string, watched bool) experiment.Contender {
	return experiment.Contender{Name: name, Reference: !watched, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		got, err := p.consume(ctx, r, watched)
		return experiment.Measured{Values: got}, err
	}}
}

func (p Pattern) consume(ctx context.Context, r experiment.Run, watched bool) (got map[experiment.Quantity]float64, err error) {
	j, err := start(ctx, r, Load{Pattern: p}, watched)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, j.close()) }()
	if err := j.runs(ctx); err != nil {
		return nil, err
	}
	// It comes into step.
	if err := pause(ctx, settleTime); err != nil {
		return nil, err
	}
	before, err := j.spent()
	if err != nil {
		return nil, err
	}
	if err := pause(ctx, pairTime); err != nil {
		return nil, err
	}
	after, err := j.spent()
	if err != nil {
		return nil, err
	}
	bytes, seconds := after.bytes-before.bytes, after.at.Sub(before.at).Seconds()
	got = map[experiment.Quantity]float64{
		Carried: bytes / seconds / 1e6, Processor: (after.processor - before.processor).Seconds() / bytes * 1e9,
	}
	if watched {
		got[Watching] = 100 * (after.watching - before.watching).Seconds() / seconds / Hosts
	}
	return got, nil
}

// A consumption is what a job has carried and used by a time.
type consumption struct {
	at                  time.Time
	bytes               float64
	processor, watching time.Duration // of all ranks
}

func (j *job) spent() (c consumption, err error) {
	if c.processor, err = j.processorTime(); err != nil {
		return c, err
	}
	if c.watching, err = j.watchTime(); err != nil {
		return c, err
	}
	c.bytes, c.at, err = j.mark()
	return c, err
}

// runs waits until the job carries data.
func (j *job) runs(ctx context.Context) error {
	const begun = 50 << 20
	var failure error
	carries, err := await(ctx, startTime, func() bool {
		sum, err := j.carried()
		failure = err
		return err != nil || sum > begun
	})
	if err == nil && !carries {
		err = j.processes[0].Kill(fmt.Errorf("the job has not carried %d bytes within %s", begun, startTime))
	}
	return errors.Join(err, failure)
}

// processorTime is that of all ranks so far.
func (j *job) processorTime() (time.Duration, error) {
	var sum time.Duration
	for _, p := range j.processes {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Cmd.Process.Pid))
		if err != nil {
			return 0, err
		}
		// The name, in brackets, may have spaces. utime and stime are fields 14 and 15 (proc(5)).
		_, rest, _ := strings.Cut(string(text), ") ")
		fields := strings.Fields(rest)
		if len(fields) < 13 {
			return 0, fmt.Errorf("unexpected /proc/PID/stat: %q", text)
		}
		for _, field := range fields[11:13] {
			ticks, err := strconv.ParseInt(field, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("unexpected /proc/PID/stat: %w", err)
			}
			sum += time.Duration(ticks) * time.Second / ticksPerSecond
		}
	}
	return sum, nil
}

// watchTime is the processor time so far of the threads that watch.
func (j *job) watchTime() (sum time.Duration, err error) {
	for _, p := range j.processes {
		used, _, err := p.ThreadTime(func(_ int, name string) bool { return name == watchThread })
		if err != nil {
			return 0, err
		}
		sum += used
	}
	return sum, nil
}
