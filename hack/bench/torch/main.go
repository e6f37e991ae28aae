// Command torch measures the backend evenkeel of torch.distributed beside Gloo, into docs/results/torch.md. It installs PyTorch
// into the cache, 5 GB.
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "torch:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	root, err := os.Getwd()
	if err != nil {
		return fmt.Errorf("this folder: %w", err)
	}
	wheel, err := artifacts.Wheel(ctx, root, os.Stderr, false)
	if err != nil {
		return err
	}
	python, dir, err := toolbox.TorchEnvironment(ctx, os.Stderr, wheel)
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	script := filepath.Join(root, "hack", "bench", "torch", "bench.py")
	page := filepath.Join(root, "docs", "results", "torch.md")
	cmd := exec.CommandContext(ctx, python, append([]string{script, "--output", page}, args...)...)
	// A warning for each connection of Gloo's would hide the progress.
	cmd.Env = append(cmd.Environ(), "PYTHONPATH="+dir, "TORCH_CPP_LOG_LEVEL=ERROR")
	// Outside the checkout, so that Python imports the installed package.
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", script, err)
	}
	return nil
}
