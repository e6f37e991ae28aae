// Command bench measures the plugin on networks of its own, beside plain
// sockets and other plugins in the same run, and writes docs/results/tcp.md; or
// reduction servers beside a ring, and writes docs/results/reduction.md.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/sockets"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

const (
	fullRuns, quickRuns = 10, 3
	mostRuns            = 1000
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

type options struct {
	quick      bool
	runs       int
	only       string
	library    string
	driver     string
	plugins    []string
	congestion string
	output     string
}

func rootCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure the plugin beside plain sockets and other plugins, and write the result",
		Long: `Measure the plugin beside plain sockets and other plugins, and write the result.

Every case has a network of its own (see "go run ./hack/lab/net --help"). In each of several rounds all
contenders run one after the other: plain sockets, the plugin, the plugin made to deal chunks in turn,
and other plugins that are given. Needs root, and a machine that does nothing else.

Results are kept in the cache: with --only, the page has the other cases as they were last measured on
this machine, each with its commit.`,
		Example: `  go run ./hack/bench/tcp
  go run ./hack/bench/tcp --quick --only four-links
  go run ./hack/bench/tcp --plugin bagua=/opt/libnccl-net-bagua.so`,
		Args:         cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE:              func(cmd *cobra.Command, _ []string) error { return bench(cmd.Context(), cmd.OutOrStdout(), o) },
	}
	cmd.Flags().BoolVar(&o.quick, "quick", false, fmt.Sprintf("shorter runs, and %d of them", quickRuns))
	cmd.Flags().IntVar(&o.runs, "runs", 0, fmt.Sprintf("rounds of each case (default %d)", fullRuns))
	cmd.Flags().StringVar(&o.only, "only", "", "only cases that this regular expression matches: "+strings.Join(caseNames(), ", "))
	cmd.Flags().StringVar(&o.library, "library", "", "the plugin to measure (default: built from this checkout)")
	cmd.Flags().StringVar(&o.driver, "driver", "", "the evenkeel-bench to measure it with (default: built from this checkout)")
	cmd.Flags().StringArrayVar(&o.plugins, "plugin", nil, "another plugin to compare with, NAME=PATH; may be given again")
	cmd.Flags().StringVar(&o.congestion, "congestion", "", "TCP congestion control (default the machine's for new namespaces)")
	cmd.Flags().StringVar(&o.output, "output", "", "folder for tcp.md and its plots (default docs/results)")
	cmd.AddCommand(reductionCommand(),
		rawCommand("raw-receive", sockets.Receive), rawCommand("raw-send", sockets.Send),
		rawCommand("raw-hub", sockets.Hub), rawCommand("raw-spoke", sockets.Spoke))
	return cmd
}

// rawCommand is one side of plain sockets, in a process of its own.
func rawCommand(name string, run func(sockets.Options, io.Writer) error) *cobra.Command {
	return &cobra.Command{
		Use: name + " OPTIONS", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var o sockets.Options
			if err := json.Unmarshal([]byte(args[0]), &o); err != nil {
				return err
			}
			return run(o, cmd.OutOrStdout())
		},
	}
}

func bench(ctx context.Context, out io.Writer, o options) error {
	only, err := regexp.Compile(o.only)
	if err != nil {
		return fmt.Errorf("--only: %w", err)
	}
	switch {
	case o.runs < 0 || o.runs > mostRuns:
		return fmt.Errorf("--runs %d: from 1 to %d", o.runs, mostRuns)
	case o.runs == 0 && o.quick:
		o.runs = quickRuns
	case o.runs == 0:
		o.runs = fullRuns
	}
	if os.Geteuid() != 0 {
		return errors.New("making networks needs root")
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if o.output == "" {
		o.output = filepath.Join(root, "docs", "results")
	}
	// Before the build, which is what would make the machine look busy.
	machine, commit := describeMachine(), toolbox.Commit(ctx, root, "plugin", "hack")
	if err := o.buildMissing(ctx, root); err != nil {
		return err
	}
	b, err := newBencher(o, out)
	if err != nil {
		return err
	}
	results, err := readEarlierTCP(machine, o)
	if err != nil {
		return err
	}
	measured := 0
	for _, c := range cases(o.quick) {
		if !only.MatchString(c.name) {
			continue
		}
		result, err := b.measure(ctx, c)
		if err != nil {
			return err
		}
		result.Commit, result.Machine, result.Runs = commit, machine, o.runs
		if err := results.add(result); err != nil {
			return err
		}
		measured++
	}
	if measured == 0 {
		return fmt.Errorf("--only %q matches none of the cases: %s", o.only, strings.Join(caseNames(), ", "))
	}
	return report{Machine: machine, Quick: o.quick, Notes: b.notes, Cases: results.cases}.write(out, o.output)
}
