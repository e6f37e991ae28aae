// Package report writes the results of a run of tests: as JUnit XML, and as a page.
package report

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/jstemmer/go-junit-report/v2/junit"

	"evenkeel.dev/evenkeel/hack/ci/check/results"
)

// A Run is a run of tests that has ended.
type Run struct {
	Commit  string
	Command string
	Started time.Time
	Took    time.Duration
	Stages  []Stage
	Jobs    []Job
	Results []results.Result
	LeftOut []string // what did not run, and why
}

// A Stage is a stage of a run.
type Stage struct {
	Name, About string
	Counts      results.Counts
	Took        time.Duration // from the start of its first part to the end of its last one
}

// A Job is a set-up, or a part of a stage.
type Job struct {
	Name   string
	Stage  string // empty for a set-up
	From   time.Duration
	Took   time.Duration
	Failed bool
}

// Names of the files that Write makes.
const (
	JUnitFile = "junit.xml"
	PageFile  = "index.html"
)

// Write writes JUnit XML and the page into a folder.
func Write(dir string, run Run) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, write := range map[string]func(io.Writer, Run) error{JUnitFile: JUnit, PageFile: Page} {
		if err := writeFile(filepath.Join(dir, name), run, write); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
	}
	return nil
}

func writeFile(path string, run Run, write func(io.Writer, Run) error) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return write(file, run)
}

// JUnit writes the results in the format that CI systems read: a suite for each program of a stage.
func JUnit(w io.Writer, run Run) error {
	suites := junit.Testsuites{Name: "evenkeel", Time: inSeconds(run.Took)}
	var order []string
	byName := map[string][]results.Result{}
	for _, r := range run.Results {
		if r.Outcome == results.Elsewhere || r.SetUp && r.Outcome != results.Failed {
			continue
		}
		name := strings.TrimSpace(r.Stage + " " + r.Program)
		if byName[name] == nil {
			order = append(order, name)
		}
		byName[name] = append(byName[name], r)
	}
	for id, name := range order {
		suite := junit.Testsuite{Name: name, ID: id}
		suite.SetTimestamp(run.Started)
		var took time.Duration
		for _, r := range byName[name] {
			took += r.Self
			test := junit.Testcase{Name: r.Name, Classname: strings.TrimSpace(r.Stage + " " + r.Program), Time: inSeconds(r.Duration)}
			switch r.Outcome {
			case results.Failed:
				test.Failure = &junit.Result{Message: "failed", Data: valid(r.Output)}
			case results.Skipped:
				test.Skipped = &junit.Result{Message: valid(r.Reason)}
			}
			suite.AddTestcase(test)
		}
		suite.Time = inSeconds(took)
		suites.AddSuite(suite)
	}
	if _, err := io.WriteString(w, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"); err != nil {
		return err
	}
	return suites.WriteXML(w)
}

func inSeconds(d time.Duration) string { return fmt.Sprintf("%.3f", d.Seconds()) }

// valid replaces what XML does not allow, such as the colors of a terminal.
func valid(text string) string {
	return strings.Map(func(r rune) rune {
		if r == '\t' || r == '\n' || r == '\r' || r >= 0x20 && r <= 0xD7FF || r >= 0xE000 && r <= 0xFFFD || r >= 0x10000 {
			return r
		}
		return '\uFFFD'
	}, text)
}
