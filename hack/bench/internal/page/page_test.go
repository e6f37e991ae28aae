package page

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestOutdatedNamesCommitsBeforeAChange(t *testing.T) {
	root := t.TempDir()
	git := func(args ...string) string {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-C", root, "-c", "user.name=test", "-c", "user.email=test@example.com"}, args...)...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %q: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	commit := func(file string) Source {
		t.Helper()
		path := filepath.Join(root, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(file), 0o644); err != nil {
			t.Fatal(err)
		}
		git("add", ".")
		git("commit", "-q", "-m", file)
		return Source{Commit: git("rev-parse", "--short=12", "HEAD"), Day: "2026-01-31"}
	}
	git("init", "-q")
	first, second, third := commit("plugin/a"), commit("plugin/b"), commit("docs/c")
	if got := Outdated(t.Context(), root, []Source{second, third}, "plugin"); got != "" {
		t.Errorf("%q, though plugin has not changed", got)
	}
	if got, want := Outdated(t.Context(), root, []Source{first, second, first}, "plugin"), "Taken at commit "+first.Commit+"; the code it measures has changed since."; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	second.Commit += ", with changes"
	if got := Outdated(t.Context(), root, []Source{first, second}, "."); !strings.Contains(got, "the code they measure has changed") {
		t.Errorf("%q, want both commits", got)
	}
}

func TestTable(t *testing.T) {
	table := Table{Heading: []string{"a", "b"}}
	table.Add("1", "2")
	var markdown, text bytes.Buffer
	table.Markdown(&markdown)
	if got, want := markdown.String(), "| a | b |\n| --- | --- |\n| 1 | 2 |\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if err := table.Text(&text); err != nil || text.String() != "a  b\n1  2\n" {
		t.Errorf("%q, %v", &text, err)
	}
}

func TestSourceHasTheCommand(t *testing.T) {
	got := Command([]string{"--quick", "--only", "two-links|2+2", "--plugin=x=/opt/x.so", "--library", "/opt/lib/y.so"})
	_, arguments, _ := strings.Cut(got, " --quick")
	if want := " --only 'two-links|2+2' --plugin=x=x.so --library y.so"; !strings.HasPrefix(got, "go run ./hack/bench/internal/page") || arguments != want {
		t.Errorf("%q, want %q", got, want)
	}
	for want, s := range map[string]Source{
		"commit abc": {Commit: "abc"},
		"commit abc, with changes, on 2026-01-31, by `go run ./x`": {Commit: "abc, with changes", Day: "2026-01-31", Command: "go run ./x"},
	} {
		if s.String() != want {
			t.Errorf("%q, want %q", s, want)
		}
		if since := s.Since("plugin", "hack"); !strings.Contains(since, "`git log --oneline abc.. -- plugin hack`") {
			t.Errorf("%q", since)
		}
	}
}
