package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/experiments"
	"evenkeel.dev/evenkeel/hack/bench/runner"
	"evenkeel.dev/evenkeel/hack/bench/workload"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func TestReadmeHasTheFiguresOfTheRecords(t *testing.T) {
	for _, f := range figures {
		e, err := experiments.Named(f.experiment)
		if err != nil || !slices.ContainsFunc(e.Cases(false), func(c experiment.Case) bool { return c.Name == f.of }) {
			t.Errorf("%q is about no case: %v", f.title, err)
		}
	}
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	want, _, err := withFigures(string(text), resultsFolder(root))
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != want {
		t.Error("the figures of README.md are stale: run `go run ./hack/bench readme`")
	}
}

// One of two rows has a record, which takes the place of what was written by hand; the other stays.
func TestReadmeKeepsRowsWithoutARecord(t *testing.T) {
	all := figures
	t.Cleanup(func() { figures = all })
	figures = []figure{{"with a record", "tcp", "slow-link"}, {"without", "tcp", "ping-pong"}}
	folder := t.TempDir()
	store, err := runner.OpenStore(record(folder, "tcp"))
	if err != nil {
		t.Fatal(err)
	}
	for round := range 5 {
		for name, rate := range map[string]float64{experiment.Ours: 0.36, "16 plain sockets": 0.4, "4 plain sockets": 0.2, "NCCL sockets": 0.1} {
			s := experiment.Sample{Experiment: "tcp", Case: "slow-link", Contender: name, Round: round}
			s.Set(experiment.Measured{Values: map[experiment.Quantity]float64{workload.Rate: rate}})
			if err := store.Append(s); err != nil {
				t.Fatal(err)
			}
		}
	}
	const heading = "\n|  | Evenkeel | Best of the others | Ratio |\n| --- | --- | --- | --- |\n"
	const kept = "| [without](docs/results/tcp.md) | 9 us | 8 us, by hand | 1.13 |\n"
	with := func(row string) string {
		return "before\n" + figuresBegin + heading + row + kept + "\n" + figuresEnd + "after\n"
	}
	got, lacking, err := withFigures(with("| [with a record](docs/results/tcp.md) | 1 | 2 | 3 |\n"), folder)
	if err != nil {
		t.Fatal(err)
	}
	want := with("| [with a record](docs/results/tcp.md) | 0.360 GB/s | 0.400 GB/s, 16 plain sockets | 0.90 (0.90 to 0.90), worse |\n")
	if got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	if len(lacking) != 1 || !strings.Contains(lacking[0], "ping-pong") {
		t.Errorf("%q, want the one row without a record", lacking)
	}
	for name, text := range map[string]string{"no lines": "before\nafter\n", "no row": strings.Replace(with(""), kept, "", 1)} {
		if _, _, err := withFigures(text, folder); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
