package results

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// RustEnvironment lets a Rust test program of the stable compiler take [RustArguments].
const RustEnvironment = "RUSTC_BOOTSTRAP=1"

// RustArguments make a Rust test program print events, with the time of each test. They are unstable, so that
// rustParser reads the usual output too.
var RustArguments = []string{"-Zunstable-options", "--format", "json", "--report-time"}

// Tests that are ignored for these reasons run elsewhere: in a process of their own that another test starts, or in
// stage rdma.
var elsewhere = []string{"part of another test", "runs in the RDMA lab"}

// rustParser reads the output of Rust's test programs: events, or lines for people, as rustdoc prints them. What tests
// and their child processes print may be between and within the lines.
type rustParser struct {
	to      Receiver
	program string
	running []string // tests, in the order of their starts
	seen    Counts   // of the present suite, with tests that run elsewhere as skipped
	open    bool     // a suite has begun and has not ended
	closed  bool     // a suite has ended
	failed  bool
	other   tail

	// Of lines for people:
	pending  string // a test whose outcome is on a later line
	failures map[string]*strings.Builder
	names    []string // of failed tests, in their order
	section  string   // the failed test whose output follows
}

// NewRust returns a parser of a Rust test program.
func NewRust(program string, to Receiver) Parser {
	return &rustParser{to: to, program: program, failures: map[string]*strings.Builder{}}
}

type rustEvent struct {
	Type, Event, Name, Stdout, Message, Reason string
	Passed, Failed, Ignored                    int
	ExecTime                                   float64 `json:"exec_time"`
}

var rustEventStart = regexp.MustCompile(`\{ ?"type": ?"(suite|test|bench|report)"`)

func (p *rustParser) Line(line string) {
	if at := rustEventStart.FindStringIndex(line); at != nil {
		var e rustEvent
		decoder := json.NewDecoder(strings.NewReader(line[at[0]:]))
		if decoder.Decode(&e) == nil {
			// What another process printed is before or behind the event.
			if before := line[:at[0]]; before != "" {
				p.show(before + "\n")
			}
			p.event(e)
			if behind := strings.TrimLeft(line[at[0]+int(decoder.InputOffset()):], "\n"); behind != "" {
				p.Line(behind)
			}
			return
		}
	}
	if !p.text(line) && strings.TrimSpace(line) != "" {
		p.show(line)
	}
}

func (p *rustParser) show(line string) {
	p.other.add(line)
	p.to.Line(line)
}

func (p *rustParser) event(e rustEvent) {
	switch {
	case e.Type == "suite" && e.Event == "started":
		p.open = true
	case e.Type == "suite":
		p.close(Counts{e.Passed, e.Failed, e.Ignored})
	case e.Type != "test":
	case e.Event == "started":
		p.running = append(p.running, e.Name)
	case e.Event == "ok":
		p.end(e.Name, Passed, e.ExecTime, "", "")
	case e.Event == "failed":
		text := e.Stdout
		if reason := cmp.Or(e.Message, e.Reason); reason != "" {
			text += reason + "\n"
		}
		p.end(e.Name, Failed, e.ExecTime, "", text)
	case e.Event == "ignored":
		p.end(e.Name, Skipped, 0, e.Message, "")
	}
}

// end reports a test.
func (p *rustParser) end(name string, outcome Outcome, took float64, reason, output string) {
	if i := slices.Index(p.running, name); i >= 0 {
		p.running = slices.Delete(p.running, i, i+1)
	}
	duration := seconds(took)
	r := Result{Program: p.program, Name: name, Outcome: outcome, Duration: duration, Self: duration, Reason: reason, Output: output}
	p.seen.Add(r)
	p.failed = p.failed || outcome == Failed
	if outcome == Skipped && slices.Contains(elsewhere, reason) {
		r.Outcome = Elsewhere
	}
	p.to.Result(r)
}

