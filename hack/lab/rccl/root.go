package rccl

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// version is Debian's version of RCCL, and suite has it. The layouts in hack/lab/hip/rccl.h are those of this version.
const version, suite = "5.4.3-3+b1", "trixie"

// packages are RCCL, and the C library and compiler's libraries that it needs: those that the suite has, as Debian
// replaces them there. HIP and SMI, which it needs too, are the lab's own.
var packages = []string{"librccl1=" + version, "libc6", "libgcc-s1", "libstdc++6"}

const downloadTimeout = 5 * time.Minute

// Missing is the error of a machine that cannot have the lab, for a reason that is not the lab's fault.
type Missing struct{ What string }

func (m Missing) Error() string { return m.What }

// A root is a folder with the files of the packages. Nothing is installed, and programs run in it with its own dynamic
// linker, so that nobody needs to be root.
type root string

func (r root) libraries() string { return filepath.Join(string(r), "usr/lib/x86_64-linux-gnu") }
func (r root) linker() string    { return filepath.Join(string(r), "usr/lib64/ld-linux-x86-64.so.2") }
func (r root) rccl() string      { return filepath.Join(r.libraries(), "librccl.so.1") }

// ensureRoot returns the root in the cache; it makes it first if there is none.
func ensureRoot(ctx context.Context, progress io.Writer) (root, error) {
	if runtime.GOARCH != "amd64" {
		return "", Missing{"RCCL's packages are those for amd64, and this machine is " + runtime.GOARCH}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "evenkeel", "roots", "rccl-"+version)
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}
	unlock, err := toolbox.Lock(ctx, dir+".lock", func() { fmt.Fprintln(progress, "waiting: another run makes the root for RCCL") })
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(dir); err == nil {
		return root(dir), nil
	}
	making := dir + ".making" // moved into place when it is whole
	if err := os.RemoveAll(making); err != nil {
		return "", err
	}
	if err := os.Mkdir(making, 0o755); err != nil {
		return "", err
	}
	fmt.Fprintf(progress, "fetching RCCL %s from Debian's %s (130 MB, once)\n", version, suite)
	ctx, cancel := context.WithTimeoutCause(ctx, downloadTimeout, fmt.Errorf("not within %s", downloadTimeout))
	defer cancel()
	if err := fetch(ctx, making); err != nil {
		return "", errors.Join(Missing{fmt.Sprintf("RCCL could not be fetched from Debian: %v", err)}, os.RemoveAll(making))
	}
	if err := freeDeviceCode(root(making).rccl()); err != nil {
		return "", err
	}
	return root(dir), os.Rename(making, dir)
}

func fetch(ctx context.Context, dir string) error {
	state := filepath.Join(dir, "apt")
	from, err := toolbox.OpenSuite(ctx, suite, state)
	if err != nil {
		return err
	}
	if err := from.Unpack(ctx, dir, packages...); err != nil {
		return err
	}
	return os.RemoveAll(state)
}

// freeDeviceCode frees the disk blocks of the code for GPUs, 98 % of the library, where the file system can do so. The
// lab does not read it.
func freeDeviceCode(library string) error {
	file, err := os.OpenFile(library, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	parsed, err := elf.NewFile(file)
	if err != nil {
		return fmt.Errorf("%s: %w", library, err)
	}
	code := parsed.Section(".hip_fatbin")
	if code == nil {
		return fmt.Errorf("%s has no code for GPUs: is it RCCL?", library)
	}
	err = unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(code.Offset), int64(code.Size))
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("%s: %w", library, err)
	}
	return file.Close()
}
