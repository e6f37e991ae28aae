package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// verify builds the release again, from a clone of the commit in another folder, and compares it with what is in the folder.
func (r *release) verify(ctx context.Context, folder string) error {
	published, err := os.ReadFile(filepath.Join(folder, sumsFile))
	if err != nil {
		return fmt.Errorf("%s is no release: build it first: %w", folder, err)
	}
	work, err := os.MkdirTemp("", "evenkeel-release-")
	if err != nil {
		return fmt.Errorf("folder for the second build: %w", err)
	}
	defer os.RemoveAll(work)
	second := *r
	second.root = filepath.Join(work, "clone")
	second.folder = filepath.Join(second.root, "dist", "release", r.version)
	if out, err := exec.CommandContext(ctx, "git", "clone", "--quiet", r.root, second.root).CombinedOutput(); err != nil {
		return fmt.Errorf("clone %s: %w\n%s", r.root, err, out)
	}
	// All that is built finds the checkout by the working directory.
	if err := os.Chdir(second.root); err != nil {
		return fmt.Errorf("second build: %w", err)
	}
	if err := second.build(ctx); err != nil {
		return fmt.Errorf("second build: %w", err)
	}
	again, err := os.ReadFile(filepath.Join(second.folder, sumsFile))
	if err != nil {
		return fmt.Errorf("second build: %w", err)
	}
	if different := differences(string(published), string(again)); len(different) > 0 {
		return fmt.Errorf("%d files differ: %s", len(different), strings.Join(different, ", "))
	}
	r.report("all %d files are the same", strings.Count(string(again), "\n"))
	return nil
}

// differences are the names of files that two texts of checksums do not have alike, sorted.
func differences(a, b string) []string {
	read := func(text string) map[string]string {
		sums := map[string]string{}
		for line := range strings.Lines(text) {
			if sum, name, ok := strings.Cut(strings.TrimSpace(line), "  "); ok {
				sums[name] = sum
			}
		}
		return sums
	}
	first, second := read(a), read(b)
	var names []string
	for name, sum := range first {
		if second[name] != sum {
			names = append(names, name)
		}
	}
	for name := range second {
		if _, ok := first[name]; !ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
