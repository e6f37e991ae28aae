// Command check runs the project's tests, stage by stage, and counts passed, failed and skipped tests.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "check:", err)
		os.Exit(1)
	}
}

func rootCommand() *cobra.Command {
	usual := names(stages)
	all := slices.Concat(usual, names(extra))
	return &cobra.Command{
		Use:   "check [STAGE...]",
		Short: "Run the tests, and count passed, failed and skipped ones",
		Long:  "Runs the stages given (" + strings.Join(all, ", ") + "), or without any: " + strings.Join(usual, ", ") + ".",
		Example: `  go run ./hack/ci/check
  go run ./hack/ci/check unit plugin`,
		ValidArgs:    all,
		Args:         cobra.OnlyValidArgs,
		SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error { return run(cmd.Context(), args) },
	}
}

func names(list []stage) []string {
	var all []string
	for _, s := range list {
		all = append(all, s.name)
	}
	return all
}

// run runs the chosen stages, even after one has failed, and prints one line for each and a total.
func run(ctx context.Context, chosen []string) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	wanted := stages
	if len(chosen) > 0 {
		wanted = slices.DeleteFunc(slices.Concat(stages, extra), func(s stage) bool { return !slices.Contains(chosen, s.name) })
	}
	if os.Geteuid() != 0 && slices.ContainsFunc(wanted, func(s stage) bool {
		return slices.Contains([]string{"rccl", "e2e", "kueue", "kinds", "walk", "aarch64"}, s.name)
	}) {
		return errors.New("the stages rccl, e2e, kueue, kinds, walk and aarch64 create namespaces or change roots: run them as root, or choose other stages (see --help)")
	}
	var all counts
	var summary []string
	for _, s := range wanted {
		fmt.Printf("\n==> %s: %s\n", s.name, s.about)
		started := time.Now()
		n, err := s.run(ctx, root)
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", s.name, err)
			n.failed = max(n.failed, 1)
		}
		all.add(n)
		summary = append(summary, fmt.Sprintf("%-10s %4d passed, %d failed, %d skipped  %6s", s.name, n.passed, n.failed, n.skipped, time.Since(started).Round(time.Second)))
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
	}
	fmt.Printf("\n%s\n\n%d passed, %d failed, %d skipped\n", strings.Join(summary, "\n"), all.passed, all.failed, all.skipped)
	if all.failed > 0 {
		return fmt.Errorf("%d failed", all.failed)
	}
	return nil
}
