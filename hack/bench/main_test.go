package main

import (
	"bytes"
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
	for _, o := range []options{{rounds: -1}, {rounds: maxRounds + 1}, {only: "("}} {
		if _, _, err := o.check([]string{"scale"}); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
	gloo := []string{"other=" + library}
	for name, given := range map[string]options{
		"collectives": {only: "process", against: "HEAD"}, "collectives-tls": {only: "element", plugins: gloo},
	} {
		if _, _, err := given.check([]string{name}); err == nil || !strings.Contains(err.Error(), name+" measure") {
			t.Errorf("%s with %+v: %v, though no plugin is measured", name, given, err)
		}
	}
	if _, _, err := (options{only: "process", plugins: gloo}).check([]string{"collectives"}); err != nil {
		t.Errorf("Gloo's benchmark was not accepted: %v", err)
	}
	if _, _, err := (options{seed: 7}).check([]string{"scale"}); err == nil || !strings.Contains(err.Error(), "scale draws nothing") {
		t.Errorf("%v, want that the experiment has no use for a seed", err)
	}
	if _, _, err := (options{}).check([]string{"no-such"}); err == nil || !strings.Contains(err.Error(), "scale") {
		t.Errorf("%v, want the names that there are", err)
	}
}

func TestAllNamesEveryExperiment(t *testing.T) {
	if got := expanded([]string{"all"}); !slices.Equal(got, experiments.Names()) || len(got) == 0 {
		t.Errorf("all is %q", got)
	}
	if got := expanded([]string{"tcp", "scale"}); !slices.Equal(got, []string{"tcp", "scale"}) {
		t.Errorf("two names became %q", got)
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
