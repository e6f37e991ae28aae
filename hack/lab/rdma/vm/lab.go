// Package vm runs commands in a virtual machine with RDMA verbs, on a machine without RDMA hardware whose kernel has no
// verbs.
//
// The virtual machine's kernel is Debian's, with soft-RoCE over the two ends
// of a virtual Ethernet link: devices rxe0 and rxe1 at 10.77.0.1 (eth0) and
// 10.77.0.2 (eth1). Its root is this machine's own file system, so every
// program, library and test binary of this machine is there, at its path.
// Files that a command writes to one shared folder are kept on this machine; all others are lost with the virtual
// machine.
//
// QEMU emulates the processor: results are right, absolute times mean little. A virtual machine has no files on disk.
// It exits with the process that called [Lab.Run].
package vm

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A Topology is how the devices are joined.
type Topology string

const (
	// Pair has both devices in one network namespace: one process may use both.
	// Traffic between the two addresses still passes the link.
	Pair Topology = "pair"
	// Hosts has them in the namespaces h1 and h2, for two processes:
	// "ip netns exec h1 COMMAND". The command itself is in neither.
	Hosts Topology = "hosts"
	// Rails is [Pair] twice: rxe2 and rxe3, at 10.77.1.1 (eth2) and 10.77.1.2
	// (eth3), have a link of their own; there is no route between the two links.
	Rails Topology = "rails"
)

// Topologies are all of them, the default first.
var Topologies = []Topology{Pair, Hosts, Rails}

// TopologyVariable is set to the topology in a command's environment.
const TopologyVariable = "EVENKEEL_RDMALAB"

// ErrTimeout is the error of a command that ran past its timeout.
var ErrTimeout = errors.New("the command ran past its timeout")

// Missing is something that the lab needs, and that this machine lacks and cannot install.
type Missing struct{ What string }

func (m Missing) Error() string { return m.What }

// programs are those that the lab and its users need.
var programs = []toolbox.Program{
	{Name: "qemu-system-x86_64", Package: "qemu-system-x86"},
	{Name: busybox, Package: "busybox-static"},
	{Name: "/sbin/modprobe", Package: "kmod"},
	{Name: "xz", Package: "xz-utils"},
	{Name: "ip", Package: "iproute2"},
	{Name: "rdma", Package: "iproute2"},
	{Name: "/etc/libibverbs.d/rxe.driver", Package: "ibverbs-providers"},
	{Name: "ibv_devinfo", Package: "ibverbs-utils"},
	{Name: "rping", Package: "rdmacm-utils"},
	{Name: "ib_write_bw", Package: "perftest"},
}

const busybox = "/bin/busybox"

// A Lab has everything that virtual machines need.
type Lab struct{ kernel kernel }

// New creates a lab. It installs missing programs from Debian and fetches a kernel into the cache. The error is
// [Missing] where this machine cannot have a lab.
func New(ctx context.Context, progress io.Writer) (*Lab, error) {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return nil, Missing{fmt.Sprintf("the lab needs Linux on amd64, this is %s on %s", runtime.GOOS, runtime.GOARCH)}
	}
	if err := toolbox.EnsurePrograms(ctx, progress, programs); err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, Missing{err.Error()}
	}
	if err := checkStatic(busybox); err != nil {
		return nil, Missing{err.Error()}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("no folder for the kernel: %w", err)
	}
	cache = filepath.Join(cache, "evenkeel", "rdmalab")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, err
	}
	k, err := ensureKernel(ctx, cache, progress)
	if err != nil {
		return nil, err
	}
	return &Lab{kernel: k}, nil
}

// Kernel is the version of the machines' kernel.
func (l *Lab) Kernel() string { return l.kernel.version }

// checkStatic reports a program that needs libraries: the initramfs has none.
func checkStatic(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return fmt.Errorf("%s is not static: install busybox-static in its place", path)
		}
	}
	return nil
}

