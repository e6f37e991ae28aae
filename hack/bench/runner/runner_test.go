package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

var rate = experiment.Quantity{Name: "rate", Title: "rate", Unit: "GB/s", Digits: 1}

// A bench is a runner of two cases with fake contenders, on a machine that is quiet.
type bench struct {
	Runner
	ran    []string // case/contender/round, in order
	clock  *clocktesting.FakePassiveClock
	busy   []float64                 // what the probe answers in turn, and then that the machine is quiet
	seeds  []uint64                  // of the runs
	failed string                    // the contender that fails
	during func(ctx context.Context) // called in each run
}

func newBench(t *testing.T, path string) *bench {
	t.Helper()
	store, err := OpenStore(path)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{clock: clocktesting.NewFakePassiveClock(time.Date(2026, 1, 31, 0, 0, 0, 0, time.UTC))}
	library := filepath.Join(t.TempDir(), "library")
	if err := os.WriteFile(library, []byte("a plugin"), 0o644); err != nil {
		t.Fatal(err)
	}
	run := func(of string) func(context.Context, experiment.Run) (experiment.Measured, error) {
		return func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
			b.ran, b.seeds = append(b.ran, of+"/"+r.Contender), append(b.seeds, r.Seed)
			b.clock.SetTime(b.clock.Now().Add(time.Second))
			if b.during != nil {
				b.during(ctx)
			}
			if r.Contender == b.failed {
				return experiment.Measured{}, errors.New("it\nbroke")
			}
			return experiment.Measured{Values: map[experiment.Quantity]float64{rate: float64(len(b.ran))}}, ctx.Err()
		}
	}
	contenders := func(of string) []experiment.Contender {
		return []experiment.Contender{{Name: "plain", Reference: true, Run: run(of)}, {Name: experiment.Ours, Run: run(of)}, {Name: "static", Run: run(of)}}
	}
	b.Runner = Runner{
		Experiment: experiment.Experiment{Name: "fake", Cases: func(bool) []experiment.Case {
			return []experiment.Case{
				{Name: "one", Headline: rate, Contenders: contenders("one")},
				{Name: "two", Headline: rate, Contenders: contenders("two")[:2]},
			}
		}},
		Rounds: 3, Programs: experiment.Programs{Library: library}, Setting: experiment.Setting{Commit: "abc", Machine: "M"},
		Wait: time.Minute, Store: store, Out: io.Discard, Clock: b.clock,
		Probe: func(context.Context) (busy float64, err error) {
			b.clock.SetTime(b.clock.Now().Add(time.Second))
			if len(b.busy) > 0 {
				busy, b.busy = b.busy[0], b.busy[1:]
			}
			return busy, nil
		},
	}
	return b
}

func (b *bench) run(t *testing.T) {
	t.Helper()
	if err := b.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestTurnsRotateFromRoundToRound(t *testing.T) {
	b := newBench(t, filepath.Join(t.TempDir(), "fake.jsonl"))
	b.run(t)
	want := []string{
		"one/plain", "one/Evenkeel", "one/static", "one/Evenkeel", "one/static", "one/plain", "one/static", "one/plain", "one/Evenkeel",
		"two/plain", "two/Evenkeel", "two/Evenkeel", "two/plain", "two/plain", "two/Evenkeel",
	}
	if !slices.Equal(b.ran, want) {
		t.Errorf("%q, want %q", b.ran, want)
	}
	last := b.Store.Samples[8]
	if last.Contender != experiment.Ours || last.Round != 2 || last.Position != 2 || last.Quantities["rate"] != (experiment.Value{Value: 9, Unit: "GB/s"}) || last.Seconds != 1 {
		t.Errorf("%+v", last)
	}
	if d, err := Digest(b.Programs.Library); err != nil || last.Library != d {
		t.Errorf("library %q, want %q: %v", last.Library, d, err)
	}
}

// What is given beside an experiment about the driver runs as its table says, and never as the subject under another
// name.
func TestOthersOfAnExperimentAboutTheDriver(t *testing.T) {
	b := newBench(t, filepath.Join(t.TempDir(), "fake.jsonl"))
	cases := b.Experiment.Cases(false)
	b.Experiment.DriverOnly, b.Rounds = true, 1
	b.Experiment.Cases = func(bool) []experiment.Case { return cases }
	b.Plugins = []Plugin{{Name: "other", Library: b.Programs.Library}}
	cases[0].Others = func(name, path string) ([]experiment.Contender, error) {
		if path != b.Programs.Library {
			t.Errorf("%s is at %s", name, path)
		}
		of := cases[0].Contenders[0]
		of.Name = name + ", ring"
		return []experiment.Contender{of}, nil
	}
	b.run(t)
	if want := []string{"one/plain", "one/Evenkeel", "one/other, ring", "one/static", "two/plain", "two/Evenkeel"}; !slices.Equal(b.ran, want) {
		t.Errorf("%q, want %q", b.ran, want)
	}
	cases[0].Others = func(string, string) ([]experiment.Contender, error) { return nil, errors.New("not a program") }
	if err := b.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "not a program") {
		t.Errorf("%v", err)
	}
}

