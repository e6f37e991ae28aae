// Command collectives measures Evenkeel's all-reduce against Gloo's, on this machine, in turn, and writes
// docs/results/collectives.md, and with TLS docs/results/collectives-tls.md.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

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

func rootCommand() *cobra.Command {
	var o options
	var program string
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
		RunE:              func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), cmd.OutOrStdout(), o, program) },
	}
	o.addFlags(cmd.Flags(), "collectives.md and its drawings")
	cmd.Flags().StringVar(&program, "gloo", "", "Gloo's benchmark program, built elsewhere, to measure instead of Debian's libgloo")
	cmd.AddCommand(tlsCommand())
	return cmd
}

func run(ctx context.Context, out io.Writer, o options, program string) error {
	library, err := whichGloo(program)
	if err != nil {
		return err
	}
	var r results
	w, err := o.prepare(ctx, &r.setting, library.prepare)
	if err != nil {
		return err
	}
	defer os.RemoveAll(w.folder)
	r.Gloo, r.Elements = library.label, elementCounts
	if o.quick {
		r.Elements = []int{1, 100, 1000, 10_000, 100_000, 1_000_000, 5_000_000}
	}
	if err := r.measure(ctx, library, w); err != nil {
		return err
	}
	if w.output == "" {
		_, err = out.Write(r.markdown())
	}
	return err
}

// measure measures all cases.
func (r *results) measure(ctx context.Context, library library, w workplace) error {
	overTCP := []contender{{name: tcp, run: evenkeel(w.bench, w.folder, []string{"tcp"})}}
	for _, algorithm := range library.algorithms {
		overTCP = append(overTCP, contender{name: gloo(algorithm), run: library.runs(w.folder, algorithm), tries: glooTries})
	}
	local := append([]contender{{name: shm, run: evenkeel(w.bench, w.folder, []string{"shm"})}}, overTCP...)
	var cases []func() error
	for _, n := range processCounts {
		m := &measured{ranks: n}
		r.Local = append(r.Local, m)
		cases = append(cases, func() error { return m.measure(ctx, local, r.Rounds, task{m.ranks, r.Length, r.Elements, loopback}) })
	}
	cases = append(cases,
		func() error {
			single := contender{name: oneFlow, run: evenkeel(w.bench, w.folder, []string{"tcp"}, "EVENKEEL_FLOWS=1")}
			return measureStar(ctx, &r.Star, append([]contender{single}, overTCP...), r.Rounds, r.StarLength)
		},
		func() error { return r.Threads.measure(ctx, w.bench, r.Rounds, r.Length) },
	)
	return r.run(cases, func() error { return r.write(w.output) })
}
