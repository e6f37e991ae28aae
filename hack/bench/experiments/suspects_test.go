package experiments

import (
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/workload/suspects"
)

func TestPageOfFaultsCountsWhatWasRightAndSaysWhatWasNot(t *testing.T) {
	var samples []experiment.Sample
	add := func(name, note string, values map[experiment.Quantity]float64) {
		s := experiment.Sample{Case: name, Contender: experiment.Ours}
		s.Set(experiment.Measured{Values: values, Note: note})
		samples = append(samples, s)
	}
	verdict := func(right, nobody, wrong, faulty float64) map[experiment.Quantity]float64 {
		got := map[experiment.Quantity]float64{
			suspects.Right: right, suspects.Nobody: nobody, suspects.Wrong: wrong, suspects.Early: 0, suspects.Calm: 40, suspects.Faulty: faulty,
		}
		if right == 1 {
			got[suspects.Named], got[suspects.OrCard] = 7, 1
		}
		return got
	}
	add("card-sending-in-ring", "card: h1 is slow", verdict(1, 0, 0, 24))
	add("path-in-all-to-all", "path from h2 to h3 (0.1): h7 is slow", verdict(0, 0, 1, 28))
	add("loss-on-a-card-in-ring", "loss: nobody was named", verdict(0, 1, 0, 39.6))
	files, err := page.NewResults(injections(), samples).Files()
	if err != nil {
		t.Fatal(err)
	}
	text := string(files["suspects.md"])
	for _, want := range []string{
		"| card, sending (ring) | 7.0 s | 7.0 s | 7.0 s | 0 % | 1 of 1 (21 to 100 %) | 0 of 1 (0 to 79 %) | 0 of 1 (0 to 79 %) | 0 of 1 (0 to 79 %) | 1 of 1 (21 to 100 %) | 1 of 1 (21 to 100 %) | 40 % (40 %) |",
		"| path (all-to-all) | - |  |  |  | 0 of 1 (0 to 79 %) | 0 of 1 (0 to 79 %) | 1 of 1 (21 to 100 %) | ",
		"| loss on a card (ring) | - |  |  |  |  |  | 0 of 1 (0 to 79 %) | 0 of 1 (0 to 79 %) |  | 0 of 1 (0 to 79 %) | 1 % (1 %) |",
		"| all | 7.0 s | 7.0 s | 7.0 s | 0 % | 1 of 2 (9 to 91 %) | 0 of 2 (0 to 66 %) | 1 of 3 (6 to 79 %) | 0 of 3 (0 to 56 %) | 1 of 1 (21 to 100 %) | 2 of 3 (21 to 94 %) |",
		"\n\n* path (all-to-all), run 1: path from h2 to h3 (0.1): h7 is slow (cost 30 %)\n\n![",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}
