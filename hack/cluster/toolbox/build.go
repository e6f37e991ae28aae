package toolbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	buildTimeout = 60 * time.Minute
	buildTick    = 30 * time.Second // between progress lines of one build
)

// build compiles a recipe into dir. The work is done in another folder, which is then renamed, so dir is complete if it exists. The
// caller holds the lock for dir.
func build(ctx context.Context, r recipe, version, folder, dir string, progress io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, buildTimeout)
	defer cancel()
	start := time.Now()
	elapsed := func() time.Duration { return time.Since(start).Round(time.Second) }
	fmt.Fprintf(progress, "building %s %s (about %s the first time)\n", r.name, version, r.estimate)
	done := make(chan struct{})
	defer close(done)
	go func() {
		tick := time.NewTicker(buildTick)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				fmt.Fprintf(progress, "building %s %s ... %s\n", r.name, version, elapsed())
			case <-done:
				return
			}
		}
	}()

	// These folders are from builds that were killed, as this process holds the lock.
	unfinished := filepath.Join(filepath.Dir(dir), "."+filepath.Base(dir)+"-")
	stale, err := filepath.Glob(unfinished + "*")
	if err != nil {
		return err
	}
	for _, path := range stale {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	work, err := os.MkdirTemp(filepath.Dir(dir), filepath.Base(unfinished))
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if err := os.Chmod(work, 0o755); err != nil {
		return err
	}
	flags := []string{"-s", "-w"}
	if r.ldflags != nil {
		flags = append(flags, r.ldflags(version)...)
	}
	for _, b := range r.binaries {
		_, err := goCommand(ctx, folder, "build", "-trimpath", "-ldflags", strings.Join(flags, " "), "-o", filepath.Join(work, b.name), b.pkg)
		if err != nil {
			return err
		}
	}
	for _, link := range r.links {
		if err := os.Symlink(r.binaries[0].name, filepath.Join(work, link)); err != nil {
			return err
		}
	}
	for to, from := range r.keep {
		source, err := goCommand(ctx, folder, "list", "-m", "-f", "{{.Dir}}", r.module)
		if err != nil {
			return err
		}
		if err := os.CopyFS(filepath.Join(work, to), os.DirFS(filepath.Join(strings.TrimSpace(source), from))); err != nil {
			return err
		}
	}
	if err := os.Rename(work, dir); err != nil {
		return err
	}
	fmt.Fprintf(progress, "built %s %s in %s\n", r.name, version, elapsed())
	return nil
}

// goCommand runs the Go command in a recipe's folder, in an environment that
// makes the result depend on the recipe alone.
func goCommand(ctx context.Context, folder string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), "GOTOOLCHAIN=local", "GOFLAGS=-buildvcs=false", "CGO_ENABLED=0", "GOWORK=off", "GOOS=", "GOARCH=")
	// The compilers that go starts must stop with it, so the signal goes to the whole process group.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", fmt.Errorf("stopped: %w", context.Cause(ctx))
		}
		return "", fmt.Errorf("go %s in %s: %w\n%s", args[0], folder, err, lastLines(stderr.String(), 20))
	}
	return stdout.String(), nil
}

// lastLines returns the last n lines of text.
func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// Lock locks the file at path, waiting until ctx ends. It calls busy once if another process holds the lock. The kernel releases the
// lock of a process that dies.
func Lock(ctx context.Context, path string, busy func()) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for first := true; ; first = false {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { file.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			file.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if first {
			busy()
		}
		select {
		case <-ctx.Done():
			file.Close()
			return nil, fmt.Errorf("lock %s: %w", path, context.Cause(ctx))
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// versionArgs are the arguments that print the version of programs without --version.
var versionArgs = map[string][]string{
	"kubectl":                 {"version", "--client"},
	"helm":                    {"version"},
	"coredns":                 {"-version"},
	"containerd-shim-runc-v2": {"-v"},
}

// takeReady reports whether folder has every program of the recipe, each of
// the recipe's version. A program of another version is an error, as it is not the pinned one.
func takeReady(ctx context.Context, r recipe, version, folder string) (bool, error) {
	if r.module == "" || len(r.keep) > 0 {
		return false, nil // this repository's own source, or it needs more than the programs
	}
	names := r.links
	if len(names) == 0 {
		names = r.programs()
	}
	for _, name := range names {
		if !exists(filepath.Join(folder, name)) {
			return false, nil
		}
	}
	for _, name := range names {
		args, ok := versionArgs[name]
		if !ok {
			args = []string{"--version"}
		}
		path := filepath.Join(folder, name)
		ask, cancel := context.WithTimeout(ctx, 20*time.Second)
		output, err := exec.CommandContext(ask, path, args...).CombinedOutput()
		cancel()
		if err != nil {
			return false, fmt.Errorf("EVENKEEL_TOOLS_DIR: %s %s: %w", path, strings.Join(args, " "), err)
		}
		if !mentionsVersion(string(output), version) {
			return false, fmt.Errorf("EVENKEEL_TOOLS_DIR: %s is not version %s: it prints %q", path, version, lastLines(string(output), 3))
		}
	}
	return true, nil
}

// mentionsVersion reports whether text contains exactly this version, with or without its leading v.
func mentionsVersion(text, version string) bool {
	bare := regexp.QuoteMeta(strings.TrimPrefix(version, "v"))
	return regexp.MustCompile(`(^|[^0-9.])` + bare + `($|[^0-9.-])`).MatchString(text)
}
