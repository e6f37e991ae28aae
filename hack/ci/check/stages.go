package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"evenkeel.dev/evenkeel/hack/ci/check/affected"
	"evenkeel.dev/evenkeel/hack/ci/check/results"
	"evenkeel.dev/evenkeel/hack/ci/check/schedule"
	"evenkeel.dev/evenkeel/hack/ci/lint"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// A stage is one layer of tests.
type stage struct {
	affected.Stage
	about string
	root  bool // it creates namespaces or changes roots
	parts []part
}

// A part of a stage is what the scheduler runs: a job with the name of the stage, and of the part if there are several.
type part struct {
	name   string
	needs  []string // set-ups
	again  []string // further set-ups for runs that repeat it
	weight schedule.Weight
	apart  []string // jobs that it must not run beside
	run    func(ctx context.Context, t *task) error
}

// A job's weight and apart are the table of what runs beside what: one Busy job at most, and beside it jobs that wait.
// The order of the stages is the order in which their jobs start, once what they need is there.

// stages are the stages of a usual run. Pure tests come first. The longest stages follow, e2e and operator. They mostly
// wait, so later stages run beside them.
var stages = []stage{
	{
		Stage: affected.Stage{Name: "format", Always: true, Reads: []string{".editorconfig", ".hadolint.yaml"}},
		about: "formatting, links, width of lines, and what go vet finds",
		parts: []part{
			{name: "format", run: linters(lint.Format()...)},
			{name: "vet", run: linters(lint.Vet())},
		},
	},
	{
		Stage: affected.Stage{
			Name: "unit", Always: true, Tests: []affected.Packages{unitTests}, Crates: []string{"*"},
			// Its tests read pages and the chart.
			Reads: slices.Concat(rustFiles, []string{"plugin/fuzz/", "docs/", ".github/", "*.md", "charts/evenkeel/", "images/", "config/"}),
		},
		about: "pure code, Go and Rust",
		parts: []part{
			{name: "go", needs: []string{"packages"}, again: []string{"unit tests"}, run: func(ctx context.Context, t *task) error {
				if t.repeats {
					return t.runGo(ctx, "unit tests", 10*time.Minute, nil)
				}
				packages, err := t.unitPackages(ctx)
				if err != nil {
					return err
				}
				t.goTest(ctx, nil, packages...)
				return nil
			}},
			{name: "rust", needs: []string{"packages", "rust tests"}, run: func(ctx context.Context, t *task) error {
				return t.rustPrograms(ctx, func(test cargo.Test) bool { return !slices.Contains(pluginPackages, test.Package) })
			}},
			// The fuzz targets are a workspace of their own. They run elsewhere, and are to compile here.
			{name: "fuzz", needs: []string{"rust tests"}, run: func(ctx context.Context, t *task) error {
				began := t.console.now()
				err := t.command(ctx, filepath.Join(t.root, "plugin"), "cargo", "check", "--locked", "--no-default-features", "--manifest-path", "fuzz/Cargo.toml", "--lib", "--bins", "--target-dir", "target", "--quiet")
				if err != nil {
					return err
				}
				took := t.console.now().Sub(began)
				t.report(results.Result{Program: "plugin/fuzz", Name: "the fuzz targets compile", Outcome: results.Passed, Duration: took, Self: took})
				return nil
			}},
			{name: "examples", needs: []string{"packages", "rust tests"}, run: func(ctx context.Context, t *task) error {
				t.cargoTest(ctx, "examples in comments", nil, "--doc", "--workspace", "--exclude", "evenkeel-python")
				return nil
			}},
		},
	},
	{
		Stage: affected.Stage{
			Name: "e2e", Tests: []affected.Packages{labTests, localTests, clusterTests}, Programs: clusterPrograms, Crates: shippedCrates, Reads: clusterFiles,
		},
		about: "labs, then everything on a real cluster",
		root:  true,
		parts: []part{
			// They check that nothing remains on the machine, and measure.
			{name: "labs", needs: []string{"images", "lab tests"}, weight: schedule.Waits, apart: []string{"cluster tools", "rdma lab", "rdma pair", "rdma rails", "rccl"}, run: func(ctx context.Context, t *task) error {
				return t.runGo(ctx, "lab tests", 45*time.Minute, nil)
			}},
			{name: "local", needs: []string{"cluster tools", "local cluster tests"}, weight: schedule.Waits, apart: []string{"e2e labs"}, run: func(ctx context.Context, t *task) error {
				return t.runGo(ctx, "local cluster tests", 45*time.Minute, nil)
			}},
			{name: "cluster", needs: []string{"images", "cluster", "cluster tests"}, weight: schedule.Waits, apart: []string{"e2e labs", "e2e local"}, run: func(ctx context.Context, t *task) error {
				return t.runGo(ctx, "cluster tests", 45*time.Minute, nil)
			}},
		},
	},
	{
		Stage: affected.Stage{
			Name: "operator", Tests: []affected.Packages{operatorTests}, Programs: []string{"./operator/cmd/..."},
			Reads: []string{"charts/evenkeel/", "config/", "hack/cluster/tools/"},
		},
		about: "the operator on a real API server",
		parts: []part{{needs: []string{"kubernetes tools", "operator tests"}, weight: schedule.Waits, run: func(ctx context.Context, t *task) error {
			return t.runGo(ctx, "operator tests", 10*time.Minute, []string{"KUBEBUILDER_ASSETS=" + t.assets, "HELM=" + t.helm})
		}}},
	},
	{
		Stage: affected.Stage{
			Name: "plugin", Crates: []string{"evenkeel-nccl-plugin", "evenkeel-reduction-server", "evenkeel-bench", "evenkeel-mpi", "evenkeel-c"}, Reads: rustFiles,
		},
		about: "the plugin through its C ABI, and the benchmark over it",
		parts: []part{{needs: []string{"packages", "rust tests"}, apart: []string{"e2e labs"}, run: func(ctx context.Context, t *task) error {
			return t.rustPrograms(ctx, func(test cargo.Test) bool { return slices.Contains(pluginPackages, test.Package) })
		}}},
	},
	{
		Stage: affected.Stage{Name: "chart", Tests: []affected.Packages{chartTests}, Reads: []string{"charts/", "hack/cluster/tools/cluster/"}},
		about: "the chart's templates and schema",
		parts: []part{{needs: []string{"helm", "chart tests"}, weight: schedule.Waits, run: func(ctx context.Context, t *task) error {
			return t.runGo(ctx, "chart tests", 10*time.Minute, []string{"HELM=" + t.helm})
		}}},
	},
	{
		Stage: affected.Stage{
			Name: "python", Programs: []string{"./hack/ci/artifacts"}, Crates: []string{"evenkeel-python", "evenkeel-nccl-plugin", "evenkeel-reduction-server"},
			Reads: slices.Concat(rustFiles, []string{"plugin/bindings/python/", "operator/internal/flightrecord/testdata/"}),
		},
		about: "the wheel, as it is installed, and its example",
		parts: []part{{needs: []string{"wheel"}, weight: schedule.Waits, run: func(ctx context.Context, t *task) error {
			python, err := toolbox.PythonEnvironment(ctx, filepath.Join(t.work, "python"), t.wheel, "numpy=="+numpyVersion)
			if err != nil {
				return err
			}
			return t.pythonTests(ctx, "plugin/bindings/python/tests", python)
		}}},
	},
	{
		Stage: affected.Stage{
			Name: "rdma", Tests: []affected.Packages{rdmaLabTests}, Programs: []string{"./hack/lab/rdma"},
			Crates: []string{"evenkeel-transport", "evenkeel-nccl-plugin", "evenkeel-bench"}, Reads: rustFiles,
		},
		about: "verbs on soft-RoCE in a virtual machine",
		parts: []part{
			{name: "lab", needs: []string{"rdma kernel", "rdma lab tests"}, run: rdmaLab},
			{name: "pair", needs: []string{"rdma kernel", "rust tests"}, run: rdma(vm.Pair)},
			// It waits for the ends of ports' outages.
			{name: "rails", needs: []string{"rdma kernel", "rust tests"}, weight: schedule.Waits, run: rdma(vm.Rails)},
		},
	},
	{
		Stage: affected.Stage{
			Name: "rccl", Tests: []affected.Packages{rcclTests}, Crates: []string{"evenkeel-nccl-plugin", "evenkeel-reduction-server"},
			Reads: slices.Concat(rustFiles, []string{"hack/lab/hip/"}),
		},
		about: "a real collective library, RCCL, over the plugin",
		root:  true,
		parts: []part{{needs: []string{"rccl lab", "rust tests", "rccl tests"}, weight: schedule.Waits, run: func(ctx context.Context, t *task) error {
			if t.skippedLab("rccl lab", 1) {
				return nil
			}
			return t.runGo(ctx, "rccl tests", 10*time.Minute, nil)
		}}},
	},
}

