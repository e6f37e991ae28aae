package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A node has three processes of this program. The supervisor starts holdNode on the machine, which joins the node's
// cgroups and network and starts initNode. That is the first process of the node's mount, pid, uts, ipc and cgroup
// namespaces. It mounts the node's file system and starts runNode, which runs containerd, the kubelet and kube-proxy.
// When any of them dies, the kernel kills everything below it.

// holdNode runs a node and returns when the node has exited.
func holdNode(s state, name string) error {
	// The node's network and its parent-death signal are those of this thread.
	runtime.LockOSThread()
	v, err := s.settings()
	if err != nil {
		return err
	}
	node, err := v.Config.node(name)
	if err != nil {
		return err
	}
	cgroups, err := s.cgroups(node.cgroup)
	if err != nil {
		return err
	}
	if err := joinCgroups(cgroups); err != nil {
		return err
	}
	if err := enterNetns(node.netns); err != nil {
		return err
	}
	cmd := exec.Command(s.program(), roleInit, string(s), name)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWCGROUP,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start node %s: %w", name, err)
	}
	if err := leaveForLeaf(cgroups); err != nil {
		return err
	}
	record, err := processOwner(cmd.Process.Pid)
	if err != nil {
		return err
	}
	if err := writeJSON(s.node(name, "init.json"), record); err != nil {
		return err
	}
	return cmd.Wait()
}

// leafGroup is the group of a version 2 node's first processes. The group above has no processes, so that it can
// delegate controllers.
const leafGroup = "init"

// leaveForLeaf moves the calling process to the leaf of a version 2 group.
func leaveForLeaf(cgroups []string) error {
	all, err := ownHierarchies()
	if err != nil || !onlyV2(all) {
		return err
	}
	leaf := filepath.Join(cgroups[0], leafGroup)
	if err := mkdir(leaf); err != nil {
		return err
	}
	return joinCgroups([]string{leaf})
}

// cgroups returns the recorded cgroup folders of a node, or of all nodes if name is empty.
func (s state) cgroups(name string) ([]string, error) {
	text, err := os.ReadFile(s.cgroupList())
	if err != nil {
		return nil, err
	}
	var dirs []string
	for line := range strings.Lines(string(text)) {
		dir := strings.TrimSpace(line)
		if name == "" || filepath.Base(dir) == name {
			dirs = append(dirs, dir)
		}
	}
	return dirs, nil
}

// node returns the plan of a node by its name.
func (c Config) node(name string) (nodePlan, error) {
	for _, node := range c.plan() {
		if node.name == name {
			return node, nil
		}
	}
	return nodePlan{}, fmt.Errorf("cluster %q has no node %q: its nodes are n1 to n%d", c.Name, name, c.Nodes)
}

// initNode is the first process of a node: it mounts the file system, then reaps orphans until the node's programs
// exit.
func initNode(s state, name string) error {
	v, err := s.settings()
	if err != nil {
		return err
	}
	node, err := v.Config.node(name)
	if err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("set host name: %w", err)
	}
	if err := mountFileSystem(s, v.Tools, name); err != nil {
		return err
	}
	cmd := exec.Command(programView, roleRun, name, node.ip, strconv.Itoa(v.Config.GPUs))
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), "PATH="+nodePath(), "TMPDIR=/tmp")
	if err := cmd.Start(); err != nil {
		return err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("wait for the node's processes: %w", err)
		case pid == cmd.Process.Pid:
			return fmt.Errorf("the node's programs exited with status %d", status.ExitStatus())
		}
	}
}

// nodePath is the search path inside a node.
func nodePath() string {
	return containerdView + ":" + kubernetesView + ":" + os.Getenv("PATH")
}

// A mounter mounts until one mount fails, and keeps that error.
type mounter struct{ err error }

func (m *mounter) do(what string, f func() error) {
	if m.err != nil {
		return
	}
	if err := f(); err != nil {
		m.err = fmt.Errorf("%s: %w", what, err)
	}
}

func (m *mounter) mount(source, target, kind string, flags uintptr, options string) {
	m.do("mount "+kind+" "+target, func() error { return unix.Mount(source, target, kind, flags, options) })
}

func (m *mounter) dirs(paths ...string) {
	for _, path := range paths {
		m.do("make folder", func() error { return os.MkdirAll(path, 0o755) })
	}
}

// bind bind-mounts a folder or file, creating the target folder.
func (m *mounter) bind(source, target string) { m.mount(source, target, "", unix.MS_BIND, "") }

// mountFileSystem mounts the node's own /proc, /sys, /run, /var and /tmp; the rest of the file system is the machine's.
// All mounts belong to the node's mount namespace.
func mountFileSystem(s state, t tools, name string) error {
	var m mounter
	// From here on mounts are invisible outside.
	m.mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	m.mount("proc", "/proc", "proc", 0, "")
	m.do("lay out cgroups", mountCgroups)

	// The new /run has bind mounts of the machine's folders that are needed, as the next mounts may cover them.
	run := s.node(name, "run")
	views := filepath.Join(run, "evenkeel")
	m.dirs(run)
	m.mount("tmpfs", run, "tmpfs", 0, "mode=755")
	for view, source := range map[string]string{
		"node":       s.node(name),
		"kubernetes": t.Kubernetes,
		"containerd": t.Containerd,
		"logs":       filepath.Join(s.logs(), name),
		"bin":        filepath.Dir(s.program()),
		"shared":     s.shared(),
	} {
		target := filepath.Join(views, view)
		m.dirs(source, target)
		m.bind(source, target)
	}
	m.mount(run, "/run", "", unix.MS_MOVE, "")
	m.dirs("/run/containerd", "/run/netns", "/run/lock", nodeView+"/tmp",
		nodeView+"/var/lib/kubelet", nodeView+"/var/lib/containerd", nodeView+"/var/log/pods", nodeView+"/var/tmp")
	m.do("write resolv.conf", func() error { return os.WriteFile("/run/evenkeel/resolv.conf", nil, 0o644) })
	m.do("link /var/run", func() error {
		err := os.Symlink("/run", nodeView+"/var/run")
		if errors.Is(err, fs.ErrExist) { // the node was restarted
			return nil
		}
		return err
	})
	m.bind(nodeView+"/var", "/var")
	m.bind(nodeView+"/tmp", "/tmp")
	m.do("cover sysctls", coverSysctls)
	// Volumes that the kubelet mounts must be visible in later containers.
	m.mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "")
	return m.err
}

