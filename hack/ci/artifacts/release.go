package artifacts

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
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

	// cargo-auditable writes the list of crates into each binary, where scanners of images look for it.
	auditableVersion = "0.7.7"
)

// shippingTool returns the path of cargo-zigbuild or maturin, in one virtual environment that has zig too.
func shippingTool(ctx context.Context, progress io.Writer, program string) (string, error) {
	return toolbox.PythonTool(ctx, progress, "cargo-zigbuild", zigbuildVersion, program, "ziglang=="+zigVersion, "maturin=="+maturinVersion)
}

// zigEnv is the environment in which cargo finds its programs, and the zig that lies beside one of them.
func zigEnv(programs ...string) []string {
	var path []string
	for _, p := range programs {
		path = append(path, filepath.Dir(p))
	}
	return append(os.Environ(), "PATH="+strings.Join(append(path, os.Getenv("PATH")), string(os.PathListSeparator)))
}

// shipped are the packages of the plugin's workspace that are in images and wheels. They are built together: cargo chooses the features
// of what they share by all of them, so that the plugin has the same bytes everywhere.
var shipped = []string{"evenkeel-nccl-plugin", "evenkeel-bench", "evenkeel-mpi", "evenkeel-reduction-server"}

// release builds the shipped packages for a processor that Go names: optimized, for glibc of [GlibcVersion] or later, with the list of
// its crates in each binary, and without paths of this machine. It returns the folder in which cargo leaves them.
func release(ctx context.Context, root string, progress io.Writer, goarch string) (string, error) {
	program, err := shippingTool(ctx, progress, "cargo-zigbuild")
	if err != nil {
		return "", err
	}
	auditable, err := toolbox.CargoTool(ctx, progress, "cargo-auditable", auditableVersion)
	if err != nil {
		return "", err
	}
	target, err := rustTarget(goarch)
	if err != nil {
		return "", err
	}
	if err := standardLibrary(ctx, progress, target); err != nil {
		return "", err
	}
	folder := targetFolder(root)
	args := []string{"auditable", "zigbuild", "--release", "--locked", "--target", target + "." + GlibcVersion}
	for _, p := range shipped {
		args = append(args, "-p", p)
	}
	cmd := exec.CommandContext(ctx, "cargo", args...)
	cmd.Env = append(zigEnv(program, auditable), withoutPaths(root, folder))
	if err := runCommand(cmd, filepath.Join(root, "plugin")); err != nil {
		return "", err
	}
	return filepath.Join(folder, target, "release"), nil
}

// targetFolder is cargo's.
func targetFolder(root string) string {
	if folder := os.Getenv("CARGO_TARGET_DIR"); folder != "" {
		return folder
	}
	return filepath.Join(root, "plugin", "target")
}

// withoutPaths is the variable that keeps the folders of this machine out of what rustc builds, so that two machines build the same
// bytes. The flags of the environment are not used.
func withoutPaths(root, target string) string {
	var flags []string
	home := os.Getenv("CARGO_HOME")
	if home == "" {
		if user, err := os.UserHomeDir(); err == nil {
			home = filepath.Join(user, ".cargo")
		}
	}
	// The last one that fits is used.
	for _, folder := range [][2]string{{home, "/cargo"}, {root, "/evenkeel"}, {target, "/target"}} {
		if folder[0] != "" {
			flags = append(flags, "--remap-path-prefix="+folder[0]+"="+folder[1])
		}
	}
	return "CARGO_ENCODED_RUSTFLAGS=" + strings.Join(flags, "\x1f")
}

// standardLibrary makes sure that Rust's library for a target is there.
func standardLibrary(ctx context.Context, progress io.Writer, target string) error {
	out, err := exec.CommandContext(ctx, "rustc", "--print", "target-libdir", "--target", target).Output()
	if err != nil {
		return fmt.Errorf("rustc: %w", err)
	}
	if _, err := os.Stat(strings.TrimSpace(string(out))); err == nil {
		return nil
	}
	fmt.Fprintf(progress, "installing Rust's library for %s\n", target)
	if out, err := exec.CommandContext(ctx, "rustup", "target", "add", target).CombinedOutput(); err != nil {
		return fmt.Errorf("rustup target add %s: %w: Rust's library for this target is needed, from rustup or a distribution\n%s", target, err, bytes.TrimSpace(out))
	}
	return nil
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
