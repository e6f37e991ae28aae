package results

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

// read gives a parser an output, and lists what it reports: one line a result, then what it passes on.
func read(text string, end error, parser func(Receiver) Parser) (reported []Result, list string) {
	var b, passed strings.Builder
	p := parser(Receiver{
		Result: func(r Result) {
			reported = append(reported, r)
			fmt.Fprintf(&b, "%s %s %s", r.Outcome, r.Program, r.Name)
			if r.Self > 0 {
				fmt.Fprintf(&b, " %s/%s", r.Self, r.Duration)
			}
			if r.Reason != "" {
				fmt.Fprintf(&b, " reason=%q", r.Reason)
			}
			if r.Output != "" && r.Outcome == Failed {
				fmt.Fprintf(&b, " output=%q", r.Output)
			}
			b.WriteString("\n")
		},
		Line: func(line string) { fmt.Fprintf(&passed, "> %s", line) },
	})
	for line := range strings.Lines(text) {
		p.Line(line)
	}
	p.End(end)
	return reported, b.String() + passed.String()
}

func compare(t *testing.T, name, got, want string) {
	t.Helper()
	if want = strings.TrimLeft(want, "\n"); got != want {
		t.Errorf("%s:\n%s\nnot\n%s", name, got, want)
	}
}

func TestGoEvents(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		end  error
		want string
	}{
		"passed, failed and skipped, with a subtest and a set-up": {`
{"Time":"2026-01-01T10:00:00Z","Action":"start","Package":"m/p"}
{"Time":"2026-01-01T10:00:02Z","Action":"run","Package":"m/p","Test":"TestA"}
{"Time":"2026-01-01T10:00:02Z","Action":"output","Package":"m/p","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Time":"2026-01-01T10:00:02Z","Action":"run","Package":"m/p","Test":"TestA/b/c"}
{"Time":"2026-01-01T10:00:03Z","Action":"output","Package":"m/p","Test":"TestA/b/c","Output":"    p_test.go:7: no\n"}
{"Time":"2026-01-01T10:00:03Z","Action":"fail","Package":"m/p","Test":"TestA/b/c","Elapsed":1}
{"Time":"2026-01-01T10:00:05Z","Action":"fail","Package":"m/p","Test":"TestA","Elapsed":3}
{"Time":"2026-01-01T10:00:05Z","Action":"run","Package":"m/p","Test":"TestS"}
{"Time":"2026-01-01T10:00:05Z","Action":"output","Package":"m/p","Test":"TestS","Output":"=== RUN   TestS\n"}
{"Time":"2026-01-01T10:00:05Z","Action":"output","Package":"m/p","Test":"TestS","Output":"    p_test.go:9: no GPU here\n"}
{"Time":"2026-01-01T10:00:05Z","Action":"output","Package":"m/p","Test":"TestS","Output":"--- SKIP: TestS (0.00s)\n"}
{"Time":"2026-01-01T10:00:05Z","Action":"skip","Package":"m/p","Test":"TestS","Elapsed":0}
{"Time":"2026-01-01T10:00:05Z","Action":"run","Package":"m/p","Test":"TestP"}
{"Time":"2026-01-01T10:00:05Z","Action":"pass","Package":"m/p","Test":"TestP","Elapsed":0.5}
{"Time":"2026-01-01T10:00:06Z","Action":"output","Package":"m/p","Output":"FAIL\n"}
{"Time":"2026-01-01T10:00:06Z","Action":"output","Package":"m/p","Output":"FAIL\tm/p\t6.0s\n"}
{"Time":"2026-01-01T10:00:06Z","Action":"fail","Package":"m/p","Elapsed":6}
`, errors.New("exit status 1"), `
passed m/p (before the first test) 2s/2s
failed m/p TestA/b/c 1s/1s output="    p_test.go:7: no\n"
failed m/p TestA 2s/3s output="=== RUN   TestA\n"
skipped m/p TestS reason="no GPU here"
passed m/p TestP 500ms/500ms
> FAIL	m/p	6.0s
`},
		"packages at the same time, one without tests": {`
{"Action":"start","Package":"m/p"}
{"Action":"start","Package":"m/q"}
{"Action":"run","Package":"m/p","Test":"TestA"}
{"Action":"run","Package":"m/q","Test":"TestA"}
{"Action":"output","Package":"m/q","Test":"TestA","Output":"of q\n"}
{"Action":"pass","Package":"m/p","Test":"TestA","Elapsed":0}
{"Action":"fail","Package":"m/q","Test":"TestA","Elapsed":0}
{"Action":"pass","Package":"m/p","Elapsed":0}
{"Action":"fail","Package":"m/q","Elapsed":0}
{"Action":"output","Package":"m/r","Output":"?   \tm/r\t[no test files]\n"}
{"Action":"skip","Package":"m/r","Elapsed":0}
`, errors.New("exit status 1"), `
passed m/p TestA
failed m/q TestA output="of q\n"
`},
		"a package that does not compile": {`
{"ImportPath":"m/p [m/p.test]","Action":"build-output","Output":"# m/p [m/p.test]\n"}
{"ImportPath":"m/p [m/p.test]","Action":"build-output","Output":"./p_test.go:3:1: undefined: x\n"}
{"ImportPath":"m/p [m/p.test]","Action":"build-fail"}
{"Action":"start","Package":"m/p"}
{"Action":"output","Package":"m/p","Output":"FAIL\tm/p [build failed]\n"}
{"Action":"fail","Package":"m/p","Elapsed":0,"FailedBuild":"m/p [m/p.test]"}
`, errors.New("exit status 1"), `
failed m/p (build) output="# m/p [m/p.test]\n./p_test.go:3:1: undefined: x\n"
> FAIL	m/p [build failed]
`},
		"a failure outside of tests": {`
{"Action":"start","Package":"m/p"}
{"Action":"output","Package":"m/p","Output":"integration: no API server\n"}
{"Action":"fail","Package":"m/p","Elapsed":1}
`, errors.New("exit status 1"), `
failed m/p (program) output="integration: no API server\n"
> integration: no API server
`},
		"a panic leaves a test without its end": {`
{"Action":"run","Package":"m/p","Test":"TestA"}
{"Action":"run","Package":"m/p","Test":"TestA/b"}
{"Action":"output","Package":"m/p","Test":"TestA/b","Output":"panic: x\n"}
{"Action":"fail","Package":"m/p","Elapsed":1}
`, errors.New("exit status 2"), `
failed m/p TestA/b output="panic: x\nthe test did not end\n"
failed m/p TestA output="the test did not end\n"
`},
		"the output is cut": {`
{"Action":"start","Package":"m/p"}
{"Action":"run","Package":"m/p","Test":"TestA"}
{"Action":"pass","Package":"m/p","Test":"TestA","Elapsed":0}
{"Action":"run","Package":"m/p","Test":"TestB"}
{"Action":"outp`, errors.New("signal: killed"), `
passed m/p TestA
failed m/p TestB output="the program ended before the test did: signal: killed\n"
> {"Action":"outp`},
		"a package that passed ends with an error": {`
{"Action":"start","Package":"m/p"}
{"Action":"run","Package":"m/p","Test":"TestA"}
{"Action":"pass","Package":"m/p","Test":"TestA","Elapsed":0}
{"Action":"pass","Package":"m/p","Elapsed":0}
`, errors.New("exit status 3"), `
passed m/p TestA
failed  (program) output="exit status 3\n"
`},
		"no tests at all": {"go: no such tool\n", errors.New("exit status 2"), `
failed  (program) output="go: no such tool\nexit status 2\n"
> go: no such tool
`},
	} {
		_, got := read(strings.TrimLeft(c.text, "\n"), c.end, NewGo)
		compare(t, name, got, c.want)
	}
}

func TestSlowestAreWithoutTheirSubtests(t *testing.T) {
	all := []Result{
		{Name: "parent", Duration: 9 * time.Second, Self: time.Second}, {Name: "parent/a", Duration: 8 * time.Second, Self: 8 * time.Second},
		{Name: "none"}, {Name: "set-up", Self: 3 * time.Second, SetUp: true},
	}
	var got []string
	for _, r := range Slowest(all, 2) {
		got = append(got, r.Name)
	}
	if list := strings.Join(got, " "); list != "parent/a set-up" {
		t.Error(list)
	}
	if n := len(Slowest(all, 60)); n != 3 {
		t.Errorf("%d tests took time, not 3", n)
	}
}

func TestCountsLeaveOutSetUpsThatPassed(t *testing.T) {
	got := Count([]Result{
		{Outcome: Passed}, {Outcome: Passed, SetUp: true}, {Outcome: Failed, SetUp: true}, {Outcome: Skipped}, {Outcome: Elsewhere},
	})
	if text := got.String(); text != "1 passed, 1 failed, 1 skipped" {
		t.Error(text)
	}
}
