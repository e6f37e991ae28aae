// Command fuzz runs the fuzz targets of plugin/fuzz: each feeds one parser with inputs that reach new code.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
)

// flags are those of rustc that tell libFuzzer which code an input reaches. They need no nightly compiler.
var flags = []string{
	"-Cpasses=sancov-module",
	"-Cllvm-args=-sanitizer-coverage-level=4",
	"-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
	"-Cllvm-args=-sanitizer-coverage-pc-table",
	"-Cllvm-args=-sanitizer-coverage-trace-compares",
	// Each comparison of a condition is a branch of its own, and so covered on its own.
	"-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
}

// limits are those of every run. The longest message that a target parses has some 8 KiB.
var limits = []string{"-max_len=16384", "-rss_limit_mb=1024", "-timeout=5"}

type options struct {
	target, input string
	duration      time.Duration
	parallel      int
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var o options
	cmd := &cobra.Command{
		Use: "fuzz", Short: "Run the fuzz targets of plugin/fuzz", Args: cobra.NoArgs,
		Long: `Run the fuzz targets of plugin/fuzz. Each feeds one parser with inputs that reach new code, for a time.

Inputs that reached new code are kept in plugin/target/fuzz/corpus, and the next run begins with them. An input that fails is kept
in plugin/target/fuzz/failures, and the command that runs it again is printed.`,
		Example:      "  go run ./hack/ci/fuzz --duration 2m\n  go run ./hack/ci/fuzz --target verdict --input FILE",
		SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return fuzz(cmd.Context(), o) },
	}
	cmd.Flags().StringVar(&o.target, "target", "", "run only this target, a file in plugin/fuzz/src/bin")
	cmd.Flags().StringVar(&o.input, "input", "", "run the target once, with the input in this file")
	cmd.Flags().DurationVar(&o.duration, "duration", time.Minute, "how long each target runs")
	cmd.Flags().IntVar(&o.parallel, "parallel", 1, "how many targets run at a time")
	if err := cmd.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "fuzz:", err)
		os.Exit(1)
	}
}

func fuzz(ctx context.Context, o options) error {
	if o.input != "" && o.target == "" {
		return errors.New("--input needs --target: the target that the input is for")
	}
	// libFuzzer takes 0 for no limit.
	if o.duration < time.Second || o.parallel < 1 {
		return errors.New("--duration must be at least 1s, and --parallel at least 1")
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	programs, err := build(ctx, root, o.target)
	if err != nil {
		return err
	}
	if o.input != "" {
		cmd := exec.CommandContext(ctx, programs[o.target], append(slices.Clone(limits), o.input)...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s with %s: %w", o.target, o.input, err)
		}
		return nil
	}
	return runAll(ctx, filepath.Join(root, "plugin", "target", "fuzz"), programs, o)
}

// build builds a target, or all of them, and returns their programs by name.
func build(ctx context.Context, root, target string) (map[string]string, error) {
	// This variable goes before all other flags. They are not for build scripts, so the processor is named, even if it is
	// this one.
	if err := os.Setenv("CARGO_ENCODED_RUSTFLAGS", strings.Join(flags, "\x1f")); err != nil {
		return nil, fmt.Errorf("flags of rustc: %w", err)
	}
	version, err := exec.CommandContext(ctx, "rustc", "-vV").Output()
	if err != nil {
		return nil, fmt.Errorf("rustc -vV: %w", err)
	}
	host, err := hostOf(string(version))
	if err != nil {
		return nil, err
	}
	args := []string{"build", "--release", "--manifest-path", "fuzz/Cargo.toml", "--target-dir", "target/fuzz", "--target", host}
	if target != "" {
		args = append(args, "--bin", target)
	}
	built, err := cargo.Run(ctx, root, args...)
	if err != nil {
		return nil, err
	}
	return built.Executables, nil
}

// hostOf finds the processor and system that rustc runs on.
func hostOf(version string) (string, error) {
	for line := range strings.Lines(version) {
		if host, found := strings.CutPrefix(strings.TrimSpace(line), "host: "); found {
			return host, nil
		}
	}
	return "", fmt.Errorf("rustc -vV names no host: %q", version)
}

// runAll runs programs, even after one has failed, and prints a line for each.
func runAll(ctx context.Context, folder string, programs map[string]string, o options) error {
	var names []string
	for name := range programs {
		names = append(names, name)
	}
	slices.Sort(names)
	fmt.Println(header)
	results := make([]result, len(names))
	var group errgroup.Group
	group.SetLimit(o.parallel)
	for i, name := range names {
		group.Go(func() error {
			var err error
			if results[i], err = run(ctx, folder, name, programs[name], o.duration); err == nil {
				fmt.Println(results[i])
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	var failed []string
	for _, r := range results {
		if r.failed {
			failed = append(failed, r.target)
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("%s failed", strings.Join(failed, ", "))
	}
	return nil
}

// run runs a target for a time. An input that fails is part of the result, and no error.
func run(ctx context.Context, folder, target, program string, duration time.Duration) (result, error) {
	corpus, seeds, failures := filepath.Join(folder, "corpus", target), filepath.Join(folder, "seeds", target), filepath.Join(folder, "failures", target)
	// Those of an earlier version of the messages may be there.
	if err := os.RemoveAll(seeds); err != nil {
		return result{}, fmt.Errorf("old seeds: %w", err)
	}
	for _, dir := range []string{corpus, seeds, failures} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return result{}, fmt.Errorf("folder for inputs: %w", err)
		}
	}
	args := append(slices.Clone(limits), fmt.Sprintf("-max_total_time=%d", int(duration.Seconds())), "-print_final_stats=1", "-artifact_prefix="+failures+"/", corpus, seeds)
	cmd := exec.CommandContext(ctx, program, args...)
	// A backtrace would push the panic's message out of the last lines.
	cmd.Env = append(os.Environ(), "EVENKEEL_FUZZ_SEEDS="+seeds, "RUST_BACKTRACE=0")
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return result{}, fmt.Errorf("%s: %w", target, context.Cause(ctx))
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return result{}, fmt.Errorf("%s: %w", target, err)
	}
	return parse(target, string(out), err != nil), nil
}