// mountCgroups mounts the node's view of the cgroup trees: its own groups
// are their roots.
func mountCgroups() error {
	const root = "/sys/fs/cgroup"
	all, err := ownHierarchies()
	if err != nil {
		return err
	}
	var m mounter
	m.do("unmount /sys", func() error { return unix.Unmount("/sys", unix.MNT_DETACH) })
	m.mount("sysfs", "/sys", "sysfs", 0, "")
	if onlyV2(all) {
		m.mount("cgroup2", root, "cgroup2", 0, "")
		leaf := filepath.Join(root, leafGroup)
		m.dirs(leaf)
		m.do("join the leaf group", func() error { return joinCgroups([]string{leaf}) })
		// The parent process leaves the group at the same time.
		m.do("hand controllers down", func() error {
			return poll(5*time.Second, 20*time.Millisecond, nil, func() error { return delegateControllers(root) })
		})
		return m.err
	}
	m.mount("tmpfs", root, "tmpfs", 0, "mode=755")
	for _, h := range all {
		if h.controllers == "" {
			m.dirs(root + "/unified")
			m.mount("cgroup2", root+"/unified", "cgroup2", 0, "")
			continue
		}
		dir := filepath.Join(root, h.mountName())
		options := h.controllers
		if h.controllers != h.mountName() {
			options = "none," + h.controllers // a tree without controllers, known by name
		}
		m.dirs(dir)
		m.mount("cgroup", dir, "cgroup", 0, options)
		if single := strings.Split(h.mountName(), ","); len(single) > 1 {
			for _, controller := range single {
				m.do("link cgroup", func() error { return os.Symlink(h.mountName(), filepath.Join(root, controller)) })
			}
		}
	}
	return m.err
}

// kubeletSysctls are machine-wide settings that the kubelet requires, with their values.
var kubeletSysctls = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// coverSysctls prevents the node's programs from changing the machine's settings. Files with the right values cover
// the settings that the kubelet requires. The rest is read-only. The network's settings are the node's own, and stay
// writable.
func coverSysctls() error {
	var m mounter
	m.bind("/proc/sys", "/proc/sys")
	m.bind("/proc/sys/net", "/proc/sys/net")
	m.dirs("/run/sysctl")
	for name, value := range kubeletSysctls {
		cover := filepath.Join("/run/sysctl", strings.ReplaceAll(name, "/", "_"))
		m.do("write", func() error { return os.WriteFile(cover, []byte(value+"\n"), 0o644) })
		m.bind(cover, filepath.Join("/proc/sys", name))
	}
	m.mount("", "/proc/sys", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
	return m.err
}

// runNode runs a node's programs until it is stopped. It returns early if they cannot be started.
func runNode(ctx context.Context, name, ip string, gpus int) error {
	thread, err := newNetThread("")
	if err != nil {
		return err
	}
	k := &keeper{thread: thread, logs: logsView}
	go k.keep(ctx, service{name: "containerd", argv: []string{containerdView + "/containerd", "-c", nodeView + "/containerd.toml"}})
	err = poll(60*time.Second, 50*time.Millisecond, ctx.Done(), func() error {
		conn, err := net.Dial("unix", containerdSock)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	if err != nil {
		return fmt.Errorf("containerd does not answer: %w\n%s", err, lastLines(k.logFile("containerd"), 5))
	}
	importing, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if output, err := exec.CommandContext(importing, "ctr", "-n", "k8s.io", "images", "import", nodeView+"/pause.tar").CombinedOutput(); err != nil {
		return fmt.Errorf("import the sandbox image: %w: %s", err, output)
	}
	// A kubelet without an API server retries at growing intervals, so it is started when there is one.
	api, err := newAPI(apiServer, nodeView, "kubelet", nil)
	if err != nil {
		return err
	}
	if err := poll(startTimeout, 100*time.Millisecond, ctx.Done(), func() error { return api.ready(ctx) }); err != nil {
		return err
	}
	go k.keep(ctx, service{name: "kubelet", argv: []string{
		kubernetesView + "/kubelet", "--config=" + nodeView + "/kubelet.yaml", "--kubeconfig=" + nodeView + "/kubelet.kubeconfig",
		"--hostname-override=" + name, "--node-ip=" + ip,
	}})
	go k.keep(ctx, service{name: "kube-proxy", argv: []string{kubernetesView + "/kube-proxy", "--config=" + nodeView + "/proxy.yaml"}})
	if gpus > 0 {
		go k.keep(ctx, service{name: "pretend-gpu", argv: []string{programView, rolePretendDevice, gpuResource, strconv.Itoa(gpus)}})
	}
	log.Printf("node %s runs", name)
	<-ctx.Done()
	return nil // the kernel kills the programs with this namespace
}

// mayLowerOOMScore reports whether this process may lower out-of-memory scores, which root may not on every machine.
func mayLowerOOMScore() (bool, error) {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "CapEff:"); ok {
			set, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			return set&(1<<unix.CAP_SYS_RESOURCE) != 0, err
		}
	}
	return false, errors.New("/proc/self/status has no CapEff")
}