// extra stages run only when they are named. Kueue and the controllers of further kinds of jobs take many minutes to
// build, Rust's library for another processor comes from rustup, a release is built for two processors, and PyTorch
// needs 5 GB.
var extra = []stage{
	{
		Stage: affected.Stage{
			Name: "torch", Tests: []affected.Packages{torchTests}, Programs: clusterPrograms, Crates: shippedCrates, Reads: clusterFiles,
		},
		about: "the backend of torch.distributed, with PyTorch, and a training job on a real cluster",
		root:  true,
		parts: []part{
			{name: "scripts", needs: []string{"wheel"}, weight: schedule.Waits, run: torchScripts},
			{name: "cluster", needs: []string{"wheel", "torch tests"}, weight: schedule.Waits, apart: clusterJobs, run: func(ctx context.Context, t *task) error {
				return t.runGo(ctx, "torch tests", 45*time.Minute, nil, "-test.run=^TestTorch")
			}},
		},
	},
	{
		Stage: affected.Stage{
			Name: "aarch64", Programs: []string{"./hack/ci/artifacts"}, Crates: slices.Concat(shippedCrates, []string{"evenkeel-reduction-kernels", "evenkeel-protocol"}), Reads: rustFiles,
		},
		about: "reductions, protocol and what is shipped on an emulated aarch64",
		root:  true,
		parts: []part{{run: aarch64}},
	},
	{
		Stage: affected.Stage{Name: "kinds", Tests: []affected.Packages{kindsTests}, Programs: clusterPrograms, Crates: shippedCrates, Reads: clusterFiles},
		about: "every kind of job under its real controller, on a real cluster",
		root:  true,
		parts: []part{{needs: []string{"kinds tests"}, weight: schedule.Waits, apart: clusterJobs, run: func(ctx context.Context, t *task) error {
			return t.runGo(ctx, "kinds tests", 45*time.Minute, nil, "-test.run=^TestKinds", "-test.parallel=16")
		}}},
	},
	{
		Stage: affected.Stage{
			Name: "walk", Tests: []affected.Packages{walkTests}, Programs: clusterPrograms, Crates: shippedCrates, Reads: slices.Concat(clusterFiles, []string{"docs/install.md", "docs/releasing.md"}),
		},
		about: "a release, installed on a real cluster as docs/install.md says",
		root:  true,
		parts: []part{{needs: []string{"walk tests"}, weight: schedule.Alone, run: func(ctx context.Context, t *task) error {
			return t.runGo(ctx, "walk tests", 120*time.Minute, nil, "-test.run=^TestRelease")
		}}},
	},
	{
		Stage: affected.Stage{Name: "kueue", Tests: []affected.Packages{kueueTests}, Programs: clusterPrograms, Crates: shippedCrates, Reads: clusterFiles},
		about: "a job in a queue of the real Kueue, on a real cluster",
		root:  true,
		parts: []part{{needs: []string{"kueue tests"}, weight: schedule.Waits, apart: clusterJobs, run: func(ctx context.Context, t *task) error {
			return t.runGo(ctx, "kueue tests", 45*time.Minute, nil, "-test.run=^TestKueue")
		}}},
	},
}

