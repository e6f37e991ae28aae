package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/ci/check/affected"
	"evenkeel.dev/evenkeel/hack/ci/check/results"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
	"evenkeel.dev/evenkeel/hack/internal/child"
)

// readLines calls take with each line, the last one with an end too.
func readLines(r io.Reader, take func(line string)) {
	reader := bufio.NewReader(r)
	for {
		line, err := reader.ReadString('\n')
		if line != "" {
			take(strings.TrimSuffix(line, "\n") + "\n")
		}
		if err != nil {
			return
		}
	}
}

// parse runs a command, and gives its standard output to the parser. Its standard error is noted.
func (t *task) parse(ctx context.Context, cmd *exec.Cmd, parser results.Parser) {
	out := &lines{take: parser.Line}
	// One writer at a time, as a parser's receiver may be the task's log.
	complaints := &lines{take: t.note}
	cmd.Stdout, cmd.Stderr = out, complaints
	err := child.Run(ctx, cmd)
	out.flush()
	complaints.flush()
	if err != nil {
		err = fmt.Errorf("%s: %w", filepath.Base(cmd.Path), err)
	}
	parser.End(err)
}

// command runs a command and shows its output.
func (t *task) command(ctx context.Context, dir, name string, args ...string) error {
	return t.show(ctx, child.Command(ctx, dir, name, args...))
}

// compile runs a command of Go that only compiles.
func (t *task) compile(ctx context.Context, args ...string) error {
	cmd := child.Command(ctx, t.root, "go", args...)
	cmd.Env = append(cmd.Environ(), toolbox.CompilerEnvironment...)
	return t.show(ctx, cmd)
}

func (t *task) show(ctx context.Context, cmd *exec.Cmd) error {
	out := t.progress()
	cmd.Stdout, cmd.Stderr = out, out
	if err := child.Run(ctx, cmd); err != nil {
		return fmt.Errorf("%s %s: %w", filepath.Base(cmd.Path), cmd.Args[1], err)
	}
	return nil
}

// A goProgram is a compiled test program of a Go package.
type goProgram struct{ pkg, dir, path string }

// compileGo compiles the tests of packages, for the stage that runs them. With tags, it leaves out packages that have
// no test which needs them, as stage unit runs those, and what the function leaves out.
func (t *task) compileGo(ctx context.Context, tests affected.Packages, leftOut func(pkg string) bool) error {
	files, order, err := t.listGo(ctx, tests.Tags, tests.Patterns...)
	if err != nil {
		return err
	}
	plain := map[string]string{}
	if tests.Tags != "" {
		if plain, _, err = t.listGo(ctx, "", tests.Patterns...); err != nil {
			return err
		}
	}
	order = slices.DeleteFunc(order, func(pkg string) bool {
		return strings.HasSuffix(files[pkg], "\t[][]") || files[pkg] == plain[pkg] || leftOut(pkg)
	})
	if len(order) == 0 {
		return fmt.Errorf("no tests in %s", strings.Join(tests.Patterns, " "))
	}
	var programs []goProgram
	for i, batch := range batches(order) {
		dir := filepath.Join(t.work, fileName(t.name), strconv.Itoa(i))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := t.compile(ctx, slices.Concat([]string{"test", "-c", "-vet=off", "-ldflags=-s -w", "-tags", tests.Tags, "-o", dir + "/"}, batch)...); err != nil {
			return err
		}
		for _, pkg := range batch {
			folder, _, _ := strings.Cut(files[pkg], "\t")
			p := goProgram{pkg, folder, filepath.Join(dir, path.Base(pkg)+".test")}
			if _, err := os.Stat(p.path); err != nil {
				return fmt.Errorf("go test -c made no program of %s: %w", pkg, err)
			}
			programs = append(programs, p)
		}
	}
	t.goTests[t.name] = programs
	if t.test2json == "" {
		program := filepath.Join(t.work, "test2json")
		if err := t.command(ctx, t.root, "go", "build", "-o", program, "cmd/test2json"); err != nil {
			return err
		}
		t.test2json = program
	}
	return nil
}

// batches divides packages so that no two of a batch have the same last element, which is the name of the test program.
func batches(packages []string) [][]string {
	var all [][]string
	seen := map[string]int{}
	for _, pkg := range packages {
		base := path.Base(pkg)
		i := seen[base]
		seen[base]++
		if i == len(all) {
			all = append(all, nil)
		}
		all[i] = append(all[i], pkg)
	}
	return all
}

// runGo runs the test programs that a set-up has compiled, one after the other.
func (t *task) runGo(ctx context.Context, setUp string, timeout time.Duration, env []string, args ...string) error {
	for _, p := range t.goTests[setUp] {
		if err := t.runGoProgram(ctx, p, timeout, env, args...); err != nil {
			return err
		}
	}
	return nil
}

