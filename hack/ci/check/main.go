// Command check runs the project's tests, stage by stage and several at a time, and counts passed, failed and skipped
// tests.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/ci/lint"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second interrupt ends this program at once
	err := setEnvironment()
	if err == nil {
		err = rootCommand().ExecuteContext(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "check:", err)
		os.Exit(1)
	}
}

// setEnvironment gives all that this program starts the same settings of Go as the Makefile, so that they share one
// build cache.
func setEnvironment() error {
	flags := os.Getenv("GOFLAGS")
	if !slices.Contains(strings.Fields(flags), "-trimpath") {
		flags = strings.TrimSpace(flags + " -trimpath")
	}
	for name, value := range map[string]string{"GOFLAGS": flags, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"} {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	return nil
}

// usualParallel is how many jobs run at a time: one that computes, and two that wait.
const usualParallel = 3

func rootCommand() *cobra.Command {
	usual := names(stages)
	all := slices.Concat(usual, names(extra))
	var run, quick runOptions
	var flaky flakesOptions
	root := &cobra.Command{
		Use:   "check [STAGE...]",
		Short: "Run the tests, and count passed, failed and skipped ones",
		Long: "Runs the stages given (" + strings.Join(all, ", ") + "), or without any: " + strings.Join(usual, ", ") + `.

Results are written to dist/test: index.html for people, junit.xml for CI, and a log of each job.`,
		Example: `  go run ./hack/ci/check
  go run ./hack/ci/check unit plugin
  go run ./hack/ci/check operator --kubernetes 1.30
  go run ./hack/ci/check --since main`,
		ValidArgs:    all,
		Args:         cobra.OnlyValidArgs,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE:              func(cmd *cobra.Command, args []string) error { return runStages(cmd.Context(), args, run) },
	}
	root.Flags().IntVar(&run.parallel, "parallel", usualParallel, "the maximum number of jobs at a time")
	root.Flags().BoolVar(&run.failFast, "fail-fast", false, "end with the first failure")
	root.Flags().BoolVar(&run.all, "all", false, "run also "+strings.Join(names(extra), ", "))
	root.Flags().BoolVar(&run.list, "list", false, "print the stages that would run, and run nothing")
	root.Flags().StringVar(&run.kubernetes, "kubernetes", "", "run stage "+kubernetesStage+" on the API server of this version: "+strings.Join(toolbox.OlderKubernetes, ", "))
	root.Flags().StringVar(&run.since, "since", "", "run only stages that changes since this commit or branch can affect")

	quickly := &cobra.Command{
		Use: "quick", Short: "What a change most often breaks, in a few minutes: formatting, linters, pure tests", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return check(cmd.Context(), quick) },
	}
	quickly.Flags().IntVar(&quick.parallel, "parallel", 1, "the maximum number of jobs at a time")
	quickly.Flags().BoolVar(&quick.failFast, "fail-fast", false, "end with the first failure")

	again := &cobra.Command{
		Use: "flakes STAGE...", Short: "Run stages several times beside load, and list the tests that ever failed", ValidArgs: all,
		Args: cobra.MatchAll(cobra.MinimumNArgs(1), cobra.OnlyValidArgs),
		RunE: func(cmd *cobra.Command, args []string) error { return flakes(cmd.Context(), args, flaky) },
	}
	again.Flags().IntVar(&flaky.rounds, "rounds", 10, "how often every test runs")
	again.Flags().IntVar(&flaky.load, "load", 5, "busy processes beside them")
	again.Flags().IntVar(&flaky.parallel, "parallel", 1, "the maximum number of jobs at a time")

	root.AddCommand(quickly, again,
		&cobra.Command{
			Use: "lint", Short: "Run the formatters and linters of every language", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				checkout, err := toolbox.Root()
				if err != nil {
					return err
				}
				return lint.Run(cmd.Context(), checkout, lint.All(), os.Stdout, os.Stderr)
			},
		},
		&cobra.Command{Use: loadCommand, Hidden: true, Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error { return compute() }})
	return root
}
