package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/ci/check/results"
)

var testRun = Run{
	Commit: "abc", Command: "go run ./hack/ci/check", Started: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Took: 100 * time.Second,
	Stages:  []Stage{{Name: "unit", About: "pure code", Counts: results.Counts{Passed: 1, Failed: 1, Skipped: 1}, Took: 90 * time.Second}},
	Jobs:    []Job{{Name: "rust tests", From: 0, Took: 25 * time.Second}, {Name: "unit go", Stage: "unit", From: 25 * time.Second, Took: 50 * time.Second, Failed: true}},
	LeftOut: []string{"e2e: <not now>"},
	Results: []results.Result{
		{Stage: "set-up", Name: "rust tests", Outcome: results.Passed, Duration: 25 * time.Second, Self: 25 * time.Second, SetUp: true},
		{Stage: "unit", Program: "m/p", Name: "TestA", Outcome: results.Passed, Duration: 1500 * time.Millisecond, Self: 1500 * time.Millisecond},
		{Stage: "unit", Program: "m/p", Name: "TestB/<script>alert(1)</script>", Outcome: results.Failed, Output: "\x1b[31m</pre><b>x</b>\x1b[0m ]]> \x00\n"},
		{Stage: "unit", Program: "m/q", Name: "TestC", Outcome: results.Skipped, Reason: `needs a "GPU" & more`},
		{Stage: "unit", Program: "m/q", Name: "TestD", Outcome: results.Elsewhere},
	},
}

// A reader of JUnit XML is not this one's writer.
func TestJUnitIsValidAndWhole(t *testing.T) {
	var b bytes.Buffer
	if err := JUnit(&b, testRun); err != nil {
		t.Fatal(err)
	}
	decoder := xml.NewDecoder(bytes.NewReader(b.Bytes()))
	type attributes = map[string]string
	var suites, cases []attributes
	var failures, skips []string
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, b.String())
		}
		start, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		of := attributes{}
		for _, a := range start.Attr {
			of[a.Name.Local] = a.Value
		}
		switch start.Name.Local {
		case "testsuites", "testsuite":
			suites = append(suites, of)
		case "testcase":
			cases = append(cases, of)
		case "failure":
			var text string
			if err := decoder.DecodeElement(&text, &start); err != nil {
				t.Fatal(err)
			}
			failures = append(failures, text)
		case "skipped":
			skips = append(skips, of["message"])
		}
	}
	if len(suites) != 3 || suites[0]["tests"] != "3" || suites[0]["failures"] != "1" || suites[0]["skipped"] != "1" || suites[1]["name"] != "unit m/p" {
		t.Errorf("suites: %v", suites)
	}
	if len(cases) != 3 || cases[0]["name"] != "TestA" || cases[0]["classname"] != "unit m/p" || cases[0]["time"] != "1.500" {
		t.Errorf("cases: %v", cases)
	}
	if len(failures) != 1 || !strings.Contains(failures[0], "</pre><b>x</b>") || !strings.Contains(failures[0], "]]>") {
		t.Errorf("failures: %q", failures)
	}
	if len(skips) != 1 || skips[0] != `needs a "GPU" & more` {
		t.Errorf("skips: %q", skips)
	}
}

func TestPageEscapesWhatTestsPrint(t *testing.T) {
	var b bytes.Buffer
	if err := Page(&b, testRun); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	for _, bad := range []string{"<script>", "</pre><b>", "<not now>", "\x1b"} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	if refers := regexp.MustCompile(`(?:src|href)=|@import|url\(`).FindString(page); refers != "" {
		t.Errorf("the page needs another file: %s", refers)
	}
}

func TestPageShowsCountsTimesAndReasons(t *testing.T) {
	var b bytes.Buffer
	if err := Page(&b, testRun); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	for _, part := range []string{
		"1 failed", "needs a &#34;GPU&#34; &amp; more", "TestB/&lt;script&gt;", "1m40s", "2026-01-02 03:04 UTC", "commit abc",
		"left: 25.00%; width: 50.00%", "1 more are marked as parts", "25.0s", "e2e: &lt;not now&gt;",
	} {
		if !strings.Contains(page, part) {
			t.Errorf("the page lacks %q", part)
		}
	}
	if t.Failed() {
		t.Log(page)
	}
}

func TestWriteMakesBothFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "test")
	if err := Write(dir, testRun); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"junit.xml", "index.html"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDurations(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0.00s", 1240 * time.Millisecond: "1.24s", 37100 * time.Millisecond: "37.1s", 12*time.Minute + 4*time.Second: "12m04s",
		59*time.Minute + 59700*time.Millisecond: "60m00s",
	} {
		if got := Duration(d); got != want {
			t.Errorf("%v: %s, not %s", d, got, want)
		}
	}
}
