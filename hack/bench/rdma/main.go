// Command rdmabench measures the plugin over RDMA beside perftest, in the same
// virtual machine and the same run, and writes docs/results/rdma.md.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// mostRounds keeps a run within what a virtual machine's time limit can be.
const mostRounds = 50

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "rdmabench:", err)
		os.Exit(1)
	}
}

func rootCommand() *cobra.Command {
	var rounds int
	var output string
	cmd := &cobra.Command{
		Use:   "rdmabench",
		Short: "Measure the plugin over RDMA beside perftest, and write docs/results/rdma.md",
		Long: `Measure the plugin over RDMA beside perftest, and write docs/results/rdma.md.

Both run in the RDMA lab's virtual machine (see "go run ./hack/lab/rdma --help"), one after the other in each
round, over the same two ports. What counts are the ratios: the processor is emulated and so is the network
card. Wants a machine that does nothing else. What is not about speed is checked by the plugin's own tests there,
once.`,
		Args:         cobra.NoArgs,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rounds < 1 || rounds > mostRounds {
				return fmt.Errorf("--rounds %d: it takes 1 to %d", rounds, mostRounds)
			}
			return bench(cmd.Context(), cmd.OutOrStdout(), rounds, output)
		},
	}
	cmd.Flags().IntVar(&rounds, "rounds", 5, "times that each case is measured")
	cmd.Flags().StringVar(&output, "output", "", "the page to write (default docs/results/rdma.md)")
	cmd.AddCommand(measureCommand())
	return cmd
}

// measureCommand is what runs in the virtual machine.
func measureCommand() *cobra.Command {
	var c contestants
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
	cmd.Flags().IntVar(&rounds, "rounds", 1, "times that each case is measured")
	return cmd
}

func bench(ctx context.Context, out io.Writer, rounds int, output string) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if output == "" {
		output = filepath.Join(root, "docs", "results", "rdma.md")
	}
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
		// What one machine has measured the other has not: the second adds to the first.
		if err := json.Unmarshal(text, &m); err != nil {
			return fmt.Errorf("what was measured in the RDMA lab: %w", err)
		}
	}
	commit := toolbox.Commit(ctx, root, "plugin", "hack/bench/rdma")
	page := markdown(m, rounds, commit, loadAverage())
	if err := os.WriteFile(output, page, 0o644); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s\nwritten: %s\n", page, output)
	return err
}

// build builds the plugin and what drives it, optimised, and the tests.
func build(ctx context.Context, root string) (contestants, error) {
	c := contestants{Tests: map[string]string{}}
	executables, err := cargo(ctx, root, "build", "--release", "-p", "evenkeel-nccl-plugin", "-p", "evenkeel-bench")
	if err != nil {
		return c, err
	}
	c.Driver = executables["evenkeel-bench"]
	c.Library = filepath.Join(filepath.Dir(c.Driver), "libnccl_net_evenkeel.so")
	// Tests load the library and start the servers that lie beside them.
	if _, err := cargo(ctx, root, "build", "-p", "evenkeel-nccl-plugin", "-p", "evenkeel-reduction-server"); err != nil {
		return c, err
	}
	for _, of := range checks {
		executables, err := cargo(ctx, root, append([]string{"test", "--no-run"}, of.Build...)...)
		if err != nil {
			return c, err
		}
		c.Tests[of.Target] = executables[of.Target]
	}
	return c, nil
}

// cargo builds something, and gives the programs among it by the names of their targets.
func cargo(ctx context.Context, root string, args ...string) (map[string]string, error) {
	cmd := exec.CommandContext(ctx, "cargo", append(args, "--locked", "--message-format", "json-render-diagnostics")...)
	cmd.Dir, cmd.Stderr = filepath.Join(root, "plugin"), os.Stderr
	text, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("cargo %s: %w", args[0], err)
	}
	executables := map[string]string{}
	for line := range bytes.Lines(text) {
		var message struct {
			Target     struct{ Name string }
			Executable string
		}
		if err := json.Unmarshal(line, &message); err != nil {
			return nil, fmt.Errorf("cargo %s: %w in what it says", args[0], err)
		}
		if message.Executable != "" {
			executables[message.Target.Name] = message.Executable
		}
	}
	return executables, nil
}

// loadAverage is that of the last minute; empty where nobody knows.
func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	if errors.Is(err, os.ErrNotExist) {
		return ""
	}
	first, _, _ := strings.Cut(string(text), " ")
	return first
}
