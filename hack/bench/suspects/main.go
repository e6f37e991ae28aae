// Command suspects injects faults into running jobs, reads whom the ranks name for them, and writes docs/results/suspects.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
)

const (
	// startTime is how long a job may take until a verdict knows all its ranks.
	startTime = time.Minute
	// calmTime is how long a job runs before its first fault, and calmAgain before others. Ranks learn how late each usually is.
	calmTime, calmAgain = 40 * time.Second, 10 * time.Second
	// verdictTime is how long a verdict may take.
	verdictTime = 45 * time.Second
	// faultsOfAJob is how many a job gets, one after the other. Before the next one, nobody is named for restTime. A job in which
	// somebody is named for lingerTime after the fault has ended gets no other.
	faultsOfAJob = 5
	restTime     = 5 * time.Second
	lingerTime   = time.Minute
	// settleTime is what a fault's cost leaves out of its beginning, and costTime how long it is measured.
	settleTime = 3 * time.Second
	costTime   = 7 * time.Second
)

type options struct {
	seed            uint64
	faults, hosts   int
	parallel        int
	quiet           time.Duration
	costPairs       int
	output          string
	only, loads     string
	library, driver string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench/suspects:", err)
		os.Exit(1)
	}
}

func rootCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "suspects",
		Short: "Inject faults into running jobs, and write whom the ranks name to docs/results/suspects.md",
		Long: `Inject faults into running jobs, and write whom the ranks name to docs/results/suspects.md.

A job has a rank on each host of a network of namespaces, and gets five faults, one after the other. Needs root. The same
seed draws the same faults. A fault takes some 40 seconds, a minute where nobody is named.`,
		Example: `  go run ./hack/bench/suspects
  go run ./hack/bench/suspects --seed 7 --faults 20 --quiet 1m --output /tmp/suspects
  go run ./hack/bench/suspects --only "path|late" --faults 4 --quiet 0 --cost-pairs 0 --output /tmp/suspects
  go run ./hack/bench/suspects --faults 0 --loads broadcast --quiet 2h --cost-pairs 0 --output /tmp/suspects

Without faults, the page is suspects-quiet.md.`,
		Args:         cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case o.faults < 0 || o.faults > 10_000:
				return fmt.Errorf("--faults %d: from 0 to 10000", o.faults)
			case o.quiet < 0:
				return fmt.Errorf("--quiet %s: 0 or more", o.quiet)
			case o.costPairs < 0 || o.costPairs > 100:
				return fmt.Errorf("--cost-pairs %d: from 0 to 100", o.costPairs)
			case o.hosts < 4 || o.hosts > 16:
				return fmt.Errorf("--hosts %d: from 4 to 16", o.hosts)
			case o.parallel < 1 || o.parallel > 16:
				return fmt.Errorf("--parallel %d: from 1 to 16", o.parallel)
			case os.Geteuid() != 0:
				return errors.New("making networks needs root")
			}
			return run(cmd.Context(), cmd.OutOrStdout(), o)
		},
	}
	cmd.Flags().Uint64Var(&o.seed, "seed", 1, "what the faults are drawn from")
	cmd.Flags().IntVar(&o.faults, "faults", 300, "number of faults; 0: none")
	cmd.Flags().StringVar(&o.only, "only", "", "kinds of faults: a regular expression, such as \"path|late\"")
	cmd.Flags().IntVar(&o.hosts, "hosts", 8, "hosts of a job")
	cmd.Flags().IntVar(&o.parallel, "parallel", runtime.NumCPU(), "jobs at a time, each in a network of its own; they share the processors")
	cmd.Flags().DurationVar(&o.quiet, "quiet", 10*time.Minute, "how long each job without a fault runs; 0: none runs")
	cmd.Flags().StringVar(&o.loads, "loads", "", "jobs without a fault: a regular expression, such as \"ring.*20 ms\"")
	cmd.Flags().IntVar(&o.costPairs, "cost-pairs", 4, "how often each job runs with and without being watched, to see what that costs; 0: not at all")
	cmd.Flags().StringVar(&o.output, "output", "", "the folder for the page (default docs/results)")
	cmd.Flags().StringVar(&o.library, "library", "", "the plugin (default: built from this checkout)")
	cmd.Flags().StringVar(&o.driver, "driver", "", "evenkeel-bench (default: built from this checkout)")
	return cmd
}

