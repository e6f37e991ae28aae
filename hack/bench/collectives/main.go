// Command collectives measures Evenkeel's all-reduce against Gloo's, on this machine, in turn, and writes
// docs/results/collectives.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const fullRounds, quickRounds = 5, 2

// elementCounts are the sizes of the sweep.
var elementCounts = []int{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000}

// algorithms are those of Gloo; Evenkeel is compared with the best of them at each size.
var algorithms = []string{"ring", "ring_chunked", "halving_doubling", "bcube", "new_ring", "new_bcube"}

// processCounts are the numbers of processes on one machine.
var processCounts = []int{2, 4}

// The measurement between hosts: their number, and the rate of each host's link.
const (
	hosts        = 4
	linkRate     = netns.Gbit
	starElements = 5_000_000
	starLength   = time.Second
)

// threads is the number of ranks as threads of one process.
const threads = 64

func main() {
	// Children are killed when the thread that started them exits; with the lock that is the main thread.
	runtime.LockOSThread()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench/collectives:", err)
		os.Exit(1)
	}
}

type options struct {
	quick        bool
	rounds       int
	output, gloo string
}

func rootCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "collectives",
		Short: "Measure the collectives against Gloo, and write docs/results/collectives.md",
		Long: `Measure the collectives against Gloo, and write docs/results/collectives.md.

In each round all contenders run once, one after the other: Evenkeel over TCP and over shared memory, and Gloo
over TCP with each of its algorithms, in its default blocking mode. Installs Debian's libgloo-dev and g++.
Needs root for the network of several hosts, and a machine that does nothing else.`,
		Example: `  go run ./hack/bench/collectives
  go run ./hack/bench/collectives --quick
  go run ./hack/bench/collectives --gloo ~/gloo/build/gloo/benchmark/benchmark`,
		Args:         cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE:              func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), cmd.OutOrStdout(), o) },
	}
	cmd.Flags().BoolVar(&o.quick, "quick", false, fmt.Sprintf("%d rounds, and few sizes; the page is printed, and written only with --output", quickRounds))
	cmd.Flags().IntVar(&o.rounds, "rounds", 0, fmt.Sprintf("rounds, in each of which every contender runs once (default %d)", fullRounds))
	cmd.Flags().StringVar(&o.output, "output", "", "folder for collectives.md and its drawings (default docs/results)")
	cmd.Flags().StringVar(&o.gloo, "gloo", "", "Gloo's benchmark program, built elsewhere, to measure instead of Debian's libgloo")
	return cmd
}

func run(ctx context.Context, out io.Writer, o options) error {
	r := results{Rounds: fullRounds, Length: 100 * time.Millisecond, StarLength: starLength, Elements: elementCounts, Quick: o.quick}
	if o.quick {
		r.Rounds, r.Length, r.StarLength = quickRounds, 30*time.Millisecond, 300*time.Millisecond
		r.Elements = []int{1, 100, 1000, 10_000, 100_000, 1_000_000, 5_000_000}
	}
	if o.rounds < 0 {
		return fmt.Errorf("--rounds %d: 1 or more", o.rounds)
	} else if o.rounds > 0 {
		r.Rounds = o.rounds
	}
	if os.Geteuid() != 0 {
		return errors.New("making the network of several hosts needs root")
	}
	library, err := whichGloo(o.gloo)
	if err != nil {
		return err
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if o.output == "" && !o.quick {
		o.output = filepath.Join(root, "docs", "results")
	}
	if o.output != "" {
		if o.output, err = filepath.Abs(o.output); err != nil {
			return err
		}
	}
	// Before the build, which raises the load.
	r.Machine, r.Source = machine.Describe(), page.NewSource(ctx, root, "plugin", "hack")
	folder, err := os.MkdirTemp("", "evenkeel-gloo-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	if err := library.prepare(ctx, root, folder); err != nil {
		return err
	}
	r.Gloo = library.label
	paths, err := cargo.Release(ctx, root, []string{"evenkeel-bench"}, []string{"evenkeel-bench"})
	if err != nil {
		return err
	}
	if err := r.measure(ctx, library, paths[0], folder, o.output); err != nil {
		return err
	}
	if o.output == "" {
		_, err = out.Write(r.markdown())
	}
	return err
}

// measure measures all cases. It writes the page after each of them, so that an interrupted run keeps its results.
func (r *results) measure(ctx context.Context, library library, bench, folder, output string) error {
	overTCP := []contender{{tcp, evenkeel(bench, folder, "tcp"), 1}}
	for _, algorithm := range library.algorithms {
		overTCP = append(overTCP, contender{gloo(algorithm), library.runs(folder, algorithm), glooTries})
	}
	local := append([]contender{{shm, evenkeel(bench, folder, "shm"), 1}}, overTCP...)
	var cases []func() error
	for _, n := range processCounts {
		m := &measured{ranks: n}
		r.Local = append(r.Local, m)
		cases = append(cases, func() error { return m.measure(ctx, local, r.Rounds, task{m.ranks, r.Length, r.Elements, loopback}) })
	}
	cases = append(cases,
		func() error {
			single := contender{oneFlow, evenkeel(bench, folder, "tcp", "EVENKEEL_FLOWS=1"), 1}
			return measureStar(ctx, &r.Star, append([]contender{single}, overTCP...), r.Rounds, r.StarLength)
		},
		func() error { return r.Threads.measure(ctx, bench, r.Rounds, r.Length) },
	)
	start := time.Now()
	for _, measure := range cases {
		err := measure()
		r.Took = time.Since(start)
		if err := errors.Join(err, r.write(output)); err != nil {
			return err
		}
	}
	return nil
}
