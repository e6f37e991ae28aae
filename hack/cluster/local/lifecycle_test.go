//go:build e2e

package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

const (
	lifecycleName = "lifecycle"
	waitLimit     = 2 * time.Minute // for anything; a loaded machine is slow
)

// progressWriter passes progress on to the test's log and calls a function
// when a line with the given text appears.
type progressWriter struct {
	t    *testing.T
	text string
	call func()
	mu   sync.Mutex
}

func (w *progressWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.t.Logf("progress: %s", bytes.TrimSpace(p))
	if w.call != nil && bytes.Contains(p, []byte(w.text)) {
		w.call()
		w.call = nil
	}
	return len(p), nil
}

// isolated gives a test a state folder of its own and takes its cluster down at the end, also after a failure.
func isolated(t *testing.T) state {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root: it starts a cluster")
	}
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	t.Cleanup(func() {
		if err := Down(context.Background(), lifecycleName); err != nil {
			t.Errorf("down: %v", err)
		}
	})
	s, err := stateOf(lifecycleName)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestLifecycle(t *testing.T) {
	s := isolated(t)
	ctx := t.Context()
	progress := &progressWriter{t: t}
	config := Config{Name: lifecycleName, Nodes: 2, GPUs: 2, LinkRate: "1gbit", Progress: progress}
	buildTestImages(t)
	before := machineState(t)

	c, err := Up(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Healthy(ctx); err != nil {
		t.Error(err)
	}
	again, err := Up(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	if again.owner != c.owner {
		t.Errorf("a healthy cluster was restarted: %v, then %v", c.owner, again.owner)
	}
	other := config
	other.Nodes = 3
	if _, err := Up(ctx, other); err == nil || !strings.Contains(err.Error(), "down --name "+lifecycleName) {
		t.Errorf("other settings: error is %v", err)
	}
	t.Run("load, image volume, GPU", func(t *testing.T) { checkPod(t, c) })
	t.Run("load an archive", func(t *testing.T) { checkArchive(t, c) })
	t.Run("exec", func(t *testing.T) { checkExec(t, c) })
	t.Run("link rate", func(t *testing.T) { checkLinkRate(t, c) })
	compare(t, "sysctls while it runs", before["sysctls"], machineState(t)["sysctls"])

	// When the supervisor is killed, all processes exit, and the next Up restarts the cluster.
	kill(t, c.owner.PID)
	next, err := Up(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	if next.owner == c.owner {
		t.Error("the killed supervisor still owns the cluster")
	}
	kill(t, next.owner.PID)
	await(t, "the cluster's processes end", func() error { return noProcessOf(s) })
	if err := Down(ctx, lifecycleName); err != nil {
		t.Fatal(err)
	}
	after := machineState(t)
	for _, what := range slices.Sorted(maps.Keys(before)) {
		compare(t, what, before[what], after[what])
	}
	if _, err := os.Stat(s.path()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the cluster's folder is still there: %v", err)
	}
	if err := Down(ctx, lifecycleName); err != nil {
		t.Errorf("down twice: %v", err)
	}
}

func TestLifecycleInterruptedStartLeavesNothing(t *testing.T) {
	s := isolated(t)
	before := machineState(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	progress := &progressWriter{t: t, text: "starting etcd", call: cancel}
	if _, err := Up(ctx, Config{Name: lifecycleName, Progress: progress}); !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	if err := noProcessOf(s); err != nil {
		t.Error(err)
	}
	after := machineState(t)
	for _, what := range slices.Sorted(maps.Keys(before)) {
		compare(t, what, before[what], after[what])
	}
	if _, err := os.Stat(s.path()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the cluster's folder is still there: %v", err)
	}
}

func TestLifecycleKilledUpLeavesNothingRunning(t *testing.T) {
	s := isolated(t)
	before := machineState(t)
	program := filepath.Join(t.TempDir(), "cluster")
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-o", program, "./hack/cluster")
	build.Dir = root
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	up := exec.Command(program, "up", "--name", lifecycleName)
	up.Dir = root
	up.Stderr = &progressWriter{t: t, text: "starting etcd", call: func() { up.Process.Kill() }}
	if err := up.Run(); err == nil || up.ProcessState.Exited() {
		t.Fatalf("up was not killed during its start; it exited with %v", err)
	}
	// The supervisor notices and cleans up; only the folder remains, for down.
	await(t, "the supervisor cleans up", func() error {
		after := machineState(t)
		if !slices.Equal(before["namespaces"], after["namespaces"]) || !slices.Equal(before["cgroups"], after["cgroups"]) {
			return fmt.Errorf("left: %v %v", after["namespaces"], after["cgroups"])
		}
		return noProcessOf(s)
	})
}

// buildTestImages makes two images: a shell, and one that holds only a file.
func buildTestImages(t *testing.T) {
	t.Helper()
	needed := append([]toolbox.Program{{Name: "busybox", Package: "busybox-static"}}, programs...)
	if err := toolbox.EnsurePrograms(t.Context(), &progressWriter{t: t}, needed); err != nil {
		t.Fatal(err)
	}
	path, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	busybox, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, text := range map[string][]byte{
		"busybox":      busybox,
		"payload":      []byte("from the image volume\n"),
		"shell.image":  []byte("FROM scratch\nCOPY busybox /bin/busybox\n"),
		"volume.image": []byte("FROM scratch\nCOPY payload /payload\n"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"shell", "volume"} {
		command(t, "buildah", "bud", "-q", "--pull-never", "-f", filepath.Join(dir, name+".image"), "-t", testImage(name), dir)
		t.Cleanup(func() { exec.Command("buildah", "rmi", testImage(name)).Run() })
	}
}

func testImage(name string) string { return "localhost/evk-lifecycle/" + name + ":1" }

func load(t *testing.T, c *Cluster, image string) string {
	t.Helper()
	pinned, err := c.Load(t.Context(), image)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(pinned, Registry+"/") || !strings.Contains(pinned, "@sha256:") {
		t.Fatalf("not pinned by digest: %s", pinned)
	}
	return pinned
}

func checkPod(t *testing.T, c *Cluster) {
	pod := fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: lifecycle}
spec:
  restartPolicy: Never
  securityContext: {runAsNonRoot: true, runAsUser: 1000}
  containers:
  - name: main
    image: %q
    command: [/bin/busybox, sh, -c, "busybox cat /volume/payload; echo gpus=$NVIDIA_VISIBLE_DEVICES; busybox grep nameserver /etc/resolv.conf"]
    volumeMounts: [{name: volume, mountPath: /volume}]
    resources: {limits: {%s: 2}}
  volumes: [{name: volume, image: {reference: %q}}]
`, load(t, c, testImage("shell")), gpuResource, load(t, c, testImage("volume")))
	kubectl(t, c, pod, "apply", "-f", "-")
	kubectl(t, c, "", "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/lifecycle", "--timeout="+waitLimit.String())
	log := kubectl(t, c, "", "logs", "lifecycle")
	for _, want := range []string{"from the image volume", "nameserver " + ControlPlaneIP} {
		if !strings.Contains(log, want) {
			t.Errorf("the pod's log is %q, want %q in it", log, want)
		}
	}
	if !strings.Contains(log, "gpus=0,1") && !strings.Contains(log, "gpus=1,0") {
		t.Errorf("the pod's log is %q: it did not get two GPUs", log)
	}
}

func checkArchive(t *testing.T, c *Cluster) {
	dir := t.TempDir()
	for _, kind := range []string{"docker-archive", "oci-archive"} {
		path := filepath.Join(dir, kind+".tar")
		command(t, "buildah", "push", "-q", testImage("volume"), kind+":"+path)
		if pinned := load(t, c, path); !strings.HasPrefix(pinned, Registry+"/"+kind+"@") {
			t.Errorf("%s is in the registry as %s", path, pinned)
		}
	}
	if _, err := c.Load(t.Context(), "localhost/no-such-image:1"); err == nil || !strings.Contains(err.Error(), "no-such-image") {
		t.Errorf("an image that is not there: %v", err)
	}
}

func checkExec(t *testing.T, c *Cluster) {
	for _, node := range c.Nodes() {
		if name, err := c.Exec(t.Context(), node, "hostname"); err != nil || strings.TrimSpace(name) != node {
			t.Errorf("host name in %s is %q, %v", node, name, err)
		}
	}
	machine, shared := c.Shared()
	if err := os.WriteFile(filepath.Join(machine, "letter"), []byte("for all"), 0o600); err != nil {
		t.Fatal(err)
	}
	if text, err := c.Exec(t.Context(), "n2", "cat", filepath.Join(shared, "letter")); err != nil || text != "for all" {
		t.Errorf("a node reads %q in the shared folder, %v", text, err)
	}
	if _, err := c.Exec(t.Context(), "n1", "sh", "-c", "echo why >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "why") {
		t.Errorf("a failing command: %v", err)
	}
	if _, err := c.Exec(t.Context(), "n9", "true"); err == nil || !strings.Contains(err.Error(), "n1 to n2") {
		t.Errorf("a node that is not there: %v", err)
	}
	if _, err := c.Exec(t.Context(), "n1", "sh", "-c", "echo 1 > /proc/sys/kernel/threads-max"); err == nil {
		t.Error("a node can change the machine's settings")
	}
}

func checkLinkRate(t *testing.T, c *Cluster) {
	check := func(want string) {
		t.Helper()
		output, err := c.Exec(t.Context(), "n1", "tc", "class", "show", "dev", "eth0")
		if err != nil || !strings.Contains(output, want) {
			t.Errorf("the node's link is %q, %v; it should have %s", output, err, want)
		}
	}
	check("rate 1Gbit")
	for rate, want := range map[string]string{"50mbit": "rate 50Mbit", "": "rate 1Gbit"} {
		if err := c.LimitLink(t.Context(), "n1", rate); err != nil {
			t.Fatal(err)
		}
		check(want)
	}
	if err := c.LimitLink(t.Context(), "n1", ""); err != nil {
		t.Fatal(err)
	}
	for _, bad := range [][2]string{{"n9", "1gbit"}, {"n1", "fast"}} {
		if err := c.LimitLink(t.Context(), bad[0], bad[1]); err == nil {
			t.Errorf("node %s can be limited to %s", bad[0], bad[1])
		}
	}
}

func command(t *testing.T, program string, args ...string) string {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", program, args, err, output)
	}
	return string(output)
}

func kubectl(t *testing.T, c *Cluster, input string, args ...string) string {
	t.Helper()
	box, err := toolbox.New(&progressWriter{t: t})
	if err != nil {
		t.Fatal(err)
	}
	program, err := box.Path(t.Context(), "kubectl")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), c.KubectlEnv()...)
	cmd.Stdin = strings.NewReader(input)
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %v: %v\n%s", args, err, output)
	}
	return string(output)
}

func kill(t *testing.T, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

func await(t *testing.T, what string, check func() error) {
	t.Helper()
	if err := poll(waitLimit, 50*time.Millisecond, t.Context().Done(), check); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// noProcessOf returns an error with the processes that have the cluster's folder in their command lines, or run in its
// network.
func noProcessOf(s state) error {
	var left []string
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err == nil && bytes.Contains(text, []byte(s)) {
			left = append(left, fmt.Sprintf("%q", text))
		}
	}
	for _, netns := range allNetns(lifecycleName) {
		if pids, err := processesIn(netns); err == nil && len(pids) > 0 {
			left = append(left, fmt.Sprintf("%v in %s", pids, netns))
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("still running: %v", left)
	}
	return nil
}

// machineState lists the machine's state that a cluster must not change. It omits what other programs change at the
// same time: counters, and namespaces of others.
func machineState(t *testing.T) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	counter := func(path string) bool {
		for _, part := range []string{"random/", "ns_last_pid", "-nr", "nr_", "-state", "_count", "cad_pid", "pty/nr", "sched_domain", "fs/quota/"} {
			if strings.Contains(path, part) {
				return true
			}
		}
		return false
	}
	err := filepath.WalkDir("/proc/sys", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || counter(path) {
			return nil // some entries are readable only by root of another namespace
		}
		if text, err := os.ReadFile(path); err == nil {
			found["sysctls"] = append(found["sysctls"], path+" = "+strings.TrimSpace(string(text)))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		point := strings.Fields(line)[4]
		if !strings.HasPrefix(point, netnsFolder) {
			found["mounts"] = append(found["mounts"], point)
		}
	}
	slices.Sort(found["mounts"])
	for _, netns := range allNetns(lifecycleName) {
		if _, err := os.Lstat(netnsPath(netns)); err == nil {
			found["namespaces"] = append(found["namespaces"], netns)
		}
	}
	prefix := netnsName(lifecycleName, "")
	err = filepath.WalkDir("/sys/fs/cgroup", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() && strings.HasPrefix(entry.Name(), prefix) {
			found["cgroups"] = append(found["cgroups"], path)
		}
		return nil // groups of others may disappear meanwhile
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"/", "/etc", "/opt", "/usr/libexec", "/var/lib", "/var/log"} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		for _, entry := range entries {
			found["folders"] = append(found["folders"], filepath.Join(dir, entry.Name()))
		}
	}
	return found
}

func compare(t *testing.T, what string, before, after []string) {
	t.Helper()
	for _, item := range after {
		if !slices.Contains(before, item) {
			t.Errorf("%s: new: %s", what, item)
		}
	}
	for _, item := range before {
		if !slices.Contains(after, item) {
			t.Errorf("%s: gone: %s", what, item)
		}
	}
}
