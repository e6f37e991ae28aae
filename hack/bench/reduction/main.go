// Command reduction measures reduction servers against a ring, over the same plugin and links, and writes
// docs/results/reduction.md.
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
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/options"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/resultcache"
	"evenkeel.dev/evenkeel/hack/bench/internal/sockets"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

const fullRounds, quickRounds = 5, 2

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench/reduction:", err)
		os.Exit(1)
	}
}

func rootCommand() *cobra.Command {
	var o options.Options
	cmd := &cobra.Command{
		Use:   "reduction",
		Short: "Measure reduction servers against a ring, and write docs/results/reduction.md",
		Long: `Measure reduction servers against a ring over the same plugin and links, and write docs/results/reduction.md.

Clients and servers are hosts around a switch, each with a link of its own. In each of several rounds
all contenders run one after the other. Needs root, and a machine that does nothing else, for about 10 minutes.

With --quick the page is printed, and written only with --output. Results are kept in the cache: with --only,
the page has the other cases as they were last measured on this machine, each with its commit and day.`,
		Example: `  go run ./hack/bench/reduction
  go run ./hack/bench/reduction --only small
  go run ./hack/bench/reduction --quick --only '2\+2'`,
		Args:         cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE:              func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), cmd.OutOrStdout(), o) },
	}
	o.AddFlags(cmd.Flags(), "reduction.md", fullRounds, quickRounds, caseNames())
	cmd.AddCommand(enterCommand())
	cmd.AddCommand(sockets.Commands()...)
	return cmd
}

// A caseResult is one measured case; it has the one field of its kind.
type caseResult struct {
	Name    string
	Source  page.Source
	Machine machine.Machine
	Rounds  int
	Star    *starResult
	Small   []smallRound
	Memory  *memoryResult
	Kernels []kernelRow
}

// A bench measures reduction servers.
type bench struct {
	options options.Options
	out     io.Writer
	root    string
	folder  string // for the file of hosts and for drawings
}

func run(ctx context.Context, out io.Writer, o options.Options) error {
	only, err := o.Check(fullRounds, quickRounds)
	if err != nil {
		return err
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	// Before the build, which raises the load.
	host, source := machine.Describe(), page.NewSource(ctx, root, "plugin", "hack")
	if err := o.BuildMissing(ctx, root, false); err != nil {
		return err
	}
	folder, err := os.MkdirTemp("", "evenkeel-reduction-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	results, err := openCache(host, o.Quick)
	if err != nil {
		return err
	}
	b := bench{options: o, out: out, root: root, folder: folder}
	measured, start := 0, time.Now()
	for _, m := range b.measurements() {
		if !only.MatchString(m.name) {
			continue
		}
		result := caseResult{Name: m.name, Source: source, Machine: host, Rounds: o.Rounds}
		if err := m.measure(ctx, &result); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		if err := results.Add(result); err != nil {
			return err
		}
		measured++
		fmt.Fprintf(out, "  %s since the start\n", time.Since(start).Round(time.Second))
	}
	if measured == 0 {
		return fmt.Errorf("--only %q matches none of the cases: %s", o.Only, strings.Join(caseNames(), ", "))
	}
	var sources []page.Source
	for _, r := range results.Results {
		sources = append(sources, r.Source)
	}
	outdated := page.Outdated(ctx, root, sources, "plugin/crates")
	report := report{machine: host, quick: o.Quick, outdated: outdated, results: results.Results}
	if o.Output == "" && o.Quick {
		_, err := out.Write(report.markdown())
		return err
	}
	if o.Output == "" {
		o.Output = filepath.Join(root, "docs", "results")
	}
	return report.write(out, o.Output)
}

// A measurement measures one case.
type measurement struct {
	name    string
	measure func(context.Context, *caseResult) error
}

func (b bench) measurements() []measurement {
	var all []measurement
	for _, c := range starCases() {
		all = append(all, measurement{c.Name, func(ctx context.Context, result *caseResult) error {
			star, err := b.star(ctx, c)
			result.Star = &star
			return err
		}})
	}
	return append(all, measurement{"small", b.small}, measurement{"memory", b.memory}, measurement{"kernels", b.kernels})
}

// openCache opens the cached results of the cases.
func openCache(host machine.Machine, quick bool) (*resultcache.Cache[caseResult], error) {
	name := func(r caseResult) string { return r.Name }
	return resultcache.Open("reduction", quick, caseNames(), name, func(r *caseResult) bool {
		if !r.Machine.Comparable(host) || !slices.Contains(caseNames(), r.Name) || r.Source.Commit == "" {
			return false
		}
		for _, c := range starCases() {
			if c.Name == r.Name && r.Star != nil {
				r.Star.Case = c
			}
		}
		return true
	})
}
