// Package cargo builds the programs and libraries that benchmarks measure and labs run.
package cargo

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Library is the file name of the plugin.
const Library = "libnccl_net_evenkeel.so"

// Built has the files that Cargo made.
type Built struct {
	// Executables are programs, and test binaries, by the names of their targets.
	Executables map[string]string
	// Files are libraries and all others, by their own names.
	Files map[string]string
}

// Run runs a subcommand of Cargo, such as "build", in the plugin's workspace, and returns what it made.
func Run(ctx context.Context, root string, args ...string) (Built, error) {
	cmd := exec.CommandContext(ctx, "cargo", append(args, "--locked", "--message-format", "json-render-diagnostics")...)
	cmd.Dir, cmd.Stderr = filepath.Join(root, "plugin"), os.Stderr
	text, err := cmd.Output()
	if err != nil {
		return Built{}, fmt.Errorf("cargo %s: %w", args[0], err)
	}
	built := Built{Executables: map[string]string{}, Files: map[string]string{}}
	for line := range bytes.Lines(text) {
		var message struct {
			Target     struct{ Name string }
			Executable string
			Filenames  []string
		}
		if err := json.Unmarshal(line, &message); err != nil {
			return Built{}, fmt.Errorf("cargo %s: %w in its messages", args[0], err)
		}
		if message.Executable != "" {
			built.Executables[message.Target.Name] = message.Executable
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
