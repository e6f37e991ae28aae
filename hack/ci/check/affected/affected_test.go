package affected

import (
	"reflect"
	"strings"
	"testing"
)

var (
	testStages = []Stage{
		{Name: "format", Always: true},
		{Name: "operator", Reads: []string{"charts/evenkeel/"}},
		{Name: "plugin", Reads: []string{"plugin/Cargo.lock"}},
		{Name: "docs", Reads: []string{"*.md"}},
	}
	testGraph = Graph{
		Folders: []string{"operator/test", "operator/internal/inject", "hack/unused", "plugin/crates/transport", "plugin/crates/tuner"},
		Needs: map[string][]string{
			"operator": {"operator/test", "operator/internal/inject"},
			"plugin":   {"plugin/crates/transport"},
		},
	}
)

func TestChangesChooseStages(t *testing.T) {
	for changed, want := range map[string]string{
		"":                                   "",
		"operator/internal/inject/inject.go": "format operator",
		"operator/internal/inject/testdata/a/b.txt": "format operator", // a package's folders are its own
		"plugin/crates/transport/src/lib.rs":        "format plugin",
		"charts/evenkeel/values.yaml":               "format operator",
		"plugin/Cargo.lock":                         "format plugin",
		"README.md":                                 "format docs",
		"operator/internal/inject/README.md":        "format operator docs",
		"hack/unused/main.go":                       "format", // known, and nobody's
		"plugin/crates/tuner/src/lib.rs":            "format",
		"Makefile":                                  "format operator plugin docs", // unknown
		"charts/evenkeel-other/values.yaml":         "format operator plugin docs",
		"README.md plugin/crates/transport/a.rs":    "format plugin docs",
	} {
		c := Choose(strings.Fields(changed), testStages, testGraph)
		if got := strings.Join(c.Stages, " "); got != want {
			t.Errorf("%s: %s, not %s", changed, got, want)
		}
		if unknown := strings.HasPrefix(changed, "Makefile") || strings.HasPrefix(changed, "charts/evenkeel-"); (c.Unknown != "") != unknown {
			t.Errorf("%s: unknown %q", changed, c.Unknown)
		}
	}
}

func TestChoiceNamesTheFirstFile(t *testing.T) {
	c := Choose([]string{"README.md", "docs/a.md"}, testStages, testGraph)
	if want := map[string]string{"format": "README.md", "docs": "README.md"}; !reflect.DeepEqual(c.Why, want) {
		t.Errorf("%v", c.Why)
	}
}

const metadata = `{"packages": [
	{"name": "bench", "manifest_path": "/r/plugin/bench/Cargo.toml", "dependencies": [
		{"name": "transport", "kind": null, "path": "/r/plugin/transport"}, {"name": "clap", "kind": null},
		{"name": "server", "kind": "dev", "path": "/r/plugin/server"}]},
	{"name": "transport", "manifest_path": "/r/plugin/transport/Cargo.toml", "dependencies": [
		{"name": "build", "kind": "build", "path": "/r/plugin/build"}, {"name": "testkit", "kind": "dev", "path": "/r/plugin/testkit"}]},
	{"name": "server", "manifest_path": "/r/plugin/server/Cargo.toml", "dependencies": []},
	{"name": "build", "manifest_path": "/r/plugin/build/Cargo.toml", "dependencies": []},
	{"name": "testkit", "manifest_path": "/r/plugin/testkit/Cargo.toml", "dependencies": []}]}`

func TestCratesNeedCrates(t *testing.T) {
	crates, err := parseCrates("/r", metadata)
	if err != nil {
		t.Fatal(err)
	}
	for root, want := range map[string]string{
		// Not testkit: transport's tests do not run.
		"bench":     "plugin/bench plugin/build plugin/server plugin/transport",
		"transport": "plugin/build plugin/testkit plugin/transport",
		"*":         "plugin/bench plugin/build plugin/server plugin/testkit plugin/transport",
	} {
		got, err := closure(crates, []string{root})
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s: %v, %v", root, got, err)
		}
	}
	if _, err := closure(crates, []string{"gone"}); err == nil {
		t.Error("an unknown crate is taken")
	}
}
