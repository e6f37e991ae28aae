// Package cargo builds the programs and libraries that benchmarks measure and labs run.
package cargo

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"evenkeel.dev/evenkeel/hack/internal/child"
)

// Library is the file name of the plugin.
const Library = "libnccl_net_evenkeel.so"

// Built has the files that Cargo made.
type Built struct {
	// Executables are programs, by the names of their targets.
	Executables map[string]string
	// Files are libraries and all others, by their own names.
	Files map[string]string
	// Tests are the test programs.
	Tests []Test
}

// A Test is a test program: the unit tests of a library or a program, or those of a file or folder in tests/.
type Test struct {
	// Package is the folder of its package, in the workspace, such as crates/transport.
	Package string
	// Target is the name of what it tests, such as evenkeel_transport, or of its file or folder in tests/.
	Target string
	// Path is where Cargo put it. It is to run in the folder of its package.
	Path string
}

// Test returns the test program of a target.
func (b Built) Test(target string) (Test, error) {
	i := slices.IndexFunc(b.Tests, func(test Test) bool { return test.Target == target })
	if i < 0 {
		return Test{}, fmt.Errorf("cargo build: it made no tests of %s", target)
	}
	return b.Tests[i], nil
}

// everything are the arguments that build all programs, libraries, examples and tests of the workspace, but for the
// Python package. Which features the dependencies have follows from the packages that are built together: whoever
// builds one package, and then another, builds most of them twice.
var everything = []string{"build", "--all-targets", "--workspace", "--exclude", "evenkeel-python"}

// Everything builds all programs, libraries, examples and tests of the workspace, but for the Python package.
func Everything(ctx context.Context, root string) (Built, error) {
	return run(ctx, root, os.Stderr, everything...)
}

// EverythingTo is [Everything] with Cargo's messages written to progress.
func EverythingTo(ctx context.Context, root string, progress io.Writer) (Built, error) {
	return run(ctx, root, progress, everything...)
}

// Run runs a subcommand of Cargo, such as "build", in the plugin's workspace, and returns what it made.
func Run(ctx context.Context, root string, args ...string) (Built, error) {
	return run(ctx, root, os.Stderr, args...)
}

func run(ctx context.Context, root string, progress io.Writer, args ...string) (Built, error) {
	workspace := filepath.Join(root, "plugin")
	cmd := child.Command(ctx, workspace, "cargo", slices.Concat(args, []string{"--locked", "--message-format", "json-render-diagnostics"})...)
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, progress
	if err := child.Run(ctx, cmd); err != nil {
		return Built{}, fmt.Errorf("cargo %s: %w", args[0], err)
	}
	built := Built{Executables: map[string]string{}, Files: map[string]string{}}
	for line := range bytes.Lines(text.Bytes()) {
		var message struct {
			ManifestPath string `json:"manifest_path"`
			Target       struct{ Name string }
			Profile      struct{ Test bool }
			Executable   string
			Filenames    []string
		}
		if err := json.Unmarshal(line, &message); err != nil {
			return Built{}, fmt.Errorf("cargo %s: %w in its messages", args[0], err)
		}
		switch {
		case message.Executable == "":
		case !message.Profile.Test:
			built.Executables[message.Target.Name] = message.Executable
		default:
			folder, err := filepath.Rel(workspace, filepath.Dir(message.ManifestPath))
			if err != nil {
				return Built{}, fmt.Errorf("cargo %s: package of %s: %w", args[0], message.Executable, err)
			}
			built.Tests = append(built.Tests, Test{folder, message.Target.Name, message.Executable})
		}
		for _, file := range message.Filenames {
			built.Files[filepath.Base(file)] = file
		}
	}
	return built, nil
}

// Release builds packages, optimised, and returns the paths of these files, each a program's or a library's name.
func Release(ctx context.Context, root string, packages, files []string) ([]string, error) {
	args := []string{"build", "--release"}
	for _, name := range packages {
		args = append(args, "-p", name)
	}
	built, err := Run(ctx, root, args...)
	if err != nil {
		return nil, err
	}
	paths := make([]string, len(files))
	for i, name := range files {
		if paths[i] = built.Executables[name]; paths[i] == "" {
			paths[i] = built.Files[name]
		}
		if paths[i] == "" {
			return nil, fmt.Errorf("cargo build: it made no %s", name)
		}
	}
	return paths, nil
}
