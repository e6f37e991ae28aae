package page

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

var update = flag.Bool("update", false, "write testdata/example.golden anew")

var (
	rate = experiment.Quantity{Name: "rate", Title: "rate", Unit: "GB/s", Digits: 2}
	rise = experiment.Quantity{Name: "rise", Title: "rise time", Unit: "s", Digits: 1, LowerIsBetter: true, Reached: true}
)

func example() experiment.Experiment {
	return experiment.Experiment{
		Name: "example", Title: "An example", About: "What it is about.", Notes: "A note.",
		Cases: func(bool) []experiment.Case {
			contenders := []experiment.Contender{{Name: "plain", Reference: true}, {Name: "static"}, {Name: experiment.Ours}}
			return []experiment.Case{
				{
					Name: "wide", Title: "four links", Load: "big messages", Contenders: contenders, Headline: rate, More: []experiment.Quantity{rise}, Limit: 0.5,
					Goals: []experiment.Goal{
						{Of: rate, Figure: 0.4}, {Of: rate, Worst: true, Figure: 0.4, Limit: "the paths"}, {Of: rise, Figure: 1, Limit: "the start"}, {Of: rate, Share: 1, Limit: "the paths"},
					},
				},
				{
					Name: "late", Title: "a fault", Contenders: contenders[1:], Headline: rate, Traces: []experiment.Level{{At: 0.5, Label: "all"}},
					Goals: []experiment.Goal{{Of: rate, Share: 0.5, Reference: experiment.Reference{Case: "wide"}}},
				},
				{Name: "unmeasured", Title: "not measured", Contenders: contenders, Headline: rate},
			}
		},
	}
}

// samples is a record of the example, as it is stored.
func samples(t *testing.T) []experiment.Sample {
	t.Helper()
	var all []experiment.Sample
	add := func(of, contender string, round int, value, rises float64) *experiment.Sample {
		s := experiment.Sample{
			Experiment: "example", Case: of, Contender: contender, Round: round, Command: "go run ./hack/bench run example", Network: "links of 1gbit", Busy: 0.3,
			Setting: experiment.Setting{Commit: "abc, with changes", Machine: "2 cores (P), K"}, Start: time.Date(2026, 1, 31, 0, 0, 0, 0, time.UTC),
			Quantities: map[string]experiment.Value{"rate": {Value: value, Unit: "GB/s"}},
		}
		if rises > 0 {
			s.Quantities["rise"] = experiment.Value{Value: rises, Unit: "s"}
		}
		all = append(all, s)
		return &all[len(all)-1]
	}
	for round := range 5 {
		step := float64(round) / 100
		add("wide", "plain", round, 0.46+step, 0.3)
		add("wide", experiment.Ours, round, 0.39+step, 0.5+step*20).NotQuiet = round == 1
		add("wide", "static", round, 0.2+step*10, 0)
		late := add("late", experiment.Ours, round, 0.3, 0)
		late.Trace, late.Drawing = [][2]float64{{0, 0.5}, {1, 0.3}}, fmt.Sprintf("<?xml?><!--%d-->", round)
		if round == 4 {
			late.Failure, late.Quantities = "it broke", nil
		}
	}
	add("wide", "bagua", 0, 0.1, 0)
	add("gone", "plain", 0, 9, 0)
	for i, s := range all {
		line, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		all[i] = experiment.Sample{}
		if err := json.Unmarshal(line, &all[i]); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

func TestPageOfARecord(t *testing.T) {
	files, err := NewResults(example(), samples(t)).Files()
	if err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "example.golden")
	got := files["example.md"]
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the page is not %s (write it anew with -update):\n%s", golden, got)
	}
	for _, name := range []string{"example-wide.svg", "example-late.svg", "example-late-run.svg"} {
		if !strings.HasPrefix(string(files[name]), "<?xml") || !strings.Contains(string(got), "("+name+")") {
			t.Errorf("%s is no drawing, or not on the page", name)
		}
	}
	if len(files) != 4 {
		t.Errorf("%d files, want 4", len(files))
	}
}

func TestAgainstComparesTheRoundsOfBoth(t *testing.T) {
	all := NewResults(example(), samples(t)).Against("plain")
	if all[0].Case != "wide" || all[0].Verdict != "worse" || all[0].Ratio.Pairs != 5 {
		t.Errorf("%+v", all[0])
	}
	if all[1].Ratio.Pairs != 0 || all[1].Verdict != "cannot tell" {
		t.Errorf("%+v, though plain did not run", all[1])
	}
}
