package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/ci/check/affected"
	"evenkeel.dev/evenkeel/hack/ci/check/results"
	"evenkeel.dev/evenkeel/hack/ci/check/schedule"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// testSession is a session whose results go to a temporary folder.
func testSession(t *testing.T) (*session, *bytes.Buffer) {
	t.Helper()
	var out bytes.Buffer
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	dir := t.TempDir()
	return &session{
		root: dir, out: dir, work: t.TempDir(), console: newConsole(&out, func() time.Time { now = now.Add(time.Second); return now }),
		goTests: map[string][]goProgram{}, missing: map[string]string{}, files: map[string]string{},
	}, &out
}

func TestTablesAreWhole(t *testing.T) {
	var jobs []string
	for _, u := range setUps {
		jobs = append(jobs, u.name)
	}
	all := slices.Concat(stages, extra)
	for _, s := range all {
		for _, p := range s.parts {
			jobs = append(jobs, jobName(s, p))
			if stage, ok := stageOf(jobName(s, p)); !ok || stage != s.Name {
				t.Errorf("job %s is of stage %q", jobName(s, p), stage)
			}
		}
	}
	known := func(where string, list []string) {
		for _, name := range list {
			if !slices.Contains(jobs, name) {
				t.Errorf("%s names %s, which is no job", where, name)
			}
		}
	}
	for _, u := range setUps {
		known(u.name, slices.Concat(u.needs, u.apart))
		if _, ok := stageOf(u.name); ok {
			t.Errorf("%s is a set-up and a part of a stage", u.name)
		}
	}
	for _, s := range slices.Concat(all, checkStages) {
		for _, p := range s.parts {
			known(jobName(s, p), slices.Concat(p.needs, p.again, p.apart))
		}
	}
	// No circles, no name twice.
	s, _ := testSession(t)
	list := s.jobsOf(all)
	for i := range list {
		list[i].Run = func(context.Context) error { return nil }
	}
	if err := schedule.Run(t.Context(), list, schedule.Options{Parallel: 2}); err != nil {
		t.Error(err)
	}
}

