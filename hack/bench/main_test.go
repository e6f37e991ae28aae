package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/experiments"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/runner"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
)

func TestInvalidFlagsAreRejected(t *testing.T) {
	library := filepath.Join(t.TempDir(), "library.so")
	if err := os.WriteFile(library, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	plugins, _, err := options{plugins: []string{"other=" + library}}.others(t.Context(), t.TempDir())
	if want := []runner.Plugin{{Name: "other", Library: library}}; err != nil || !slices.Equal(plugins, want) {
		t.Errorf("%v, %v; want %v", plugins, err, want)
	}
	for _, plugin := range []string{"", "x", "x=", "=y", "x=" + library + "-not"} {
		if _, _, err := (options{plugins: []string{plugin}}).others(t.Context(), t.TempDir()); err == nil {
			t.Errorf("--plugin %q was accepted", plugin)
		}
	}
	for _, o := range []options{{rounds: -1}, {rounds: maxRounds + 1}, {builtFrom: "abc"}, {only: "("}, {only: "no-such"}} {
		if _, _, err := o.check(io.Discard, []string{"scale"}); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
	gloo := []string{"other=" + library}
	for name, given := range map[string]options{
		"collectives": {only: "process", against: "HEAD"}, "collectives-tls": {only: "element", plugins: gloo},
	} {
		if _, _, err := given.check(io.Discard, []string{name}); err == nil || !strings.Contains(err.Error(), name+" measure") {
			t.Errorf("%s with %+v: %v, though no plugin is measured", name, given, err)
		}
	}
	if _, _, err := (options{only: "process", plugins: gloo}).check(io.Discard, []string{"collectives"}); err != nil {
		t.Errorf("Gloo's benchmark was not accepted: %v", err)
	}
	if _, _, err := (options{seed: 7}).check(io.Discard, []string{"scale"}); err == nil || !strings.Contains(err.Error(), "scale draws nothing") {
		t.Errorf("%v, want that the experiment has no use for a seed", err)
	}
	if _, _, err := (options{}).check(io.Discard, []string{"no-such"}); err == nil || !strings.Contains(err.Error(), "scale") {
		t.Errorf("%v, want the names that there are", err)
	}
}

// command runs the program.
func command(t *testing.T, args ...string) (output string, err error) {
	t.Helper()
	var out bytes.Buffer
	root := rootCommand()
	root.SetArgs(args)
	root.SetOut(&out)
	root.SetErr(&out)
	err = root.ExecuteContext(t.Context())
	return out.String(), err
}

func TestAllLeavesOutWhatRefusesAFlag(t *testing.T) {
	out, err := command(t, "run", "all", "--only", "pairs|process", "--against", "no-such-commit")
	if err == nil || !strings.Contains(err.Error(), "no commit of this checkout") {
		t.Errorf("%v, want that there is no such commit: scale can be compared with one", err)
	}
	for _, want := range []string{"left out: --against no-such-commit: collectives measures", "left out: --only \"pairs|process\" matches no case of tcp: it has four-links, "} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if strings.Contains(out, "scale") {
		t.Errorf("scale is left out:\n%s", out)
	}
	if _, err := command(t, "run", "all", "--only", "no-such-case"); err == nil || !strings.Contains(err.Error(), "no experiment can be measured") {
		t.Errorf("%v, though nothing is selected", err)
	}
}

// The last experiment has a record, the others have none.
func TestPagesOfAllAreThoseThatHaveARecord(t *testing.T) {
	folder, names := t.TempDir(), experiments.Names()
	last := names[len(names)-1]
	e, err := experiments.Named(last)
	if err != nil {
		t.Fatal(err)
	}
	c := e.Cases(false)[0]
	store, err := runner.OpenStore(record(folder, last))
	if err != nil {
		t.Fatal(err)
	}
	sample := experiment.Sample{Experiment: last, Case: c.Name, Contender: experiment.Ours}
	sample.Set(experiment.Measured{Values: map[experiment.Quantity]float64{c.Headline: 1}})
	if err := store.Append(sample); err != nil {
		t.Fatal(err)
	}
	out, err := command(t, "page", "all", "--output", folder)
	if err != nil || !strings.Contains(out, "run "+names[0]) || strings.Contains(out, "run "+last+"`") {
		t.Errorf("%v:\n%s", err, out)
	}
	if _, err := os.Stat(filepath.Join(folder, last+".md")); err != nil {
		t.Error(err)
	}
	if _, err := command(t, "page", names[0], "--output", folder); err == nil || !strings.Contains(err.Error(), "has no samples") {
		t.Errorf("%v, want that the named one has no samples", err)
	}
}

func TestCommandsHaveExamples(t *testing.T) {
	for _, cmd := range rootCommand().Commands() {
		if !cmd.Hidden && (cmd.Example == "" || cmd.Short == "") {
			t.Errorf("%s has no example or no description", cmd.Name())
		}
	}
}

// repository is a git repository with one commit.
func repository(t *testing.T) (root, hash string) {
	t.Helper()
	root = t.TempDir()
	for _, args := range [][]string{{"init", "-q"}, {"-c", "user.name=test", "-c", "user.email=test@example.com", "commit", "-q", "--allow-empty", "-m", "first"}} {
		if text, err := exec.Command("git", append([]string{"-C", root}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("git %q: %v: %s", args, err, text)
		}
	}
	hash, err := git(t.Context(), root, "rev-parse", "--short=12", "HEAD")
	if err != nil {
		t.Fatal(err)
	}
	return root, hash
}

func TestPluginOfACommitIsBuiltOnce(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	root, hash := repository(t)
	library := filepath.Join(cache, "evenkeel", "bench", "commits", hash, cargo.Library)
	if err := os.MkdirAll(filepath.Dir(library), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(library, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := buildCommit(t.Context(), root, "HEAD")
	if want := (runner.Plugin{Name: hash, Library: library}); err != nil || got != want {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	if _, err := buildCommit(t.Context(), root, "no-such-commit"); err == nil || !strings.Contains(err.Error(), "--against no-such-commit") {
		t.Errorf("%v", err)
	}
}

func TestFailedRunOfAnExperimentThatChecksIsAnError(t *testing.T) {
	e, samples := experiment.Experiment{Name: "gpu"}, []experiment.Sample{{Case: "loopback", Contender: experiment.Ours}}
	if err := checked(e, samples); err != nil {
		t.Error(err)
	}
	samples = append(samples, experiment.Sample{Case: "killed-rank", Contender: experiment.Ours, Round: 1, Failure: "it broke"})
	if err := checked(e, samples); err == nil || err.Error() != "gpu, killed-rank, Evenkeel, run 2 failed: it broke" {
		t.Errorf("%v", err)
	}
}

// A commit that was better in five rounds of five is a regression; in four it cannot be told.
func TestComparisonFailsWhereTheSubjectIsWorse(t *testing.T) {
	e, err := experiments.Named("tcp")
	if err != nil {
		t.Fatal(err)
	}
	const earlier = experiment.Ours + " at abc"
	for rounds, fails := range map[int]bool{5: true, 4: false} {
		var samples []experiment.Sample
		for round := range rounds {
			for name, rate := range map[string]float64{experiment.Ours: 1, earlier: 1.1} {
				samples = append(samples, experiment.Sample{
					Case: "four-connections", Contender: name, Round: round, Start: time.Unix(0, 0), Quantities: map[string]experiment.Value{"rate": {Value: rate, Unit: "GB/s"}},
				})
			}
		}
		var out bytes.Buffer
		err := compare(&out, page.NewResults(e, samples), earlier)
		if (err != nil) != fails || !strings.Contains(out.String(), "0.91 (0.91 to 0.91)") {
			t.Errorf("%d rounds: %v\n%s", rounds, err, &out)
		}
	}
}
