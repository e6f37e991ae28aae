// Package toolbox builds the third-party programs of the local cluster and the tests. Each is built once, at the
// version that its recipe pins, and kept in a cache outside the checkout.
//
// The cache is $XDG_CACHE_HOME/evenkeel/tools (or ~/.cache/evenkeel/tools),
// one folder per version and recipe. A folder that exists is complete, and is never built again.
//
// EVENKEEL_TOOLS_DIR is a folder of ready programs, such as official releases. A tool is taken from it if all of its
// programs are there and have the right version; others are built as usual.
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
	for _, minor := range OlderKubernetes {
		names = append(names, "envtest-"+minor)
	}
	for _, r := range recipes {
		names = append(append(names, r.name), r.programs()...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Dir returns the folder of the named tool, building the tool first if it is
// not in the cache. The name is a tool's or one of its programs'.
func (t *Toolbox) Dir(ctx context.Context, name string) (string, error) {
	dirs, err := t.Dirs(ctx, name)
	if err != nil {
		return "", err
	}
	return dirs[0], nil
}

// Dirs is Dir for several tools. Those of one group that are missing are built together, which takes less time than one
// after another.
func (t *Toolbox) Dirs(ctx context.Context, names ...string) ([]string, error) {
	dirs := make([]string, len(names))
	wanted := map[string][]job{} // by the folder of their module
	for i, name := range names {
		r, err := findRecipe(name)
		if err != nil {
			return nil, err
		}
		folder := r.folder(t.root)
		version, err := r.version(folder)
		if err != nil {
			return nil, err
		}
		if t.ready != "" {
			found, err := takeReady(ctx, r, version, t.ready)
			if err != nil {
				return nil, err
			}
			if found {
				dirs[i] = t.ready
				continue
			}
		}
		key, err := r.key(folder, version)
		if err != nil {
			return nil, err
		}
		dirs[i] = filepath.Join(t.cache, key)
		if !exists(dirs[i]) {
			wanted[folder] = append(wanted[folder], job{r, version, dirs[i]})
		}
	}
	for folder, jobs := range wanted {
		if err := t.make(ctx, folder, jobs); err != nil {
			return nil, err
		}
	}
	return dirs, nil
}

// make builds tools of one folder, unless another run has built them meanwhile.
func (t *Toolbox) make(ctx context.Context, folder string, jobs []job) error {
	// All runs lock in the same order, so that two of them never wait for each other.
	slices.SortFunc(jobs, func(a, b job) int { return strings.Compare(a.dir, b.dir) })
	jobs = slices.CompactFunc(jobs, func(a, b job) bool { return a.dir == b.dir })
	for _, j := range jobs {
		unlock, err := Lock(ctx, j.dir+".lock", func() { fmt.Fprintf(t.progress, "waiting: another run builds %s\n", j) })
		if err != nil {
			return err
		}
		defer unlock()
	}
	jobs = slices.DeleteFunc(jobs, func(j job) bool { return exists(j.dir) })
	if len(jobs) == 0 {
		return nil
	}
	if err := build(ctx, folder, jobs, t.progress); err != nil {
		return fmt.Errorf("build %s: %w", jobs[0], err)
	}
	return nil
}

// Path returns the path of a program, building its tool first if needed. A
// tool's own name means its first program; "envtest" means the folder that
// [Toolbox.Envtest] returns, and "envtest-1.30" that of an older minor version.
func (t *Toolbox) Path(ctx context.Context, name string) (string, error) {
	if name == "envtest" {
		return t.Envtest(ctx, "")
	}
	if minor, ok := strings.CutPrefix(name, "envtest-"); ok {
		return t.Envtest(ctx, minor)
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
	return r.version(r.folder(t.root))
}

// Envtest returns a folder with kube-apiserver, etcd and kubectl in it: what controller-runtime's envtest expects in
// KUBEBUILDER_ASSETS. The API server is of the minor version, one of [OlderKubernetes]; empty: the local cluster's. The
// other two are the local cluster's.
func (t *Toolbox) Envtest(ctx context.Context, minor string) (string, error) {
	links := []string{"kube-apiserver", "kubectl", "etcd"}
	programs := slices.Clone(links)
	if minor != "" {
		if !slices.Contains(OlderKubernetes, minor) {
			return "", fmt.Errorf("unknown version %q of Kubernetes: there are %s", minor, strings.Join(OlderKubernetes, ", "))
		}
		programs[0] = olderAPIServer(minor)
	}
	dirs, err := t.Dirs(ctx, programs...)
	if err != nil {
		return "", err
	}
	var targets []string
	for i, program := range programs {
		target, err := filepath.Abs(filepath.Join(dirs[i], program))
		if err != nil {
			return "", err
		}
		targets = append(targets, target)
	}
	// The name has both versions, as two checkouts with different ones must not change each other's folder.
	kubernetes, err := t.Version(programs[0])
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
	for i, name := range links {
		link := filepath.Join(dir, name)
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