func TestWhatAnExperimentLeavesOpenIsAnError(t *testing.T) {
	b := newBench(t, filepath.Join(t.TempDir(), "fake.jsonl"))
	b.Experiment.Open = func(context.Context, io.Writer) (func() error, error) {
		return func() error { return errors.New("the lab is still there") }, nil
	}
	if err := b.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "the lab is still there") {
		t.Errorf("the error is %v", err)
	}
}

func TestFreshRunMeasuresTheSelectedCasesAnew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fake.jsonl")
	newBench(t, path).run(t)
	b := newBench(t, path)
	b.Only, b.Fresh = regexp.MustCompile("two"), true
	b.run(t)
	if len(b.ran) != 6 || len(b.Store.Samples) != 15 {
		t.Errorf("%d runs and %d samples, want 6 and 15", len(b.ran), len(b.Store.Samples))
	}
}

// runs are the runs of the samples, sorted.
func runs(samples []experiment.Sample) []string {
	var all []string
	for _, s := range samples {
		all = append(all, fmt.Sprintf("%s/%s/%d/%d", s.Case, s.Contender, s.Round, s.Position))
	}
	return slices.Sorted(slices.Values(all))
}

// A record that ends anywhere, also within a line, is completed by what it lacks and no more.
func TestResumeAfterACutAtEveryLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fake.jsonl")
	first := newBench(t, path)
	first.run(t)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	for whole := range first.Store.Samples {
		for _, torn := range []int{0, 1, len(lines[whole]) / 2, len(lines[whole]) - 1} {
			cut := append(bytes.Join(lines[:whole], nil), lines[whole][:torn]...)
			if err := os.WriteFile(path, cut, 0o644); err != nil {
				t.Fatal(err)
			}
			b := newBench(t, path)
			b.run(t)
			if want := len(first.Store.Samples) - whole; len(b.ran) != want {
				t.Errorf("after %d lines and %d bytes: %d runs, want %d", whole, torn, len(b.ran), want)
			}
			again, err := OpenStore(path)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := runs(again.Samples), runs(first.Store.Samples); !slices.Equal(got, want) {
				t.Errorf("after %d lines and %d bytes: %q, want %q", whole, torn, got, want)
			}
		}
	}
}

func TestStoreRefusesABrokenLineBeforeTheLast(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fake.jsonl")
	newBench(t, path).run(t)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text = append([]byte("{\n"), text...)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenStore(path); err == nil || !strings.Contains(err.Error(), "line 1 is no sample") {
		t.Errorf("%v", err)
	}
}

func TestInterruptedRunLosesOneSample(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fake.jsonl")
	b := newBench(t, path)
	ctx, cancel := context.WithCancel(t.Context())
	b.during = func(context.Context) {
		if len(b.ran) == 5 {
			cancel()
		}
	}
	if err := b.Run(ctx); err == nil || !strings.Contains(err.Error(), "goes on where it stopped") {
		t.Errorf("%v", err)
	}
	if len(b.Store.Samples) != 4 {
		t.Errorf("%d samples of 5 runs, the last interrupted", len(b.Store.Samples))
	}
}

func TestPageCanBeWrittenAfterEachCase(t *testing.T) {
	b := newBench(t, filepath.Join(t.TempDir(), "fake.jsonl"))
	var there []int
	b.Measured = func() error {
		there = append(there, len(b.Store.Samples))
		return nil
	}
	b.run(t)
	if want := []int{9, 15}; !slices.Equal(there, want) {
		t.Errorf("%v samples were there after the cases, want %v", there, want)
	}
	b = newBench(t, filepath.Join(t.TempDir(), "fake.jsonl"))
	b.Measured = func() error { return errors.New("no space") }
	if err := b.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "no space") {
		t.Errorf("%v", err)
	}
}

