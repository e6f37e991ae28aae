package local

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

func TestRenderedYAMLAndJSONParse(t *testing.T) {
	for name, text := range map[string]string{
		"kubelet":    kubeletConfig(),
		"kube-proxy": proxyConfig("n1"),
		"registry":   registryConfig("/a folder/registry"),
		"CNI":        cniConfig("10.244.1.0/24"),
	} {
		var parsed map[string]any
		if err := yaml.UnmarshalStrict([]byte(text), &parsed); err != nil {
			t.Errorf("%s: %v\n%s", name, err, text)
		}
	}
	var cni struct{ Plugins []struct{ Type string } }
	if err := json.Unmarshal([]byte(cniConfig("10.244.1.0/24")), &cni); err != nil || len(cni.Plugins) != 2 {
		t.Errorf("CNI: %+v %v", cni, err)
	}
}

func TestContainerdConfigKeepsOOMScore(t *testing.T) {
	if text := containerdConfig(true); !strings.Contains(text, "restrict_oom_score_adj = true") {
		t.Error(text)
	}
	if text := containerdConfig(false); !strings.Contains(text, "restrict_oom_score_adj = false") {
		t.Error(text)
	}
}

// The control plane must not write outside the cluster's folder.
func TestControlPlaneWritesOnlyInItsFolder(t *testing.T) {
	etcd, apiserver, rest := controlPlane("/state", tools{Kubernetes: "/k", Etcd: "/e", CoreDNS: "/d"}, "/k")
	names := map[string]bool{}
	for _, s := range append([]service{etcd, apiserver}, rest...) {
		if names[s.name] {
			t.Errorf("%s: two services of one name share a log", s.name)
		}
		names[s.name] = true
		for _, arg := range s.argv[1:] {
			_, value, ok := strings.Cut(arg, "=")
			if ok && strings.HasPrefix(value, "/") && !strings.HasPrefix(value, "/state/") {
				t.Errorf("%s: %s is outside the cluster's folder", s.name, arg)
			}
		}
	}
}

func TestImagePauseArchiveHasOneProgram(t *testing.T) {
	archive, err := pauseArchive([]byte("PROGRAM"))
	if err != nil {
		t.Fatal(err)
	}
	files := untar(t, archive)
	var manifest []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(files["manifest.json"], &manifest); err != nil || len(manifest) != 1 {
		t.Fatalf("manifest: %s %v", files["manifest.json"], err)
	}
	if !slices.Equal(manifest[0].RepoTags, []string{sandboxImage}) {
		t.Errorf("the image is called %v", manifest[0].RepoTags)
	}
	layer := untar(t, files[manifest[0].Layers[0]])
	if len(layer) != 1 || string(layer["pause"]) != "PROGRAM" {
		t.Errorf("the layer holds %v", layer)
	}
	path := filepath.Join(t.TempDir(), "pause.tar")
	if err := os.WriteFile(path, archive, 0o644); err != nil {
		t.Fatal(err)
	}
	if kind, err := archiveKind(path); err != nil || kind != "docker-archive" {
		t.Errorf("archive is of kind %q, %v", kind, err)
	}
}

