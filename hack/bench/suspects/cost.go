package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	// pairTime is how long a job runs with somebody who looks, and without.
	pairTime = 15 * time.Second
	// manyRanks is the number of ranks of the job whose datagrams are counted, and manyTime how long.
	manyRanks = 64
	manyTime  = 30 * time.Second
	// ticksPerSecond is the unit of /proc/PID/stat, the same on all of Linux's processors.
	ticksPerSecond = 100
	// watchThread is the name of the plugin's thread that watches.
	watchThread = "evenkeel-watch"
)

// A cost is what looking for suspects costs a job.
type cost struct {
	// Traffic and Processor are ratios of what a job carries, and of its processor time for that, with and without; by pattern.
	Traffic, Processor map[string][]float64
	// Watching is the share of a processor that a rank's thread takes that watches; by pattern.
	Watching map[string][]float64
	// Datagrams are bytes a second of all ranks of the large job together, with headers of IP.
	Datagrams float64
}

// measureCost measures one job at a time.
func measureCost(ctx context.Context, out io.Writer, o options) (cost, error) {
	c := cost{Traffic: map[string][]float64{}, Processor: map[string][]float64{}, Watching: map[string][]float64{}}
	for _, pattern := range patterns {
		for round := range o.costPairs {
			// In turn, so that what drifts hits both.
			first := round%2 == 0
			a, err := consume(ctx, o, load{Pattern: pattern, unwatched: first})
			if err != nil {
				return c, fmt.Errorf("cost: %w", err)
			}
			b, err := consume(ctx, o, load{Pattern: pattern, unwatched: !first})
			if err != nil {
				return c, fmt.Errorf("cost: %w", err)
			}
			without, with := a, b
			if !first {
				without, with = b, a
			}
			traffic, processor := with.rate/without.rate, with.processor/without.processor
			c.Traffic[pattern], c.Processor[pattern] = append(c.Traffic[pattern], traffic), append(c.Processor[pattern], processor)
			c.Watching[pattern] = append(c.Watching[pattern], with.watching)
			fmt.Fprintf(out, "cost, %s, %d of %d: %.4f of the traffic, %.3f of the processor time, %.5f of a processor to watch\n", pattern, round+1, o.costPairs, traffic, processor, with.watching)
		}
	}
	var err error
	if c.Datagrams, err = countDatagrams(ctx, o); err != nil {
		return c, fmt.Errorf("cost of %d ranks: %w", manyRanks, err)
	}
	fmt.Fprintf(out, "cost, %d ranks: %.1f KB/s\n", manyRanks, c.Datagrams/1e3)
	return c, nil
}

// A consumption is what a job carries, in bytes a second, its processor time, in seconds for a byte, and the share of a
// processor that a rank's thread takes that watches.
type consumption struct{ rate, processor, watching float64 }

func consume(ctx context.Context, o options, l load) (got consumption, err error) {
	j, err := start(ctx, o, 0, l)
	if err != nil {
		return got, err
	}
	defer func() { err = errors.Join(err, j.close(context.WithoutCancel(ctx))) }()
	if err := j.runs(ctx); err != nil {
		return got, err
	}
	// It comes into step.
	if _, _, err := await(ctx, settleTime, func() bool { return false }); err != nil {
		return got, err
	}
	spent, err := j.processorTime()
	if err != nil {
		return got, err
	}
	watched, err := j.watchTime()
	if err != nil {
		return got, err
	}
	before, since, err := j.mark(ctx)
	if err != nil {
		return got, err
	}
	if _, _, err := await(ctx, pairTime, func() bool { return false }); err != nil {
		return got, err
	}
	if got.rate, err = j.rate(ctx, before, since); err != nil {
		return got, err
	}
	all, err := j.processorTime()
	if err != nil {
		return got, err
	}
	watchedAll, err := j.watchTime()
	if err != nil {
		return got, err
	}
	got.watching = (watchedAll - watched).Seconds() / time.Since(since).Seconds() / float64(len(j.processes))
	got.processor = (all - spent).Seconds() / (got.rate * time.Since(since).Seconds())
	return got, nil
}

