package toolbox

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// tiny is a recipe that builds quickly and needs no network.
var tiny = recipe{name: "tiny", binaries: []binary{{"tiny", "."}}, links: []string{"alias"}, estimate: "a moment"}

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
		folder := filepath.Join(root, "hack", "cluster", "tools", r.name)
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
	dir := filepath.Join(cache, "tiny")
	if err := os.Mkdir(filepath.Join(cache, ".tiny-killed"), 0o755); err != nil {
		t.Fatal(err)
	}
	var progress bytes.Buffer
	if err := build(t.Context(), tiny, "v1", folder, dir, &progress); err != nil {
		t.Fatal(err)
	}
	for _, name := range tiny.programs() {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode()&0o111 == 0 {
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
	err := build(t.Context(), tiny, "v1", folder, filepath.Join(parent, "tiny"), &bytes.Buffer{})
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
