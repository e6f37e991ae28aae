package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/ci/check/affected"
	"evenkeel.dev/evenkeel/hack/ci/check/schedule"
	"evenkeel.dev/evenkeel/hack/cluster/local"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
	"evenkeel.dev/evenkeel/hack/internal/child"
	rcclLab "evenkeel.dev/evenkeel/hack/lab/rccl"
	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// A setUp makes something that tests need, once for all of them.
type setUp struct {
	name   string
	needs  []string
	weight schedule.Weight // usually Busy, as it compiles
	apart  []string
	run    func(ctx context.Context, t *task) error
	// cleanUp, if there is one, undoes it at the end of the session.
	cleanUp func(ctx context.Context, s *session) error
}

// Go tests that run as programs of their own, so that they are compiled while others run.
var (
	unitTests     = affected.Packages{Patterns: []string{"./..."}}
	operatorTests = affected.Packages{Patterns: []string{"./operator/test/..."}}
	chartTests    = affected.Packages{Patterns: []string{"./charts/..."}}
	labTests      = affected.Packages{Tags: "e2e", Patterns: []string{"./hack/lab/net/...", "./hack/bench/workload", "./hack/ci/artifacts"}}
	localTests    = affected.Packages{Tags: "e2e", Patterns: []string{"./hack/cluster/..."}}
	clusterTests  = affected.Packages{Tags: "e2e", Patterns: []string{"./e2e/..."}}
	rdmaLabTests  = affected.Packages{Tags: "e2e", Patterns: []string{"./hack/lab/rdma/..."}}
	rcclTests     = affected.Packages{Tags: "e2e", Patterns: []string{"./hack/lab/rccl/..."}}
	torchTests    = affected.Packages{Tags: "e2e,torch", Patterns: []string{"./e2e"}}
	kindsTests    = affected.Packages{Tags: "e2e,kinds", Patterns: []string{"./e2e"}}
	kueueTests    = affected.Packages{Tags: "e2e,kueue", Patterns: []string{"./e2e"}}
	walkTests     = affected.Packages{Tags: "release", Patterns: []string{"./hack/ci/release"}}
)

// compiles is the set-up that compiles Go tests.
func compiles(name string, tests affected.Packages) setUp {
	return setUp{name: name, run: func(ctx context.Context, t *task) error {
		return t.compileGo(ctx, tests, func(string) bool { return false })
	}}
}

