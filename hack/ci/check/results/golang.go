package results

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// goParser reads what "go test -json" and test2json print: one event a line, of several packages at once.
type goParser struct {
	to       Receiver
	packages map[string]*goPackage
	builds   map[string]*tail // output of the compiler, by what it compiled
	other    tail
	failed   bool
}

type goPackage struct {
	started time.Time
	begun   bool // the first test has started
	running map[string]*goTest
	order   []string // of the running tests
	output  tail     // of the package itself
	failed  bool
}

type goTest struct {
	output  strings.Builder
	started time.Time
	below   time.Duration // of its subtests
}

// NewGo returns a parser of Go's tests.
func NewGo(to Receiver) Parser {
	return &goParser{to: to, packages: map[string]*goPackage{}, builds: map[string]*tail{}}
}

type goEvent struct {
	Time                          time.Time
	Action, Package, Test, Output string
	ImportPath, FailedBuild       string
	Elapsed                       float64
}

// SetUpName is the name of what a package does before its first test.
const SetUpName = "(before the first test)"

// Names of failures that are not of a test.
const (
	programName = "(program)"
	buildName   = "(build)"
)

func (p *goParser) Line(line string) {
	var e goEvent
	if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &e) != nil || e.Action == "" {
		p.other.add(line)
		p.to.Line(line)
		return
	}
	switch e.Action {
	case "build-output":
		if p.builds[e.ImportPath] == nil {
			p.builds[e.ImportPath] = &tail{}
		}
		p.builds[e.ImportPath].add(e.Output)
		return
	case "build-fail":
		return // the packages that need it fail
	}
	of := p.packages[e.Package]
	if of == nil {
		of = &goPackage{running: map[string]*goTest{}}
		p.packages[e.Package] = of
	}
	if e.Test == "" {
		p.packageEvent(e, of)
		return
	}
	if e.Action == "run" && !of.begun {
		of.begun = true
		if wait := e.Time.Sub(of.started); !of.started.IsZero() && wait > 0 {
			p.to.Result(Result{Program: e.Package, Name: SetUpName, Outcome: Passed, Duration: wait, Self: wait, SetUp: true})
		}
	}
	test := of.running[e.Test]
	if test == nil {
		test = &goTest{started: e.Time}
		of.running[e.Test] = test
		of.order = append(of.order, e.Test)
	}
	switch e.Action {
	case "output":
		test.output.WriteString(e.Output)
	case "pass", "fail", "skip":
		took := seconds(e.Elapsed)
		p.end(e.Package, of, e.Test, map[string]Outcome{"pass": Passed, "fail": Failed, "skip": Skipped}[e.Action], took)
	}
}

// packageEvent takes an event of the package itself.
func (p *goParser) packageEvent(e goEvent, of *goPackage) {
	switch e.Action {
	case "start":
		of.started = e.Time
	case "output":
		of.output.add(e.Output)
		if line := strings.TrimSpace(e.Output); line != "PASS" && line != "FAIL" && !strings.HasSuffix(line, "[no test files]") {
			p.to.Line(e.Output)
		}
	case "pass", "fail":
		p.unfinished(e.Package, of, "the test did not end")
		if e.Action == "fail" && !of.failed {
			p.failed = true
			r := Result{Program: e.Package, Name: programName, Outcome: Failed, Duration: seconds(e.Elapsed), Output: of.output.String()}
			if build := p.builds[e.FailedBuild]; build != nil {
				r.Name, r.Output = buildName, build.String()
			}
			p.to.Result(r)
		}
		if p.to.Program != nil {
			p.to.Program(e.Package, seconds(e.Elapsed))
		}
		delete(p.packages, e.Package)
	case "skip": // it has no tests
		delete(p.packages, e.Package)
	}
}

// end reports a test that ended.
func (p *goParser) end(program string, of *goPackage, name string, outcome Outcome, took time.Duration) {
	test := of.running[name]
	delete(of.running, name)
	of.order = slices.DeleteFunc(of.order, func(n string) bool { return n == name })
	if at := strings.LastIndexByte(name, '/'); at > 0 {
		// A subtest's own name may contain slashes.
		for ; at > 0; at = strings.LastIndexByte(name[:at], '/') {
			if above := of.running[name[:at]]; above != nil {
				above.below += took
				break
			}
		}
	}
	r := Result{Program: program, Name: name, Outcome: outcome, Duration: took, Self: max(0, took-test.below)}
	if outcome != Passed {
		r.Output = test.output.String()
	}
	switch outcome {
	case Failed:
		of.failed, p.failed = true, true
	case Skipped:
		r.Reason = skipReason(r.Output)
	}
	p.to.Result(r)
}

var (
	goFraming = regexp.MustCompile(`^\s*(=== |--- )`)
	goPlace   = regexp.MustCompile(`^\s*\S+\.go:\d+: `)
)

// skipReason is what a test printed before it was skipped.
func skipReason(output string) string {
	var lines []string
	for line := range strings.Lines(output) {
		if !goFraming.MatchString(line) {
			lines = append(lines, strings.TrimSpace(goPlace.ReplaceAllString(line, "")))
		}
	}
	return strings.Join(lines, " ")
}

// unfinished reports the tests that have not ended, subtests first.
func (p *goParser) unfinished(program string, of *goPackage, why string) {
	for len(of.order) > 0 {
		name := of.order[len(of.order)-1]
		of.running[name].output.WriteString(why + "\n")
		p.end(program, of, name, Failed, 0)
	}
}

func (p *goParser) End(err error) {
	why := "the program ended before the test did"
	if err != nil {
		why = fmt.Sprintf("%s: %v", why, err)
	}
	for _, name := range sortedKeys(p.packages) {
		of := p.packages[name]
		p.unfinished(name, of, why)
		if !of.failed {
			p.failed = true
			p.to.Result(Result{Program: name, Name: programName, Outcome: Failed, Output: of.output.String() + why + "\n"})
		}
	}
	p.packages = map[string]*goPackage{}
	if err != nil && !p.failed {
		var text strings.Builder
		for _, name := range sortedKeys(p.builds) {
			text.WriteString(p.builds[name].String())
		}
		p.to.Result(Result{Name: programName, Outcome: Failed, Output: text.String() + p.other.String() + err.Error() + "\n"})
	}
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}
