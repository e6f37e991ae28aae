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
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	buildTimeout = 60 * time.Minute
	buildTick    = 30 * time.Second // between progress lines of one build
)

// A job is a tool that is to be built into dir.
type job struct {
	recipe
	version, dir string
}

func (j job) String() string { return j.name + " " + j.version }

// build compiles tools of one folder with one "go build". The work is done in another folder, whose parts are then
// renamed, so a tool's dir is complete if it exists. The caller holds the locks of all dirs.
func build(ctx context.Context, folder string, jobs []job, progress io.Writer) (err error) {
	ctx, cancel := context.WithTimeout(ctx, buildTimeout)
	defer cancel()
	var names []string
	var estimate time.Duration
	for _, j := range jobs {
		names, estimate = append(names, j.String()), estimate+j.estimate
	}
	what := strings.Join(names, ", ")
	start := time.Now()
	elapsed := func() time.Duration { return time.Since(start).Round(time.Second) }
	fmt.Fprintf(progress, "building %s (up to %s of processor time the first time)\n", what, estimate)
	done := make(chan struct{})
	defer close(done)
	go func() {
		tick := time.NewTicker(buildTick)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				fmt.Fprintf(progress, "building %s ... %s\n", what, elapsed())
			case <-done:
				return
			}
		}
	}()

	work, err := workFolder(jobs[0].dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	programs := filepath.Join(work, "programs")
	if err := compile(ctx, folder, programs, jobs); err != nil {
		return err
	}
	for _, j := range jobs {
		whole := filepath.Join(work, j.name)
		if err := j.assemble(ctx, folder, programs, whole); err != nil {
			return err
		}
		if err := os.Rename(whole, j.dir); err != nil {
			return err
		}
	}
	fmt.Fprintf(progress, "built %s in %s\n", what, elapsed())
	return nil
}

// compile builds the programs of tools into a new folder.
func compile(ctx context.Context, folder, programs string, jobs []job) error {
	const small = "-s -w"
	args := []string{"build", "-ldflags=" + small}
	var packages []string
	for _, j := range jobs {
		for _, b := range j.binaries {
			packages = append(packages, b.pkg)
			if j.ldflags != nil {
				args = append(args, "-ldflags="+b.pkg+"="+small+" "+strings.Join(j.ldflags(j.version), " "))
			}
		}
	}
	// Several programs are named as their packages, which a test checks for the recipes that share a folder.
	out := programs + "/"
	if len(packages) == 1 {
		out += jobs[0].binaries[0].name
	}
	_, err := goCommand(ctx, folder, slices.Concat(args, []string{"-o", out}, packages)...)
	return err
}

// assemble makes the tool's folder whole, with its programs.
func (j job) assemble(ctx context.Context, folder, programs, whole string) error {
	if err := os.Mkdir(whole, 0o755); err != nil {
		return err
	}
	for _, b := range j.binaries {
		if err := os.Rename(filepath.Join(programs, b.name), filepath.Join(whole, b.name)); err != nil {
			return err
		}
	}
	for _, link := range j.links {
		if err := os.Symlink(j.binaries[0].name, filepath.Join(whole, link)); err != nil {
			return err
		}
	}
	for to, from := range j.keep {
		source, err := goCommand(ctx, folder, "list", "-m", "-f", "{{.Dir}}", j.module)
		if err != nil {
			return err
		}
		if err := os.CopyFS(filepath.Join(whole, to), os.DirFS(filepath.Join(strings.TrimSpace(source), from))); err != nil {
			return err
		}
	}
	return nil
}

// workFolder makes a folder beside dir. It removes what killed builds of dir left, as this process holds the lock.
func workFolder(dir string) (string, error) {
	unfinished := filepath.Join(filepath.Dir(dir), "."+filepath.Base(dir)+"-")
	stale, err := filepath.Glob(unfinished + "*")
	if err != nil {
		return "", err
	}
	for _, path := range stale {
		if err := os.RemoveAll(path); err != nil {
			return "", err
		}
	}
	return os.MkdirTemp(filepath.Dir(dir), filepath.Base(unfinished))
}

// GoFlags are the flags of all builds of Go in this repository, in the Makefile too: with the same flags and the same
// versions, what programs share is compiled once. Programs are without paths of this machine. Their symbols for
// debuggers, which take a tenth of the time, are left out, and functions are not inlined, which takes a third. Those of
// the standard library are: its cryptography would take half again as long.
const GoFlags = "-trimpath '-gcflags=all=-dwarf=false -l' -gcflags=std=-dwarf=false"

// GoReleaseFlags are those of what is published.
const GoReleaseFlags = "-trimpath"

// CompilerEnvironment has Go's compiler and linters collect no garbage below a limit, which takes a tenth less time.
var CompilerEnvironment = []string{"GOGC=off", "GOMEMLIMIT=2GiB"}

// goCommand runs the Go command in a recipe's folder, in an environment that
// makes the result depend on the recipe alone.
func goCommand(ctx context.Context, folder string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), "GOTOOLCHAIN=local", "GOFLAGS=-buildvcs=false "+GoFlags, "CGO_ENABLED=0", "GOWORK=off", "GOOS=", "GOARCH=")
	cmd.Env = append(cmd.Env, CompilerEnvironment...)
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

// Lock locks the file at path, waiting until ctx ends. It calls busy once if another process holds the lock. The kernel
// releases the lock of a process that dies.
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
