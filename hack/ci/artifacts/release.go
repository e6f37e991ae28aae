package artifacts

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

const (
	// GlibcVersion is the oldest glibc that what is shipped runs with: that of RHEL 8. Debian 11 and Ubuntu 20.04 have 2.31.
	// Rust's standard library needs getrandom, which 2.25 brought.
	GlibcVersion = "2.28"

	// zig's linker brings the symbol versions of every glibc, so no sysroot of an old distribution is needed.
	zigVersion      = "0.17.1"
	zigbuildVersion = "0.24.0"
)

// shippingTool returns the path of cargo-zigbuild or maturin, in one virtual environment that has zig too.
func shippingTool(ctx context.Context, progress io.Writer, program string) (string, error) {
	return toolbox.PythonTool(ctx, progress, "cargo-zigbuild", zigbuildVersion, program, "ziglang=="+zigVersion, "maturin=="+maturinVersion)
}

// zigEnv is the environment in which cargo finds the zig that lies beside a program.
func zigEnv(program string) []string {
	return append(os.Environ(), "PATH="+filepath.Dir(program)+string(os.PathListSeparator)+os.Getenv("PATH"))
}

// release builds packages of the plugin's workspace for shipping: optimized, and for glibc of [GlibcVersion] or later. It returns
// the folder in which cargo leaves them.
func release(ctx context.Context, root string, progress io.Writer, packages ...string) (string, error) {
	program, err := shippingTool(ctx, progress, "cargo-zigbuild")
	if err != nil {
		return "", err
	}
	target, err := rustTarget(runtime.GOARCH)
	if err != nil {
		return "", err
	}
	plugin := filepath.Join(root, "plugin")
	args := []string{"zigbuild", "--release", "--locked", "--target", target + "." + GlibcVersion}
	for _, p := range packages {
		args = append(args, "-p", p)
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = zigEnv(program)
	if err := runCommand(cmd, plugin); err != nil {
		return "", err
	}
	return filepath.Join(targetDir(plugin), target, "release"), nil
}

// targetDir is the folder in which cargo builds the workspace.
func targetDir(plugin string) string {
	if folder := os.Getenv("CARGO_TARGET_DIR"); folder != "" {
		return folder
	}
	return filepath.Join(plugin, "target")
}

// rustTarget is Rust's name of a Linux with glibc on a processor that Go names.
func rustTarget(goarch string) (string, error) {
	switch goarch {
	case "amd64":
		return "x86_64-unknown-linux-gnu", nil
	case "arm64":
		return "aarch64-unknown-linux-gnu", nil
	}
	return "", fmt.Errorf("nothing is shipped for %s: build on amd64 or arm64", goarch)
}

// CheckGlibc returns an error if a program or library needs symbols that glibc has only since a later version than limit, such as
// "2.28". It names the file and a symbol.
func CheckGlibc(path, limit string) error {
	file, err := elf.Open(path)
	if err != nil {
		return fmt.Errorf("glibc versions of %s: %w", path, err)
	}
	defer file.Close()
	symbols, err := file.ImportedSymbols()
	if err != nil {
		return fmt.Errorf("glibc versions of %s: %w", path, err)
	}
	var late []error
	for _, s := range symbols {
		version, ok := strings.CutPrefix(s.Version, "GLIBC_")
		if ok && laterVersion(version, limit) {
			late = append(late, fmt.Errorf("%s needs %s of glibc %s, and must run with %s", path, s.Name, version, limit))
		}
	}
	return errors.Join(late...)
}

// laterVersion reports whether version a, numbers with dots between them, is later than b. What is no number ("PRIVATE") is later than
// all.
func laterVersion(a, b string) bool {
	x, y := strings.Split(a, "."), strings.Split(b, ".")
	for i := range max(len(x), len(y)) {
		var m, n int
		var err error
		if i < len(x) {
			if m, err = strconv.Atoi(x[i]); err != nil {
				return true
			}
		}
		if i < len(y) {
			if n, err = strconv.Atoi(y[i]); err != nil {
				return false
			}
		}
		if m != n {
			return m > n
		}
	}
	return false
}
