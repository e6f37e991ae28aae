// Command scale measures what thousands of connections cost while they carry nothing, against as many plain sockets, and writes
// docs/results/scale.md.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
)

const (
	maxRounds = 100
	// runTimeout is how long one contender may take in one round.
	runTimeout = 3 * time.Minute
	// exitGrace is how long a run that is ended may take to end its ranks.
	exitGrace = 5 * time.Second
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench/scale:", err)
		os.Exit(1)
	}
}

type options struct {
	rounds                  int
	library, driver, output string
}

func rootCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "scale",
		Short: "Measure what thousands of idle connections cost, and write docs/results/scale.md",
		Long: `Measure what thousands of idle connections cost, and write docs/results/scale.md.

Two processes open connections to each other over the loopback interface, send one message of 1 KiB over
each, wait, and close them ("evenkeel-bench scale --help"). In each round all contenders run one after the
other: the plugin, the plugin with one flow, and plain sockets. Needs 20,000 descriptors for a process
(ulimit -Hn), and a machine that does nothing else.`,
		Example: `  go run ./hack/bench/scale
  go run ./hack/bench/scale --rounds 1 --output /tmp/scale.md`,
		Args:         cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.rounds < 1 || o.rounds > maxRounds {
				return fmt.Errorf("--rounds %d: from 1 to %d", o.rounds, maxRounds)
			}
			return run(cmd.Context(), cmd.OutOrStdout(), o)
		},
	}
	flags := cmd.Flags()
	flags.IntVar(&o.rounds, "rounds", 5, "rounds of each case")
	flags.StringVar(&o.library, "library", "", "the plugin to measure (default: built from this checkout)")
	flags.StringVar(&o.driver, "driver", "", "the evenkeel-bench to measure it with (default: built from this checkout)")
	flags.StringVar(&o.output, "output", "", "the page to write (default docs/results/scale.md)")
	return cmd
}

func run(ctx context.Context, out io.Writer, o options) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if o.output == "" {
		o.output = filepath.Join(root, "docs", "results", "scale.md")
	}
	// Before the build, which raises the load.
	r := report{machine: machine.Describe(), source: page.NewSource(ctx, root, "plugin", "hack/bench/scale"), rounds: o.rounds}
	if o.library == "" || o.driver == "" {
		built, err := artifacts.Rust(ctx, root, os.Stderr, false)
		if err != nil {
			return err
		}
		o.library, o.driver = filepath.Join(built, cargo.Library), filepath.Join(built, "evenkeel-bench")
	}
	for _, c := range cases {
		r.cases = append(r.cases, caseResult{of: c})
	}
	for round := range o.rounds {
		for i, c := range cases {
			got, err := c.run(ctx, o)
			if err != nil {
				return fmt.Errorf("%s: %w", c, err)
			}
			r.cases[i].runs = append(r.cases[i].runs, got)
			fmt.Fprintf(out, "  %2d of %d  %-50s open %.2f s, close %.2f s, %.1f descriptors, %.0f KiB, idle %.2f %%\n", round+1, o.rounds, c,
				got.Listen+got.Open, got.Close, got.Descriptors, got.Memory, got.Idle)
		}
	}
	return page.Write(filepath.Dir(o.output), map[string][]byte{filepath.Base(o.output): r.markdown()})
}

// A benchCase is a number of connections of one kind.
type benchCase struct {
	pairs        int // between two processes
	processes    int // pairs of processes that do so at the same time
	plainSockets int // for each connection, in place of the plugin
	flows        int // of the plugin for each connection; default its own
}

func (c benchCase) String() string {
	kind := "Evenkeel"
	switch {
	case c.plainSockets == 1:
		kind = "1 plain socket"
	case c.plainSockets > 0:
		kind = fmt.Sprintf("%d plain sockets", c.plainSockets)
	case c.flows == 1:
		kind = "Evenkeel, 1 flow"
	case c.flows > 1:
		kind = fmt.Sprintf("Evenkeel, %d flows", c.flows)
	}
	if c.processes > 1 {
		return fmt.Sprintf("%s, %d times %d pairs", kind, c.processes, c.pairs)
	}
	return fmt.Sprintf("%s, %d pairs", kind, c.pairs)
}

// An outcome is what "evenkeel-bench scale --json" prints. Of several pairs of processes it is the slowest and the most expensive.
type outcome struct {
	Listen      float64 `json:"listen_s"`
	Open        float64 `json:"open_s"`
	Close       float64 `json:"close_s"`
	Descriptors float64 // of a pair
	Memory      float64 `json:"memory_kib"` // of a pair
	Idle        float64 `json:"idle_percent"`
	Wakeups     float64 `json:"wakeups_per_s"`
}

func (c benchCase) run(ctx context.Context, o options) (outcome, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, runTimeout, fmt.Errorf("not done within %s", runTimeout))
	defer cancel()
	type result struct {
		outcome
		err error
	}
	results := make(chan result)
	processes := max(c.processes, 1)
	for range processes {
		go func() {
			got, err := c.runOnce(ctx, o)
			results <- result{got, err}
		}()
	}
	var worst outcome
	var failures []error
	for range processes {
		got := <-results
		failures = append(failures, got.err)
		worst = outcome{
			max(worst.Listen, got.Listen), max(worst.Open, got.Open), max(worst.Close, got.Close),
			max(worst.Descriptors, got.Descriptors), max(worst.Memory, got.Memory), worst.Idle + got.Idle, worst.Wakeups + got.Wakeups,
		}
	}
	return worst, errors.Join(failures...)
}

// runOnce runs one pair of processes.
func (c benchCase) runOnce(ctx context.Context, o options) (outcome, error) {
	arguments := []string{"scale", "--json", "--idle", strconv.Itoa(idleSeconds), "--connections", strconv.Itoa(c.pairs)}
	if c.plainSockets > 0 {
		arguments = append(arguments, "--plain-sockets", strconv.Itoa(c.plainSockets))
	} else {
		arguments = append(arguments, "--plugin", o.library)
	}
	cmd := exec.CommandContext(ctx, o.driver, arguments...)
	cmd.Env = append(os.Environ(), "NCCL_SOCKET_IFNAME=lo")
	if c.flows > 0 {
		cmd.Env = append(cmd.Env, "EVENKEEL_FLOWS="+strconv.Itoa(c.flows))
	}
	// The driver ends its ranks when it is asked to.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = exitGrace
	text, err := cmd.Output()
	if cause := context.Cause(ctx); cause != nil {
		return outcome{}, cause
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return outcome{}, fmt.Errorf("evenkeel-bench: %w: %s", err, exit.Stderr)
	} else if err != nil {
		return outcome{}, fmt.Errorf("evenkeel-bench: %w", err)
	}
	var got outcome
	if err := json.Unmarshal(text, &got); err != nil {
		return outcome{}, fmt.Errorf("unexpected report of evenkeel-bench: %q", text)
	}
	return got, nil
}