// close ends a suite, and compares its own counts with the tests that were read.
func (p *rustParser) close(told Counts) {
	for _, name := range p.names {
		p.end(name, Failed, 0, "", p.failures[name].String())
	}
	p.names, p.failures, p.section, p.pending = nil, map[string]*strings.Builder{}, "", ""
	for _, missing := range []struct {
		outcome Outcome
		number  int
	}{{Passed, told.Passed - p.seen.Passed}, {Failed, told.Failed - p.seen.Failed}, {Skipped, told.Skipped - p.seen.Skipped}} {
		for i := range missing.number {
			p.end(fmt.Sprintf("(a line of a test that %s could not be read: %d)", missing.outcome, i+1), missing.outcome, 0, "its line could not be read", "")
		}
	}
	p.seen, p.open, p.closed = Counts{}, false, true
}

var (
	rustOpening = regexp.MustCompile(`^running \d+ tests?$`)
	rustTest    = regexp.MustCompile(`(?:^|.*?\b)test (\S.*?) \.\.\. (.*)$`)
	rustOutcome = regexp.MustCompile(`^(ok|FAILED|ignored)(?:, (.*?))?(?: <([0-9.]+)s>)?$`)
	rustSection = regexp.MustCompile(`^---- (.+) stdout ----$`)
	rustClosing = regexp.MustCompile(`^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored`)
)

// text reads a line for people, and reports whether it was one.
func (p *rustParser) text(raw string) bool {
	line := strings.TrimRight(raw, "\r\n")
	if m := rustClosing.FindStringSubmatch(line); m != nil {
		p.close(Counts{number(m[1]), number(m[2]), number(m[3])})
		return true
	}
	if rustOpening.MatchString(line) {
		p.open = true
		return true
	}
	if !p.open {
		return false
	}
	if m := rustSection.FindStringSubmatch(line); m != nil && p.failures[m[1]] != nil {
		p.section = m[1]
		return true
	}
	if line == "failures:" {
		p.section = ""
		return true
	}
	if p.section != "" {
		p.failures[p.section].WriteString(raw)
		return true
	}
	if m := rustTest.FindStringSubmatch(line); m != nil {
		if outcome := rustOutcome.FindStringSubmatch(m[2]); outcome != nil {
			p.told(m[1], outcome)
			return true
		}
		// The outcome follows what the test has printed.
		p.pending = m[1]
		if m[2] != "" {
			p.show(m[2] + "\n")
		}
		return true
	}
	if p.pending != "" {
		if outcome := rustOutcome.FindStringSubmatch(line); outcome != nil {
			p.told(p.pending, outcome)
			return true
		}
	}
	return slices.Contains(p.names, strings.TrimSpace(line)) // the list of failed tests
}

// told reports a test of a line for people. One that failed waits for its output.
func (p *rustParser) told(name string, outcome []string) {
	p.pending = ""
	took, err := strconv.ParseFloat(outcome[3], 64)
	if err != nil {
		took = 0 // there was none
	}
	switch outcome[1] {
	case "ok":
		p.end(name, Passed, took, "", "")
	case "ignored":
		p.end(name, Skipped, 0, outcome[2], "")
	default:
		p.names, p.failures[name] = append(p.names, name), &strings.Builder{}
	}
}

func (p *rustParser) End(err error) {
	why := "the program ended before the test did"
	if err != nil {
		why = fmt.Sprintf("%s: %v", why, err)
	}
	for _, name := range p.names {
		p.end(name, Failed, 0, "", p.failures[name].String())
	}
	if p.pending != "" && !slices.Contains(p.running, p.pending) {
		p.running = append(p.running, p.pending)
	}
	for len(p.running) > 0 {
		p.end(p.running[0], Failed, 0, "", p.other.String()+why+"\n")
	}
	switch {
	case p.failed || err == nil && p.closed && !p.open:
	case err != nil:
		p.to.Result(Result{Program: p.program, Name: programName, Outcome: Failed, Output: p.other.String() + err.Error() + "\n"})
	default:
		p.to.Result(Result{Program: p.program, Name: programName, Outcome: Failed, Output: p.other.String() + "the program ended without a result\n"})
	}
}

func number(digits string) int {
	n, err := strconv.Atoi(digits)
	if err != nil {
		return 0 // the pattern matches only digits
	}
	return n
}