// Config describes a virtual machine and its command.
type Config struct {
	Topology Topology      // default [Pair]
	Share    string        // the folder that the command writes to; default Dir
	Dir      string        // the command's working folder; default the caller's
	Env      []string      // the command's environment, as os.Environ has it
	Command  []string      // a program and its arguments
	Timeout  time.Duration // for the command, from its start; default [DefaultTimeout]
	CPUs     int           // default [DefaultCPUs]
	Memory   int           // MiB; default [DefaultMemory]

	Stdout, Stderr io.Writer // default nowhere
}

// Defaults of [Config].
const (
	DefaultTimeout = 10 * time.Minute
	DefaultCPUs    = 2
	DefaultMemory  = 2048

	maxCPUs, minMemory = 64, 512

	// boots is the maximum number of starts of a machine that fails before it is ready.
	boots = 4
)

func (c Config) withDefaults() (Config, error) {
	if c.Topology == "" {
		c.Topology = Pair
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	if c.CPUs == 0 {
		c.CPUs = DefaultCPUs
	}
	if c.Memory == 0 {
		c.Memory = DefaultMemory
	}
	if c.Stdout == nil {
		c.Stdout = io.Discard
	}
	if c.Stderr == nil {
		c.Stderr = io.Discard
	}
	var err error
	if c.Dir, err = folder(c.Dir); err != nil {
		return c, fmt.Errorf("working folder: %w", err)
	}
	if c.Share == "" {
		c.Share = c.Dir
	}
	if c.Share, err = folder(c.Share); err != nil {
		return c, fmt.Errorf("shared folder: %w", err)
	}
	switch {
	case !slices.Contains(Topologies, c.Topology):
		return c, fmt.Errorf("topology %q: one of %v", c.Topology, Topologies)
	case c.Share == "/" || slices.ContainsFunc([]string{"/dev", "/proc", "/run", "/sys"}, func(d string) bool { return below(c.Share, d) }):
		return c, fmt.Errorf("shared folder %s: the machine has its own there; share a folder elsewhere", c.Share)
	case strings.ContainsAny(c.Share, ",\n"):
		return c, fmt.Errorf("shared folder %q: a path without commas and line ends", c.Share)
	case len(c.Command) == 0:
		return c, errors.New("no command to run")
	case slices.ContainsFunc(c.Command, func(a string) bool { return strings.ContainsRune(a, 0) }):
		return c, fmt.Errorf("command %q: no NUL bytes", c.Command)
	case c.Timeout < time.Second:
		return c, fmt.Errorf("timeout %s: at least 1s", c.Timeout)
	case c.CPUs < 1 || c.CPUs > maxCPUs:
		return c, fmt.Errorf("%d processors: from 1 to %d", c.CPUs, maxCPUs)
	case c.Memory < minMemory:
		return c, fmt.Errorf("memory of %d MiB: at least %d", c.Memory, minMemory)
	}
	return c, nil
}

// folder returns the path of an existing folder without links; "" is the caller's.
func folder(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return "", err
	}
	info, err := os.Stat(path)
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is not a folder", path)
	}
	return path, err
}

func below(path, parent string) bool { return path == parent || strings.HasPrefix(path, parent+"/") }

// Run starts a machine, runs the command in it and returns the command's exit
// status. Its output comes as it is written. The error is [ErrTimeout],
// [Missing], ctx's cause, or that the machine failed, with the end of its console.
func (l *Lab) Run(ctx context.Context, c Config) (int, error) {
	c, err := c.withDefaults()
	if err != nil {
		return 0, err
	}
	if c.Topology == Hosts && !l.kernel.separatesHosts() {
		return 0, Missing{fmt.Sprintf("topology %s needs Linux 7.2 or newer, Debian's kernel here is %s", Hosts, l.kernel.version)}
	}
	files, err := l.initramfs(c)
	if err != nil {
		return 0, err
	}
	for boot := 1; ; boot++ {
		code, err := runMachine(ctx, l.kernel, c, files)
		// The kernel patches its own code while it boots. It sometimes fails, as the emulated processor still executes the
		// old code.
		var failure machineError
		if boot == boots || !errors.As(err, &failure) || !failure.early {
			return code, err
		}
	}
}
