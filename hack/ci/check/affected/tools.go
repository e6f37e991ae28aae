package affected

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Changed lists the files that differ from the commit where the checkout left ref: committed, changed and new ones.
func Changed(ctx context.Context, root, ref string) ([]string, error) {
	base, err := output(ctx, root, "git", "merge-base", ref, "HEAD")
	if err != nil {
		return nil, err
	}
	changed, err := output(ctx, root, "git", "diff", "--name-only", "--no-renames", "-z", strings.TrimSpace(base))
	if err != nil {
		return nil, err
	}
	added, err := output(ctx, root, "git", "ls-files", "--others", "--exclude-standard", "-z")
	if err != nil {
		return nil, err
	}
	files := strings.FieldsFunc(changed+added, func(r rune) bool { return r == 0 })
	slices.Sort(files)
	return slices.Compact(files), nil
}

// Load asks go list and cargo metadata for what the stages depend on.
func Load(ctx context.Context, root string, stages []Stage) (Graph, error) {
	g := Graph{Needs: map[string][]string{}}
	crates, err := loadCrates(ctx, root)
	if err != nil {
		return g, err
	}
	for _, c := range crates {
		g.Folders = append(g.Folders, c.folder)
	}
	// Of folders with several packages, the tests' tags select files, not the folder.
	all, err := goFolders(ctx, root, false, "", "./...")
	if err != nil {
		return g, err
	}
	g.Folders = append(g.Folders, all...)
	for _, s := range stages {
		var needs []string
		for _, tests := range s.Tests {
			folders, err := goFolders(ctx, root, true, tests.Tags, tests.Patterns...)
			if err != nil {
				return g, err
			}
			needs = append(needs, folders...)
		}
		if len(s.Programs) > 0 {
			folders, err := goFolders(ctx, root, false, "", s.Programs...)
			if err != nil {
				return g, err
			}
			needs = append(needs, folders...)
		}
		folders, err := closure(crates, s.Crates)
		if err != nil {
			return g, fmt.Errorf("stage %s: %w", s.Name, err)
		}
		needs = append(needs, folders...)
		slices.Sort(needs)
		g.Needs[s.Name] = slices.Compact(needs)
		g.Folders = append(g.Folders, g.Needs[s.Name]...)
	}
	slices.Sort(g.Folders)
	g.Folders = slices.Compact(g.Folders)
	return g, nil
}

// goFolders lists the folders, in the checkout, of packages and of all that they depend on, with their tests if tests
// is set.
func goFolders(ctx context.Context, root string, tests bool, tags string, patterns ...string) ([]string, error) {
	args := []string{"list", "-e", "-deps", "-f", "{{if not .Standard}}{{.Dir}}{{end}}"}
	if tests {
		args = append(args, "-test")
	}
	if tags != "" {
		args = append(args, "-tags", tags)
	}
	text, err := output(ctx, root, "go", append(args, patterns...)...)
	if err != nil {
		return nil, err
	}
	var folders []string
	for line := range strings.Lines(text) {
		if folder, err := filepath.Rel(root, strings.TrimSpace(line)); err == nil && filepath.IsLocal(folder) {
			folders = append(folders, filepath.ToSlash(folder))
		}
	}
	slices.Sort(folders)
	return slices.Compact(folders), nil
}

// A crate is a Rust package of the workspace, and the names of those that it needs: needs for itself, dev for its
// tests.
type crate struct {
	name, folder string
	needs, dev   []string
}

func loadCrates(ctx context.Context, root string) ([]crate, error) {
	text, err := output(ctx, filepath.Join(root, "plugin"), "cargo", "metadata", "--format-version", "1", "--no-deps", "--locked")
	if err != nil {
		return nil, err
	}
	return parseCrates(root, text)
}

// parseCrates reads the output of cargo metadata.
func parseCrates(root, text string) ([]crate, error) {
	var told struct {
		Packages []struct {
			Name         string
			ManifestPath string `json:"manifest_path"`
			Dependencies []struct{ Name, Kind, Path string }
		}
	}
	if err := json.Unmarshal([]byte(text), &told); err != nil {
		return nil, fmt.Errorf("cargo metadata: %w", err)
	}
	var crates []crate
	for _, p := range told.Packages {
		folder, err := filepath.Rel(root, filepath.Dir(p.ManifestPath))
		if err != nil {
			return nil, fmt.Errorf("cargo metadata: %w", err)
		}
		c := crate{name: p.Name, folder: filepath.ToSlash(folder)}
		for _, d := range p.Dependencies {
			switch {
			case d.Path == "": // from a registry
			case d.Kind == "dev":
				c.dev = append(c.dev, d.Name)
			default:
				c.needs = append(c.needs, d.Name)
			}
		}
		crates = append(crates, c)
	}
	return crates, nil
}

// closure lists the folders of crates, and of all that they and their tests need.
func closure(crates []crate, roots []string) ([]string, error) {
	known := map[string]crate{}
	for _, c := range crates {
		known[c.name] = c
	}
	found := map[string]bool{}
	var visit func(name string)
	visit = func(name string) {
		if found[name] {
			return
		}
		found[name] = true
		for _, need := range known[name].needs {
			visit(need)
		}
	}
	if slices.Contains(roots, "*") {
		roots = nil
		for _, c := range crates {
			roots = append(roots, c.name)
		}
	}
	for _, root := range roots {
		c, ok := known[root]
		if !ok {
			return nil, fmt.Errorf("there is no crate %s", root)
		}
		visit(root)
		for _, need := range c.dev {
			visit(need)
		}
	}
	var folders []string
	for name := range found {
		folders = append(folders, known[name].folder)
	}
	slices.Sort(folders)
	return folders, nil
}

func output(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	text, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) && len(exit.Stderr) > 0 {
			return "", fmt.Errorf("%s %s: %s", name, args[0], strings.TrimSpace(string(exit.Stderr)))
		}
		return "", fmt.Errorf("%s %s: %w", name, args[0], err)
	}
	return string(text), nil
}
