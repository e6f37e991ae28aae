package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func root(t *testing.T) string {
	t.Helper()
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	return root
}

func TestGeneratedPagesAreFresh(t *testing.T) {
	root := root(t)
	for _, p := range pages {
		want, err := p.generate(root)
		if err != nil {
			t.Errorf("%s: %v", p.path, err)
			continue
		}
		got, err := os.ReadFile(filepath.Join(root, p.path))
		if err != nil || string(got) != string(want) {
			t.Errorf("%s is stale: run \"go run ./hack/ci/docs generate\" (%v)", p.path, err)
		}
	}
}

// TestNamedTestsExist finds the Go tests that pages name.
func TestNamedTestsExist(t *testing.T) {
	root := root(t)
	declared, named := regexp.MustCompile(`(?m)^func ((?:Test|Benchmark)\w+)\(`), regexp.MustCompile("`((?:Test|Benchmark)[A-Z]\\w+)`")
	exists, checked := map[string]bool{}, 0
	for _, folder := range []string{"charts", "e2e", "hack", "operator"} {
		if err := filepath.WalkDir(filepath.Join(root, folder), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for _, m := range declared.FindAllSubmatch(text, -1) {
				exists[string(m[1])] = true
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range named.FindAllSubmatch(text, -1) {
			if checked++; !exists[string(m[1])] {
				t.Errorf("%s names the test %s, which does not exist", filepath.Base(file), m[1])
			}
		}
	}
	if checked == 0 {
		t.Error("no page names a test")
	}
}

// TestStagedLinksLeadToFiles stages the book, which fails on a link to a file that is missing, and follows the links of
// the pages in it.
func TestStagedLinksLeadToFiles(t *testing.T) {
	book := t.TempDir()
	if err := stage(root(t), book); err != nil {
		t.Fatal(err)
	}
	checked := 0
	err := filepath.WalkDir(book, func(name string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(name, ".md") {
			return err
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		for _, part := range link.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(part[3], "://") {
				continue
			}
			checked++
			if _, err := os.Stat(filepath.Join(filepath.Dir(name), part[3])); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if checked < 50 {
		t.Errorf("%d links were checked, want at least 50", checked)
	}
}

func TestSummaryListsEveryPage(t *testing.T) {
	root := root(t)
	summary, err := os.ReadFile(filepath.Join(root, "docs", "SUMMARY.md"))
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(filepath.Join(root, "docs"), func(name string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(name, ".md") || entry.Name() == "SUMMARY.md" {
			return err
		}
		relative, err := filepath.Rel(filepath.Join(root, "docs"), name)
		if err == nil && !strings.Contains(string(summary), "("+relative+")") {
			t.Errorf("docs/SUMMARY.md does not list %s", relative)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestRustMetricsAreRead(t *testing.T) {
	const text = `
type OfJob<M> = Family<Label, M>;
struct Label {
    job: String,
}
struct Metrics {
    sent: OfJob<Counter>,
    refused: Gauge,
}
let mut all = Registry::with_prefix("x");
let help = "Bytes that were sent";
all.register_with_unit("sent", help, Unit::Bytes, self.sent.clone());
all.register("refused", "Clients that were refused", self.refused.clone());
`
	got, err := rustMetrics(text)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].name != "x_sent_bytes_total" || got[0].kind != "counter" || strings.Join(got[0].labels, " ") != "job" ||
		got[0].help != "Bytes that were sent" || got[1].name != "x_refused" || got[1].kind != "gauge" || len(got[1].labels) != 0 {
		t.Errorf("got %+v", got)
	}
	if _, err := rustMetrics(strings.Replace(text, "self.refused.clone()", "refused", 1)); err == nil {
		t.Error("a metric of an unknown type is accepted")
	}
}

func TestGoMetricsAreRead(t *testing.T) {
	const text = `package p
var jobs = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "x_total", Help: "Jobs."}, []string{"result"})
var desc = prometheus.NewDesc("x_nodes", "Nodes.", []string{"node"}, nil)`
	got, err := goMetrics(text)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].name != "x_total" || got[0].kind != "counter" || got[0].labels[0] != "result" ||
		got[1].name != "x_nodes" || got[1].kind != "gauge" || got[1].labels[0] != "node" {
		t.Errorf("got %+v", got)
	}
}

// forEachPage calls do with every hand-written page of the documentation.
func forEachPage(t *testing.T, do func(name, text string)) {
	t.Helper()
	root := root(t)
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(pages) == 0 {
		t.Fatalf("%d pages: %v", len(pages), err)
	}
	for _, name := range []string{"README.md", "CONTRIBUTING.md", "SECURITY.md"} {
		pages = append(pages, filepath.Join(root, name))
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		do(filepath.Base(page), string(text))
	}
}

func TestPathsInDocsExist(t *testing.T) {
	root, found := root(t), 0
	quoted := regexp.MustCompile("`((?:plugin|operator|hack|charts|images|e2e|config|docs)/[\\w./-]+)`")
	forEachPage(t, func(page, text string) {
		for _, path := range quoted.FindAllStringSubmatch(text, -1) {
			found++
			if _, err := os.Stat(filepath.Join(root, path[1])); err != nil {
				t.Errorf("%s: %v", page, err)
			}
		}
	})
	if found < 20 {
		t.Errorf("%d paths were found, want at least 20", found)
	}
}

// TestSourcesInDocsExist looks for source files that a page names from a crate's folder on, or from its src folder on.
func TestSourcesInDocsExist(t *testing.T) {
	root, found := root(t), 0
	quoted := regexp.MustCompile("`([\\w-]+/[\\w/-]+\\.rs)`")
	forEachPage(t, func(page, text string) {
		for _, file := range quoted.FindAllStringSubmatch(text, -1) {
			found++
			var all []string
			for _, folder := range []string{"", "plugin", "plugin/crates", "plugin/crates/*/src"} {
				files, err := filepath.Glob(filepath.Join(root, folder, file[1]))
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, files...)
			}
			if len(all) == 0 {
				t.Errorf("%s: no file %s", page, file[1])
			}
		}
	})
	if found < 10 {
		t.Errorf("%d files were found, want at least 10", found)
	}
}

// The values of a release name its images by digest, so that an upgrade that reuses them upgrades nothing.
func TestUpgradesInDocsReuseNoValues(t *testing.T) {
	found := 0
	command := regexp.MustCompile("helm upgrade evenkeel (?:[^`\\\\\n]|\\\\\n)*") // with the lines that it continues on
	forEachPage(t, func(page, text string) {
		for _, upgrade := range command.FindAllString(text, -1) {
			found++
			if strings.Contains(upgrade, "--reuse-values") {
				t.Errorf("%s: %s", page, upgrade)
			}
		}
	})
	if found < 3 {
		t.Errorf("%d upgrades were found, want at least 3", found)
	}
}

func TestMetricsInDocsExist(t *testing.T) {
	reference, err := metricsPage(root(t))
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	quoted := regexp.MustCompile("`(evenkeel_[a-z_]+)[`{]")
	forEachPage(t, func(page, text string) {
		for _, name := range quoted.FindAllStringSubmatch(text, -1) {
			found++
			if !strings.Contains(string(reference), "`"+name[1]+"`") {
				t.Errorf("%s: %s is not a metric", page, name[1])
			}
		}
	})
	if found < 20 {
		t.Errorf("%d metrics were found, want at least 20", found)
	}
}

// TestTestsInDocsExist looks for the Go tests that pages name as the reason of what they say.
func TestTestsInDocsExist(t *testing.T) {
	root, found := root(t), 0
	defined := map[string]bool{}
	definition := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	for _, folder := range []string{"charts", "e2e", "hack", "operator"} {
		err := filepath.WalkDir(filepath.Join(root, folder), func(name string, entry os.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(name, "_test.go") {
				return err
			}
			text, err := os.ReadFile(name)
			for _, test := range definition.FindAllSubmatch(text, -1) {
				defined[string(test[1])] = true
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	quoted := regexp.MustCompile("`(Test[A-Z]\\w+)`")
	forEachPage(t, func(page, text string) {
		for _, name := range quoted.FindAllStringSubmatch(text, -1) {
			found++
			if !defined[name[1]] {
				t.Errorf("%s: there is no test %s", page, name[1])
			}
		}
	})
	if found < 20 {
		t.Errorf("%d tests were found, want at least 20", found)
	}
}