// kinds match the kinds of faults that are asked for.
func (o options) kinds() (*regexp.Regexp, error) {
	only, err := regexp.Compile(o.only)
	if err != nil {
		return nil, fmt.Errorf("--only: %w", err)
	}
	if !slices.ContainsFunc(kinds, func(k kind) bool { return only.MatchString(string(k)) }) {
		return nil, fmt.Errorf("--only %q matches none of %q", o.only, kinds)
	}
	return only, nil
}

// chosenLoads are the jobs without a fault that are asked for.
func (o options) chosenLoads() ([]load, error) {
	wanted, err := regexp.Compile(o.loads)
	if err != nil {
		return nil, fmt.Errorf("--loads: %w", err)
	}
	var chosen, all []string
	var found []load
	for _, l := range loads {
		all = append(all, l.String())
		if wanted.MatchString(l.String()) {
			chosen, found = append(chosen, l.String()), append(found, l)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("--loads %q matches none of %q", o.loads, all)
	}
	return found, nil
}

// A report is what has been measured. Parts that were not asked for are empty.
type report struct {
	results []result
	calm    []quiet
	spent   cost
	// stopped is why the rest is missing; nil: nothing is.
	stopped error
}

func run(ctx context.Context, out io.Writer, o options) error {
	only, err := o.kinds()
	if err != nil {
		return err
	}
	chosen, err := o.chosenLoads()
	if err != nil {
		return err
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if o.output == "" {
		o.output = filepath.Join(root, "docs", "results")
	}
	host, source := machine.Describe(), page.NewSource(ctx, root, "plugin", "hack")
	if o.library == "" || o.driver == "" {
		built, err := artifacts.Rust(ctx, root, os.Stderr, false)
		if err != nil {
			return err
		}
		o.library, o.driver = filepath.Join(built, cargo.Library), filepath.Join(built, "evenkeel-bench")
	}
	r := measure(ctx, out, o, only, chosen)
	if r.stopped != nil && len(r.results) == 0 && len(r.calm) == 0 {
		return r.stopped
	}
	// What took an hour to measure is not thrown away for what failed afterwards.
	files := map[string][]byte{o.name(): markdown(r, o, source, host)}
	if len(r.results) > 0 {
		files["suspects.svg"] = matrix(r.results)
	}
	return errors.Join(r.stopped, page.Write(o.output, files))
}

func measure(ctx context.Context, out io.Writer, o options, only *regexp.Regexp, chosen []load) (r report) {
	if r.results, r.stopped = injected(ctx, out, o, only); r.stopped != nil {
		return r
	}
	if o.quiet > 0 {
		if r.calm, r.stopped = undisturbed(ctx, out, o, chosen); r.stopped != nil {
			return r
		}
	}
	if o.costPairs > 0 {
		r.spent, r.stopped = measureCost(ctx, out, o)
	}
	return r
}

// injected runs a job for each fault that is drawn from the seed, and returns what it found by the time that something failed.
func injected(ctx context.Context, out io.Writer, o options, only *regexp.Regexp) ([]result, error) {
	random := rand.New(rand.NewPCG(o.seed, 0)) //nolint:gosec // the same faults for the same seed
	var faults []fault
	for len(faults) < o.faults {
		if f := draw(random, o.hosts); only.MatchString(string(f.Kind)) {
			faults = append(faults, f)
		}
	}
	var groups [][]numbered
	for _, pattern := range patterns {
		var group []numbered
		for number, f := range faults {
			if f.Pattern == pattern {
				group = append(group, numbered{number, f})
			}
		}
		groups = slices.AppendSeq(groups, slices.Chunk(group, faultsOfAJob))
	}
	results := make([]*result, o.faults)
	err := slots(ctx, o.parallel, len(groups), func(ctx context.Context, slot, at int) error {
		return inOneJob(ctx, o, slot, groups[at], func(number int, r result) {
			results[number] = &r
			fmt.Fprintf(out, "%d: %s, %s, cost %.0f %% of %.1f MB/s: right %t after %.1f s: %s\n",
				number+1, r.Fault, r.Fault.Pattern, 100*r.Cost, r.Calm/1e6, r.Right, r.After.Seconds(), r.said())
		})
	})
	var done []result
	for _, r := range results {
		if r != nil {
			done = append(done, *r)
		}
	}
	weigh(done)
	return done, err
}

// A numbered fault is one of those that are drawn.
type numbered struct {
	number int
	fault  fault
}

// slots does work with the numbers from 0 to count, some at a time. What is done at the same time has different slots.
func slots(ctx context.Context, parallel, count int, work func(ctx context.Context, slot, number int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	numbers := make(chan int)
	group.Go(func() error {
		defer close(numbers)
		for number := range count {
			select {
			case numbers <- number:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		return nil
	})
	for slot := range parallel {
		group.Go(func() error {
			for number := range numbers {
				if err := work(ctx, slot, number); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// inOneJob injects faults one after the other. A job in which somebody stays named is replaced by a new one.
func inOneJob(ctx context.Context, o options, slot int, faults []numbered, found func(number int, r result)) error {
	for len(faults) > 0 {
		j, err := begin(ctx, o, slot, load{Pattern: faults[0].fault.Pattern})
		if err != nil {
			return fmt.Errorf("fault %d: %w", faults[0].number+1, err)
		}
		calm := calmTime
		for usable := true; usable && len(faults) > 0 && err == nil; faults = faults[1:] {
			var r result
			if r, err = one(ctx, j, faults[0].fault, calm); err == nil {
				found(faults[0].number, r)
				usable, err = j.calms(ctx)
				calm = calmAgain
			}
			if err != nil {
				err = fmt.Errorf("fault %d: %w", faults[0].number+1, err)
			}
		}
		if err = errors.Join(err, j.close(context.WithoutCancel(ctx))); err != nil {
			return err
		}
	}
	return nil
}

// calms waits until nobody is named, and says whether that came and the job goes on: the collectives end it when a rank is stopped for
// long.
func (j *job) calms(ctx context.Context) (bool, error) {
	since := time.Now()
	_, calm, err := await(ctx, lingerTime, func() bool {
		if _, named := j.suspected(); named {
			since = time.Now()
		}
		return time.Since(since) >= restTime || j.hasEnded()
	})
	return calm && !j.hasEnded(), err
}

// one injects a fault into a job in which nobody is named, after that time without one.
func one(ctx context.Context, j *job, f fault, length time.Duration) (_ result, err error) {
	r := result{Fault: f, Found: classNobody}
	// Looks for a time whether somebody is named already.
	watch := func(most time.Duration) error {
		passed, named, err := await(ctx, most, func() bool { v, named := j.suspected(); r.Text = v.Text; return named })
		r.Early, r.Before = named, r.Before+passed
		return err
	}
	// The first half is for ranks to come into step.
	if err := watch(length / 2); err != nil || r.Early {
		return r, err
	}
	before, since, err := j.mark(ctx)
	if err != nil {
		return r, err
	}
	if err := watch(length / 2); err != nil || r.Early {
		return r, err
	}
	calm, err := j.rate(ctx, before, since)
	if err != nil {
		return r, err
	}
	end, err := f.inject(ctx, j)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, end()) }()
	injected := time.Now()
	var found verdict
	named := func() (named bool) { found, named = j.suspected(); return named }
	known := false
	if r.After, known, err = await(ctx, settleTime, named); err != nil {
		return r, err
	}
	if _, _, err := await(ctx, settleTime-time.Since(injected), func() bool { return false }); err != nil {
		return r, err
	}
	if before, since, err = j.mark(ctx); err != nil {
		return r, err
	}
	if !known {
		if _, known, err = await(ctx, verdictTime-settleTime, named); err != nil {
			return r, err
		}
		r.After = time.Since(injected)
	}
	if _, _, err := await(ctx, costTime-time.Since(since), func() bool { return false }); err != nil {
		return r, err
	}
	faulty, err := j.rate(ctx, before, since)
	if err != nil {
		return r, err
	}
	r.Calm, r.Faulty, r.Cost = max(calm, 1), faulty, 1-faulty/max(calm, 1)
	if known {
		r.Found, r.Host, r.Text, r.Right = found.Suspects[0].Class, found.Suspects[0].Host, found.Text, f.isRight(found)
		r.Either = f.mayBePath(found.Suspects[0])
	} else {
		r.Text = j.unsuspecting()
	}
	return r, nil
}

// begin starts a job, and returns once a verdict knows all its ranks.
func begin(ctx context.Context, o options, slot int, l load) (*job, error) {
	j, err := start(ctx, o, slot, l)
	if err != nil {
		return nil, err
	}
	_, known, err := await(ctx, startTime, func() bool { return j.ranks() == o.hosts })
	if err == nil && !known {
		err = j.processes[0].Kill(fmt.Errorf("no verdict knows the %d ranks within %s, only %d", o.hosts, startTime, j.ranks()))
	}
	if err != nil {
		return nil, errors.Join(err, j.close(context.WithoutCancel(ctx)))
	}
	return j, nil
}
