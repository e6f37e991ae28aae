package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/utils/clock"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/experiments"
	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
	"evenkeel.dev/evenkeel/hack/bench/runner"
	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
)

// maxRounds bounds --rounds.
const maxRounds = 1000

// options are the values of the flags.
type options struct {
	quick, fresh            bool
	rounds                  int
	only                    string
	plugins                 []string // NAME=PATH
	against                 string
	library, driver, output string
	builtFrom               string
	congestion              string
	seed                    uint64
	wait                    time.Duration
}

func runCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use: "run EXPERIMENT...", Short: "Measure experiments, and write their pages", Args: someExperiments,
		Long: `Measure experiments, and write their pages.

In each round all contenders run one after the other, and each round begins with the next one. Before each run the machine
should be quiet: the program waits for that, and records it where the time was up. A run that was interrupted goes on where it
stopped when it is started again at the same commit on the same machine; cases of another commit are measured anew. A run that
failed is a result, too, and is not tried again. Most experiments make networks, which needs root. Where this machine lacks what
an experiment needs, such as a GPU, the error names it, and the exit status is 2.

Pages of quick runs and of comparisons with another commit go to dist/bench, others to docs/results.`,
		Example: `  go run ./hack/bench run all
  go run ./hack/bench run scale
  go run ./hack/bench run tcp --quick --only four-links
  go run ./hack/bench run tcp --plugin bagua=/opt/libnccl-net-bagua.so
  go run ./hack/bench run tcp --only 'ping-pong|one-connection' --rounds 10 --against main
  go run ./hack/bench run collectives --plugin "Gloo's benchmark=gloo/build/gloo/benchmark/benchmark"`,
		RunE: func(cmd *cobra.Command, names []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout(), names)
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&o.quick, "quick", false, "shorter runs, and fewer rounds")
	flags.IntVar(&o.rounds, "rounds", 0, "rounds of each case (default the experiment's)")
	flags.StringVar(&o.only, "only", "", "only cases whose names match this regular expression (go run ./hack/bench list)")
	flags.StringArrayVar(&o.plugins, "plugin", nil, "another plugin to compare with, or for collectives Gloo's benchmark program, NAME=PATH; may be repeated")
	flags.StringVar(&o.against, "against", "", "an earlier commit, whose plugin is built and runs in turns; the exit status is not zero if this checkout is worse in a case")
	flags.StringVar(&o.library, "library", "", "the plugin to measure (default: built from this checkout)")
	flags.StringVar(&o.driver, "driver", "", "the evenkeel-bench to measure it with (default: built from this checkout)")
	flags.StringVar(&o.builtFrom, "built-from", "", "the commit of --library and --driver, where this machine cannot build them (default this checkout's)")
	flags.StringVar(&o.output, "output", "", "folder for records and pages (default docs/results, or dist/bench)")
	flags.StringVar(&o.congestion, "congestion", "", "TCP congestion control (default the machine's for new namespaces)")
	flags.Uint64Var(&o.seed, "seed", 0, "what an experiment draws its faults from, if it draws any")
	flags.DurationVar(&o.wait, "wait", 5*time.Minute, "how long to wait for a quiet machine, in all")
	flags.BoolVar(&o.fresh, "fresh", false, "measure the selected cases anew, whatever is recorded of them")
	return cmd
}

