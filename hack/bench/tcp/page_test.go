package main

import (
	"bytes"
	"encoding/xml"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

func result(goals []goal, reference, ours []float64, failures int) caseResult {
	runs := func(rates []float64) []outcome {
		var all []outcome
		for _, rate := range rates {
			all = append(all, outcome{Rate: rate, Send: 1, Receive: 1})
		}
		return all
	}
	r := caseResult{
		testCase:   benchCase{name: "test", title: "a test", plainFlows: []int{1}, goals: goals, size: 1 << 20, depth: 4, connections: 1},
		Contenders: []series{{Name: "plain socket", Outcomes: runs(reference)}, {Name: ourName, Outcomes: runs(ours)}},
	}
	for range failures {
		r.Contenders[1].Outcomes = append(r.Contenders[1].Outcomes, outcome{Failure: "it broke"})
	}
	return r
}

func TestGoalResults(t *testing.T) {
	for name, test := range map[string]struct {
		goal     goal
		ours     []float64
		failures int
		reached  string
	}{
		"median reached":      {goal{of: medianRate, figure: 2}, []float64{1, 2, 3}, 0, "yes"},
		"median missed":       {goal{of: medianRate, figure: 2.1}, []float64{1, 2, 3}, 0, "no"},
		"worst reached":       {goal{of: worstRate, figure: 1}, []float64{3, 1, 2}, 0, "yes"},
		"worst missed":        {goal{of: worstRate, figure: 1.1}, []float64{3, 1, 2}, 0, "no"},
		"share reached":       {goal{of: medianRate, share: 0.5}, []float64{2}, 0, "yes"},
		"share missed":        {goal{of: medianRate, share: 0.6}, []float64{2}, 0, "no"},
		"cost reached":        {goal{of: processor, share: 1}, []float64{2}, 0, "yes"},
		"cost missed":         {goal{of: processor, share: 0.9}, []float64{2}, 0, "no"},
		"a failed run":        {goal{of: medianRate, figure: 2}, []float64{2}, 1, "no"},
		"cost of only failed": {goal{of: processor, share: 1}, nil, 2, "no"},
	} {
		r := result([]goal{test.goal}, []float64{4}, test.ours, test.failures)
		results := r.goalResults()
		if len(results) != 1 || results[0].reached != test.reached {
			t.Errorf("%s: %+v", name, results)
		}
	}
	r := result([]goal{{of: medianRate, figure: 1}}, []float64{4}, nil, 0)
	r.Contenders = r.Contenders[:1]
	if v := r.goalResults(); len(v) != 1 || v[0].reached != unknown || !strings.HasPrefix(v[0].measured, "not measured") {
		t.Errorf("not measured: %+v", v)
	}
}

func TestPage(t *testing.T) {
	shaped := result([]goal{{of: worstRate, figure: 0.3}}, []float64{0.4}, []float64{0.35}, 1)
	shaped.Name = "shaped"
	shaped.testCase.lab.Links = netns.Links(netns.Gbit)
	shaped.Contenders[0].Outcomes[0].Busy = 0.95
	faulty := result([]goal{{of: worstRate, figure: 0.3}}, []float64{0.4}, []float64{0.35}, 0)
	faulty.Name = "faulty"
	faulty.testCase.fault = &fault{start: time.Second, length: time.Second, remaining: 0.3}
	faulty.testCase.length = 3 * time.Second
	faulty.Contenders[1].Outcomes[0].Trace = traceOf(0.4, 0.3, 0.4)
	idle := result([]goal{{of: maxThreads, figure: 4}}, nil, []float64{0}, 0)
	idle.Name, idle.testCase.idle, idle.testCase.plainFlows = "idle", true, nil
	idle.Contenders = idle.Contenders[1:]
	lost := result([]goal{{of: medianRate, figure: 0.3}}, []float64{0.4}, nil, 2)
	lost.Name = "lost"
	shaped.Machine.Load, shaped.Source = 3, page.Source{Commit: "abc", Day: "2026-01-31"}
	r := report{machine: machine.Machine{Cores: 2}, outdated: "the code has changed since", notes: []string{"a note"}, costs: page.Table{Heading: []string{"what", "figure"}, Rows: [][]string{{"cost of a pair", "5 KiB"}}}, cases: []caseResult{shaped, faulty, idle, lost}}

	folder := filepath.Join(t.TempDir(), "results")
	var out bytes.Buffer
	if err := r.write(&out, folder); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(filepath.Join(folder, "tcp.md"))
	if err != nil {
		t.Fatal(err)
	}
	text := string(content)
	for _, want := range []string{
		"not quiet", "rounds at commit abc, on 2026-01-31", "the code has changed since", "static mode", "not the behaviour of NCCL's own sockets", "Goals are this project's own",
		"Plain sockets equal or beat Evenkeel in 2 of 4 cases: a test (plain socket: 0.400 GB/s, Evenkeel: 0.350 GB/s)", "a note", "run 2 failed: it broke", "1 of 2 runs failed", "all runs failed",
		"processors were all in use", "recovered after", "| cost of a pair | 5 KiB |", "| a test | worst | 0.120 GB/s | 0.400 GB/s | 0.350 GB/s",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the page lacks %q:\n%s", want, text)
		}
	}
	files, err := filepath.Glob(filepath.Join(folder, "*.svg"))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != 3 {
		t.Errorf("plots: %v, want one of each case but the idle one", files)
	}
	for _, file := range files {
		if !strings.Contains(text, "("+filepath.Base(file)+")") {
			t.Errorf("the page does not show %s", file)
		}
		svg, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		wellFormed(t, file, svg)
	}
}

