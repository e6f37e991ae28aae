package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"evenkeel.dev/evenkeel/hack/ci/check/report"
	"evenkeel.dev/evenkeel/hack/ci/check/results"
	"evenkeel.dev/evenkeel/hack/ci/check/schedule"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
)

// A session is one run of this program.
type session struct {
	root    string
	out     string // the folder for results
	work    string // a temporary folder
	console *console
	cache   bool // Go may answer from its cache of test results
	repeats bool // parts run several times
	// kubernetes is the minor version of the API server of stage operator; empty: the local cluster's.
	kubernetes string

	// What set-ups have made. The scheduler runs a job after the set-ups that it needs.
	rust      cargo.Built
	goTests   map[string][]goProgram // by the set-up that compiled them
	test2json string
	assets    string // the folder of envtest
	helm      string
	wheel     string
	rdmaLab   string            // the program
	missing   map[string]string // why this machine cannot have a lab, by the set-up

	mu      sync.Mutex
	results []results.Result
	jobs    []report.Job
	files   map[string]string // with the output of failed tests, by their IDs
	active  []*task
}

// newSession opens a session in the checkout. The caller closes it.
func newSession(console *console) (*session, error) {
	root, err := toolbox.Root()
	if err != nil {
		return nil, err
	}
	work, err := os.MkdirTemp("", "evenkeel-check-")
	if err != nil {
		return nil, err
	}
	s := &session{root: root, out: filepath.Join(root, "dist", "test"), work: work, console: console,
		goTests: map[string][]goProgram{}, missing: map[string]string{}, files: map[string]string{}}
	// Results of an earlier run could be taken for this one's.
	if err := errors.Join(os.RemoveAll(s.out), os.MkdirAll(s.out, 0o755)); err != nil {
		return nil, errors.Join(err, os.RemoveAll(work))
	}
	return s, nil
}

func (s *session) close() error { return os.RemoveAll(s.work) }

// A task is a job of the session that runs: a set-up, or a part of a stage.
type task struct {
	*session
	name  string // of the job
	stage string // of its results; empty for a set-up
	began time.Time
	log   *os.File

	// Guarded by session.mu:
	counts   results.Counts
	programs map[string]results.Counts
}

// job makes a job of the scheduler from a function.
func (s *session) job(name, stage string, weight schedule.Weight, needs, after, apart []string, run func(context.Context, *task) error) schedule.Job {
	return schedule.Job{Name: name, Needs: needs, After: after, Weight: weight, Apart: apart, Run: func(ctx context.Context) error {
		t := &task{session: s, name: name, stage: stage, began: s.console.now(), programs: map[string]results.Counts{}}
		return t.run(ctx, run)
	}}
}

// run runs the task, and records how it ended.
func (t *task) run(ctx context.Context, run func(context.Context, *task) error) (err error) {
	if t.log, err = os.OpenFile(filepath.Join(t.out, fileName(t.name)+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.log.Close()) }()
	t.mu.Lock()
	t.active = append(t.active, t)
	t.mu.Unlock()
	t.say("starts")
	err = run(ctx, t)
	took := t.console.now().Sub(t.began)
	if err != nil {
		t.failure(err)
	}
	if t.stage == "" && err == nil {
		t.report(results.Result{Stage: setUpStage, Name: t.name, Outcome: results.Passed, Duration: took, Self: took, SetUp: true})
	}
	t.mu.Lock()
	counts := t.counts
	t.active = slices.DeleteFunc(t.active, func(o *task) bool { return o == t })
	t.jobs = append(t.jobs, report.Job{Name: t.name, Stage: t.stage, From: t.began.Sub(t.console.started), Took: took, Failed: err != nil || counts.Failed > 0})
	t.mu.Unlock()
	if t.stage == "" {
		t.say("ended after " + report.Duration(took))
	} else {
		t.say(fmt.Sprintf("ended: %s  %s", counts, report.Duration(took)))
	}
	if err == nil && counts.Failed > 0 {
		err = fmt.Errorf("%d failed", counts.Failed)
	}
	return err
}

// setUpStage stands for the stage of set-ups in results.
const setUpStage = "set-up"

// failure reports an error that belongs to no test.
func (t *task) failure(err error) {
	r := results.Result{Stage: t.stage, Name: "(" + t.name + ")", Outcome: results.Failed, Output: err.Error() + "\n"}
	if t.stage == "" {
		r.Stage, r.Name, r.SetUp = setUpStage, t.name, true
	}
	t.report(r)
}

func (t *task) say(text string) { t.console.print(t.name, text) }

