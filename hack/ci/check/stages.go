package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
)

// A stage is one layer of tests.
type stage struct {
	name, about string
	run         func(ctx context.Context, root string) (counts, error)
}

type counts struct{ passed, failed, skipped int }

func (c *counts) add(o counts) {
	c.passed, c.failed, c.skipped = c.passed+o.passed, c.failed+o.failed, c.skipped+o.skipped
}

// redis are the programs of the real Redis server that tests start and end.
var redis = []toolbox.Program{{Name: "redis-server", Package: "redis-server"}, {Name: "setpriv", Package: "util-linux"}}

// compilers are those of the programs against the header of MPI.
var compilers = []toolbox.Program{{Name: "cc", Package: "gcc"}, {Name: "c++", Package: "g++"}}

// faults are the programs with which the soak breaks its network.
var faults = []toolbox.Program{{Name: "ss", Package: "iproute2"}, {Name: "tc", Package: "iproute2"}, {Name: "nft", Package: "nftables"}, {Name: "unshare", Package: "util-linux"}}

// stages are the default stages.
var stages = []stage{
	{"unit", "pure code, Rust and Go", func(ctx context.Context, root string) (counts, error) {
		// The Redis store is tested with a real server.
		if err := toolbox.EnsurePrograms(ctx, os.Stderr, slices.Concat(redis, compilers)); err != nil {
			return counts{}, err
		}
		// The fuzz targets are a workspace of their own. They run elsewhere, and are to compile here.
		if err := stream(command(ctx, pluginDir(root), "cargo", "check", "--locked", "--manifest-path", "fuzz/Cargo.toml", "--lib", "--bins", "--target-dir", "target"), nil); err != nil {
			return counts{}, err
		}
		rust, err := rustTests(ctx, root, func(test cargo.Test) bool { return !slices.Contains(pluginPackages, test.Package) })
		if err != nil {
			return rust, err
		}
		examples, err := cargoTest(ctx, root, nil, "--doc", "--workspace", "--exclude", "evenkeel-python")
		rust.add(examples)
		if err != nil {
			return rust, err
		}
		packages, err := goPackages(ctx, root, "./...")
		if err != nil {
			return rust, err
		}
		golang, err := goTest(ctx, root, nil, packages...)
		rust.add(golang)
		return rust, err
	}},
	{"plugin", "the plugin through its C ABI, and the benchmark over it", func(ctx context.Context, root string) (counts, error) {
		if err := toolbox.EnsurePrograms(ctx, os.Stderr, append(faults, redis...)); err != nil {
			return counts{}, err
		}
		return rustTests(ctx, root, func(test cargo.Test) bool { return slices.Contains(pluginPackages, test.Package) })
	}},
	{"rdma", "verbs on soft-RoCE in a virtual machine", rdma},
	{"rccl", "a real collective library, RCCL, over the plugin", rccl},
	{"python", "the wheel, as it is installed, and its example", func(ctx context.Context, root string) (counts, error) {
		wheel, err := artifacts.Wheel(ctx, root, os.Stderr)
		if err != nil {
			return counts{}, err
		}
		dir, err := os.MkdirTemp("", "evenkeel-wheel-")
		if err != nil {
			return counts{}, fmt.Errorf("folder for a virtual environment: %w", err)
		}
		defer os.RemoveAll(dir)
		python, err := toolbox.PythonEnvironment(ctx, dir, wheel, "numpy=="+numpyVersion)
		if err != nil {
			return counts{}, err
		}
		return pythonTest(ctx, filepath.Join(pluginDir(root), "bindings", "python", "tests"), python)
	}},
	{"operator", "the operator on a real API server", func(ctx context.Context, root string) (counts, error) {
		box, err := toolbox.New(os.Stderr)
		if err != nil {
			return counts{}, err
		}
		assets, err := box.Envtest(ctx)
		if err != nil {
			return counts{}, err
		}
		return goTest(ctx, root, []string{"KUBEBUILDER_ASSETS=" + assets}, "./operator/test/...")
	}},
	{"chart", "the chart's templates and schema", func(ctx context.Context, root string) (counts, error) {
		box, err := toolbox.New(os.Stderr)
		if err != nil {
			return counts{}, err
		}
		helm, err := box.Path(ctx, "helm")
		if err != nil {
			return counts{}, err
		}
		return goTest(ctx, root, []string{"HELM=" + helm}, "./charts/...")
	}},
	{"e2e", "everything on a real cluster", func(ctx context.Context, root string) (counts, error) {
		// One package at a time, as the tests of clusters check that nothing remains on the machine.
		return goTest(ctx, root, nil, "-tags", "e2e", "-p", "1", "-timeout", "45m", "./hack/lab/net/...", "./hack/bench/tcp/...", "./hack/cluster/...", "./hack/ci/artifacts", "./e2e/...")
	}},
}