func untar(t *testing.T, archive []byte) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[header.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

func TestImageArchiveKindErrors(t *testing.T) {
	other, err := tarOf(file{"readme", 0o644, []byte("x")})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ content, want string }{
		"text":  {"this is no archive, whatever its name", "not an image archive"},
		"empty": {"", "not of an image"},
		"other": {string(other), "not of an image"},
	} {
		path := filepath.Join(t.TempDir(), name+".tar")
		if err := os.WriteFile(path, []byte(c.content), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := archiveKind(path); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestImageRegistryName(t *testing.T) {
	for _, c := range []struct{ image, repository, tag string }{
		{"localhost/plugin:dev", "plugin", "dev"},
		{"localhost/a/b", "a/b", "latest"},
		{"plugin", "plugin", "latest"},
		{"team/plugin:1.2", "team/plugin", "1.2"},
		{"host.example:5000/plugin:1", "plugin", "1"},
	} {
		repository, tag, err := registryName(c.image)
		if err != nil || repository != c.repository || tag != c.tag {
			t.Errorf("%s: %q %q %v", c.image, repository, tag, err)
		}
	}
	for _, image := range []string{"", "localhost/", "no/such/file.tar:", "UPPER", "-q", "a b", "x:y z"} {
		if repository, tag, err := registryName(image); err == nil {
			t.Errorf("%q was taken for %q %q", image, repository, tag)
		}
	}
}

func TestParseHierarchies(t *testing.T) {
	all, err := parseHierarchies("9:name=systemd:/a\n2:cpu,cpuacct:/\n0::/x:y\n")
	if err != nil {
		t.Fatal(err)
	}
	want := []hierarchy{{"name=systemd", "/a"}, {"cpu,cpuacct", "/"}, {"", "/x:y"}}
	if !slices.Equal(all, want) || onlyV2(all) || all[0].mountName() != "systemd" {
		t.Errorf("read %v", all)
	}
	if all, err := parseHierarchies("0::/user.slice\n"); err != nil || !onlyV2(all) {
		t.Errorf("version 2 alone: %v %v", all, err)
	}
	if _, err := parseHierarchies("nonsense\n"); err == nil {
		t.Error("nonsense was read")
	}
}

func TestParseStat(t *testing.T) {
	fields := " S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4242 100 200"
	for _, name := range []string{"x", "a b", "odd) name ("} {
		if start, err := parseStat("12 (" + name + ")" + fields); err != nil || start != 4242 {
			t.Errorf("%s: %d %v", name, start, err)
		}
	}
	if _, err := parseStat("12 (x)" + strings.Replace(fields, " S ", " Z ", 1)); err == nil {
		t.Error("a process that has exited counts as running")
	}
	if _, err := parseStat(""); err == nil {
		t.Error("an empty line was read")
	}
}

func TestOwnerIsNotALaterProcessWithItsPID(t *testing.T) {
	self, err := processOwner(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if !self.alive() {
		t.Error("this process does not run")
	}
	self.Start++
	if self.alive() {
		t.Error("another start time is the same process")
	}
	if (owner{}).alive() {
		t.Error("a process without a record runs")
	}
}

func TestCheckNodes(t *testing.T) {
	node := func(name string, ready corev1.ConditionStatus, gpus int64) corev1.Node {
		return corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Status: corev1.NodeStatus{
				Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}},
				Allocatable: corev1.ResourceList{gpuResource: *resource.NewQuantity(gpus, resource.DecimalSI)},
			},
		}
	}
	c := Config{Name: "x", Nodes: 2, GPUs: 4}
	if err := checkNodes([]corev1.Node{node("n1", "True", 4), node("n2", "True", 4)}, c); err != nil {
		t.Error(err)
	}
	for want, nodes := range map[string][]corev1.Node{
		"n2 has not registered": {node("n1", "True", 4)},
		"n1 is not ready":       {node("n1", "Unknown", 4), node("n2", "True", 4)},
		"n2 offers 0 of 4":      {node("n1", "True", 4), node("n2", "True", 0)},
	} {
		if err := checkNodes(nodes, c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error is %v, want one with %q", err, want)
		}
	}
}

func TestServiceKeeperRestartsUntilContextEnds(t *testing.T) {
	thread, err := newNetThread("")
	if err != nil {
		t.Fatal(err)
	}
	defer thread.close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ends := make(chan string, 10)
	k := &keeper{thread: thread, logs: t.TempDir(), ended: func(name string, _ error) { ends <- name }}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		k.keep(ctx, service{name: "short", argv: []string{"sh", "-c", "echo ran; exit 3"}})
	}()
	for range 2 {
		select {
		case name := <-ends:
			if name != "short" {
				t.Errorf("%s ended", name)
			}
		case <-time.After(30 * time.Second):
			t.Fatal("the service was not started again")
		}
	}
	cancel()
	select {
	case <-stopped:
	case <-time.After(30 * time.Second):
		t.Fatal("the keeper went on")
	}
	if text := lastLines(k.logFile("short"), 2); text != "ran\nran" {
		t.Errorf("the log is %q", text)
	}
}

