package main

import (
	"bytes"
	"context"
	"encoding/xml"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// traceOf has a point each traceStep, at the rates, in GB/s, that each second has.
func traceOf(rates ...float64) []point {
	var trace []point
	var bytes float64
	for i := 0; i <= len(rates)*int(time.Second/traceStep); i++ {
		at := time.Duration(i) * traceStep
		trace = append(trace, point{At: at, Bytes: uint64(bytes)})
		second := min(int(at/time.Second), len(rates)-1)
		bytes += rates[second] * 1e9 * traceStep.Seconds()
	}
	return trace
}

func near(a, b float64) bool { return math.Abs(a-b) < 0.01*max(math.Abs(b), 0.001) }

func TestFault(t *testing.T) {
	f := fault{before: 2 * time.Second, lasts: 4 * time.Second, recovery: time.Second, left: 0.3}
	for name, test := range map[string]struct {
		trace []point
		rate  float64
		after time.Duration // negative: never
	}{
		"at once":   {traceOf(0.4, 0.4, 0.3, 0.3, 0.3, 0.3, 0.4), 0.3, recoveredOver},
		"in time":   {traceOf(0.4, 0.4, 0.1, 0.3, 0.3, 0.3, 0.4), 0.3, time.Second + recoveredOver},
		"late":      {traceOf(0.4, 0.4, 0, 0, 0.3, 0.3, 0.4), 0.2, 2*time.Second + recoveredOver},
		"never":     {traceOf(0.4, 0.4, 0, 0, 0, 0, 0.4), 0, -1},
		"too short": {traceOf(0.4), 0, -1},
		"none":      {nil, 0, -1},
	} {
		if got := f.rate(test.trace); !near(got, test.rate) {
			t.Errorf("%s: rate %.3f, want %.3f", name, got, test.rate)
		}
		after, ok := f.recovered(test.trace)
		// The window may begin with a step of the time before.
		if ok != (test.after >= 0) || ok && (after-test.after).Abs() > 2*traceStep {
			t.Errorf("%s: recovered after %s, %v; want %s", name, after, ok, test.after)
		}
	}
}

func TestBusiestLink(t *testing.T) {
	sum, busiest := growth([]uint64{9, 5, 0}, []uint64{10, 9, 3})
	if sum != 8 || busiest != 1 {
		t.Errorf("%d bytes, most on link %d; want 8, and link 1", sum, busiest)
	}
}

func TestWireLimit(t *testing.T) {
	// 1448 bytes of each 1514 that a packet takes.
	if got := wireLimit(netns.Gbit, netns.Gbit, netns.Gbit, netns.Gbit); !near(got, 0.4782) {
		t.Errorf("4 links of 1 Gbit/s carry %.4f GB/s", got)
	}
	if got := (benchCase{}).limit(); got != 0 {
		t.Errorf("an unshaped network's limit is %f", got)
	}
}

func TestMedian(t *testing.T) {
	for want, values := range map[float64][]float64{2: {3, 1, 2}, 2.5: {4, 1, 2, 3}, 7: {7}} {
		if got := medianOf(values); got != want {
			t.Errorf("median of %v: %v", values, got)
		}
	}
}

func result(goals []goal, reference, ours []float64, failures int) caseResult {
	runs := func(rates []float64) []outcome {
		var all []outcome
		for _, rate := range rates {
			all = append(all, outcome{Rate: rate, Send: 1, Receive: 1})
		}
		return all
	}
	r := caseResult{
		Case:       benchCase{name: "test", title: "a test", rawFlows: []int{1}, goals: goals, size: 1 << 20, depth: 4, connections: 1},
		Contenders: []series{{Name: "plain socket", Outcomes: runs(reference)}, {Name: ourName, Outcomes: runs(ours)}},
	}
	for range failures {
		r.Contenders[1].Outcomes = append(r.Contenders[1].Outcomes, outcome{Failure: "it broke"})
	}
	return r
}

func TestVerdicts(t *testing.T) {
	for name, test := range map[string]struct {
		goal     goal
		ours     []float64
		failures int
		reached  answer
	}{
		"median reached":      {goal{of: medianRate, figure: 2}, []float64{1, 2, 3}, 0, yes},
		"median missed":       {goal{of: medianRate, figure: 2.1}, []float64{1, 2, 3}, 0, no},
		"worst reached":       {goal{of: worstRate, figure: 1}, []float64{3, 1, 2}, 0, yes},
		"worst missed":        {goal{of: worstRate, figure: 1.1}, []float64{3, 1, 2}, 0, no},
		"share reached":       {goal{of: medianRate, share: 0.5}, []float64{2}, 0, yes},
		"share missed":        {goal{of: medianRate, share: 0.6}, []float64{2}, 0, no},
		"cost reached":        {goal{of: processor, share: 1}, []float64{2}, 0, yes},
		"cost missed":         {goal{of: processor, share: 0.9}, []float64{2}, 0, no},
		"a failed run":        {goal{of: medianRate, figure: 2}, []float64{2}, 1, no},
		"cost of only failed": {goal{of: processor, share: 1}, nil, 2, no},
	} {
		r := result([]goal{test.goal}, []float64{4}, test.ours, test.failures)
		verdicts := r.verdicts()
		if len(verdicts) != 1 || verdicts[0].reached != test.reached {
			t.Errorf("%s: %+v", name, verdicts)
		}
	}
	r := result([]goal{{of: medianRate, figure: 1}}, []float64{4}, nil, 0)
	r.Contenders = r.Contenders[:1]
	if v := r.verdicts(); len(v) != 1 || v[0].reached != unknown || !strings.HasPrefix(v[0].seen, "not measured") {
		t.Errorf("not measured: %+v", v)
	}
}

func TestReport(t *testing.T) {
	shaped := result([]goal{{of: worstRate, figure: 0.3}}, []float64{0.4}, []float64{0.35}, 1)
	shaped.Case.name = "shaped"
	shaped.Case.lab.Links = netns.Links(netns.Gbit)
	shaped.Contenders[0].Outcomes[0].Busy = 0.95
	faulty := result([]goal{{of: worstRate, figure: 0.3}}, []float64{0.4}, []float64{0.35}, 0)
	faulty.Case.name = "faulty"
	faulty.Case.fault = &fault{before: time.Second, lasts: time.Second, left: 0.3}
	faulty.Case.length = 3 * time.Second
	faulty.Contenders[1].Outcomes[0].Trace = traceOf(0.4, 0.3, 0.4)
	idle := result([]goal{{of: mostThread, figure: 4}}, nil, []float64{0}, 0)
	idle.Case.name, idle.Case.idle, idle.Case.rawFlows = "idle", true, nil
	idle.Contenders = idle.Contenders[1:]
	lost := result([]goal{{of: medianRate, figure: 0.3}}, []float64{0.4}, nil, 2)
	lost.Case.name = "lost"
	shaped.Machine.Load, shaped.Commit = 3, "abc"
	r := report{Machine: machine{Cores: 2}, Notes: []string{"a note"}, Cases: []caseResult{shaped, faulty, idle, lost}}

	folder := filepath.Join(t.TempDir(), "results")
	var said bytes.Buffer
	if err := r.write(&said, folder); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(folder, "tcp.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"not quiet", "a note", "run 2 failed: it broke", "1 of 2 runs failed", "all runs failed",
		"processors were all in use", "recovered after", "| a test | worst | 0.120 GB/s | 0.400 GB/s | 0.350 GB/s",
	} {
		if !strings.Contains(string(page), want) {
			t.Errorf("the page does not say %q:\n%s", want, page)
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
		if !strings.Contains(string(page), "("+filepath.Base(file)+")") {
			t.Errorf("the page does not show %s", file)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		wellFormed(t, file, text)
	}
}

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
		t.Errorf("%s has places that are no numbers:\n%s", name, svg)
	}
}

func TestRefusals(t *testing.T) {
	library := filepath.Join(t.TempDir(), "library.so")
	if err := os.WriteFile(library, []byte("a library that knows "+staticSetting), 0o644); err != nil {
		t.Fatal(err)
	}
	b, err := newBencher(options{library: library, driver: "true", plugins: []string{"other=" + library}}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if len(b.others) != 2 || len(b.notes) != 0 {
		t.Errorf("contenders beside the plugin: %d, notes %q; want it dealing in turn, and the other one", len(b.others), b.notes)
	}
	for _, plugin := range []string{"", "x", "x=", "=y", "x=" + library + "-not"} {
		if _, err := newBencher(options{library: library, driver: "true", plugins: []string{plugin}}, io.Discard); err == nil {
			t.Errorf("--plugin %q was accepted", plugin)
		}
	}
	for _, o := range []options{{library: library, driver: "/no/driver"}, {library: library + "-not", driver: "true"}} {
		if _, err := newBencher(o, io.Discard); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
	for _, o := range []options{{runs: -1}, {only: "("}} {
		if err := bench(context.Background(), io.Discard, o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}

func TestCasesCanBeMeasuredOneAtATime(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	here, o := machine{Cores: 2, Processor: "a processor", Load: 0.1}, options{quick: true}
	measured := func(name, commit string, m machine) caseResult {
		r := result(nil, []float64{0.4}, []float64{0.35}, 1)
		r.Case.name, r.Commit, r.Machine = name, commit, m
		r.Case.lab.Links = netns.Links(netns.Gbit)
		r.Name, r.Lab = name, r.Case.lab
		r.Contenders[1].Outcomes[0].Trace = traceOf(0.4, 0.3)
		return r
	}
	elsewhere := here
	elsewhere.Cores = 4
	for _, r := range []caseResult{
		measured("ping-pong", "old", here), measured("slow-link", "elsewhere", elsewhere),
		measured("four-links", "new", here), measured("ping-pong", "new", here),
	} {
		e, err := readEarlierTCP(here, o)
		if err != nil {
			t.Fatal(err)
		}
		if err := e.add(r); err != nil {
			t.Fatal(err)
		}
	}
	here.Load = 3
	e, err := readEarlierTCP(here, o)
	if err != nil {
		t.Fatal(err)
	}
	if len(e.cases) != 2 || e.cases[0].Case.name != "four-links" || e.cases[1].Case.name != "ping-pong" || e.cases[1].Commit != "new" {
		t.Fatalf("read %+v", e.cases)
	}
	want := measured("four-links", "new", machine{})
	if got := e.cases[0]; !slices.Equal(got.Contenders[1].Outcomes[0].Trace, want.Contenders[1].Outcomes[0].Trace) || got.Case.limit() != want.Case.limit() {
		t.Errorf("read %+v", got)
	}
	if e, err := readEarlierTCP(here, options{}); err != nil || len(e.cases) != 0 {
		t.Errorf("full runs have quick ones beside them: %+v, %v", e, err)
	}
}

func TestReductionPageJudgesByTheLinkAndByTheRing(t *testing.T) {
	c := reductionCases()[0]
	limit := c.limit()
	runs := func(shares ...float64) []reduced {
		var all []reduced
		for _, share := range shares {
			all = append(all, reduced{Algbw: share * limit, Busy: 0.5})
		}
		return all
	}
	star := starResult{Case: c, Timeline: "<svg/>", Runs: map[string][]reduced{
		byServers.Name: runs(0.5, 0.92, 0.95), inPieces.Name: runs(0.8), byRing.Name: runs(0.6, 0.75, 0.8),
	}}
	page := reductionPage{Results: []reductionResult{
		{Name: c.Name, Star: &star},
		{Name: "small", Small: []smallRound{{AllReduce: 50e-6, TwoMessages: 30e-6}}},
		{Name: "memory", Memory: &memoryResult{Jobs: memoryJobs, Most: memoryBound + 1, Peak: 2 * memoryBound}},
		{Name: "kernels", Kernels: []kernelRow{
			{Total: "24 KiB", Sources: 2, Add: 100, Float32: 95, Float16: 90, Bfloat16: 90},
			{Total: "24 KiB", Sources: 16, Add: 100, Float32: 89, LoadFloat32: 93, Float16: 88, Bfloat16: 80},
			{Total: "256 MiB", Sources: 2, Add: 10, Float32: 10, Float16: 9, Bfloat16: 7},
		}},
	}}
	var reached []string
	for _, row := range page.rows() {
		reached = append(reached, row.cells()[4])
	}
	// 0.92 of the link and beside it 0.8, 1.23 of the ring, 1.7 of two messages, a byte too much; 0.89 of an add, 0.9 of float32; 1 and 0.7.
	if want := []string{"yes", "", "no", "yes", "no", "no", "yes", "yes", "no"}; !slices.Equal(reached, want) {
		t.Errorf("reached: %v, want %v of\n%s", reached, want, page.markdown())
	}
	text := string(page.markdown())
	for _, part := range []string{"0.92", "1.23", "cuts it: by servers, operations of 512 KiB | link, 0.1196 GB/s | 0.0956 GB/s, 0.80 |  |  |", "0.89 at least (16 sources)", "gets 0.93 there, so that it is not the loads", "0.70 at least (bfloat16, 2 sources)", star.plotFile(), star.timelineFile()} {
		if !strings.Contains(text, part) {
			t.Errorf("no %q in\n%s", part, text)
		}
	}
	if strings.Contains(text, "processors were all in use") {
		t.Error("half of the processors counts as all")
	}
}

func TestReductionPageShowsEveryFileThatItWrites(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	here, folder := machine{Cores: 2}, t.TempDir()
	for _, c := range reductionCases() {
		all := map[string][]reduced{}
		for _, who := range reducers {
			all[who.Name] = []reduced{{Algbw: c.limit(), Busy: 0.95}}
		}
		results, err := readEarlierReduction(here, options{})
		if err != nil {
			t.Fatal(err)
		}
		star := starResult{Case: c, Runs: all}
		if c.Drawn {
			star.Timeline = "<svg/>"
		}
		if err := results.add(reductionResult{Name: c.Name, Machine: here, Star: &star}); err != nil {
			t.Fatal(err)
		}
	}
	results, err := readEarlierReduction(here, options{})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := (reductionPage{Results: results.cases}).write(&out, folder); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(folder, "reduction.md"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(folder, "*.svg"))
	if err != nil || len(files) != 6 {
		t.Errorf("%d drawings, %v: one of each case, and two timelines", len(files), err)
	}
	for _, file := range files {
		if !bytes.Contains(page, []byte("("+filepath.Base(file)+")")) {
			t.Errorf("the page does not show %s", file)
		}
	}
	if !strings.Contains(out.String(), "4 clients, 4 servers") || !bytes.Contains(page, []byte("processors were all in use")) {
		t.Errorf("%s\n%s", out.String(), page)
	}
}
