package toolbox

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/mod/modfile"
)

// Module is the path of this repository's Go module.
const Module = "evenkeel.dev/evenkeel"

// Root returns the folder of the checkout that the working directory is in.
func Root() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		text, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && modfile.ModulePath(text) == Module {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("%s is not inside a checkout of %s: run this from the repository", start, Module)
		}
	}
}

// Commit is the commit that is checked out at root, with a note if these folders have uncommitted changes.
func Commit(ctx context.Context, root string, folders ...string) string {
	git := func(args ...string) (string, error) {
		text, err := exec.CommandContext(ctx, "git", append([]string{"-C", root}, args...)...).Output()
		return strings.TrimSpace(string(text)), err
	}
	hash, err := git("rev-parse", "--short=12", "HEAD")
	if err != nil {
		return "unknown"
	}
	changes, err := git(append([]string{"status", "--porcelain", "--"}, folders...)...)
	if err != nil || changes != "" {
		hash += ", with changes"
	}
	return hash
}
