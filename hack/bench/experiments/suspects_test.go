package experiments

import (
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/workload/suspects"
)

// record is runs of an experiment, one in each round.
type record struct {
	of      string
	samples []experiment.Sample
}

func (r *record) add(name string, round int, note string, values map[experiment.Quantity]float64) {
	s := experiment.Sample{Experiment: r.of, Case: name, Contender: experiment.Ours, Round: round}
	s.Set(experiment.Measured{Values: values, Note: note})
	r.samples = append(r.samples, s)
}

// has checks the text of the page.
func (r *record) has(t *testing.T, wanted ...string) {
	t.Helper()
	e, err := Named(r.of)
	if err != nil {
		t.Fatal(err)
	}
	files, err := page.NewResults(e, r.samples).Files()
	if err != nil {
		t.Fatal(err)
	}
	text := string(files[r.of+".md"])
	for _, want := range wanted {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestPageOfFaultsCountsWhatWasRightAndSaysWhatWasNot(t *testing.T) {
	r := record{of: "suspects"}
	verdict := func(right, nobody, wrong, faulty float64) map[experiment.Quantity]float64 {
		got := map[experiment.Quantity]float64{
			suspects.Right: right, suspects.Nobody: nobody, suspects.Wrong: wrong, suspects.Early: 0, suspects.Calm: 40, suspects.Faulty: faulty,
		}
		if right == 1 {
			got[suspects.Named], got[suspects.OrCard] = 7, 1
		}
		return got
	}
	r.add("card-sending-in-ring", 0, "card: h1 is slow", verdict(1, 0, 0, 24))
	r.add("path-in-all-to-all", 0, "path from h2 to h3 (0.1): h7 is slow", verdict(0, 0, 1, 28))
	r.add("loss-on-a-card-in-ring", 0, "loss: nobody was named", verdict(0, 1, 0, 39.6))
	r.has(t,
		"| card, sending (ring) | 7.0 s | 7.0 s | 7.0 s | 0 % | 1 of 1 (21 to 100 %) | 0 of 1 (0 to 79 %) | 0 of 1 (0 to 79 %) | 0 of 1 (0 to 79 %) | 1 of 1 (21 to 100 %) | 1 of 1 (21 to 100 %) | 40 % (40 %) |",
		"| path (all-to-all) | - |  |  |  | 0 of 1 (0 to 79 %) | 0 of 1 (0 to 79 %) | 1 of 1 (21 to 100 %) | ",
		"| loss on a card (ring) | - |  |  |  |  |  | 0 of 1 (0 to 79 %) | 0 of 1 (0 to 79 %) |  | 0 of 1 (0 to 79 %) | 1 % (1 %) |",
		"| all | 7.0 s | 7.0 s | 7.0 s | 0 % | 1 of 2 (9 to 91 %) | 0 of 2 (0 to 66 %) | 1 of 3 (6 to 79 %) | 0 of 3 (0 to 56 %) | 1 of 1 (21 to 100 %) | 2 of 3 (21 to 94 %) |",
		"\n\n* path (all-to-all), run 1: path from h2 to h3 (0.1): h7 is slow (cost 30 %)\n\n![",
	)
}

func TestJobsWithoutFaultsHaveAPageOfTheirOwn(t *testing.T) {
	r := record{of: "suspects-quiet"}
	for round := range 2 {
		r.add("ring-plain", round, "", map[experiment.Quantity]float64{suspects.FalseVerdicts: 0})
		r.add("gather-even", round, "h1 was named", map[experiment.Quantity]float64{suspects.FalseVerdicts: 30})
	}
	for round := range 5 {
		for name, watched := range map[string]float64{experiment.Ours: 1, "not watched": 0} {
			r.add("cost-ring", round, "", map[experiment.Quantity]float64{suspects.Carried: 40 - watched, suspects.Processor: 2 + watched, suspects.Watching: 0.05})
			r.samples[len(r.samples)-1].Contender = name
		}
	}
	r.has(t,
		"nobody is to blame", "| case | false verdicts, mean | worst |",
		"| all-reduce in a ring, over the plugin: nobody computes | 0.0 /h | 0.0 /h |", "| all | 15.0 /h | 30.0 /h |",
		"* gather at rank 0, over the collectives: all compute for 20 ms, run 2: h1 was named\n",
		"| not watched | 40.00 MB/s | 40.00 MB/s | 40.00 MB/s | 0 % | 0.97 (0.97 to 0.97) | worse |", "| 0.050 % (0.050 %) |",
	)
}