func (t *task) runGoProgram(ctx context.Context, p goProgram, timeout time.Duration, env []string, args ...string) (err error) {
	parser := results.NewGo(t.receiver())
	convert := child.Command(ctx, p.dir, t.test2json, "-t", "-p", p.pkg)
	in, err := convert.StdinPipe()
	if err != nil {
		return err
	}
	out := &lines{take: parser.Line}
	convert.Stdout = out
	// It ends with its input. An interrupt must not end it before the tests have cleaned up.
	convert.Cancel = func() error { return nil }
	if err := convert.Start(); err != nil {
		return err
	}
	cmd := child.Command(ctx, p.dir, p.path, append([]string{"-test.v=test2json", "-test.paniconexit0", "-test.timeout=" + timeout.String()}, args...)...)
	cmd.Env = append(cmd.Environ(), env...)
	// Behind a type of its own, the pipe does not become the program's: what it leaves running could keep that open.
	to := struct{ io.Writer }{in}
	cmd.Stdout, cmd.Stderr = to, to
	failure := child.Run(ctx, cmd)
	if err := errors.Join(in.Close(), convert.Wait()); err != nil && ctx.Err() == nil {
		return fmt.Errorf("test2json: %w", err)
	}
	out.flush()
	parser.End(failure)
	return nil
}

// unitPackages lists the Go packages whose tests need nothing else; the others have stages of their own.
func (t *task) unitPackages(ctx context.Context) ([]string, error) {
	_, packages, err := t.listGo(ctx, "", "./...")
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(packages, inOtherStage), nil
}

// listGo lists packages in their order, and of each its folder and its files of tests.
func (t *task) listGo(ctx context.Context, tags string, patterns ...string) (files map[string]string, order []string, err error) {
	cmd := child.Command(ctx, t.root, "go", append([]string{"list", "-tags", tags, "-f", "{{.ImportPath}}\t{{.Dir}}\t{{.TestGoFiles}}{{.XTestGoFiles}}"}, patterns...)...)
	var out, complaints strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := child.Run(ctx, cmd); err != nil {
		return nil, nil, fmt.Errorf("go list: %w\n%s", err, complaints.String())
	}
	files = map[string]string{}
	for line := range strings.Lines(out.String()) {
		pkg, rest, _ := strings.Cut(strings.TrimSpace(line), "\t")
		files[pkg] = rest
		order = append(order, pkg)
	}
	return files, order, nil
}

func inOtherStage(pkg string) bool {
	return slices.ContainsFunc(notUnit, func(other string) bool { return short(pkg) == other || strings.HasPrefix(short(pkg), other+"/") })
}

// notUnit are the folders of Go packages that are not of stage unit.
var notUnit = []string{"operator/test", "charts", "e2e"}

// goTest compiles and runs tests of Go packages.
func (t *task) goTest(ctx context.Context, env []string, args ...string) {
	all := []string{"test", "-json", "-vet=off"}
	if !t.cache {
		all = append(all, "-count=1")
	}
	cmd := child.Command(ctx, t.root, "go", append(all, args...)...)
	cmd.Env = append(cmd.Environ(), env...)
	t.parse(ctx, cmd, results.NewGo(t.receiver()))
}

// rustPrograms runs the chosen test programs, which the set-up "rust tests" has built, one after the other.
func (t *task) rustPrograms(ctx context.Context, chosen func(cargo.Test) bool) error {
	ran := false
	for _, test := range t.rust.Tests {
		if chosen(test) && ctx.Err() == nil {
			ran = true
			t.rustProgram(ctx, test.Package+" "+test.Target, child.Command(ctx, filepath.Join(t.root, "plugin", test.Package), test.Path))
		}
	}
	if !ran && ctx.Err() == nil {
		return errors.New("no test program was chosen")
	}
	return context.Cause(ctx)
}

// rustProgram runs a Rust test program, or a command that runs one with the arguments at its end.
func (t *task) rustProgram(ctx context.Context, name string, cmd *exec.Cmd) {
	began := t.console.now()
	cmd.Args = append(cmd.Args, results.RustArguments...)
	cmd.Env = append(cmd.Environ(), results.RustEnvironment)
	t.parse(ctx, cmd, results.NewRust(name, t.receiver()))
	t.programEnded(name, t.console.now().Sub(began))
}

// cargoTest builds and runs Rust tests with Cargo, whose output is for people.
func (t *task) cargoTest(ctx context.Context, name string, env []string, args ...string) {
	began := t.console.now()
	cmd := child.Command(ctx, filepath.Join(t.root, "plugin"), "cargo", append([]string{"test", "--locked", "--no-fail-fast"}, args...)...)
	cmd.Env = append(cmd.Environ(), env...)
	t.parse(ctx, cmd, results.NewRust(name, t.receiver()))
	t.programEnded(name, t.console.now().Sub(began))
}

// pythonTests runs the tests of a folder. They must import the installed package, so they run in a folder without its
// source.
func (t *task) pythonTests(ctx context.Context, folder, python string, env ...string) error {
	began := t.console.now()
	events, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer events.Close()
	cmd := child.Command(ctx, filepath.Join(t.root, filepath.FromSlash(folder)), python, "-c", results.PythonScript)
	cmd.Env = append(cmd.Environ(), env...)
	cmd.ExtraFiles = []*os.File{theirs}
	out := &lines{take: t.note}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		return errors.Join(err, theirs.Close())
	}
	theirs.Close() //nolint:errcheck // the program has it
	parser := results.NewPython(folder, t.receiver())
	read := make(chan struct{})
	go func() {
		defer close(read)
		readLines(events, parser.Line)
	}()
	err = child.Wait(ctx, cmd)
	<-read
	out.flush()
	parser.End(err)
	t.programEnded(folder, t.console.now().Sub(began))
	return nil
}