// runs waits until the job carries data.
func (j *job) runs(ctx context.Context) error {
	const begun = 50 << 20
	var failure error
	_, carries, err := await(ctx, startTime, func() bool {
		sum, err := j.carried(ctx)
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

// watchTime is the processor time so far of the threads that watch. Its unit is fine enough for threads that do little.
func (j *job) watchTime() (time.Duration, error) {
	var sum time.Duration
	for _, p := range j.processes {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", p.Cmd.Process.Pid))
		if err != nil {
			return 0, err
		}
		for _, thread := range threads {
			name, err := os.ReadFile(filepath.Join(thread, "comm"))
			if errors.Is(err, fs.ErrNotExist) {
				continue // it has ended
			}
			if err != nil {
				return 0, err
			}
			if strings.TrimSpace(string(name)) != watchThread {
				continue
			}
			text, err := os.ReadFile(filepath.Join(thread, "schedstat"))
			if err != nil {
				return 0, err
			}
			// The first is the time on a processor, in nanoseconds (sched-stats of the kernel's documentation).
			spent, _, _ := strings.Cut(string(text), " ")
			nanoseconds, err := strconv.ParseInt(spent, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("unexpected schedstat: %w", err)
			}
			sum += time.Duration(nanoseconds)
		}
	}
	return sum, nil
}

var counted = regexp.MustCompile(`bytes (\d+)`)

// countDatagrams runs a job of many ranks on one host, which exchange with all others, and counts what they tell each other.
func countDatagrams(ctx context.Context, o options) (rate float64, err error) {
	lab, err := netns.Up(ctx, netns.Config{Name: "bench-suspects-many"})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, lab.Down(context.WithoutCancel(ctx))) }()
	folder, err := os.MkdirTemp("", "suspects")
	if err != nil {
		return 0, err
	}
	j := &job{lab: lab, folder: folder}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	if _, err := lab.Exec(ctx, netns.H1, "nft", "table inet cost { chain out { type filter hook output priority 0; meta l4proto udp counter; }; }"); err != nil {
		return 0, err
	}
	if err := j.compute(0, "100"); err != nil {
		return 0, err
	}
	// Each has a name of the length that a node has.
	environment := []string{"EVENKEEL_WATCH=on", "EVENKEEL_STATUS_DIR=" + folder, "EVENKEEL_NODE=ip-10-0-100-100.eu-central-1.compute.internal"}
	ranks, err := proc.Start(ctx, lab, netns.H1, "ranks", environment, o.driver, "collective", "--spawn", strconv.Itoa(manyRanks), "--transport", "tcp",
		"--elements", "6400", "--no-verify", "--compute", j.computeFile(0), "--iteration-time", "86400s", "alltoall")
	if err != nil {
		return 0, err
	}
	defer func() { _ = ranks.Kill(nil) }()
	if _, known, err := await(ctx, 2*startTime, func() bool { return j.ranks() == manyRanks }); err != nil || !known {
		return 0, errors.Join(err, ranks.Kill(fmt.Errorf("no verdict knows the %d ranks, only %d", manyRanks, j.ranks())))
	}
	count := func() (float64, error) {
		text, err := lab.Exec(ctx, netns.H1, "nft", "list", "table", "inet", "cost")
		if err != nil {
			return 0, err
		}
		found := counted.FindStringSubmatch(text)
		if found == nil {
			return 0, fmt.Errorf("no counter in %q", text)
		}
		return strconv.ParseFloat(found[1], 64)
	}
	before, err := count()
	if err != nil {
		return 0, err
	}
	since := time.Now()
	if _, _, err := await(ctx, manyTime, func() bool { return false }); err != nil {
		return 0, err
	}
	after, err := count()
	return (after - before) / time.Since(since).Seconds(), err
}

// write writes the section of the page.
func (c cost) write(b *bytes.Buffer) {
	pairs := len(c.Traffic[patterns[0]])
	fmt.Fprintf(b, "\n## What it costs\n\nEach job ran %d times with `EVENKEEL_WATCH=on` and %d times without, in turn, for %s each, one job at a time. The cards limit what\n"+
		"it carries. Its processor time is that of all ranks, for each byte. Ratios are medians of the pairs, with the smallest and the largest.\n"+
		"Pairs scatter, so the last column has what is measured without one: the share of a processor that a rank's thread takes that watches.\n\n", pairs, pairs, pairTime)
	table := page.Table{Heading: []string{"Job", "What it carries", "Its processor time", "A rank's thread that watches"}}
	of := func(ratios []float64) string {
		return fmt.Sprintf("%.3f (%.3f to %.3f)", stats.Median(ratios), slices.Min(ratios), slices.Max(ratios))
	}
	percent := func(shares []float64) string {
		return fmt.Sprintf("%.3f %% (%.3f to %.3f)", 100*stats.Median(shares), 100*slices.Min(shares), 100*slices.Max(shares))
	}
	for _, pattern := range patterns {
		table.Add(pattern, of(c.Traffic[pattern]), of(c.Processor[pattern]), percent(c.Watching[pattern]))
	}
	table.Markdown(b)
	fmt.Fprintf(b, "\nA job of %d ranks, each of which exchanges with all others, sent %.0f KB/s for this, all ranks together, with headers of IP.\n", manyRanks, c.Datagrams/1e3)
}
