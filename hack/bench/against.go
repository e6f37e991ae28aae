package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/runner"
	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
)

// buildCommit builds the plugin of a commit in a worktree of its own, with that commit's sources and versions of
// dependencies. The library stays in the user's cache, so that a commit is compiled once; an interrupted build goes on.
// It returns the plugin under the commit's short hash.
func buildCommit(ctx context.Context, root, commit string) (runner.Plugin, error) {
	hash, err := git(ctx, root, "rev-parse", "--verify", "--short=12", commit+"^{commit}")
	if err != nil {
		return runner.Plugin{}, fmt.Errorf("--against %s: no commit of this checkout (git fetch --unshallow brings earlier ones): %w", commit, err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return runner.Plugin{}, fmt.Errorf("--against %s: %w", commit, err)
	}
	folder := filepath.Join(cache, "evenkeel", "bench", "commits", hash)
	plugin := runner.Plugin{Name: hash, Library: filepath.Join(folder, cargo.Library)}
	if _, err := os.Stat(plugin.Library); err == nil {
		return plugin, nil
	}
	if err := buildInWorktree(ctx, root, hash, filepath.Join(folder, "worktree"), plugin.Library); err != nil {
		return runner.Plugin{}, fmt.Errorf("--against %s: %w", commit, err)
	}
	return plugin, nil
}

// buildInWorktree builds the plugin of a commit, and copies it to a path.
func buildInWorktree(ctx context.Context, root, hash, tree, library string) error {
	if _, err := os.Stat(tree); errors.Is(err, fs.ErrNotExist) {
		// A worktree whose folder was removed would be in the way.
		if _, err := git(ctx, root, "worktree", "prune"); err != nil {
			return err
		}
		if _, err := git(ctx, root, "worktree", "add", "--detach", tree, hash); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	built, err := artifacts.Rust(ctx, tree, os.Stderr, false)
	if err != nil {
		return fmt.Errorf("build in %s: %w", tree, err)
	}
	content, err := os.ReadFile(filepath.Join(built, cargo.Library))
	if err != nil {
		return err
	}
	if err := os.WriteFile(library+".new", content, 0o755); err != nil {
		return err
	}
	if err := os.Rename(library+".new", library); err != nil {
		return err
	}
	_, err = git(ctx, root, "worktree", "remove", "--force", tree)
	return err
}

func git(ctx context.Context, root string, args ...string) (string, error) {
	text, err := exec.CommandContext(ctx, "git", append([]string{"-C", root}, args...)...).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return "", fmt.Errorf("git %s: %w: %s", args[0], err, strings.TrimSpace(string(exit.Stderr)))
	} else if err != nil {
		return "", fmt.Errorf("git: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}
