package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/ci/check/results"
	"evenkeel.dev/evenkeel/hack/ci/check/schedule"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A filter that matches no test runs nothing, without an error. So each filter must match a module, or the beginning of
// a function's name in a file of that module.
func TestRDMAFiltersMatchRustTests(t *testing.T) {
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	sources := map[string]string{}
	err = filepath.WalkDir(filepath.Join(root, "plugin", "crates"), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".rs" {
			return err
		}
		text, err := os.ReadFile(path)
		sources[path] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, tests := range rdmaTests {
		for _, filter := range tests.run {
			if strings.HasPrefix(filter, "--") || !strings.Contains(filter, "::") {
				continue // an option, or its value
			}
			parts := strings.Split(filter, "::")
			modules, function := parts[:len(parts)-1], regexp.MustCompile(`\bfn `+regexp.QuoteMeta(parts[len(parts)-1]))
			found := false
			for path, text := range sources {
				inModule := true
				for _, module := range modules {
					inModule = inModule && (strings.Contains(path, "/"+module) || strings.Contains(text, "mod "+module))
				}
				last := parts[len(parts)-1]
				// Such as rdma::failover, a folder or a file.
				isModule := strings.Contains(path, "/"+last+"/") || strings.HasSuffix(path, "/"+last+".rs")
				found = found || inModule && (isModule || function.MatchString(text))
			}
			if !found {
				t.Errorf("no Rust test matches %q", filter)
			}
		}
	}
}

// suite is what a Rust test program with one test prints.
func suite(name, outcome string) string {
	return fmt.Sprintf(`{ "type": "suite", "event": "started", "test_count": 1 }
{ "type": "test", "name": "%s", "event": "%s", "exec_time": 1 }
{ "type": "suite", "event": "%[2]s", "passed": %d, "failed": %d, "ignored": 0 }
`, name, outcome, map[string]int{"ok": 1}[outcome], map[string]int{"failed": 1}[outcome])
}

// The script runs in a shell of this machine, with programs that print what the tests would.
func TestProgramsInOneMachineAreToldApart(t *testing.T) {
	s, _ := testSession(t)
	printing := func(name, text, status string) rdmaProgram {
		return rdmaProgram{name: name, dir: s.root, environment: []string{"STATUS=" + status}, command: []string{"bash", "-c", `printf "%s" "$1"; exit $STATUS`, "it's", text}}
	}
	programs := []rdmaProgram{
		printing("a", suite("one", "ok")+"no end of line", "0"), printing("b", suite("two", "failed"), "101"), printing("c", "cannot start\n", "127"),
	}
	job := s.job("rdma pair", "rdma", schedule.Busy, nil, nil, nil, func(ctx context.Context, t *task) error {
		t.parse(ctx, exec.CommandContext(ctx, "bash", "-c", rdmaScript(programs)), &rdmaParser{task: t, programs: programs})
		return nil
	})
	if err := s.execute(t.Context(), []schedule.Job{job}, runOptions{}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range s.results {
		got = append(got, fmt.Sprintf("%s %s %s", r.Outcome, r.Program, r.Name))
	}
	if list := strings.Join(got, ", "); list != "passed a one, failed b two, failed c (program)" {
		t.Error(list)
	}
}

func TestProgramsOfAMachineThatEndsEarlyFail(t *testing.T) {
	s, _ := testSession(t)
	job := s.job("rdma pair", "rdma", schedule.Busy, nil, nil, nil, func(_ context.Context, t *task) error {
		p := &rdmaParser{task: t, programs: []rdmaProgram{{name: "a"}, {name: "b"}, {name: "c"}}}
		for line := range strings.Lines(rdmaMark + "start\n" + suite("one", "ok") + rdmaMark + "end 0\n" + rdmaMark + "start\n") {
			p.Line(line)
		}
		p.End(errors.New("exit status 125"))
		return nil
	})
	if err := s.execute(t.Context(), []schedule.Job{job}, runOptions{}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range s.results {
		got = append(got, fmt.Sprintf("%s %s %s", r.Outcome, r.Program, r.Name))
	}
	if list := strings.Join(got, ", "); list != "passed a one, failed b (program), failed c (not run)" {
		t.Error(list)
	}
	if n := results.Count(s.results).Failed; n != 2 {
		t.Errorf("%d failed", n)
	}
}
