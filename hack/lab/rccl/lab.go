// Package rccl runs RCCL, the collective library for AMD's GPUs, on a machine without any: RCCL itself is Debian's, and
// under it is hack/lab/hip, a HIP runtime whose device memory is the host's. The package starts ranks, on this machine
// or on the hosts of a network lab, and tells them what to do.
package rccl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A Lab has RCCL, and the programs built for it.
type Lab struct {
	root  root
	built string // a temporary folder
}

// New fetches RCCL, unless it is in the cache, and builds the lab's programs. The error is [Missing] where RCCL cannot
// be had.
func New(ctx context.Context, progress io.Writer) (_ *Lab, err error) {
	root, err := ensureRoot(ctx, progress)
	if err != nil {
		return nil, err
	}
	if err := toolbox.EnsurePrograms(ctx, progress, []toolbox.Program{{Name: "gcc", Package: "gcc"}}); err != nil {
		return nil, err
	}
	checkout, err := toolbox.Root()
	if err != nil {
		return nil, err
	}
	built, err := os.MkdirTemp("", "evenkeel-rccl-")
	if err != nil {
		return nil, err
	}
	l := &Lab{root: root, built: built}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	hip, rank := filepath.Join(checkout, "hack", "lab", "hip"), filepath.Join(checkout, "hack", "lab", "rccl", "rank")
	amdhip, smi := filepath.Join(built, "libamdhip64.so.5"), filepath.Join(built, "librocm_smi64.so.1")
	shared := func(path string, more ...string) []string {
		return append([]string{"-shared", "-o", path, "-Wl,-soname," + filepath.Base(path)}, more...)
	}
	for _, args := range [][]string{
		shared(amdhip, "-Wl,--version-script,hip.map", "hip.c", "kernels.c", "fibers.c", "arithmetic.c", "-lpthread"),
		shared(smi, "smi.c"),
		// RCCL needs a later C library than this machine may have; it finds that in the root.
		{"-o", filepath.Join(built, "rank"), "-I.", filepath.Join(rank, "rank.c"), "arithmetic.c", amdhip, root.rccl(), "-Wl,--allow-shlib-undefined"},
	} {
		cmd := exec.CommandContext(ctx, "gcc", append([]string{"-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-g", "-fPIC"}, args...)...)
		cmd.Dir = hip
		if text, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("gcc: %w\n%s", err, text)
		}
	}
	return l, nil
}

// Close removes what was built. The ranks must have ended.
func (l *Lab) Close() error { return os.RemoveAll(l.built) }

// Use makes RCCL find this plugin, the library that Cargo built.
func (l *Lab) Use(plugin string) error {
	link := filepath.Join(l.built, artifacts.RCCLLibrary)
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Symlink(plugin, link)
}

// argv is the command of a rank.
func (l *Lab) argv() []string {
	return []string{l.root.linker(), "--library-path", l.built + ":" + l.root.libraries(), filepath.Join(l.built, "rank")}
}