// extra stages run only when they are named. Kueue and the controllers of further kinds of jobs take many minutes to build, Rust's
// library for another processor comes from rustup, a release is built for two processors, and PyTorch needs 5 GB.
var extra = []stage{
	{"torch", "the backend of torch.distributed, with PyTorch, and a training job on a real cluster", func(ctx context.Context, root string) (counts, error) {
		wheel, err := artifacts.Wheel(ctx, root, os.Stderr)
		if err != nil {
			return counts{}, err
		}
		python, dir, err := toolbox.TorchEnvironment(ctx, os.Stderr, wheel)
		if err != nil {
			return counts{}, err
		}
		defer os.RemoveAll(dir)
		tests, err := toolbox.PyTorchTests(ctx, os.Stderr)
		if err != nil {
			return counts{}, err
		}
		scripts, err := pythonTest(ctx, filepath.Join(pluginDir(root), "bindings", "python", "tests_torch"), python, "PYTHONPATH="+dir, "EVENKEEL_PYTORCH_TESTS="+tests)
		if err != nil {
			return scripts, err
		}
		cluster, err := goTest(ctx, root, nil, "-tags", "e2e,torch", "-run", "^TestTorch", "-timeout", "45m", "./e2e")
		cluster.add(scripts)
		return cluster, err
	}},
	{"aarch64", "reductions, protocol and what is shipped on an emulated aarch64", aarch64},
	{"kinds", "every kind of job under its real controller, on a real cluster", func(ctx context.Context, root string) (counts, error) {
		return goTest(ctx, root, nil, "-tags", "e2e,kinds", "-run", "^TestKinds", "-parallel", "16", "-timeout", "45m", "./e2e")
	}},
	{"walk", "a release, installed on a real cluster as docs/install.md says", func(ctx context.Context, root string) (counts, error) {
		return goTest(ctx, root, nil, "-tags", "release", "-run", "^TestRelease", "-timeout", "120m", "./hack/ci/release")
	}},
	{"kueue", "a job in a queue of the real Kueue, on a real cluster", func(ctx context.Context, root string) (counts, error) {
		return goTest(ctx, root, nil, "-tags", "e2e,kueue", "-run", "^TestKueue", "-timeout", "45m", "./e2e")
	}},
}

// numpyVersion is the version of numpy for the Python tests.
const numpyVersion = "2.4.6"

// goPackages lists the packages whose tests need only Go; the others have stages of their own.
func goPackages(ctx context.Context, root, pattern string) ([]string, error) {
	cmd := command(ctx, root, "go", "list", pattern)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	other := regexp.MustCompile(`^evenkeel\.dev/evenkeel/(operator/test|charts|e2e)(/|$)`)
	var packages []string
	for _, p := range regexp.MustCompile(`\S+`).FindAllString(string(out), -1) {
		if !other.MatchString(p) {
			packages = append(packages, p)
		}
	}
	return packages, nil
}

// pluginPackages are those of stage plugin.
var pluginPackages = []string{"crates/nccl-plugin", "crates/reduction-server", "crates/bench"}

// rustTests builds the workspace, whose tests load the library and start the programs, and runs the chosen test programs.
func rustTests(ctx context.Context, root string, chosen func(cargo.Test) bool) (counts, error) {
	built, err := cargo.Everything(ctx, root)
	if err != nil {
		return counts{}, err
	}
	var n counts
	var failed []error
	for _, test := range built.Tests {
		if !chosen(test) {
			continue
		}
		fmt.Printf("\n%s: %s\n", test.Package, test.Target)
		result, err := countRust(command(ctx, filepath.Join(pluginDir(root), test.Package), test.Path))
		n.add(result)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s of %s: %w", test.Target, test.Package, err))
		}
	}
	return n, errors.Join(failed...)
}

// An ignored test of these two kinds does not count as skipped: another test runs it in a process of its own, or stage rdma runs it.
const (
	partOfAnother = "... ignored, part of another test"
	inTheLab      = "... ignored, runs in the RDMA lab"
)