// run measures experiments one after the other.
func (o options) run(ctx context.Context, out io.Writer, names []string) error {
	only, all, err := o.check(out, names)
	if err != nil {
		return err
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	switch {
	case o.output != "":
	case o.quick || o.against != "":
		o.output = filepath.Join(root, "dist", "bench")
	default:
		o.output = resultsFolder(root)
	}
	// First the others: with a target folder of cargo's that all checkouts share, the last build is the one that is there.
	plugins, earlier, err := o.others(ctx, root)
	if err != nil {
		return err
	}
	programs, err := o.programs(ctx, root)
	if err != nil {
		return err
	}
	driver, err := runner.Digest(programs.Driver)
	if err != nil {
		return err
	}
	commit := o.builtFrom
	if commit == "" {
		commit = toolbox.Commit(ctx, root, "plugin", "hack")
	}
	setting := experiment.Setting{
		Commit: commit, Machine: machine.Describe().String(), Driver: driver, Quick: o.quick,
		Congestion: o.congestion, Seed: o.seed,
	}
	_, every := expanded(names)
	var failures []error
	for _, e := range all {
		store, err := runner.OpenStore(record(o.output, e.Name))
		if err != nil {
			return err
		}
		r := runner.Runner{
			Experiment: e, Only: only, Fresh: o.fresh, Rounds: o.roundsOf(e), Programs: programs, Plugins: plugins[:len(plugins):len(plugins)], Setting: setting,
			Command: page.Command(os.Args[1:]), Wait: o.wait, Store: store, Out: out, Clock: clock.RealClock{}, Probe: runner.Busy,
			Measured: func() error {
				_, err := writePage(page.NewResults(e, store.Samples), o.output)
				return err
			},
		}
		against := ""
		if earlier.Library != "" {
			against = e.SubjectName() + " at " + earlier.Name
			r.Plugins = append(r.Plugins, runner.Plugin{Name: against, Library: earlier.Library})
		}
		measured := r.Run(ctx)
		if missing := experiment.MissingError(""); every && errors.As(measured, &missing) {
			fmt.Fprintln(out, "left out:", measured)
			continue
		}
		if measured != nil && len(store.Samples) == 0 {
			return measured
		}
		// What an interruption has left has a page, too.
		results, err := writePage(page.NewResults(e, store.Samples), o.output)
		if err := errors.Join(measured, err); err != nil {
			return err
		}
		fmt.Fprintln(out)
		if err := results.Text(out); err != nil {
			return err
		}
		fmt.Fprintf(out, "\n%s has all of it\n", filepath.Join(o.output, e.Name+".md"))
		if against != "" {
			failures = append(failures, compare(out, results, against))
		}
		if e.Checks {
			failures = append(failures, checked(e, store.Samples))
		}
	}
	return errors.Join(failures...)
}

// checked is an error if a run has failed.
func checked(e experiment.Experiment, samples []experiment.Sample) error {
	for _, s := range samples {
		if s.Failure != "" {
			return fmt.Errorf("%s, %s, %s, run %d failed: %s", e.Name, s.Case, s.Contender, s.Round+1, s.Failure)
		}
	}
	return nil
}

// compare prints how the subject compares with another contender. It is an error if it is worse in a case.
func compare(out io.Writer, results page.Results, name string) error {
	table := page.Table{Heading: []string{"case", "ratio to " + name, "it is"}}
	var worse []string
	for _, c := range results.Against(name) {
		table.Add(c.Case, c.Ratio.String(), string(c.Verdict))
		if c.Verdict == stats.Worse {
			worse = append(worse, c.Case)
		}
	}
	if err := table.Text(out); err != nil {
		return err
	}
	if len(worse) > 0 {
		return fmt.Errorf("worse than %s in %s", name, strings.Join(worse, ", "))
	}
	return nil
}

// check checks the flags before anything is built, and returns the experiments that are to be measured. Where all were
// asked for, those that cannot be measured with these flags are left out, each with a line.
func (o options) check(out io.Writer, names []string) (*regexp.Regexp, []experiment.Experiment, error) {
	only, err := regexp.Compile(o.only)
	if err != nil {
		return nil, nil, fmt.Errorf("--only: %w", err)
	}
	if o.rounds < 0 || o.rounds > maxRounds {
		return nil, nil, fmt.Errorf("--rounds %d: from 1 to %d", o.rounds, maxRounds)
	}
	if o.builtFrom != "" && (o.library == "" || o.driver == "") {
		return nil, nil, fmt.Errorf("--built-from %s: --library and --driver are needed too", o.builtFrom)
	}
	names, every := expanded(names)
	var all []experiment.Experiment
	for _, name := range names {
		e, err := experiments.Named(name)
		if err != nil {
			return nil, nil, err
		}
		networks, refusal := o.refusal(e, only)
		switch {
		case refusal != nil && every:
			fmt.Fprintln(out, "left out:", refusal)
			continue
		case refusal != nil:
			return nil, nil, refusal
		case networks && os.Geteuid() != 0:
			return nil, nil, fmt.Errorf("%s makes networks, which needs root", name)
		}
		all = append(all, e)
	}
	if len(all) == 0 {
		return nil, nil, errors.New("no experiment can be measured with these flags")
	}
	return only, all, nil
}

// refusal is why an experiment cannot be measured with these flags; nil if it can. Networks says whether its selected
// cases have any.
func (o options) refusal(e experiment.Experiment, only *regexp.Regexp) (networks bool, refusal error) {
	var cases []string
	selected, others := 0, !e.DriverOnly
	for _, c := range e.Cases(o.quick) {
		cases = append(cases, c.Name)
		if only.MatchString(c.Name) {
			selected++
			networks, others = networks || c.Network != nil, others || c.Others != nil
		}
	}
	switch {
	case selected == 0:
		return false, fmt.Errorf("--only %q matches no case of %s: it has %s", o.only, e.Name, strings.Join(cases, ", "))
	case o.seed != 0 && !e.Seeded:
		return false, fmt.Errorf("--seed %d: %s draws nothing from a seed", o.seed, e.Name)
	case o.against != "" && e.DriverOnly:
		return false, fmt.Errorf("--against %s: %s measures no plugin, and of a commit only the plugin is built", o.against, e.Name)
	case len(o.plugins) > 0 && !others:
		return false, fmt.Errorf("--plugin %s: the selected cases of %s measure no plugin", o.plugins[0], e.Name)
	}
	return networks, nil
}

func (o options) roundsOf(e experiment.Experiment) int {
	if o.quick {
		return cmp.Or(o.rounds, e.QuickRounds)
	}
	return cmp.Or(o.rounds, e.Rounds)
}

// programs builds this checkout's programs, except where flags give others.
func (o options) programs(ctx context.Context, root string) (experiment.Programs, error) {
	if o.library == "" || o.driver == "" {
		built, err := artifacts.Rust(ctx, root, os.Stderr, false)
		if err != nil {
			return experiment.Programs{}, err
		}
		o.library, o.driver = cmp.Or(o.library, filepath.Join(built, cargo.Library)), cmp.Or(o.driver, filepath.Join(built, "evenkeel-bench"))
	}
	library, err := filepath.Abs(o.library)
	if err != nil {
		return experiment.Programs{}, fmt.Errorf("--library: %w", err)
	}
	driver, err := filepath.Abs(o.driver)
	if err != nil {
		return experiment.Programs{}, fmt.Errorf("--driver: %w", err)
	}
	return experiment.Programs{Library: library, Driver: driver}, nil
}

// others are the other plugins that were given, and that of the earlier commit, if there is one.
func (o options) others(ctx context.Context, root string) (plugins []runner.Plugin, earlier runner.Plugin, err error) {
	for _, given := range o.plugins {
		name, path, ok := strings.Cut(given, "=")
		if !ok || name == "" || path == "" {
			return nil, earlier, fmt.Errorf("--plugin %q: NAME=PATH, such as bagua=/opt/libnccl-net-bagua.so", given)
		}
		if path, err = filepath.Abs(path); err != nil {
			return nil, earlier, fmt.Errorf("--plugin %s: %w", name, err)
		}
		if _, err := os.Stat(path); err != nil {
			return nil, earlier, fmt.Errorf("--plugin %s: %w", name, err)
		}
		plugins = append(plugins, runner.Plugin{Name: name, Library: path})
	}
	if o.against != "" {
		earlier, err = buildCommit(ctx, root, o.against)
	}
	return plugins, earlier, err
}
