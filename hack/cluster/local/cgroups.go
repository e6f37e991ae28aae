package local

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A hierarchy is one cgroup tree that the calling process belongs to.
type hierarchy struct {
	// controllers as /proc/self/cgroup names them: "memory", "cpu,cpuacct",
	// "name=systemd"; empty for version 2's tree.
	controllers string
	// path of the process's group below the tree's root.
	path string
}

// mountName is the usual mount point of the tree under /sys/fs/cgroup.
func (h hierarchy) mountName() string { return strings.TrimPrefix(h.controllers, "name=") }

// ownHierarchies reads the calling process's groups.
func ownHierarchies() ([]hierarchy, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	return parseHierarchies(string(text))
}

func parseHierarchies(text string) ([]hierarchy, error) {
	var all []hierarchy
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			return nil, fmt.Errorf("/proc/self/cgroup: cannot read %q", line)
		}
		all = append(all, hierarchy{controllers: fields[1], path: fields[2]})
	}
	return all, nil
}

// onlyV2 reports whether version 2's tree is the only one.
func onlyV2(all []hierarchy) bool { return len(all) == 1 && all[0].controllers == "" }

// makeCgroups creates a group of the given name in every tree, for a node, and returns their folders.
//
// In a version 1 tree the group is created below the caller's own, whose limits then apply to the cluster too. Where
// version 2 is alone it is created at the root of the tree: a group with processes, such as the caller's, cannot
// delegate controllers.
func makeCgroups(name string) ([]string, error) {
	const root = "/sys/fs/cgroup"
	all, err := ownHierarchies()
	if err != nil {
		return nil, err
	}
	if onlyV2(all) {
		if err := delegateControllers(root); err != nil {
			return nil, err
		}
		dir := filepath.Join(root, name)
		return []string{dir}, mkdir(dir)
	}
	var dirs []string
	for _, h := range all {
		mount := filepath.Join(root, h.mountName())
		if h.controllers == "" {
			mount = filepath.Join(root, "unified")
			if _, err := os.Stat(mount); errors.Is(err, fs.ErrNotExist) {
				continue // not mounted, and not needed: its controllers are in version 1's trees
			}
		}
		parent := filepath.Join(mount, h.path)
		dir := filepath.Join(parent, name)
		if err := mkdir(dir); err != nil {
			return dirs, fmt.Errorf("make a cgroup: %w", err)
		}
		dirs = append(dirs, dir)
		if slices.Contains(strings.Split(h.controllers, ","), "cpuset") {
			if err := inheritCPUSet(parent, dir); err != nil {
				return dirs, err
			}
		}
	}
	return dirs, nil
}

func mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// inheritCPUSet gives a version 1 cpuset group its parent's processors. A new group has none, and accepts no process.
func inheritCPUSet(parent, dir string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(parent, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), value, 0); err != nil {
			return fmt.Errorf("cgroup cpuset: %w", err)
		}
	}
	return os.WriteFile(filepath.Join(dir, "cgroup.clone_children"), []byte("1"), 0)
}

// delegateControllers delegates a version 2 group's controllers to its children.
func delegateControllers(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("cgroup controllers: %w", err)
	}
	for _, controller := range strings.Fields(string(text)) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0); err != nil {
			return fmt.Errorf("delegate cgroup controller %s of %s: %w", controller, dir, err)
		}
	}
	return nil
}

// joinCgroups moves the calling process into the groups.
func joinCgroups(dirs []string) error {
	for _, dir := range dirs {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0); err != nil {
			return fmt.Errorf("join cgroup: %w", err)
		}
	}
	return nil
}

// removeCgroups kills every process in the groups and removes them with all groups below. A group can be removed only
// when its last process has been reaped, so it retries until the timeout.
func removeCgroups(dirs []string, timeout time.Duration) error {
	return poll(timeout, 50*time.Millisecond, nil, func() error {
		var all []error
		for _, dir := range dirs {
			all = append(all, removeCgroup(dir))
		}
		return errors.Join(all...)
	})
}

func removeCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.IsDir() {
			if err := removeCgroup(filepath.Join(dir, entry.Name())); err != nil {
				return err
			}
		}
	}
	procs, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, field := range strings.Fields(string(procs)) {
		if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
			unix.Kill(pid, unix.SIGKILL) // it may have exited by itself
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
