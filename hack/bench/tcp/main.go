// Command tcp measures the plugin on networks of its own, against plain sockets and other plugins in the same run, and writes
// docs/results/tcp.md.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/options"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/resultcache"
	"evenkeel.dev/evenkeel/hack/bench/internal/sockets"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

const fullRounds, quickRounds = 10, 3

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench/tcp:", err)
		os.Exit(1)
	}
}

type config struct {
	options.Options
	plugins []string // NAME=PATH
}

func rootCommand() *cobra.Command {
	var o config
	cmd := &cobra.Command{
		Use:   "tcp",
		Short: "Measure the plugin against plain sockets and other plugins, and write docs/results/tcp.md",
		Long: `Measure the plugin against plain sockets and other plugins, and write docs/results/tcp.md.

Each case has a network of its own (see "go run ./hack/lab/net --help"). In each of several rounds all
contenders run one after the other: plain sockets, the plugin, the plugin in its static mode, and other
plugins that are given. Needs root, and a machine that does nothing else.

Results are kept in the cache: with --only, the page has the other cases as they were last measured on
this machine, each with its commit and day.`,
		Example: `  go run ./hack/bench/tcp
  go run ./hack/bench/tcp --quick --only four-links
  go run ./hack/bench/tcp --plugin bagua=/opt/libnccl-net-bagua.so`,
		Args:         cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE:              func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), cmd.OutOrStdout(), o) },
	}
	o.AddFlags(cmd.Flags(), "tcp.md", fullRounds, quickRounds, caseNames())
	cmd.Flags().StringArrayVar(&o.plugins, "plugin", nil, "another plugin to compare with, NAME=PATH; may be repeated")
	cmd.AddCommand(encryptionCommand())
	cmd.AddCommand(sockets.Commands()...)
	return cmd
}

func run(ctx context.Context, out io.Writer, o config) error {
	only, err := o.Check(fullRounds, quickRounds)
	if err != nil {
		return err
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if o.Output == "" {
		o.Output = filepath.Join(root, "docs", "results")
	}
	// First of all, as it fails where the other pages have another form.
	costs, err := idleCosts(filepath.Join(root, "docs", "results"))
	if err != nil {
		return err
	}
	// Before the build, which raises the load.
	host, source := machine.Describe(), page.NewSource(ctx, root, "plugin", "hack")
	if err := o.BuildMissing(ctx, root, false); err != nil {
		return err
	}
	b, err := newBench(o, out)
	if err != nil {
		return err
	}
	results, err := openCache(host, o.Quick)
	if err != nil {
		return err
	}
	measured := 0
	for _, c := range cases(o.Quick) {
		if !only.MatchString(c.name) {
			continue
		}
		result, err := b.measure(ctx, c)
		if err != nil {
			return err
		}
		result.Source, result.Machine, result.Rounds = source, host, o.Rounds
		if err := results.Add(result); err != nil {
			return err
		}
		measured++
	}
	if measured == 0 {
		return fmt.Errorf("--only %q matches none of the cases: %s", o.Only, strings.Join(caseNames(), ", "))
	}
	var sources []page.Source
	for _, r := range results.Results {
		sources = append(sources, r.Source)
	}
	outdated := page.Outdated(ctx, root, sources, "plugin/crates")
	return report{machine: host, quick: o.Quick, outdated: outdated, notes: b.notes, costs: costs, cases: results.Results}.write(out, o.Output)
}

// openCache opens the cached results of the cases.
func openCache(host machine.Machine, quick bool) (*resultcache.Cache[caseResult], error) {
	name := func(r caseResult) string { return r.Name }
	return resultcache.Open("tcp", quick, caseNames(), name, func(r *caseResult) bool {
		known := slices.IndexFunc(cases(quick), func(c benchCase) bool { return c.name == r.Name })
		if known < 0 || !r.Machine.Comparable(host) || r.Source.Commit == "" {
			return false
		}
		r.testCase = cases(quick)[known]
		if r.Load != r.testCase.String() {
			return false // another load under the same name
		}
		r.testCase.lab = r.Lab
		return true
	})
}
