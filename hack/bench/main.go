// Command bench runs the experiments of this repository, and writes a page about each into docs/results.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/experiments"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/sockets"
	"evenkeel.dev/evenkeel/hack/bench/runner"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		if missing := experiment.MissingError(""); errors.As(err, &missing) {
			os.Exit(2)
		}
		os.Exit(1)
	}
}

func rootCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Run experiments, and write a page about each into docs/results",
		Long: `Run experiments, and write a page about each into docs/results.

An experiment has cases, and in each of them contenders that run in turns. Each run is recorded in docs/results/NAME.jsonl.
The page docs/results/NAME.md and its drawings are made from that file alone.`,
		Example: `  go run ./hack/bench list
  go run ./hack/bench run tcp --rounds 5 --only 'links'
  go run ./hack/bench page tcp`,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	cmd.AddCommand(listCommand(), runCommand(), pageCommand(), readmeCommand(), enterCommand(), rdmaCommand())
	cmd.AddCommand(sockets.Commands()...)
	return cmd
}

func listCommand() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the experiments and their cases", Args: cobra.NoArgs,
		Example: `  go run ./hack/bench list`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			table := page.Table{Heading: []string{"experiment", "case", "what it measures"}}
			for _, e := range experiments.All() {
				table.Add(e.Name, "", e.Summary)
				for _, c := range e.Cases(false) {
					table.Add("", c.Name, c.Title)
				}
			}
			return table.Text(cmd.OutOrStdout())
		},
	}
}

func pageCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use: "page EXPERIMENT...", Short: "Make pages again from their records, without measuring", Args: someExperiments,
		Example: `  go run ./hack/bench page tcp scale`,
		RunE: func(cmd *cobra.Command, names []string) error {
			root, err := toolbox.Root()
			if err != nil {
				return err
			}
			if output == "" {
				output = resultsFolder(root)
			}
			names, every := expanded(names)
			for _, name := range names {
				e, err := experiments.Named(name)
				if err != nil {
					return err
				}
				path := record(output, e.Name)
				store, err := runner.OpenStore(path)
				if err != nil {
					return err
				}
				if len(store.Samples) == 0 {
					lacking := fmt.Errorf("%s has no samples: measure them by `go run ./hack/bench run %s`", path, e.Name)
					if !every {
						return lacking
					}
					fmt.Fprintln(cmd.ErrOrStderr(), lacking)
					continue
				}
				if _, err := writePage(page.NewResults(e, store.Samples), output); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&output, "output", "", "folder of the records and the pages (default docs/results)")
	return cmd
}

// someExperiments are the arguments of commands that take experiments.
func someExperiments(_ *cobra.Command, names []string) error {
	if len(names) == 0 {
		return fmt.Errorf("no experiment is given: name one or more of %s, or %s", strings.Join(experiments.Names(), ", "), everyExperiment)
	}
	return nil
}

// everyExperiment stands for all names.
const everyExperiment = "all"

// expanded are the experiments that arguments name, and whether they stand for all.
func expanded(names []string) (_ []string, every bool) {
	if len(names) == 1 && names[0] == everyExperiment {
		return experiments.Names(), true
	}
	return names, false
}

func resultsFolder(root string) string { return filepath.Join(root, "docs", "results") }

// record is the file with the samples of an experiment.
func record(folder, name string) string { return filepath.Join(folder, name+".jsonl") }

// writePage writes a page and its drawings.
func writePage(r page.Results, folder string) (page.Results, error) {
	files, err := r.Files()
	if err != nil {
		return r, err
	}
	return r, page.Write(folder, files)
}
