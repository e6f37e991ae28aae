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
	"runtime"
	"strconv"
	"strings"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

const (
	// GlibcVersion is the oldest glibc that what is shipped runs with: that of RHEL 8. Debian 11 and Ubuntu 20.04 have
	// 2.31. Rust's standard library needs getrandom, which 2.25 brought.
	GlibcVersion = "2.28"

	// zig's linker brings the symbol versions of every glibc, so no sysroot of an old distribution is needed.
	zigVersion = "0.17.1"

	// cargo-auditable writes the list of crates into each binary, where scanners of images look for it.
	auditableVersion = "0.7.7"
)

// shipped are the packages of the plugin's workspace that are in images and wheels. They are built together: cargo
// chooses the features of what they share by all of them, so that the plugin has the same bytes everywhere, and maturin
// finds what the Python package needs.
var shipped = []string{"evenkeel-nccl-plugin", "evenkeel-bench", "evenkeel-mpi", "evenkeel-reduction-server", "evenkeel-python"}

// Rust builds what is shipped of the plugin's workspace for this machine's processor, and returns the folder that has
// the programs and libraries under cargo's names for them. Quick is [Builder]'s.
func Rust(ctx context.Context, root string, progress io.Writer, quick bool) (string, error) {
	t, err := newToolchain(ctx, root, progress, runtime.GOARCH)
	if err != nil {
		return "", err
	}
	fmt.Fprintf(progress, "building the plugin (cargo, %s)\n", profile(quick))
	return t.programs(ctx, progress, quick, false)
}

// A toolchain builds what is shipped for one processor. Cargo and maturin use the same linker and flags.
type toolchain struct {
	root, target, folder string
	maturin              string
	env                  []string
}

// newToolchain installs what is missing of the toolchain for a processor that Go names.
func newToolchain(ctx context.Context, root string, progress io.Writer, goarch string) (*toolchain, error) {
	target, err := rustTarget(goarch)
	if err != nil {
		return nil, err
	}
	if err := standardLibrary(ctx, progress, target); err != nil {
		return nil, err
	}
	// In one virtual environment, where maturin finds zig.
	maturin, err := toolbox.PythonTool(ctx, progress, "maturin", maturinVersion, "maturin", "ziglang=="+zigVersion)
	if err != nil {
		return nil, err
	}
	t := &toolchain{root: root, target: target, folder: targetFolder(root), maturin: maturin}
	processor, _, _ := strings.Cut(target, "-")
	linker, err := t.script("cc", fmt.Sprintf("zig cc -- -fno-sanitize=all -target %s-linux-gnu.%s", processor, GlibcVersion))
	if err != nil {
		return nil, err
	}
	archiver, err := t.script("ar", "zig ar --")
	if err != nil {
		return nil, err
	}
	name := strings.ReplaceAll(target, "-", "_")
	t.env = append(os.Environ(), withoutPaths(root, t.folder),
		"CARGO_TARGET_"+strings.ToUpper(name)+"_LINKER="+linker, "CC_"+name+"="+linker, "AR_"+name+"="+archiver,
		"SOURCE_DATE_EPOCH="+strconv.Itoa(wheelTime),
		// Without this file, maturin describes Python to PyO3 in another place than cargo does, and each builds PyO3 after
		// the other.
		"PYO3_CONFIG_FILE="+filepath.Join(root, "plugin", "bindings", "python", "pyo3-config.txt"),
		"PATH="+filepath.Dir(maturin)+string(os.PathListSeparator)+os.Getenv("PATH"))
	return t, nil
}

// script writes a program that runs a command of maturin, and returns its path.
func (t *toolchain) script(name, command string) (string, error) {
	path := filepath.Join(t.folder, "zig", t.target+"-"+name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", fmt.Errorf("linker: %w", err)
	}
	text := fmt.Appendf(nil, "#!/bin/sh\nexec %q %s \"$@\"\n", t.maturin, command)
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, text) {
		return path, nil // another run may be using it
	}
	if err := os.WriteFile(path, text, 0o755); err != nil {
		return "", fmt.Errorf("linker: %w", err)
	}
	return path, nil
}

// programs builds the shipped packages: optimized, for glibc of [GlibcVersion] or later, without paths of this machine,
// and with the list of its crates in each binary if listed. It returns the folder in which cargo leaves them.
func (t *toolchain) programs(ctx context.Context, progress io.Writer, quick, listed bool) (string, error) {
	args := []string{"build", "--profile", profile(quick), "--locked", "--target", t.target}
	env := t.env
	if listed {
		auditable, err := toolbox.CargoTool(ctx, progress, "cargo-auditable", auditableVersion)
		if err != nil {
			return "", err
		}
		args = append([]string{"auditable"}, args...)
		env = append(env, "PATH="+filepath.Dir(auditable)+string(os.PathListSeparator)+filepath.Dir(t.maturin)+string(os.PathListSeparator)+os.Getenv("PATH"))
	}
	for _, p := range shipped {
		args = append(args, "-p", p)
	}
	cmd := exec.CommandContext(ctx, "cargo", args...)
	cmd.Env = env
	if err := runCommand(cmd, filepath.Join(t.root, "plugin")); err != nil {
		return "", err
	}
	return filepath.Join(t.folder, t.target, profile(quick)), nil
}

// profile is cargo's.
func profile(quick bool) string {
	if quick {
		return "quick"
	}
	return "release"
}

// targetFolder is cargo's.
func targetFolder(root string) string {
	if folder := os.Getenv("CARGO_TARGET_DIR"); folder != "" {
		return folder
	}
	return filepath.Join(root, "plugin", "target")
}

// withoutPaths is the variable that keeps the folders of this machine out of what rustc builds, so that two machines
// build the same bytes. The flags of the environment are not used.
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

// CheckGlibc returns an error if a program or library needs symbols that glibc has only since a later version than
// limit, such as "2.28". It names the file and a symbol.
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

// laterVersion reports whether version a, numbers with dots between them, is later than b. What is no number
// ("PRIVATE") is later than all.
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
