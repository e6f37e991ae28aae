package page

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

var (
	least  = experiment.Quantity{Name: "least", Title: "least time", Unit: "us", LowerIsBetter: true}
	middle = experiment.Quantity{Name: "middle", Title: "median time", Unit: "us", LowerIsBetter: true}
)

// swept is an experiment with a sweep.
func swept() experiment.Experiment {
	return experiment.Experiment{
		Name: "swept", Title: "A sweep", Cases: func(bool) []experiment.Case {
			return []experiment.Case{{
				Name: "sizes", Title: "two ranks", Headline: least,
				Sweep:      &experiment.Sweep{Of: "elements", Points: []float64{1, 1000, 1_000_000}, More: []experiment.Quantity{middle}},
				Contenders: []experiment.Contender{{Name: "tree", Reference: true}, {Name: "ring", Reference: true}, {Name: experiment.Ours}, {Name: "memory"}},
				Goals: []experiment.Goal{
					{Of: least, Share: 1},
					{Of: least, Share: 0.7, Points: 0.5},
					{Of: least, Share: 1, To: 1000},
					{Of: middle, Share: 0.3, From: 1001, Contender: "memory"},
					{Of: least, Figure: 600, Worst: true},
				},
			}}
		},
	}
}

// sweepSamples has a tree that is fast at first, a ring that is fast at the end, and five rounds of each.
func sweepSamples() []experiment.Sample {
	var all []experiment.Sample
	for round := range 5 {
		for name, times := range map[string][3]float64{
			"tree": {10, 100, 2000}, "ring": {20, 110, 1000}, experiment.Ours: {6, 60, 1200}, "memory": {1, 10, 200},
		} {
			s := experiment.Sample{Case: "sizes", Contender: name, Round: round, Start: time.Unix(0, 0), Busy: 0.5, Quantities: map[string]experiment.Value{}}
			for i, point := range []float64{1, 1000, 1_000_000} {
				of := times[i] * (1 + float64(round)/1000)
				s.Quantities[least.At(point).Name] = experiment.Value{Value: of, Unit: "us"}
				s.Quantities[middle.At(point).Name] = experiment.Value{Value: 2 * of, Unit: "us"}
			}
			all = append(all, s)
		}
	}
	return all
}

func TestSweepComparesWithTheBestAtEachPoint(t *testing.T) {
	files, err := NewResults(swept(), sweepSamples()).Files()
	if err != nil {
		t.Fatal(err)
	}
	text := string(files["swept.md"])
	for _, want := range []string{
		"loses to the best of the others in 1 of 3 cases, each point of a sweep counted as one: two ranks, 1000000 elements (ring: 1002 us, Evenkeel: 1202 us, ratio 1.20 (1.20 to 1.20)).",
		"\nLeast time, median of the rounds:\n\n| elements | best of the others | Evenkeel | over the best | it is | memory | over the best | it is |\n",
		"\n| 1 | 10 us, tree | 6 us | 0.60 (0.60 to 0.60) | better | 1 us | 0.10 (0.10 to 0.10) | better |\n",
		"\n| 1000000 | 1002 us, ring | 1202 us | 1.20 (1.20 to 1.20) | worse | 200 us | 0.20 (0.20 to 0.20) | better |\n",
		"\nMedian time, median of the rounds:\n",
		"\n| 1000 | 200 us, tree | 120 us | 0.60 (0.60 to 0.60) | better | 20 us |",
		"\n| contender | processors in all |\n| --- | --- |\n| tree | 50 % |\n",
		"![two ranks](swept-sizes.svg)",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	drawing := string(files["swept-sizes.svg"])
	for _, want := range []string{"Evenkeel, least time", "memory, median time", "ratio to the best of the others", "elements"} {
		if !strings.Contains(drawing, want) {
			t.Errorf("no %q in the drawing", want)
		}
	}
	if strings.Contains(drawing, "tree") {
		t.Error("the drawing has a line of what the ratios are to")
	}
}

func TestGoalsOfASweep(t *testing.T) {
	rows := func(samples []experiment.Sample) []string {
		var all []string
		for _, g := range NewResults(swept(), samples).goals() {
			all = append(all, fmt.Sprintf("%s: %s; %s; %s", g.Of, g.Goal, g.Measured, g.Reached))
		}
		return all
	}
	want := []string{
		"least time: 1 of the reference, at every point; at 2 of 3; not at 1000000 (1202 us, goal 1002 us, 1 of ring); no",
		"least time: 0.7 of the reference, at 50 % of the points; at 2 of 3; not at 1000000 (1202 us, goal 701 us, 0.7 of ring); yes",
		"least time, up to 1000 elements: 1 of the reference, at every point; at 2 of 2; yes",
		"median time, from 1001 elements: 0.3 of the reference, at every point; at 1 of 1; yes",
		"worst least time: 600 us, at every point; at 2 of 3; not at 1000000 (1205 us, goal 600 us); no",
	}
	if got := rows(sweepSamples()); !slices.Equal(got, want) {
		t.Errorf("%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	alone := slices.DeleteFunc(sweepSamples(), func(s experiment.Sample) bool { return s.Contender != "ring" })
	if got := rows(alone)[0]; got != "least time: 1 of the reference, at every point; not measured; -" {
		t.Errorf("without a run of the subject: %s", got)
	}
	failed := sweepSamples()
	for i := range failed {
		if failed[i].Contender == experiment.Ours && failed[i].Round == 1 {
			failed[i].Failure = "it broke"
		}
	}
	if got := rows(failed)[2]; !strings.Contains(got, "at 0 of 2; not at 1 (6 us, and 1 of 5 runs failed, goal 10 us, 1 of tree)") || !strings.HasSuffix(got, "; no") {
		t.Errorf("with a failed run: %s", got)
	}
}

func TestSweepWithoutRivalsShowsTheHeadline(t *testing.T) {
	alone := slices.DeleteFunc(sweepSamples(), func(s experiment.Sample) bool { return s.Contender != experiment.Ours })
	files, err := NewResults(swept(), alone).Files()
	if err != nil {
		t.Fatal(err)
	}
	if text := string(files["swept.md"]); !strings.Contains(text, "\n| 1 | - | 6 us | - |  |\n") || strings.Contains(text, "loses to") {
		t.Error(text)
	}
	if drawing := string(files["swept-sizes.svg"]); !strings.Contains(drawing, ">us<") || strings.Contains(drawing, "ratio to") {
		t.Errorf("the drawing has no times, or has ratios: %s", drawing)
	}
}

func TestAgainstComparesEachPoint(t *testing.T) {
	all := NewResults(swept(), sweepSamples()).Against("ring")
	if len(all) != 3 || all[0].Case != "sizes, 1 elements" || all[0].Verdict != "better" || all[2].Verdict != "worse" {
		t.Errorf("%+v", all)
	}
}
