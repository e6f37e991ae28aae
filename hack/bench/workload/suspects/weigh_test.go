package suspects

import (
	"maps"
	"math"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

// sample is the record of a finding, whose case is the pattern.
func sample(p Pattern, f finding) experiment.Sample {
	s := experiment.Sample{Case: string(p)}
	s.Set(f.measured())
	return s
}

func patternOf(s experiment.Sample) Pattern { return Pattern(s.Case) }

func has(t *testing.T, s experiment.Sample, want map[experiment.Quantity]float64) {
	t.Helper()
	for _, q := range []experiment.Quantity{Right, Nobody, Wrong, Early, OrCard, Costly, Named} {
		value, ok := s.Value(q)
		wanted, there := want[q]
		if ok != there || value != wanted {
			t.Errorf("%s is %g, %t, and should be %g, %t: %q", q.Name, value, ok, wanted, there, s.Note)
		}
	}
}

func TestFaultsAreWeighedAgainstTheMiddleOfAllCalmJobsOfAPattern(t *testing.T) {
	of := func(p Pattern, calm, faulty float64) experiment.Sample {
		return sample(p, finding{calm: calm * 1e6, faulty: faulty * 1e6})
	}
	samples := []experiment.Sample{of(Ring, 100, 50), of(Ring, 60, 98), of(Ring, 102, 100), of(AllToAll, 10, 5)}
	quick := of(Ring, 10, 5)
	quick.Quick = true
	samples = append(samples, quick, experiment.Sample{Failure: "it broke"}, sample(Ring, finding{early: true}))
	for at, want := range []float64{50, 2, 0, 50, 50} {
		got, ok := Weigh(samples, patternOf)[at].Value(Cost)
		if !ok || math.Abs(got-want) > 1e-9 {
			t.Errorf("%d costs %g %%, not %g", at, got, want)
		}
	}
	for _, s := range Weigh(samples, patternOf)[5:] {
		if got, ok := s.Value(Cost); ok {
			t.Errorf("%q costs %g %%, though no fault began", s.Failure+s.Note, got)
		}
	}
	if _, ok := samples[0].Value(Cost); ok {
		t.Error("the samples that were given have changed")
	}
}

// What counts of a fault depends on whether it costs a tenth, and on whether somebody was named before it.
func TestAFaultIsCountedByWhatItCosts(t *testing.T) {
	card := fault{Kind: egress, Amount: 0.5}
	right, elsewhere := orCard(names(classPath, "h1", "h2")), names(classLink, "h7", "")
	right.Text, elsewhere.Text = "h1 is slow", "h7 is slow"
	quantities := func(values ...float64) map[experiment.Quantity]float64 {
		got := map[experiment.Quantity]float64{}
		for at, q := range []experiment.Quantity{Costly, Wrong, Early, Right, Nobody, OrCard, Named}[:len(values)] {
			got[q] = values[at]
		}
		return got
	}
	for name, test := range map[string]struct {
		finding
		want map[experiment.Quantity]float64
		note string
	}{
		"right": {finding{fault: card, named: true, first: right, after: 7 * time.Second, calm: 100, faulty: 60}, quantities(1, 0, 0, 1, 0, 1, 7), ""},
		"wrong": {
			finding{fault: card, named: true, first: elsewhere, after: 7 * time.Second, calm: 100, faulty: 60}, quantities(1, 1, 0, 0, 0),
			"card, sending of h1 (0.5): h7 is slow (cost 40 %)",
		},
		"nobody": {
			finding{fault: card, calm: 100, faulty: 60, unsaid: "all wait a little"}, quantities(1, 0, 0, 0, 1),
			"card, sending of h1 (0.5): nobody was named: all wait a little (cost 40 %)",
		},
		"early": {finding{fault: card, early: true, first: right}, quantities(1, 1, 1, 0, 0), "card, sending of h1 (0.5): before the fault: h1 is slow"},
		"cheap": {finding{fault: card, calm: 100, faulty: 99}, quantities(0, 0, 0), ""},
		"cheap, named": {
			finding{fault: card, named: true, first: right, calm: 100, faulty: 99}, quantities(0, 0, 0), "",
		},
		"cheap, wrong": {
			finding{fault: card, named: true, first: elsewhere, calm: 100, faulty: 99}, quantities(0, 1, 0),
			"card, sending of h1 (0.5): h7 is slow (cost 1 %)",
		},
	} {
		t.Run(name, func(t *testing.T) {
			raw := sample(Ring, test.finding)
			before := maps.Clone(raw.Quantities)
			s := Weigh([]experiment.Sample{raw}, patternOf)[0]
			has(t, s, test.want)
			if s.Note != test.note {
				t.Errorf("the note is %q, and should be %q", s.Note, test.note)
			}
			if !maps.Equal(before, raw.Quantities) || !strings.Contains(raw.Note, card.String()) {
				t.Error("the record has changed")
			}
		})
	}
}
