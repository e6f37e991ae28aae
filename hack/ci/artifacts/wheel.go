package artifacts

import (
	"archive/zip"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// maturinVersion is also in plugin/bindings/python/pyproject.toml, for builds without this program.
const maturinVersion = "1.16.0"

// wheelTime is the time of the files in a wheel, in seconds of Unix: the beginning of 1980, before which ZIP has no
// time. Cargo has it too, as it builds C anew when the time is another.
const wheelTime = 315532800

// Wheel builds the wheel for this machine's processor, for Python 3.11 and later and glibc of [GlibcVersion] or later,
// and returns its path in dist/wheel/. Quick is [Builder]'s.
func Wheel(ctx context.Context, root string, progress io.Writer, quick bool) (string, error) {
	return Builder{Quick: quick, Progress: progress}.Wheel(ctx, root, filepath.Join(root, "dist", "wheel"))
}

// Wheel is [Wheel] for the builder's processor. The wheel is in out, which it empties.
func (b Builder) Wheel(ctx context.Context, root, out string) (string, error) {
	t, err := newToolchain(ctx, root, b.progress(), b.arch())
	if err != nil {
		return "", err
	}
	b.report("building the plugin (cargo, " + profile(b.Quick) + ")")
	built, err := t.programs(ctx, b.progress(), b.Quick, b.Stamp)
	if err != nil {
		return "", err
	}
	return t.wheel(ctx, b.progress(), b.Quick, out, filepath.Join(built, "libnccl_net_evenkeel.so"))
}

// wheel builds the wheel with a plugin that is built already. It is in out, which is emptied.
func (t *toolchain) wheel(ctx context.Context, progress io.Writer, quick bool, out, source string) (string, error) {
	plugin := filepath.Join(t.root, "plugin")
	fmt.Fprintln(progress, "building the wheel (maturin)")
	if err := CheckGlibc(source, GlibcVersion); err != nil {
		return "", err
	}
	library, err := os.ReadFile(source)
	if err != nil {
		return "", fmt.Errorf("read the plugin that cargo built: %w", err)
	}
	lib := filepath.Join(plugin, "bindings", "python", "evenkeel", "lib")
	if err := os.MkdirAll(lib, 0o755); err != nil {
		return "", fmt.Errorf("folder for the plugin: %w", err)
	}
	for _, name := range []string{Libraries[0], RCCLLibrary} {
		if err := os.WriteFile(filepath.Join(lib, name), library, 0o755); err != nil {
			return "", fmt.Errorf("copy the plugin into the package: %w", err)
		}
	}
	// A wheel of another version or machine could be confused with this one.
	if err := os.RemoveAll(out); err != nil {
		return "", fmt.Errorf("clear %s: %w", out, err)
	}
	// maturin refuses a library that needs a later glibc than the wheel's tag promises.
	cmd := exec.CommandContext(ctx, t.maturin, "build", "--locked", "--profile", profile(quick), "--target", t.target, "--compatibility", "manylinux_"+strings.ReplaceAll(GlibcVersion, ".", "_"),
		"--target-dir", t.folder, "--out", out)
	cmd.Env = t.env
	if err := runCommand(cmd, filepath.Join(plugin, "bindings", "python")); err != nil {
		return "", err
	}
	wheels, err := filepath.Glob(filepath.Join(out, "evenkeel-*.whl"))
	if err != nil || len(wheels) != 1 {
		return "", fmt.Errorf("maturin built %d wheels in %s, not one (%v)", len(wheels), out, err)
	}
	return wheels[0], withoutCheckout(wheels[0], t.root)
}

// unpackWheel puts what a wheel would install into a folder for PYTHONPATH, in the place of what is there: the package,
// and the metadata by which torch finds its backend. It leaves out the plugin, which the images have beside that
// folder.
func unpackWheel(wheel, folder string) error {
	if err := os.RemoveAll(folder); err != nil {
		return fmt.Errorf("clear %s: %w", folder, err)
	}
	archive, err := zip.OpenReader(wheel)
	if err != nil {
		return fmt.Errorf("open the wheel: %w", err)
	}
	defer archive.Close()
	for _, f := range archive.File {
		if f.FileInfo().IsDir() || strings.HasPrefix(f.Name, "evenkeel/lib/") {
			continue
		}
		if err := unpackFile(f, folder); err != nil {
			return fmt.Errorf("unpack %s of the wheel: %w", f.Name, err)
		}
	}
	return nil
}

func unpackFile(f *zip.File, folder string) error {
	if !filepath.IsLocal(f.Name) {
		return errors.New("it leads out of the folder")
	}
	path := filepath.Join(folder, f.Name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	in, err := f.Open()
	if err != nil {
		return err
	}
	defer in.Close()
	content, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	return os.WriteFile(path, content, f.Mode().Perm())
}

// runCommand runs a command that must succeed in a folder, and shows its output if it does not.
func runCommand(cmd *exec.Cmd, dir string) error {
	var out bytes.Buffer
	cmd.Dir = dir
	cmd.Stdout, cmd.Stderr = &out, &out
	// Compilers that it starts must stop with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", filepath.Base(cmd.Path), cmd.Args[1], err, bytes.TrimSpace(out.Bytes()))
	}
	return nil
}