func TestServiceKeeperKillsAtTheEnd(t *testing.T) {
	thread, err := newNetThread("")
	if err != nil {
		t.Fatal(err)
	}
	defer thread.close()
	ctx, cancel := context.WithCancel(t.Context())
	k := &keeper{thread: thread, logs: t.TempDir()}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		k.keep(ctx, service{name: "long", argv: []string{"sh", "-c", "echo started; exec sleep 1000"}})
	}()
	if err := poll(30*time.Second, 10*time.Millisecond, nil, func() error {
		if lastLines(k.logFile("long"), 1) != "started" {
			return errors.New("not started")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	cancel()
	select {
	case <-stopped:
	case <-time.After(30 * time.Second):
		t.Fatal("the service outlived its context")
	}
}

func TestForwardCopiesBothDirections(t *testing.T) {
	thread, err := newNetThread("")
	if err != nil {
		t.Fatal(err)
	}
	defer thread.close()
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer echo.Close()
	go func() {
		conn, err := echo.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		text, _ := io.ReadAll(conn) // answers only when the client has closed its side
		conn.Write(bytes.ToUpper(text))
	}()
	front, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- thread.forward(front, echo.Addr().String()) }()
	conn, err := net.Dial("tcp", front.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := conn.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	conn.(*net.TCPConn).CloseWrite()
	if text, err := io.ReadAll(conn); err != nil || string(text) != "HELLO" {
		t.Errorf("got %q, %v", text, err)
	}
	front.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A thread in another network must not be the process's main one, whose network other programs take for the process's.
func TestNetThreadIsNotTheMainThread(t *testing.T) {
	for range 50 {
		err := make(chan error, 1)
		go onOwnThread(func() {
			self, readErr := os.Readlink("/proc/thread-self")
			if readErr == nil && filepath.Base(self) == filepath.Base(filepath.Dir(filepath.Dir(self))) {
				readErr = errors.New("running on the main thread: " + self)
			}
			err <- readErr
		})
		if err := <-err; err != nil {
			t.Fatal(err)
		}
	}
}

func TestPollReturnsTheLastErrorOrTheStop(t *testing.T) {
	last := errors.New("not yet")
	if err := poll(20*time.Millisecond, time.Millisecond, nil, func() error { return last }); !errors.Is(err, last) {
		t.Errorf("error is %v", err)
	}
	stop := make(chan struct{})
	close(stop)
	if err := poll(time.Hour, time.Hour, stop, func() error { return last }); !errors.Is(err, errStopped) {
		t.Errorf("error is %v", err)
	}
}

func TestOpenAndDownOfAMissingCluster(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	if _, err := Open("absent"); err == nil || !strings.Contains(err.Error(), "up --name absent") {
		t.Errorf("open: %v", err)
	}
	if err := Down(t.Context(), "absent"); err != nil {
		t.Errorf("down: %v", err)
	}
	if err := Down(t.Context(), "../absent"); err == nil {
		t.Error("a path was taken for a name")
	}
	if names, err := List(); err != nil || len(names) != 0 {
		t.Errorf("list: %v %v", names, err)
	}
}

// The record of a killed supervisor must not make Down kill another process that has the same PID now.
func TestDownSparesAnotherProcessWithTheSupervisorsPID(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	other := exec.Command("sleep", "1000")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- other.Wait() }()
	defer func() { other.Process.Kill(); <-ended }()
	s, err := stateOf("old")
	if err != nil {
		t.Fatal(err)
	}
	record, err := processOwner(other.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	record.Start--
	if err := writeJSON(s.path("supervisor.json"), record); err != nil {
		t.Fatal(err)
	}
	if err := Down(t.Context(), "old"); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		t.Fatalf("the other process was killed: %v", err)
	default:
	}
	if _, err := os.Stat(s.path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is still there: %v", err)
	}
}