// setUps are all set-ups.
var setUps = []setUp{
	{name: "packages", run: func(ctx context.Context, t *task) error {
		return toolbox.EnsurePrograms(ctx, t.progress(), testPrograms)
	}},
	{name: "rust tests", run: func(ctx context.Context, t *task) (err error) {
		t.rust, err = cargo.EverythingTo(ctx, t.root, t.progress())
		return err
	}},
	{name: "kubernetes tools", run: func(ctx context.Context, t *task) error {
		box, err := toolbox.New(t.progress())
		if err != nil {
			return err
		}
		if t.assets, err = box.Envtest(ctx, t.kubernetes); err != nil {
			return err
		}
		t.helm, err = box.Path(ctx, "helm")
		return err
	}},
	{name: "helm", run: func(ctx context.Context, t *task) error {
		box, err := toolbox.New(t.progress())
		if err != nil {
			return err
		}
		t.helm, err = box.Path(ctx, "helm")
		return err
	}},
	// What a cluster and its controllers run, in one build: the cluster's own set-up, and the tests, find it.
	{name: "cluster tools", run: func(ctx context.Context, t *task) error {
		box, err := toolbox.New(t.progress())
		if err == nil {
			_, err = box.Dirs(ctx, append([]string{"helm", "training-operator", "mpi-operator"}, local.Tools...)...)
		}
		return err
	}},
	{name: "wheel", run: func(ctx context.Context, t *task) error {
		wheel, err := artifacts.Wheel(ctx, t.root, t.progress(), true)
		if err != nil {
			return err
		}
		// A copy, as other stages build it again, in the same place.
		text, err := os.ReadFile(wheel)
		if err != nil {
			return err
		}
		t.wheel = filepath.Join(t.work, filepath.Base(wheel))
		return os.WriteFile(t.wheel, text, 0o644)
	}},
	{name: "images", run: func(ctx context.Context, t *task) error {
		_, err := artifacts.Builder{Quick: true, Progress: t.progress()}.All(ctx)
		return err
	}},
	{
		name: "cluster", needs: []string{"cluster tools"}, weight: schedule.Waits, apart: []string{"e2e labs", "e2e local"},
		// The tests of e2e ask for the same one, and find it.
		run: func(ctx context.Context, t *task) error {
			return t.command(ctx, t.root, "go", "run", "./hack/cluster", "up", "--name", testCluster, "--nodes", "4", "--link-rate", "400mbit")
		},
		cleanUp: func(ctx context.Context, s *session) error {
			cmd := child.Command(ctx, s.root, "go", "run", "./hack/cluster", "down", "--name", testCluster)
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("take the cluster down: %w\n%s", err, out)
			}
			return nil
		},
	},
	{name: "rdma kernel", run: func(ctx context.Context, t *task) error {
		_, err := vm.New(ctx, t.progress())
		if missing := (vm.Missing{}); errors.As(err, &missing) {
			t.missing["rdma kernel"] = "no RDMA lab on this machine: " + missing.What
			return nil
		}
		if err != nil {
			return err
		}
		t.rdmaLab = filepath.Join(t.work, "rdma-lab")
		return t.command(ctx, t.root, "go", "build", "-o", t.rdmaLab, "./hack/lab/rdma")
	}},
	{name: "rccl lab", run: func(ctx context.Context, t *task) error {
		lab, err := rcclLab.New(ctx, t.progress())
		if missing := (rcclLab.Missing{}); errors.As(err, &missing) {
			t.missing["rccl lab"] = "no RCCL on this machine: " + missing.What
			return nil
		}
		if err != nil {
			return err
		}
		return lab.Close()
	}},
	// Usually "go test" compiles them while others of them run. This is for runs that repeat them.
	{name: "unit tests", run: func(ctx context.Context, t *task) error { return t.compileGo(ctx, unitTests, inOtherStage) }},
	compiles("operator tests", operatorTests),
	compiles("chart tests", chartTests),
	compiles("lab tests", labTests),
	compiles("local cluster tests", localTests),
	compiles("cluster tests", clusterTests),
	compiles("rdma lab tests", rdmaLabTests),
	compiles("rccl tests", rcclTests),
	compiles("torch tests", torchTests),
	compiles("kinds tests", kindsTests),
	compiles("kueue tests", kueueTests),
	compiles("walk tests", walkTests),
}

// testCluster is the name of the cluster of the tests, which e2e knows too.
const testCluster = "e2e"

// testPrograms are the programs that unit tests run, by their Debian packages.
var testPrograms = []toolbox.Program{
	// The real Redis server.
	{Name: "redis-server", Package: "redis-server"}, {Name: "setpriv", Package: "util-linux"},
	// Compilers of the programs against the header of MPI.
	{Name: "cc", Package: "gcc"}, {Name: "c++", Package: "g++"},
	// With these the soak breaks its network.
	{Name: "ss", Package: "iproute2"}, {Name: "tc", Package: "iproute2"}, {Name: "nft", Package: "nftables"}, {Name: "unshare", Package: "util-linux"},
	// It reads the RDMA lab's archives.
	{Name: "cpio", Package: "cpio"},
}

// cleanUpTimeout bounds the end of all set-ups.
const cleanUpTimeout = 3 * time.Minute

// cleanUp undoes the set-ups that have run.
func (s *session) cleanUp() error {
	// The session's own context may have been interrupted.
	ctx, cancel := context.WithTimeout(context.Background(), cleanUpTimeout)
	defer cancel()
	var all []error
	for _, u := range setUps {
		if u.cleanUp == nil {
			continue
		}
		if _, err := os.Stat(filepath.Join(s.out, fileName(u.name)+".log")); err == nil { // it has started
			all = append(all, u.cleanUp(ctx, s))
		}
	}
	return errors.Join(all...)
}