// progress shows what a set-up prints, and keeps it in the task's log.
func (t *task) progress() io.Writer {
	return &lines{take: func(line string) {
		t.note(line)
		t.say(line)
	}}
}

// note keeps a line in the task's log.
func (t *task) note(line string) { io.WriteString(t.log, line) } //nolint:errcheck // a full disk fails elsewhere

// shownLines is how many of the last lines of a failed test's output are shown.
const shownLines = 60

// report records a result, and shows a failure at once.
func (t *task) report(r results.Result) {
	if r.Stage == "" {
		r.Stage = t.stage
	}
	file := ""
	if r.Outcome == results.Failed {
		file = t.keep(r)
	}
	t.mu.Lock()
	t.results = append(t.results, r)
	t.counts.Add(r)
	of := t.programs[r.Program]
	of.Add(r)
	t.programs[r.Program] = of
	if file != "" && t.files[r.ID()] == "" { // the first failure's
		t.files[r.ID()] = file
	}
	t.mu.Unlock()
	if r.Outcome != results.Failed {
		return
	}
	text := strings.Split(strings.TrimRight(r.Output, "\n"), "\n")
	var b strings.Builder
	fmt.Fprintf(&b, "FAIL %s %s  %s\n", short(r.Program), r.Name, report.Duration(r.Duration))
	if left := len(text) - shownLines; left > 0 {
		fmt.Fprintf(&b, "    (%d lines before are in %s)\n", left, t.relative(file))
		text = text[left:]
	}
	for _, line := range text {
		fmt.Fprintf(&b, "    %s\n", line)
	}
	t.say(b.String())
}

// keep writes the output of a failed test into a file of its own, and returns its path.
func (t *task) keep(r results.Result) string {
	dir := filepath.Join(t.out, "failed")
	name := fileName(r.ID())
	for n := 1; ; n++ {
		path := filepath.Join(dir, fmt.Sprintf("%s.%d.txt", name, n))
		err := os.MkdirAll(dir, 0o755)
		if err == nil {
			var file *os.File
			if file, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644); err == nil {
				_, err = file.WriteString(r.Output)
				err = errors.Join(err, file.Close())
			}
		}
		switch {
		case err == nil:
			return path
		case errors.Is(err, os.ErrExist):
		default:
			t.say("the output of a failed test could not be kept: " + err.Error())
			return ""
		}
	}
}

// relative is a path from the root of the checkout.
func (s *session) relative(path string) string {
	if rel, err := filepath.Rel(s.root, path); err == nil {
		return rel
	}
	return path
}

// failedTests is how many tests of the task have failed.
func (t *task) failedTests() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.counts.Failed
}

// receiver hands the results of a parser on to the task.
func (t *task) receiver() results.Receiver {
	return results.Receiver{Result: t.report, Line: t.note, Program: t.programEnded}
}

// programEnded shows a line for a program whose tests have ended.
func (t *task) programEnded(program string, took time.Duration) {
	t.mu.Lock()
	counts := t.programs[program]
	t.mu.Unlock()
	word := "ok  "
	switch {
	case counts.Failed > 0:
		word = "FAIL"
	case counts == results.Counts{}:
		return // it has no tests
	}
	t.say(fmt.Sprintf("%s %-40s %s  %s", word, short(program), counts, report.Duration(took)))
}

// state is what runs now, in one line.
func (s *session) state() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var parts []string
	for _, t := range s.active {
		text := fmt.Sprintf("%s for %s", t.name, report.Duration(s.console.now().Sub(t.began)))
		if t.stage != "" {
			text += fmt.Sprintf(" (%s)", t.counts)
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, "; ")
}

// watch prints what runs whenever nothing else was printed for a while, until the returned function is called.
func (s *session) watch() (stop func()) {
	const silence = 30 * time.Second
	done := make(chan struct{})
	go func() {
		tick := time.NewTicker(silence / 3)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				if s.console.quiet() >= silence {
					s.console.print("...", s.state())
				}
			}
		}
	}()
	return func() { close(done) }
}

// short is the name of a program without this module's path.
func short(program string) string { return strings.TrimPrefix(program, modulePrefix) }

const modulePrefix = toolbox.Module + "/"

var notInFileNames = regexp.MustCompile(`[^A-Za-z0-9._-]+`)

// fileName makes a file's name of any text.
func fileName(text string) string {
	const longest = 150
	name := strings.Trim(notInFileNames.ReplaceAllString(strings.ReplaceAll(text, modulePrefix, ""), "-"), "-")
	return name[:min(len(name), longest)]
}