func TestTestProgramsOfABatchHaveDifferentNames(t *testing.T) {
	got := batches([]string{"m/a/rdma", "m/b/rdma", "m/page", "m/c/rdma", "m/c/page"})
	if want := [][]string{{"m/a/rdma", "m/page"}, {"m/b/rdma", "m/c/page"}, {"m/c/rdma"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v", got)
	}
}

// What the tables of SINCE name must exist, as nobody would notice a file that has moved.
func TestFilesOfStagesExist(t *testing.T) {
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range slices.Concat(stages, extra) {
		for _, file := range s.Reads {
			if file == "plugin/.cargo/" {
				continue // people may add it
			}
			if _, err := os.Stat(filepath.Join(root, file)); err != nil && !strings.HasPrefix(file, "*") {
				t.Errorf("stage %s: %v", s.Name, err)
			}
		}
	}
	for _, folder := range slices.Concat(notUnit, slowPackages) {
		if _, err := os.Stat(filepath.Join(root, folder)); err != nil {
			t.Error(err)
		}
	}
	for _, folder := range slices.Concat(pureCrates, pluginPackages) {
		if _, err := os.Stat(filepath.Join(root, "plugin", folder)); err != nil {
			t.Error(err)
		}
	}
}

func TestSetUpsComeBeforeWhatNeedsThemAndOnce(t *testing.T) {
	s, _ := testSession(t)
	chosen, err := choose([]string{"plugin", "unit"})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, job := range s.jobsOf(chosen) {
		got = append(got, job.Name)
	}
	want := "packages, unit go, rust tests, unit rust, unit fuzz, unit examples, plugin"
	if list := strings.Join(got, ", "); list != want {
		t.Errorf("%s, not %s", list, want)
	}
}

func TestUnknownStageIsRefused(t *testing.T) {
	if _, err := choose([]string{"unit", "units"}); err == nil || !strings.Contains(err.Error(), "there is no stage units: there are format, unit,") {
		t.Error(err)
	}
}

func TestOtherVersionsAreOfStageOperatorOnly(t *testing.T) {
	for _, c := range []struct {
		version string
		stages  []string
		refusal string
	}{
		{"", nil, ""},
		{"1.30", []string{"operator"}, ""},
		{"1.29", []string{"operator"}, "there is no API server of Kubernetes 1.29: there are 1.30, 1.31"},
		{"1.30", nil, "only stage operator runs on another version of Kubernetes, and not format, unit"},
		{"1.30", []string{"operator", "chart"}, "and not operator, chart"},
	} {
		chosen, err := choose(c.stages)
		if err != nil {
			t.Fatal(err)
		}
		err = runOptions{kubernetes: c.version}.versioned(chosen)
		if (err == nil) != (c.refusal == "") || err != nil && !strings.Contains(err.Error(), c.refusal) {
			t.Errorf("%s with %v: %v", c.version, c.stages, err)
		}
	}
}

// Each case is a run of fake stages: what its parts do, and what is counted in the end.
func TestRunCountsAndCloses(t *testing.T) {
	passes := func(_ context.Context, t *task) error {
		t.report(results.Result{Program: "p", Name: "TestA", Outcome: results.Passed})
		t.report(results.Result{Program: "p", Name: "TestS", Outcome: results.Skipped, Reason: "no GPU"})
		return nil
	}
	fails := func(_ context.Context, t *task) error {
		t.report(results.Result{Program: "p", Name: "TestF", Outcome: results.Failed, Output: "why\n"})
		return nil
	}
	for name, c := range map[string]struct {
		run    func(context.Context, *task) error
		fails  string
		closes string
		says   []string
	}{
		"passed":         {passes, "", "1 passed, 0 failed, 1 skipped", []string{"skipped:\nunit     p TestS  no GPU\n", "unit          1 passed, 0 failed, 1 skipped"}},
		"a failed test":  {fails, "1 failed", "0 passed, 1 failed, 0 skipped", []string{"FAIL p TestF", "    why\n", "failed:\nunit     p TestF  failed/unit-p-TestF.1.txt\n"}},
		"a failed stage": {func(context.Context, *task) error { return errors.New("no machine") }, "1 failed", "0 passed, 1 failed, 0 skipped", []string{"no machine", "failed:\nunit      (unit)"}},
	} {
		s, out := testSession(t)
		one := stage{Stage: affected.Stage{Name: "unit"}, parts: []part{{run: c.run}}}
		err := s.runAndReport(t.Context(), []stage{one}, runOptions{parallel: 1}, []string{"e2e: not now"})
		if got := ""; err != nil {
			got = err.Error()
			if got != c.fails {
				t.Errorf("%s: %s", name, got)
			}
		} else if c.fails != "" {
			t.Errorf("%s: no error", name)
		}
		if lines := strings.Split(strings.TrimRight(out.String(), "\n"), "\n"); lines[len(lines)-1] != c.closes {
			t.Errorf("%s: the last line is %q", name, lines[len(lines)-1])
		}
		for _, text := range append(c.says, "left out:\ne2e: not now\n") {
			if !strings.Contains(out.String(), text) {
				t.Errorf("%s: it does not print %q, but\n%s", name, text, out.String())
			}
		}
		for _, file := range []string{"junit.xml", "index.html", "unit.log"} {
			if _, err := os.Stat(filepath.Join(s.out, file)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// A part that does not run is a failure of its stage, and not silence.
func TestFailedSetUpFailsWhatNeedsIt(t *testing.T) {
	s, out := testSession(t)
	jobs := []schedule.Job{
		s.job("rust tests", "", schedule.Busy, nil, nil, nil, func(context.Context, *task) error { return errors.New("does not compile") }),
		s.job("plugin", "plugin", schedule.Busy, []string{"rust tests"}, nil, nil, func(context.Context, *task) error { t.Error("it ran"); return nil }),
	}
	if err := s.execute(t.Context(), jobs, runOptions{parallel: 2}); err != nil {
		t.Fatal(err)
	}
	if got := results.Count(s.results).String(); got != "0 passed, 2 failed, 0 skipped" {
		t.Error(got)
	}
	if !strings.Contains(out.String(), "FAIL not run: rust tests failed") {
		t.Error(out.String())
	}
}

func TestConsoleKeepsLinesTogether(t *testing.T) {
	var out bytes.Buffer
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	c := newConsole(&out, func() time.Time { return now })
	now = now.Add(61 * time.Second)
	w := &lines{take: func(line string) { c.print("build", line) }}
	for _, part := range []string{"one\ntw", "o", "\nrest"} {
		if n, err := w.Write([]byte(part)); n != len(part) || err != nil {
			t.Errorf("%d, %v", n, err)
		}
	}
	c.print("unit", "a\nb")
	w.flush()
	want := "  1:01 build            one\n  1:01 build            two\n  1:01 unit             a\n  1:01 unit             b\n  1:01 build            rest\n"
	if out.String() != want {
		t.Errorf("%q", out.String())
	}
}

func TestTallyCountsRoundsAndFailures(t *testing.T) {
	result := func(name string, outcome results.Outcome) results.Result {
		return results.Result{Stage: "unit", Program: "p", Name: name, Outcome: outcome}
	}
	var all tally
	for round := range 3 {
		list := []results.Result{result("steady", results.Passed), result("skipped", results.Skipped), result("child", results.Elsewhere), result("broken", results.Failed)}
		if round == 1 {
			list = append(list, result("flaky", results.Failed))
		} else {
			list = append(list, result("flaky", results.Passed))
		}
		if round == 2 {
			list = append(list, result("(program)", results.Failed)) // it has no result in other rounds
		}
		all.add(list)
	}
	want := `
failed       test, and the output of its first failure
  3 of 3     unit p broken
             file of unit p broken
  1 of 1     unit p (program)
             file of unit p (program)
  1 of 3     unit p flaky
             file of unit p flaky

4 tests, 3 rounds, 3 failed at least once
`
	if got := all.table(func(id string) string { return "file of " + id }); got != want {
		t.Errorf("%s\nnot\n%s", got, want)
	}
}

func TestFirstFailureKeepsItsFile(t *testing.T) {
	s, _ := testSession(t)
	r := results.Result{Stage: "unit", Program: "p", Name: "TestF", Outcome: results.Failed, Output: "first\n"}
	again := s.job("unit", "unit", schedule.Busy, nil, nil, nil, func(_ context.Context, t *task) error {
		t.report(r)
		r.Output = "second\n"
		t.report(r)
		return nil
	})
	if err := s.execute(t.Context(), []schedule.Job{again}, runOptions{}); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(s.files[r.ID()]); err != nil || string(text) != "first\n" {
		t.Errorf("%q, %v", text, err)
	}
}