// What neither build tool knows.
var (
	// clusterJobs are those whose tests start a cluster of the same name, or look for what remains on the machine.
	clusterJobs = []string{"cluster", "e2e labs", "e2e local", "e2e cluster", "torch cluster", "kinds", "kueue"}
	// clusterPrograms run on the cluster, or start it.
	clusterPrograms = []string{"./operator/cmd/...", "./hack/cluster/...", "./hack/ci/images"}
	shippedCrates   = []string{"evenkeel-nccl-plugin", "evenkeel-bench", "evenkeel-reduction-server", "evenkeel-mpi", "evenkeel-python"}
	// rustFiles are those of the whole Rust workspace.
	rustFiles    = []string{"plugin/Cargo.toml", "plugin/Cargo.lock", "plugin/.cargo/"}
	clusterFiles = slices.Concat(rustFiles, []string{"charts/evenkeel/", "config/", "images/", "Dockerfile", ".dockerignore", "hack/cluster/tools/", "plugin/bindings/python/"})
)

// pluginPackages are those of stage plugin.
var pluginPackages = []string{"crates/nccl-plugin", "crates/reduction-server", "crates/bench"}

// numpyVersion is the version of numpy for the Python tests.
const numpyVersion = "2.4.6"

// jobName is the scheduler's name of a part of a stage.
func jobName(s stage, p part) string {
	if p.name == "" {
		return s.Name
	}
	return s.Name + " " + p.name
}

// linters are a part that reports each linter as a test.
func linters(all ...lint.Linter) func(context.Context, *task) error {
	return func(ctx context.Context, t *task) error {
		for _, l := range all {
			began := t.console.now()
			err := l.Run(ctx, t.root, t.progress())
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			took := t.console.now().Sub(began)
			r := results.Result{Program: "lint", Name: l.Name, Outcome: results.Passed, Duration: took, Self: took}
			if err != nil {
				r.Outcome, r.Output = results.Failed, err.Error()+"\n"
			}
			t.report(r)
		}
		return nil
	}
}

// skippedLab reports n skipped tests if the machine cannot have a lab, as its set-up has found.
func (t *task) skippedLab(setUp string, n int) bool {
	why := t.missing[setUp]
	if why == "" {
		return false
	}
	for i := range n {
		t.report(results.Result{Program: setUp, Name: fmt.Sprintf("tests in the lab (%d)", i+1), Outcome: results.Skipped, Reason: why})
	}
	return true
}

// torchScripts runs the tests of the Python package with PyTorch, and PyTorch's own of a backend.
func torchScripts(ctx context.Context, t *task) error {
	python, dir, err := toolbox.TorchEnvironment(ctx, t.progress(), t.wheel)
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	tests, err := toolbox.PyTorchTests(ctx, t.progress())
	if err != nil {
		return err
	}
	return t.pythonTests(ctx, "plugin/bindings/python/tests_torch", python, "PYTHONPATH="+dir, "EVENKEEL_PYTORCH_TESTS="+tests)
}
