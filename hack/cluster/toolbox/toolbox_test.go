package toolbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/modfile"
)

// tiny is a recipe that builds quickly and needs no network.
var tiny = recipe{name: "tiny", binaries: []binary{{"tiny", "."}}, links: []string{"alias"}, estimate: time.Second}

// writeRecipe writes tiny's folder with the given main.go.
func writeRecipe(t *testing.T, source string) string {
	t.Helper()
	folder := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module tiny\n\ngo 1.26.0\n", "main.go": source} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

func TestRecipesPinVersions(t *testing.T) {
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range recipes {
		folder := r.folder(root)
		version, err := r.version(folder)
		if err != nil {
			t.Error(err)
			continue
		}
		if !strings.HasPrefix(version, "v") {
			t.Errorf("%s: version %q", r.name, version)
		}
		if _, err := r.key(folder, version); err != nil {
			t.Error(err)
		}
		if r.module != "" && !exists(filepath.Join(folder, "go.sum")) {
			t.Errorf("%s: no go.sum: its content is not pinned", r.name)
		}
	}
}

// One "go build" of several packages names each program after its package.
func TestGroupedProgramsHaveTheNamesOfTheirPackages(t *testing.T) {
	for _, r := range recipes {
		for _, b := range r.binaries {
			if r.group != "" && path.Base(b.pkg) != b.name {
				t.Errorf("%s: package %s would become %s, not %s", r.name, b.pkg, path.Base(b.pkg), b.name)
			}
		}
	}
}

// What the local cluster runs and Evenkeel's own programs share most of their dependencies. With other versions, or
// other flags, each would be compiled twice: minutes of "make demo".
func TestClusterSharesDependenciesWithEvenkeel(t *testing.T) {
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	versions := func(path string) map[string]string {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		file, err := modfile.Parse(path, text, nil)
		if err != nil {
			t.Fatal(err)
		}
		found := map[string]string{}
		for _, require := range file.Require {
			found[require.Mod.Path] = require.Mod.Version
		}
		return found
	}
	cluster := versions(filepath.Join(root, "hack", "cluster", "tools", clusterGroup, "go.mod"))
	shared := 0
	for module, version := range versions(filepath.Join(root, "go.mod")) {
		if other, ok := cluster[module]; ok {
			shared++
			if other != version {
				t.Errorf("%s is %s in go.mod, and %s in hack/cluster/tools/%s/go.mod", module, version, other, clusterGroup)
			}
		}
	}
	if shared < 50 {
		t.Errorf("%d shared modules: the files were not read", shared)
	}
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"export GOFLAGS := " + GoFlags, "export CGO_ENABLED := 0"} {
		if !strings.Contains(string(makefile), "\n"+line+"\n") {
			t.Errorf("the Makefile lacks %q", line)
		}
	}
}

func TestToolsOfOneFolderAreBuiltTogether(t *testing.T) {
	folder := writeRecipe(t, "package main\n\nfunc main() {}\n")
	parent := t.TempDir()
	var jobs []job
	for _, name := range []string{"hello", "bye"} {
		if err := os.Mkdir(filepath.Join(folder, name), 0o755); err != nil {
			t.Fatal(err)
		}
		source := "package main\n\nvar version string\n\nfunc main() { print(\"" + name + " \" + version) }\n"
		if err := os.WriteFile(filepath.Join(folder, name, "main.go"), []byte(source), 0o644); err != nil {
			t.Fatal(err)
		}
		jobs = append(jobs, job{recipe{name: name, binaries: []binary{{name, "./" + name}}}, "v1", filepath.Join(parent, name)})
	}
	jobs[0].ldflags = func(version string) []string { return []string{"-X", "main.version=" + version} }
	var progress bytes.Buffer
	if err := build(t.Context(), folder, jobs, &progress); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"hello": "hello v1", "bye": "bye "} {
		out, err := exec.CommandContext(t.Context(), filepath.Join(parent, name, name)).CombinedOutput()
		if err != nil || string(out) != want {
			t.Errorf("%s printed %q (%v), not %q", name, out, err, want)
		}
	}
	if !strings.Contains(progress.String(), "built hello v1, bye v1 in") {
		t.Errorf("progress was %q", progress.String())
	}
}

