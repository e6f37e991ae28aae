// Package toolbox builds the third-party programs of the local cluster and the tests. Each is built once, at the version that its
// recipe pins, and kept in a cache outside the checkout.
//
// The cache is $XDG_CACHE_HOME/evenkeel/tools (or ~/.cache/evenkeel/tools),
// one folder per version and recipe. A folder that exists is complete, and is never built again.
//
// EVENKEEL_TOOLS_DIR is a folder of ready programs, such as official releases. A tool is taken from it if all of its programs are
// there and have the right version; others are built as usual.
package toolbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A Toolbox finds programs by name, and builds them if needed.
type Toolbox struct {
	cache    string // folder of tool folders
	root     string // the checkout
	ready    string // EVENKEEL_TOOLS_DIR, or empty
	progress io.Writer
}

// New opens the toolbox of the checkout that the working directory is in.
// Progress of builds is written to progress.
func New(progress io.Writer) (*Toolbox, error) {
	root, err := Root()
	if err != nil {
		return nil, err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("no folder for the cache of tools: %w", err)
	}
	ready := os.Getenv("EVENKEEL_TOOLS_DIR")
	if ready != "" {
		if ready, err = filepath.Abs(ready); err != nil {
			return nil, err
		}
		if info, err := os.Stat(ready); err != nil || !info.IsDir() {
			return nil, fmt.Errorf("EVENKEEL_TOOLS_DIR: %s is not a folder of programs", ready)
		}
	}
	return &Toolbox{
		cache:    filepath.Join(cache, "evenkeel", "tools"),
		root:     root,
		ready:    ready,
		progress: progress,
	}, nil
}

// Names lists every tool and program of the toolbox, sorted.
func Names() []string {
	names := []string{"envtest"}
	for _, r := range recipes {
		names = append(append(names, r.name), r.programs()...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Dir returns the folder of the named tool, building the tool first if it is
// not in the cache. The name is a tool's or one of its programs'.
func (t *Toolbox) Dir(ctx context.Context, name string) (string, error) {
	r, err := findRecipe(name)
	if err != nil {
		return "", err
	}
	folder := filepath.Join(t.root, "hack", "cluster", "tools", r.name)
	version, err := r.version(folder)
	if err != nil {
		return "", err
	}
	if t.ready != "" {
		if found, err := takeReady(ctx, r, version, t.ready); err != nil || found {
			return t.ready, err
		}
	}
	key, err := r.key(folder, version)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(t.cache, key)
	if exists(dir) {
		return dir, nil
	}
	unlock, err := Lock(ctx, dir+".lock", func() {
		fmt.Fprintf(t.progress, "waiting: another run builds %s %s\n", r.name, version)
	})
	if err != nil {
		return "", err
	}
	defer unlock()
	if exists(dir) {
		return dir, nil
	}
	if err := build(ctx, r, version, folder, dir, t.progress); err != nil {
		return "", fmt.Errorf("build %s %s: %w", r.name, version, err)
	}
	return dir, nil
}

// Path returns the path of a program, building its tool first if needed. A
// tool's own name means its first program; "envtest" means the folder that
// [Toolbox.Envtest] returns.
func (t *Toolbox) Path(ctx context.Context, name string) (string, error) {
	if name == "envtest" {
		return t.Envtest(ctx)
	}
	r, err := findRecipe(name)
	if err != nil {
		return "", err
	}
	dir, err := t.Dir(ctx, name)
	if err != nil {
		return "", err
	}
	if !slices.Contains(r.programs(), name) {
		name = r.binaries[0].name
	}
	return filepath.Join(dir, name), nil
}

// Version returns the exact version of a tool, as its recipe pins it.
func (t *Toolbox) Version(name string) (string, error) {
	r, err := findRecipe(name)
	if err != nil {
		return "", err
	}
	return r.version(filepath.Join(t.root, "hack", "cluster", "tools", r.name))
}

// Envtest returns a folder with kube-apiserver, etcd and kubectl in it: what
// controller-runtime's envtest expects in KUBEBUILDER_ASSETS.
func (t *Toolbox) Envtest(ctx context.Context) (string, error) {
	programs := []string{"kube-apiserver", "kubectl", "etcd"}
	targets := make([]string, len(programs))
	for i, program := range programs {
		path, err := t.Path(ctx, program)
		if err != nil {
			return "", err
		}
		if targets[i], err = filepath.Abs(path); err != nil {
			return "", err
		}
	}
	// The name has both versions, as two checkouts with different ones must not change each other's folder.
	kubernetes, err := t.Version("kubernetes")
	if err != nil {
		return "", err
	}
	etcd, err := t.Version("etcd")
	if err != nil {
		return "", err
	}
	dir := filepath.Join(t.cache, fmt.Sprintf("envtest-%s-etcd-%s", kubernetes, strings.TrimPrefix(etcd, "v")))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	unlock, err := Lock(ctx, dir+".lock", func() {})
	if err != nil {
		return "", err
	}
	defer unlock()
	for i, program := range programs {
		link := filepath.Join(dir, program)
		if target, err := os.Readlink(link); err == nil && target == targets[i] {
			continue
		}
		if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		if err := os.Symlink(targets[i], link); err != nil {
			return "", err
		}
	}
	return dir, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