func TestOtherSettingMeasuresSelectedCasesAnew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fake.jsonl")
	newBench(t, path).run(t)
	b := newBench(t, path)
	b.Setting.Commit, b.Only = "def", regexp.MustCompile("two")
	b.run(t)
	commits := map[string]int{}
	for _, s := range b.Store.Samples {
		commits[s.Case+" "+s.Commit]++
	}
	if len(b.ran) != 6 || commits["one abc"] != 9 || commits["two def"] != 6 || len(commits) != 2 {
		t.Errorf("%d runs; samples %v", len(b.ran), commits)
	}
	// Another build of the plugin under the same commit.
	if err := os.WriteFile(b.Programs.Library, []byte("another"), 0o644); err != nil {
		t.Fatal(err)
	}
	b.ran, b.Only = nil, regexp.MustCompile("two")
	if b.run(t); len(b.ran) != 6 {
		t.Errorf("%d runs of another build, want 6", len(b.ran))
	}
	b.ran, b.seeds, b.Setting.Seed = nil, nil, 7
	if b.run(t); len(b.ran) != 6 || !slices.Equal(slices.Compact(b.seeds), []uint64{7}) {
		t.Errorf("%d runs of another seed, want 6; they drew from %d", len(b.ran), b.seeds)
	}
}

func TestCaseThatDoesNotVaryRunsOnce(t *testing.T) {
	b := newBench(t, filepath.Join(t.TempDir(), "fake.jsonl"))
	cases := b.Experiment.Cases
	b.Experiment.Cases = func(quick bool) []experiment.Case {
		all := cases(quick)
		all[0].Once = true
		return all
	}
	b.run(t)
	if got := len(b.Store.Samples); got != 3+6 {
		t.Errorf("%d samples, want 3 of the case that runs once, and 6", got)
	}
}

func TestFailureIsPartOfTheResult(t *testing.T) {
	b := newBench(t, filepath.Join(t.TempDir(), "fake.jsonl"))
	b.failed = "static"
	b.run(t)
	failures := 0
	for _, s := range b.Store.Samples {
		if (s.Failure == "it; broke") != (s.Contender == "static") {
			t.Errorf("%+v", s)
		} else if s.Failure != "" {
			failures++
		}
	}
	if failures != 3 || len(b.ran) != 15 {
		t.Errorf("%d failures in %d runs, want 3 in 15", failures, len(b.ran))
	}
}

// The first run waits for the machine; later ones find that the time is used up.
func TestRunWaitsForAQuietMachine(t *testing.T) {
	b := newBench(t, filepath.Join(t.TempDir(), "fake.jsonl"))
	b.Wait, b.Only = 5*time.Second, regexp.MustCompile("two")
	b.busy = []float64{0.5, 0.5, 0.05, 0.5, 0.5, 0.5, 0.4, 0.3}
	b.run(t)
	var got []string
	for _, s := range b.Store.Samples {
		got = append(got, fmt.Sprintf("%.2f %t", s.BusyBefore, s.NotQuiet))
	}
	if want := []string{"0.05 false", "0.50 true", "0.50 true", "0.40 true", "0.30 true", "0.00 false"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestOtherPluginsRunAsTheSubjectDoes(t *testing.T) {
	b := newBench(t, filepath.Join(t.TempDir(), "fake.jsonl"))
	b.Only, b.Rounds, b.Plugins = regexp.MustCompile("two"), 1, []Plugin{{Name: "bagua", Library: os.DevNull}}
	b.run(t)
	if want := []string{"two/plain", "two/Evenkeel", "two/bagua"}; !slices.Equal(b.ran, want) {
		t.Errorf("%q, want %q", b.ran, want)
	}
	if s := b.Store.Samples; s[1].Library == s[2].Library {
		t.Errorf("both libraries are %s", s[1].Library)
	}
	b.Plugins[0].Library = filepath.Join(t.TempDir(), "none")
	if err := b.Run(t.Context()); err == nil {
		t.Error("no error without the library")
	}
}