// cargoTest builds Rust tests with Cargo and runs them.
func cargoTest(ctx context.Context, root string, env []string, args ...string) (counts, error) {
	cmd := command(ctx, pluginDir(root), "cargo", append([]string{"test", "--locked", "--no-fail-fast"}, args...)...)
	cmd.Env = append(os.Environ(), env...)
	return countRust(cmd)
}

// countRust runs Rust tests, and counts them by the last line of each test program.
func countRust(cmd *exec.Cmd) (counts, error) {
	var n counts
	closing := regexp.MustCompile(`^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored`)
	err := stream(cmd, func(line string) string {
		if m := closing.FindStringSubmatch(line); m != nil {
			n.add(counts{atoi(m[1]), atoi(m[2]), atoi(m[3])})
		} else if line := strings.TrimSpace(line); strings.HasSuffix(line, partOfAnother) || strings.HasSuffix(line, inTheLab) {
			n.skipped--
		}
		return line
	})
	return n, err
}

// goTest runs Go tests, and counts top-level tests and subtests alike. It shows the output of failed tests, and one line per package.
func goTest(ctx context.Context, root string, env []string, args ...string) (counts, error) {
	var n counts
	output := map[string]string{} // of tests that still run
	cmd := command(ctx, root, "go", append([]string{"test", "-json", "-count=1"}, args...)...)
	cmd.Env = append(os.Environ(), env...)
	err := stream(cmd, func(line string) string {
		var event struct{ Action, Package, Test, Output string }
		if json.Unmarshal([]byte(line), &event) != nil {
			return line
		}
		key := event.Package + " " + event.Test
		switch event.Action {
		case "output":
			if event.Test == "" {
				return event.Output
			}
			output[key] += event.Output
			return ""
		case "build-output":
			return event.Output
		case "pass", "fail", "skip":
			text := output[key]
			delete(output, key)
			if event.Test == "" {
				return ""
			}
			switch event.Action {
			case "pass":
				n.passed++
				return ""
			case "fail":
				n.failed++
			default:
				n.skipped++
			}
			return text
		}
		return ""
	})
	return n, err
}

// pythonTest runs the tests of a folder, and counts them by unittest's last lines.
func pythonTest(ctx context.Context, dir, python string, env ...string) (counts, error) {
	// They must import the installed package, so they run in a folder without its source.
	cmd := command(ctx, dir, python, "-c", "import sys, unittest; unittest.main(None, argv=['unittest', 'discover'], testRunner=unittest.TextTestRunner(sys.stdout))")
	cmd.Env = append(cmd.Environ(), env...)
	var n counts
	all := 0
	ran, closing := regexp.MustCompile(`^Ran (\d+) tests? in `), regexp.MustCompile(`^(?:OK|FAILED)(?: \((.*)\))?$`)
	err := stream(cmd, func(line string) string {
		if m := ran.FindStringSubmatch(line); m != nil {
			all = atoi(m[1])
		} else if m := closing.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
			for part := range strings.SplitSeq(m[1], ", ") {
				switch what, number, _ := strings.Cut(part, "="); what {
				case "failures", "errors":
					n.failed += atoi(number)
				case "skipped":
					n.skipped += atoi(number)
				}
			}
			n.passed = all - n.failed - n.skipped
		}
		return line
	})
	if err == nil && all == 0 {
		err = fmt.Errorf("no test in %s", dir)
	}
	return n, err
}

// stream runs a command and prints its output line by line, changed by show.
func stream(cmd *exec.Cmd, show func(line string) string) error {
	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("%s: %w", cmd, err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("%s: %w", cmd, err)
	}
	lines := bufio.NewReader(pipe)
	for {
		line, err := lines.ReadString('\n')
		if show != nil && line != "" {
			line = show(line)
		}
		if line != "" {
			io.WriteString(os.Stdout, line) //nolint:errcheck // a closed terminal cannot be reported
		}
		if err != nil {
			break
		}
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(cmd.Path), err)
	}
	return nil
}

func command(ctx context.Context, dir, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	// The terminal sends an interrupt to the whole process group. Children clean up before they exit.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 0
	return cmd
}

func pluginDir(root string) string { return filepath.Join(root, "plugin") }

func atoi(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0 // the pattern matches only digits
	}
	return n
}