// wellFormed checks that a drawing is XML and has no undefined coordinates.
func wellFormed(t *testing.T, name string, svg []byte) {
	t.Helper()
	for decoder := xml.NewDecoder(bytes.NewReader(svg)); ; {
		_, err := decoder.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
	}
	if bytes.Contains(svg, []byte("NaN")) || bytes.Contains(svg, []byte("Inf")) {
		t.Errorf("%s has undefined coordinates:\n%s", name, svg)
	}
}

func TestUnshapedNetworkHasNoWireLimit(t *testing.T) {
	if got := (benchCase{}).limit(); got != 0 {
		t.Errorf("an unshaped network's limit is %f", got)
	}
}

func TestResultCacheAddsCasesOfThisMachine(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	here, quick := machine.Machine{Cores: 2, Processor: "a processor", Load: 0.1}, true
	measured := func(name, commit string, m machine.Machine) caseResult {
		r := result(nil, []float64{0.4}, []float64{0.35}, 1)
		r.Source.Commit, r.Machine = commit, m
		r.testCase.lab.Links = netns.Links(netns.Gbit)
		r.Name, r.Lab = name, r.testCase.lab
		for _, c := range cases(quick) {
			if c.name == name {
				r.Load = c.String()
			}
		}
		r.Contenders[1].Outcomes[0].Trace = traceOf(0.4, 0.3)
		return r
	}
	elsewhere := here
	elsewhere.Cores = 4
	otherLoad := measured("capped-flows", "new", here)
	otherLoad.Load = "another"
	for _, r := range []caseResult{
		measured("ping-pong", "old", here), measured("slow-link", "elsewhere", elsewhere),
		measured("four-links", "new", here), measured("ping-pong", "new", here), otherLoad,
	} {
		c, err := openCache(here, quick)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Add(r); err != nil {
			t.Fatal(err)
		}
	}
	here.Load = 3
	c, err := openCache(here, quick)
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Results) != 2 || c.Results[0].Name != "four-links" || c.Results[1].Name != "ping-pong" || c.Results[1].Source.Commit != "new" {
		t.Fatalf("read %+v", c.Results)
	}
	want := measured("four-links", "new", machine.Machine{})
	if got := c.Results[0]; !slices.Equal(got.Contenders[1].Outcomes[0].Trace, want.Contenders[1].Outcomes[0].Trace) || got.testCase.limit() != want.testCase.limit() {
		t.Errorf("read %+v", got)
	}
	if c, err := openCache(here, false); err != nil || len(c.Results) != 0 {
		t.Errorf("full runs include quick ones: %+v, %v", c, err)
	}
}

func TestPageSaysWhatLimitsMissedGoals(t *testing.T) {
	missed := result([]goal{{of: medianRate, figure: 3}}, []float64{4}, []float64{2}, 0)
	reached := result([]goal{{of: medianRate, figure: 1}}, []float64{4}, []float64{2}, 0)
	missed.testCase.goals[0].limit, reached.testCase.goals[0].limit = "the moon", "the sun"
	other := missed
	other.testCase.title = "another"
	text := string(report{cases: []caseResult{missed, other, missed, reached}}.markdown())
	if want := "\n* a test; another: the moon.\n"; !strings.Contains(text, want) || strings.Contains(text, "the sun") {
		t.Errorf("no %q, or a limit of what was reached, in\n%s", want, text)
	}
}

func TestPageShowsRiseTimes(t *testing.T) {
	r := result([]goal{{of: riseTime, figure: 0.5}}, []float64{0.4}, []float64{0.35, 0.35, 0.35}, 0)
	r.Name, r.testCase.cold, r.testCase.lab.Links = "cold", true, netns.Links(netns.Gbit)
	for i, at := range []time.Duration{300 * time.Millisecond, 0, 600 * time.Millisecond} {
		r.Contenders[1].Outcomes[i].Rise = at
	}
	text := string(report{cases: []caseResult{r}}.markdown())
	for _, want := range []string{"| median rise time |  | never | 0.60 s | 0.50 s | no |", "| 0.60 s (never) |", "until the end of the first 250ms in which they carry 95 %"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page lacks %q:\n%s", want, text)
		}
	}
}

func TestDrawnLinksStayTheSame(t *testing.T) {
	var names []string
	for _, name := range caseNames() {
		if strings.HasPrefix(name, "links-") {
			names = append(names, name)
		}
	}
	if want := []string{"links-670-200-50", "links-330-320-140-90", "links-620-550-370-360-330-80"}; !slices.Equal(names, want) {
		t.Errorf("%q, want %q: results of other links are no longer comparable", names, want)
	}
	for count := 2; count <= 32; count++ {
		for _, link := range drawnLinks(count) {
			if link.Rate < 50*netns.Mbit || link.Rate > netns.Gbit {
				t.Errorf("%d links: one of %s", count, link.Rate)
			}
		}
	}
}
