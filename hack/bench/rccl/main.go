// Command rccl measures all-reduces of RCCL, a real collective library, over the plugin and over RCCL's own sockets in the same run, and
// writes docs/results/rccl.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
	"evenkeel.dev/evenkeel/hack/lab/rccl"
)

const (
	maxRounds = 100
	// allReduceBytes is the size of an all-reduce.
	allReduceBytes = 32 << 20
	// runTimeout is how long one contender may take in one round.
	runTimeout = 2 * time.Minute
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench/rccl:", err)
		os.Exit(1)
	}
}

type options struct {
	rounds                int
	library, output, only string
}

func rootCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "rccl",
		Short: "Measure RCCL over the plugin against RCCL over its own sockets, and write docs/results/rccl.md",
		Long: `Measure RCCL over the plugin against RCCL over its own sockets, and write docs/results/rccl.md.

RCCL is real, and the GPUs are not: see hack/lab/rccl. Two hosts of one rank each are joined by a network of its
own for each case. In each round all contenders run one after the other. Needs root, and a machine that does
nothing else.`,
		Example: `  go run ./hack/bench/rccl
  go run ./hack/bench/rccl --rounds 3 --only direct --output /tmp/rccl.md`,
		Args:         cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.rounds < 1 || o.rounds > maxRounds {
				return fmt.Errorf("--rounds %d: from 1 to %d", o.rounds, maxRounds)
			}
			if o.only != "" && !slices.Contains(names(), o.only) {
				return fmt.Errorf("--only %s: one of %s", o.only, strings.Join(names(), ", "))
			}
			if o.only != "" && o.output == "" {
				return errors.New("--only needs --output, so that the page keeps its other cases")
			}
			if os.Geteuid() != 0 {
				return errors.New("making networks needs root")
			}
			return run(cmd.Context(), cmd.OutOrStdout(), o)
		},
	}
	cmd.Flags().StringVar(&o.only, "only", "", "only this case: "+strings.Join(names(), ", "))
	cmd.Flags().IntVar(&o.rounds, "rounds", 5, "rounds of each case")
	cmd.Flags().StringVar(&o.library, "library", "", "the plugin to measure (default: built from this checkout)")
	cmd.Flags().StringVar(&o.output, "output", "", "the page to write (default docs/results/rccl.md)")
	return cmd
}

// A benchCase is a network.
type benchCase struct {
	name, title string
	links       []netns.Link
	// perRound is how many all-reduces a round has, besides the first one, which connects. They take a second or more.
	perRound int
}

var cases = []benchCase{
	{"four-links", "4 links of 500 Mbit/s, chosen by a hash of addresses and ports", netns.Links(500*netns.Mbit, 500*netns.Mbit, 500*netns.Mbit, 500*netns.Mbit), 5},
	{"slow-link", "the same, one link at 100 Mbit/s", netns.Links(500*netns.Mbit, 500*netns.Mbit, 500*netns.Mbit, 100*netns.Mbit), 5},
	{"direct", "hosts joined directly, unshaped", nil, 40},
}

func names() []string {
	var names []string
	for _, c := range cases {
		names = append(names, c.name)
	}
	return names
}

// A contender is a network of RCCL.
type contender struct {
	name    string
	sockets bool
	env     []string
}

var contenders = []contender{
	{"RCCL's sockets", true, nil},
	{"RCCL's sockets, 16 for each connection", true, []string{"NCCL_SOCKET_NTHREADS=4", "NCCL_NSOCKS_PERTHREAD=4"}},
	{"Evenkeel", false, nil},
}

// A result has the rates of a contender in a case, in GB/s, one for each round.
type result [][][]float64

func run(ctx context.Context, out io.Writer, o options) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if o.output == "" {
		o.output = filepath.Join(root, "docs", "results", "rccl.md")
	}
	// Before the build, which raises the load.
	host, source := machine.Describe(), page.NewSource(ctx, root, "plugin", "hack")
	if o.library == "" {
		built, err := artifacts.Rust(ctx, root, os.Stderr, false)
		if err != nil {
			return err
		}
		o.library = filepath.Join(built, cargo.Library)
	}
	if o.library, err = filepath.Abs(o.library); err != nil {
		return err
	}
	lab, err := rccl.New(ctx, os.Stderr)
	if err != nil {
		return err
	}
	defer lab.Close() //nolint:errcheck // a temporary folder
	if err := lab.Use(o.library); err != nil {
		return err
	}
	chosen := cases
	if o.only != "" {
		chosen = slices.DeleteFunc(slices.Clone(cases), func(c benchCase) bool { return c.name != o.only })
	}
	var rates result
	for i, c := range chosen {
		rates = append(rates, make([][]float64, len(contenders)))
		for round := range o.rounds {
			for k, of := range contenders {
				rate, err := measure(ctx, lab, c, of)
				if err != nil {
					return fmt.Errorf("%s: %s: %w", c.title, of.name, err)
				}
				rates[i][k] = append(rates[i][k], rate)
				fmt.Fprintf(out, "%s, round %d: %s: %.3f GB/s\n", c.title, round+1, of.name, rate)
			}
		}
	}
	text := markdown(chosen, rates, o.rounds, source, host)
	if err := os.WriteFile(o.output, text, 0o644); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s\nwritten: %s\n", text, o.output)
	return err
}

// measure is one round of one contender: the median rate of its all-reduces, in GB/s. Network and processes are new, so that
// connections have new ports and take other links.
func measure(ctx context.Context, lab *rccl.Lab, c benchCase, of contender) (_ float64, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, runTimeout, fmt.Errorf("not done within %s", runTimeout))
	defer cancel()
	network, err := netns.Up(ctx, netns.Config{Name: "bench-rccl", Links: c.links})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, network.Down(context.WithoutCancel(ctx))) }()
	group, err := lab.Start(ctx, rccl.Config{
		Ranks: 2, Sockets: of.sockets, Env: append(slices.Clone(of.env), "NCCL_SOCKET_IFNAME=eth0"),
		Command: func(ctx context.Context, host int, argv ...string) (*exec.Cmd, error) {
			return network.Command(ctx, []netns.Host{netns.H1, netns.H2}[host], argv...)
		},
	})
	if err != nil {
		return 0, err
	}
	defer group.Kill()
	communicator, err := group.Init(ctx, func(rank int) int { return rank })
	if err != nil {
		return 0, err
	}
	seconds, err := group.AllReduce(ctx, communicator, allReduceBytes, c.perRound)
	if err != nil {
		return 0, err
	}
	if _, err := group.All(ctx, fmt.Sprintf("destroy %d", communicator)); err != nil {
		return 0, err
	}
	return allReduceBytes / stats.Median(seconds) / 1e9, group.End()
}
