package vm

import (
	"context"
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
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// suites have the kernels that are known to work, the preferred one first. Only the first suite's soft-RoCE works in
// network namespaces.
var suites = []string{"trixie-backports", "bookworm-backports"}

const downloadTimeout = 15 * time.Minute

// bootModules are what the initramfs needs to reach the root.
var bootModules = []string{"virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console"}

// A kernel is Debian's, unpacked into a folder of the cache and never
// installed: vmlinuz, lib/modules/VERSION, and in boot/ the modules that the
// initramfs loads, in that order.
type kernel struct{ dir, version string }

func (k kernel) image() string { return filepath.Join(k.dir, "vmlinuz") }

// separatesHosts reports whether a soft-RoCE device works in the network
// namespace of its interface. It does not in 6.12, and does in 7.2.
func (k kernel) separatesHosts() bool {
	var major, minor int
	if _, err := fmt.Sscanf(k.version, "%d.%d", &major, &minor); err != nil {
		return false
	}
	return major > 7 || major == 7 && minor >= 2
}

// ensureKernel returns the kernel in the cache, fetching it first if there is none.
func ensureKernel(ctx context.Context, cache string, progress io.Writer) (kernel, error) {
	dir := filepath.Join(cache, "kernel")
	if k, err := openKernel(dir); err == nil {
		return k, nil
	}
	unlock, err := toolbox.Lock(ctx, dir+".lock", func() { fmt.Fprintln(progress, "waiting: another run fetches the kernel") })
	if err != nil {
		return kernel{}, err
	}
	defer unlock()
	if k, err := openKernel(dir); err == nil {
		return k, nil
	}
	// These are from killed runs, as this process holds the lock.
	stale, err := filepath.Glob(filepath.Join(cache, ".kernel-*"))
	if err != nil {
		return kernel{}, err
	}
	for _, path := range append(stale, dir) {
		if err := os.RemoveAll(path); err != nil {
			return kernel{}, err
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, downloadTimeout, fmt.Errorf("no kernel within %s", downloadTimeout))
	defer cancel()
	var failures []error
	for _, suite := range suites {
		work, err := os.MkdirTemp(cache, ".kernel-")
		if err != nil {
			return kernel{}, err
		}
		defer os.RemoveAll(work)
		fmt.Fprintf(progress, "fetching the kernel of Debian's %s (some 100 to 200 MB, once)\n", suite)
		if err := fetchKernel(ctx, suite, work); err != nil {
			failures = append(failures, fmt.Errorf("%s: %w", suite, err))
			continue
		}
		if err := os.Rename(work, dir); err != nil {
			return kernel{}, err
		}
		return openKernel(dir)
	}
	return kernel{}, Missing{fmt.Sprintf("no kernel with soft-RoCE could be fetched from Debian: %v", errors.Join(failures...))}
}

func openKernel(dir string) (kernel, error) {
	version, err := os.ReadFile(filepath.Join(dir, "version"))
	if err != nil {
		return kernel{}, err
	}
	return kernel{dir: dir, version: string(version)}, nil
}

// fetchKernel downloads the newest kernel of a suite and unpacks it into dir.
func fetchKernel(ctx context.Context, name, dir string) error {
	state := filepath.Join(dir, "apt")
	suite, err := toolbox.OpenSuite(ctx, name, state)
	if err != nil {
		return err
	}
	depends, err := suite.Depends(ctx, "linux-image-amd64")
	if err != nil {
		return err
	}
	image := regexp.MustCompile(`Depends: (linux-image-[0-9]\S*)`).FindStringSubmatch(depends)
	if image == nil {
		return fmt.Errorf("linux-image-amd64 depends on no kernel: %q", depends)
	}
	// From Linux 7 on, Debian has the image in several packages.
	if depends, err = suite.Depends(ctx, image[1]); err != nil {
		return err
	}
	packages := []string{image[1]}
	if parts := regexp.MustCompile(`Depends: (linux-(?:base|binary|modules)-[0-9]\S*)`).FindAllStringSubmatch(depends, -1); parts != nil {
		packages = nil
		for _, p := range parts {
			packages = append(packages, p[1])
		}
	}
	if err := suite.Unpack(ctx, dir, packages...); err != nil {
		return err
	}
	if err := os.RemoveAll(state); err != nil {
		return err
	}
	return layOutKernel(ctx, dir)
}

// layOutKernel creates the folder of a [kernel] from the unpacked packages.
func layOutKernel(ctx context.Context, dir string) error {
	if _, err := os.Stat(filepath.Join(dir, "lib")); err != nil {
		if err := os.Symlink("usr/lib", filepath.Join(dir, "lib")); err != nil {
			return err
		}
	}
	modules, err := filepath.Glob(filepath.Join(dir, "lib", "modules", "*"))
	if err != nil || len(modules) != 1 {
		return fmt.Errorf("the packages have modules of %d kernels, expected 1", len(modules))
	}
	version := filepath.Base(modules[0])
	images, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz*"))
	if err != nil {
		return err
	}
	images = append(images, filepath.Join(modules[0], "vmlinuz"))
	if err := os.Rename(images[0], filepath.Join(dir, "vmlinuz")); err != nil {
		return err
	}
	if _, err := output(ctx, dir, "/sbin/depmod", "-b", dir, version); err != nil {
		return err
	}
	list, err := output(ctx, dir, "/sbin/modprobe", append([]string{"-d", dir, "-S", version, "-a", "--show-depends"}, bootModules...)...)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(dir, "boot")); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(dir, "boot"), 0o755); err != nil {
		return err
	}
	var files []string
	for _, m := range regexp.MustCompile(`(?m)^insmod (\S+)`).FindAllStringSubmatch(list, -1) {
		if !slices.Contains(files, m[1]) {
			files = append(files, m[1])
		}
	}
	for i, file := range files {
		content, err := readModule(ctx, file)
		if err != nil {
			return err
		}
		name, _, _ := strings.Cut(filepath.Base(file), ".ko")
		if err := os.WriteFile(filepath.Join(dir, "boot", fmt.Sprintf("%02d-%s.ko", i, name)), content, 0o644); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(dir, "version"), []byte(version), 0o644)
}

func readModule(ctx context.Context, file string) ([]byte, error) {
	if strings.HasSuffix(file, ".ko") {
		return os.ReadFile(file)
	}
	if !strings.HasSuffix(file, ".xz") {
		return nil, fmt.Errorf("%s: not compressed with xz", file)
	}
	text, err := output(ctx, "/", "xz", "-dc", file)
	return []byte(text), err
}

// output runs a program and returns its standard output; the error has the end of its standard error.
func output(ctx context.Context, dir, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	cmd.WaitDelay = 10 * time.Second
	complaint := &tail{limit: 800}
	cmd.Stderr = complaint
	text, err := cmd.Output()
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strconv.Quote(program), err, strings.TrimSpace(complaint.String()))
	}
	return string(text), nil
}
