package results

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// pythonParser reads the events that unittest_events.py writes: one a line, on a file of their own.
type pythonParser struct {
	to      Receiver
	program string
	running []string
	ended   bool
	number  int
	failed  bool
}

// NewPython returns a parser of the events of unittest_events.py.
func NewPython(program string, to Receiver) Parser {
	return &pythonParser{to: to, program: program}
}

type pythonEvent struct {
	Event, Test, Outcome, Reason, Output string
	Seconds                              float64
}

func (p *pythonParser) Line(line string) {
	var e pythonEvent
	if json.Unmarshal([]byte(line), &e) != nil {
		p.to.Line(line)
		return
	}
	switch e.Event {
	case "start":
		p.running = append(p.running, e.Test)
	case "stop":
		p.stop(e)
	case "end":
		p.ended = true
	default:
		p.to.Line(line)
	}
}

func (p *pythonParser) stop(e pythonEvent) {
	p.running = slices.DeleteFunc(p.running, func(name string) bool { return name == e.Test })
	took := seconds(e.Seconds)
	r := Result{Program: p.program, Name: e.Test, Outcome: Failed, Duration: took, Self: took, Reason: e.Reason, Output: e.Output}
	switch Outcome(e.Outcome) {
	case Passed, Skipped:
		r.Outcome = Outcome(e.Outcome)
	default:
		p.failed = true
	}
	p.number++
	p.to.Result(r)
}

func (p *pythonParser) End(err error) {
	why := "the program ended before the test did"
	if err != nil {
		why = fmt.Sprintf("%s: %v", why, err)
	}
	for len(p.running) > 0 {
		p.stop(pythonEvent{Test: p.running[0], Output: why + "\n"})
	}
	var complaint []string
	switch {
	case err != nil && !p.failed:
		complaint = append(complaint, err.Error())
	case !p.ended && !p.failed:
		complaint = append(complaint, "the program ended without a result")
	case p.number == 0:
		complaint = append(complaint, "no tests")
	}
	if len(complaint) > 0 {
		p.to.Result(Result{Program: p.program, Name: programName, Outcome: Failed, Output: strings.Join(complaint, "\n") + "\n"})
	}
}
