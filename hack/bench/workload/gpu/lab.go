// Package gpu runs real NCCL over the plugin, all ranks on this machine's first GPU as if each were a host of its own.
package gpu

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A Lab is NCCL on this machine's first GPU, and the program of a rank.
type Lab struct {
	probe
	program, nccl string // paths
	work          string // folder of its own, with the program
	logs          string // folder with NCCL's logs
}

// New compiles the program of a rank, and finds NCCL: libnccl.so.2 where the loader finds it, or that of Python's
// package. It needs an NVIDIA driver, NCCL 2.21 or newer, and cc. Where one is missing, the error is an
// [experiment.MissingError].
func New(ctx context.Context, progress io.Writer) (*Lab, error) {
	root, err := toolbox.Root()
	if err != nil {
		return nil, err
	}
	candidates := []string{"libnccl.so.2"}
	const locate = "import importlib.util as u; print(*u.find_spec('nvidia.nccl').submodule_search_locations)"
	if folder, err := exec.CommandContext(ctx, "python3", "-c", locate).Output(); err == nil {
		candidates = append(candidates, filepath.Join(strings.TrimSpace(string(folder)), "lib", "libnccl.so.2"))
	}
	l, err := open(ctx, filepath.Join(root, "dist", "gpu"), candidates...)
	if err == nil {
		fmt.Fprintf(progress, "%s; NCCL's logs are in %s\n", l.versions(), l.logs)
	}
	return l, err
}

// open takes the first of these libraries that loads.
func open(ctx context.Context, logs string, candidates ...string) (l *Lab, err error) {
	l = &Lab{logs: logs}
	if l.work, err = os.MkdirTemp("", "evenkeel-gpu-"); err != nil {
		return nil, fmt.Errorf("the program of a rank: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	if err := os.MkdirAll(logs, 0o755); err != nil {
		return nil, fmt.Errorf("NCCL's logs: %w", err)
	}
	if l.program, err = compile(ctx, l.work); err != nil {
		return nil, err
	}
	for _, l.nccl = range candidates {
		if l.probe, err = tryNCCL(ctx, l.program, l.nccl); err == nil {
			break
		}
	}
	if err == nil && l.NCCL < minNCCL {
		err = experiment.MissingError(fmt.Sprintf("NCCL %s (%s) is too old: 2.21 is the first that loads a plugin by its path", l.ncclVersion(), l.nccl))
	}
	return l, err
}

// Close removes the program.
func (l *Lab) Close() error { return os.RemoveAll(l.work) }

//go:embed rank/allreduce.c
var source []byte

// compile builds the program of a rank.
func compile(ctx context.Context, work string) (program string, err error) {
	program = filepath.Join(work, "allreduce")
	cmd := exec.CommandContext(ctx, "cc", "-std=c11", "-D_DEFAULT_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, "-x", "c", "-", "-ldl")
	cmd.Stdin = bytes.NewReader(source)
	output, err := cmd.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return "", experiment.MissingError("there is no C compiler (cc): apt-get install gcc libc6-dev")
	}
	if err != nil {
		return "", fmt.Errorf("cc: %w: %s", err, bytes.TrimSpace(output))
	}
	return program, nil
}

// A probe is the NCCL, driver and GPU of this machine.
type probe struct {
	NCCL int // of ncclGetVersion
	CUDA int // the newest that the driver supports, of cuDriverGetVersion
	GPU  string
}

func (p probe) ncclVersion() string {
	return fmt.Sprintf("%d.%d.%d", p.NCCL/10000, p.NCCL/100%100, p.NCCL%100)
}

// versions lists the GPU, its driver and the libraries that all ranks use, and says how the ranks share the GPU.
func (p probe) versions() string {
	sharing := "time slicing"
	if mpsRuns() {
		sharing = "NVIDIA's MPS"
	}
	return fmt.Sprintf("NCCL %s, %s by %s, driver %s (CUDA %d.%d)", p.ncclVersion(), p.GPU, sharing, driverVersion(), p.CUDA/1000, p.CUDA/10%100)
}

// minNCCL is the first NCCL that loads a plugin by its path.
const minNCCL = 22100

// tryNCCL checks that a library and the driver load.
func tryNCCL(ctx context.Context, program, path string) (probe, error) {
	var p probe
	text, err := exec.CommandContext(ctx, program, "--probe", "1", "--nccl", path).Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		reason := strings.TrimPrefix(strings.TrimSpace(string(exit.Stderr)), prefix)
		if exit.ExitCode() == 2 {
			return p, experiment.MissingError(reason)
		}
		return p, fmt.Errorf("%s: %w: %s", path, err, reason)
	}
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil {
		return p, fmt.Errorf("%s: %w", path, err)
	}
	return p, nil
}

// mpsRuns says whether NVIDIA's Multi-Process Service runs, where programs look for it: the process of its file is
// there.
func mpsRuns() bool {
	text, err := os.ReadFile(filepath.Join(cmp.Or(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "/tmp/nvidia-mps"), "nvidia-cuda-mps-control.pid"))
	if err != nil {
		return false
	}
	_, err = os.Stat(filepath.Join("/proc", strings.TrimSpace(string(text))))
	return err == nil
}

// driverVersion is that of NVIDIA's kernel module.
func driverVersion() string {
	text, err := os.ReadFile("/sys/module/nvidia/version")
	if err != nil {
		return "of unknown version"
	}
	return strings.TrimSpace(string(text))
}
