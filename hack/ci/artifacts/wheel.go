// Package artifacts makes the Python package evenkeel.
package artifacts

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// maturinVersion is also in plugin/bindings/python/pyproject.toml, for those who build without this program.
const maturinVersion = "1.16.0"

// Wheel builds the wheel, for Python 3.11 and later on machines like this one, and returns its path in dist/wheel/.
func Wheel(ctx context.Context, root string, progress io.Writer) (string, error) {
	maturin, err := toolbox.PythonTool(ctx, progress, "maturin", maturinVersion, "maturin")
	if err != nil {
		return "", err
	}
	plugin := filepath.Join(root, "plugin")
	fmt.Fprintln(progress, "building the plugin and the Python package (cargo, release)")
	if err := run(ctx, plugin, "cargo", "build", "--release", "--locked", "-p", "evenkeel-nccl-plugin"); err != nil {
		return "", err
	}
	target := os.Getenv("CARGO_TARGET_DIR")
	if target == "" {
		target = filepath.Join(plugin, "target")
	}
	library, err := os.ReadFile(filepath.Join(target, "release", "libnccl_net_evenkeel.so"))
	if err != nil {
		return "", fmt.Errorf("the plugin that cargo has built: %w", err)
	}
	lib := filepath.Join(plugin, "bindings", "python", "evenkeel", "lib")
	if err := os.MkdirAll(lib, 0o755); err != nil {
		return "", fmt.Errorf("make room for the plugin: %w", err)
	}
	if err := os.WriteFile(filepath.Join(lib, "libnccl-net-evenkeel.so"), library, 0o755); err != nil {
		return "", fmt.Errorf("put the plugin into the package: %w", err)
	}
	out := filepath.Join(root, "dist", "wheel")
	// Wheels of other versions or machines would be taken for this one.
	if err := os.RemoveAll(out); err != nil {
		return "", fmt.Errorf("clear %s: %w", out, err)
	}
	if err := run(ctx, filepath.Join(plugin, "bindings", "python"), maturin, "build", "--locked", "--release", "--out", out); err != nil {
		return "", err
	}
	wheels, err := filepath.Glob(filepath.Join(out, "evenkeel-*.whl"))
	if err != nil || len(wheels) != 1 {
		return "", fmt.Errorf("maturin left %d wheels in %s, not one (%v)", len(wheels), out, err)
	}
	return wheels[0], nil
}

// run runs a command that must succeed, and shows what it said if it does not.
func run(ctx context.Context, dir, name string, args ...string) error {
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Stdout, cmd.Stderr = &out, &out
	// Compilers that it starts stop with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", filepath.Base(name), args[0], err, bytes.TrimSpace(out.Bytes()))
	}
	return nil
}