func TestRecipeKeyChangesWithInputs(t *testing.T) {
	folder := writeRecipe(t, "package main\n\nfunc main() {}\n")
	key := func(r recipe) string {
		k, err := r.key(folder, "v1")
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	first := key(tiny)
	if again := key(tiny); again != first {
		t.Errorf("the key changed without a change of inputs: %s, %s", first, again)
	}
	flagged := tiny
	flagged.ldflags = kubernetesVersionFlags
	if k, err := flagged.key(folder, "v1.2.3"); err != nil || strings.HasSuffix(k, first[len(first)-12:]) {
		t.Errorf("linker flags do not change the key: %s %v", k, err)
	}
	if err := os.WriteFile(filepath.Join(folder, "go.mod"), []byte("module tiny\n\ngo 1.26.1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if key(tiny) == first {
		t.Error("another go.mod does not change the key")
	}
}

func TestBuildIsComplete(t *testing.T) {
	folder := writeRecipe(t, "package main\n\nfunc main() { println(\"tiny runs\") }\n")
	cache := t.TempDir()
	one := job{tiny, "v1", filepath.Join(cache, "tiny")}
	if err := os.Mkdir(filepath.Join(cache, ".tiny-killed"), 0o755); err != nil {
		t.Fatal(err)
	}
	var progress bytes.Buffer
	if err := build(t.Context(), folder, []job{one}, &progress); err != nil {
		t.Fatal(err)
	}
	for _, name := range tiny.programs() {
		if info, err := os.Stat(filepath.Join(one.dir, name)); err != nil || info.Mode()&0o111 == 0 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	if entries, err := os.ReadDir(cache); err != nil || len(entries) != 1 {
		t.Errorf("the remains of a killed build are not removed: %v %v", entries, err)
	}
	if !strings.Contains(progress.String(), "built tiny v1 in") {
		t.Errorf("progress was %q", progress.String())
	}
}

func TestBuildFailureLeavesNothing(t *testing.T) {
	folder := writeRecipe(t, "package main\n\nfunc main() { undefinedThing() }\n")
	parent := t.TempDir()
	err := build(t.Context(), folder, []job{{tiny, "v1", filepath.Join(parent, "tiny")}}, &bytes.Buffer{})
	if err == nil || !strings.Contains(err.Error(), "undefinedThing") {
		t.Errorf("error was %v", err)
	}
	if left, _ := os.ReadDir(parent); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestLockWaitsUntilContextEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.lock")
	unlock, err := Lock(t.Context(), path, func() { t.Error("a free lock was busy") })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	gaveUp := errors.New("gave up")
	waited := 0
	if _, err := Lock(ctx, path, func() { waited++; cancel(gaveUp) }); !errors.Is(err, gaveUp) {
		t.Errorf("second lock: %v", err)
	}
	if waited != 1 {
		t.Errorf("busy was called %d times", waited)
	}
	unlock()
	ctx, done := context.WithTimeout(t.Context(), 10*time.Second)
	defer done()
	unlock, err = Lock(ctx, path, func() {})
	if err != nil {
		t.Fatalf("after unlock: %v", err)
	}
	unlock()
}

func TestReadyProgramsMustHaveTheVersion(t *testing.T) {
	r := recipe{name: "thing", module: "example.com/thing", binaries: []binary{{"thing", "."}}}
	folder := t.TempDir()
	if found, err := takeReady(t.Context(), r, "v1.2.3", folder); found || err != nil {
		t.Errorf("empty folder: %v, %v", found, err)
	}
	script := "#!/bin/sh\necho thing version v1.2.3 linux\n"
	if err := os.WriteFile(filepath.Join(folder, "thing"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	if found, err := takeReady(t.Context(), r, "v1.2.3", folder); !found || err != nil {
		t.Errorf("right version: %v, %v", found, err)
	}
	if _, err := takeReady(t.Context(), r, "v1.2.4", folder); err == nil || !strings.Contains(err.Error(), "v1.2.4") {
		t.Errorf("wrong version: %v", err)
	}
}

func TestMentionsVersion(t *testing.T) {
	for _, c := range []struct {
		text string
		want bool
	}{
		{"Kubernetes v1.36.3", true},
		{"etcd Version: 1.36.3\nGit SHA", true},
		{"v1.36.3+build", true},
		{"v1.36.31", false},
		{"v11.36.3", false},
		{"v1.36.3-rc.1", false},
		{"", false},
	} {
		if got := mentionsVersion(c.text, "v1.36.3"); got != c.want {
			t.Errorf("%q: %v", c.text, got)
		}
	}
}

func TestUnknownToolErrorListsTools(t *testing.T) {
	toolbox := &Toolbox{cache: t.TempDir(), root: t.TempDir(), progress: &bytes.Buffer{}}
	_, err := toolbox.Path(t.Context(), "helmet")
	if err == nil || !strings.Contains(err.Error(), "helm,") || !strings.Contains(err.Error(), "kubectl") {
		t.Errorf("error was %v", err)
	}
}

// Every minor version from the chart's kubeVersion to the one before the local cluster's has its API server.
func TestOlderKubernetesIsWhatTheChartAllows(t *testing.T) {
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	chart, err := os.ReadFile(filepath.Join(root, "charts", "evenkeel", "Chart.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	minor := func(pattern, text string) int {
		found := regexp.MustCompile(pattern).FindStringSubmatch(text)
		if found == nil {
			t.Fatalf("%q does not match %s", text, pattern)
		}
		n, err := strconv.Atoi(found[1])
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	tools := &Toolbox{root: root}
	cluster, err := tools.Version("kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for n := minor(`(?m)^kubeVersion: ">=1\.(\d+)\.0-0"$`, string(chart)); n < minor(`^v1\.(\d+)\.`, cluster); n++ {
		want = append(want, fmt.Sprintf("1.%d", n))
	}
	if !slices.Equal(OlderKubernetes, want) {
		t.Errorf("the toolbox has %v, and the chart allows %v", OlderKubernetes, want)
	}
	for _, older := range OlderKubernetes {
		if version, err := tools.Version(olderAPIServer(older)); err != nil || !strings.HasPrefix(version, "v"+older+".") {
			t.Errorf("the API server of %s is %s, %v", older, version, err)
		}
	}
}

// The folder for envtest has the older API server under the name that envtest looks for.
func TestEnvtestOfAnOlderVersion(t *testing.T) {
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	tools := &Toolbox{cache: t.TempDir(), root: root, ready: t.TempDir(), progress: &bytes.Buffer{}}
	ready := func(name, version string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(tools.ready, name), []byte("#!/bin/sh\necho "+version+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for tool, programs := range map[string][]string{"kubernetes": recipes[0].links, "etcd": {"etcd"}, "kube-apiserver-1.30": {"kube-apiserver-1.30"}} {
		version, err := tools.Version(tool)
		if err != nil {
			t.Fatal(err)
		}
		for _, program := range programs {
			ready(program, version)
		}
	}
	for name, want := range map[string]string{"envtest": "kube-apiserver", "envtest-1.30": "kube-apiserver-1.30"} {
		folder, err := tools.Path(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		if target, err := os.Readlink(filepath.Join(folder, "kube-apiserver")); err != nil || target != filepath.Join(tools.ready, want) {
			t.Errorf("%s: kube-apiserver is %s, %v", name, target, err)
		}
		for _, program := range []string{"kubectl", "etcd"} {
			if target, err := os.Readlink(filepath.Join(folder, program)); err != nil || target != filepath.Join(tools.ready, program) {
				t.Errorf("%s: %s is %s, %v", name, program, target, err)
			}
		}
	}
	if _, err := tools.Path(t.Context(), "envtest-1.29"); err == nil || !strings.Contains(err.Error(), "there are 1.30, 1.31") {
		t.Errorf("a version that no recipe has: %v", err)
	}
}

func TestMissingPackages(t *testing.T) {
	got := missing([]Program{
		{"sh", "dash"},
		{"no-such-program", "b-package"},
		{"/no/such/file", "a-package"},
		{"no-such-program-either", "b-package"},
	})
	if want := []string{"a-package", "b-package"}; !slices.Equal(got, want) {
		t.Errorf("missing %v, want %v", got, want)
	}
}
