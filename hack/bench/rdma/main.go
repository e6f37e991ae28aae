// Command rdma measures the plugin over RDMA against perftest, in the same
// virtual machine and the same run, and writes docs/results/rdma.md.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// maxRounds keeps a run within the time limit of a virtual machine.
const maxRounds = 50

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench/rdma:", err)
		os.Exit(1)
	}
}

func rootCommand() *cobra.Command {
	var rounds int
	var output string
	cmd := &cobra.Command{
		Use:   "rdma",
		Short: "Measure the plugin over RDMA against perftest, and write docs/results/rdma.md",
		Long: `Measure the plugin over RDMA against perftest, and write docs/results/rdma.md.

Both run in the RDMA lab's virtual machine (see "go run ./hack/lab/rdma --help"), one after the other in each
round, over the same two ports. Only the ratios count: the processor and the network card are emulated. The
plugin's own tests check there, once, what is not about speed. Needs a machine that does nothing else.`,
		Example: `  go run ./hack/bench/rdma
  go run ./hack/bench/rdma --rounds 2 --output /tmp/rdma.md`,
		Args:         cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rounds < 1 || rounds > maxRounds {
				return fmt.Errorf("--rounds %d: from 1 to %d", rounds, maxRounds)
			}
			return run(cmd.Context(), cmd.OutOrStdout(), rounds, output)
		},
	}
	cmd.Flags().IntVar(&rounds, "rounds", 5, "rounds of each case")
	cmd.Flags().StringVar(&output, "output", "", "the page to write (default docs/results/rdma.md)")
	cmd.AddCommand(measureCommand())
	return cmd
}

// measureCommand is the part that runs in the virtual machine.
func measureCommand() *cobra.Command {
	var c programs
	var rounds int
	cmd := &cobra.Command{
		Use:    "measure",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			m, err := c.measure(cmd.Context(), cmd.ErrOrStderr(), rounds, vm.Topology(os.Getenv(vm.TopologyVariable)))
			if err != nil {
				return err
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(m)
		},
	}
	cmd.Flags().StringVar(&c.Library, "library", "", "the plugin")
	cmd.Flags().StringVar(&c.Driver, "driver", "", "evenkeel-bench")
	cmd.Flags().StringToStringVar(&c.Tests, "tests", nil, "test binaries, by package")
	cmd.Flags().IntVar(&rounds, "rounds", 1, "rounds of each case")
	return cmd
}

func run(ctx context.Context, out io.Writer, rounds int, output string) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if output == "" {
		output = filepath.Join(root, "docs", "results", "rdma.md")
	}
	// Before the build, which raises the load.
	host, source := machine.Describe(), page.NewSource(ctx, root, "plugin", "hack/bench/rdma")
	c, err := build(ctx, root)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	limit := time.Duration(5+4*rounds) * time.Minute
	var m measured
	for _, topology := range []vm.Topology{vm.Pair, vm.Rails} {
		args := []string{"run", "./hack/lab/rdma", "--topology", string(topology), "--timeout", limit.String(), "--",
			self, "measure", "--library", c.Library, "--driver", c.Driver, "--rounds", fmt.Sprint(rounds)}
		for name, binary := range c.Tests {
			args = append(args, "--tests", name+"="+binary)
		}
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir, cmd.Stderr = root, os.Stderr
		// A virtual machine ends with the program that runs it: interrupt it rather than kill it.
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		cmd.WaitDelay = time.Minute
		text, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("measuring in the RDMA lab: %w", err)
		}
		// Each virtual machine measures other cases: the second result adds to the first.
		if err := json.Unmarshal(text, &m); err != nil {
			return fmt.Errorf("results of the RDMA lab: %w", err)
		}
	}
	text := markdown(m, rounds, source, host)
	if err := os.WriteFile(output, text, 0o644); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s\nwritten: %s\n", text, output)
	return err
}

// build builds the plugin and its driver, optimised, and the tests.
func build(ctx context.Context, root string) (programs, error) {
	c := programs{Tests: map[string]string{}}
	release, err := artifacts.Rust(ctx, root, os.Stderr, false)
	if err != nil {
		return c, err
	}
	c.Library, c.Driver = filepath.Join(release, cargo.Library), filepath.Join(release, "evenkeel-bench")
	// Tests load the library and start the servers of the debug build.
	built, err := cargo.Everything(ctx, root)
	if err != nil {
		return c, err
	}
	for _, of := range checks {
		test, err := built.Test(of.Target)
		if err != nil {
			return c, err
		}
		c.Tests[of.Target] = test.Path
	}
	return c, nil
}
