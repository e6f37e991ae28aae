package page

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

// A group has a row for each case and one of all runs, with shares of those that have the quantity. Runs without the
// headline have not failed.
func TestAGroupIsOneTable(t *testing.T) {
	named := experiment.Quantity{Name: "named", Title: "named after", Unit: "s", Digits: 1, LowerIsBetter: true}
	right := experiment.Quantity{Name: "right", Title: "right", Statistic: experiment.Share}
	alarms := experiment.Quantity{Name: "alarms", Title: "alarms", Unit: "/h", Digits: 1, LowerIsBetter: true, Statistic: experiment.Mean}
	var derived int
	e := experiment.Experiment{
		Name: "grouped", Title: "Grouped",
		Cases: func(quick bool) []experiment.Case {
			if quick {
				return nil
			}
			ours := []experiment.Contender{{Name: experiment.Ours}}
			c := experiment.Case{Group: "injected faults", Headline: named, More: []experiment.Quantity{right, alarms}, Contenders: ours}
			path, card := c, c
			path.Name, path.Title, card.Name, card.Title = "path", "slow path", "card", "slow card"
			return []experiment.Case{path, card, {Name: "cost", Title: "cost", Headline: alarms, Contenders: ours}}
		},
		Derive: func(samples []experiment.Sample) []experiment.Sample {
			derived = len(samples)
			return samples
		},
	}
	var samples []experiment.Sample
	add := func(of string, round int, note string, values map[experiment.Quantity]float64) {
		s := experiment.Sample{Case: of, Contender: experiment.Ours, Round: round}
		s.Set(experiment.Measured{Values: values, Note: note})
		samples = append(samples, s)
	}
	add("path", 0, "", map[experiment.Quantity]float64{named: 7, right: 1, alarms: 0})
	add("path", 1, "h7 was named", map[experiment.Quantity]float64{right: 0, alarms: 3})
	add("path", 2, "h7 was named", map[experiment.Quantity]float64{alarms: 0})
	add("card", 0, "", map[experiment.Quantity]float64{alarms: 0})
	add("cost", 0, "", map[experiment.Quantity]float64{alarms: 1})
	samples = append(samples, experiment.Sample{Case: "card", Contender: "bagua", Failure: "it broke"})
	files, err := NewResults(e, samples).Files()
	if err != nil {
		t.Fatal(err)
	}
	text := string(files["grouped.md"])
	for _, want := range []string{
		"## Injected faults\n\n| case | named after, median | worst | best | spread | right | alarms, mean (worst) | processors in all |\n| --- ",
		"| slow path | 7.0 s | 7.0 s | 7.0 s | 0 % | 1 of 2 (9 to 91 %) | 1.0 /h (3.0 /h) | 0 % |\n| slow card | - |  |  |  |  | 0.0 /h (0.0 /h) | 0 % |\n",
		"| slow card, bagua | all runs failed |\n| all | 7.0 s | 7.0 s | 7.0 s | 0 % | 1 of 2 (9 to 91 %) | 0.8 /h (3.0 /h) | 0 % |\n\n",
		"slow card, bagua, run 1 failed: it broke\n\n* slow path, runs 2, 3: h7 was named\n\n![injected faults](grouped-injected-faults.svg)\n",
		"## Cost\n\n| contender | alarms, mean |",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if drawing := string(files["grouped-injected-faults.svg"]); !strings.Contains(drawing, "slow path") || strings.Contains(drawing, ">slow card<") {
		t.Error("the drawing lacks what was named, or has a row for what was not")
	}
	if derived != len(samples) || strings.Count(text, "## ") != 2 || len(files) != 3 {
		t.Errorf("%d of %d samples were derived from; files %q", derived, len(samples), slices.Sorted(maps.Keys(files)))
	}
}
