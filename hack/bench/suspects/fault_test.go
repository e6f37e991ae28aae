package main

import (
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
)

const hosts = 8

func drawMany(seed uint64) []fault {
	random := rand.New(rand.NewPCG(seed, 0))
	var all []fault
	for range 1000 {
		all = append(all, draw(random, hosts))
	}
	return all
}

func TestASeedDrawsTheSameFaultsOfEveryKindAndAmount(t *testing.T) {
	all := drawMany(1)
	if !reflect.DeepEqual(all, drawMany(1)) || reflect.DeepEqual(all, drawMany(2)) {
		t.Error("the seed does not decide what is drawn")
	}
	for _, k := range kinds {
		for _, amount := range append(amounts[k], 0)[:max(len(amounts[k]), 1)] {
			if !slices.ContainsFunc(all, func(f fault) bool { return f.Kind == k && f.Amount == amount }) {
				t.Errorf("no %s (%g) among 1000", k, amount)
			}
		}
	}
	for _, f := range all {
		switch {
		case f.Kind == two && (f.Both[0].touches(f.Both[1].Host) || f.Both[1].touches(f.Both[0].Host)):
			t.Errorf("two faults of one host: %s", f)
		case f.Kind == path && (f.Peer == f.Host || f.Pattern == ring && f.Peer != (f.Host+1)%hosts):
			t.Errorf("no path of the job: %s, %s", f, f.Pattern)
		}
	}
}

func TestAVerdictIsRightThatNamesPlaceAndClass(t *testing.T) {
	names := func(class, host, peer string) verdict {
		s := suspect{Class: class, Host: host}
		if peer != "" {
			s.Peer = &struct{ Host string }{peer}
		}
		return verdict{Suspects: []suspect{s}}
	}
	card := fault{Kind: egress, Pattern: allToAll, Host: 2}
	inRing := fault{Kind: delay, Pattern: ring, Host: 2}
	orCard := func(v verdict) verdict {
		v.Suspects[0].OrCard = true
		return v
	}
	between := fault{Kind: path, Pattern: allToAll, Host: 2, Peer: 5}
	slowed := fault{Kind: behind, Pattern: ring, Host: 4}
	for _, test := range []struct {
		fault fault
		said  verdict
		right bool
	}{
		{card, names(classLink, "h3", ""), true},
		{card, names(classLink, "h4", ""), false},
		{card, names(classPath, "h3", "h4"), false},
		{card, names(classLate, "h3", ""), false},
		{card, verdict{}, false},
		{card, orCard(names(classPath, "h3", "h4")), true},
		{inRing, orCard(names(classPath, "h2", "h3")), true},
		{inRing, names(classPath, "h2", "h3"), false},
		{inRing, orCard(names(classPath, "h4", "h5")), false},
		{between, names(classPath, "h6", "h3"), true},
		{between, names(classPath, "h3", "h5"), false},
		{between, names(classLink, "h3", ""), false},
		{slowed, names(classLate, "h5", ""), true},
		{slowed, names(classLink, "h5", ""), false},
		{fault{Kind: two, Both: []fault{card, slowed}}, names(classLate, "h5", ""), true},
		{fault{Kind: two, Both: []fault{card, slowed}}, names(classLate, "h3", ""), false},
	} {
		if got := test.fault.isRight(test.said); got != test.right {
			t.Errorf("%s, named %+v: right %t", test.fault, test.said, got)
		}
	}
}

func TestPageCountsWhatWasRightAndSaysWhatWasNot(t *testing.T) {
	right := result{Fault: fault{Kind: egress, Pattern: ring, Amount: 0.5}, Found: classPath, Right: true, Either: true, Before: time.Hour, After: 7 * time.Second, Cost: 0.4}
	wrong := result{Fault: fault{Kind: path, Pattern: allToAll, Host: 1, Peer: 2, Amount: 0.1}, Found: classLink, Text: "h7 is slow", Cost: 0.3}
	cheap := result{Fault: fault{Kind: loss, Pattern: ring, Amount: 0.001}, Found: classNobody, Cost: 0.01}
	calm := []quiet{{load: load{Pattern: ring, Detail: "nobody computes"}, Length: time.Hour, Named: []string{"h1 was named"}}}
	spent := cost{Traffic: map[string][]float64{}, Processor: map[string][]float64{}, Watching: map[string][]float64{}, Datagrams: 50e3}
	for _, pattern := range patterns {
		spent.Watching[pattern] = []float64{0.001, 0.002}
		spent.Traffic[pattern], spent.Processor[pattern] = []float64{0.99, 1, 1.01}, []float64{1, 1.01, 1.02}
	}
	text := string(markdown(report{results: []result{right, wrong, cheap}, calm: calm, spent: spent}, options{seed: 1, hosts: hosts, faults: 3}, page.Source{}, machine.Machine{}))
	for _, want := range []string{
		"Of 2 faults that cost the job at least 10 % of its traffic, 1 are right**, 1 wrong, and for 0 nobody was named",
		"Of these, 1 in rings and 0 in all-to-alls say of a card that it is a path, or one of its cards",
		"Before the faults, the jobs ran for 1.0 hours without one. 0 times somebody was named then",
		"* path from h2 to h3 (0.1), all-to-all, over the collectives, cost 30 %: h7 is slow",
		"1.0 hours of jobs in which nobody is to blame had 1 false verdicts",
		"nobody computes: h1 was named",
		"1.000 (0.990 to 1.010) | 1.010 (1.000 to 1.020) | 0.150 % (0.100 to 0.200) |",
		"sent 50 KB/s",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestFaultsAreWeighedAgainstTheMiddleOfAllCalmJobsOfAPattern(t *testing.T) {
	of := func(pattern string, calm, faulty float64) result {
		return result{Fault: fault{Pattern: pattern}, Calm: calm, Faulty: faulty}
	}
	results := []result{of(ring, 100, 50), of(ring, 60, 98), of(ring, 102, 100), of(allToAll, 10, 5), {Early: true}}
	weigh(results)
	for at, want := range []float64{0.5, 0.02, 0, 0.5, 0} {
		if math.Abs(results[at].Cost-want) > 1e-9 {
			t.Errorf("%d costs %g, not %g", at, results[at].Cost, want)
		}
	}
}

func TestRunWithoutFaultsHasAPageOfItsOwn(t *testing.T) {
	calm := []quiet{{load: load{Pattern: ring, Detail: "nobody computes"}, Length: time.Hour}}
	o := options{hosts: hosts}
	text := string(markdown(report{calm: calm}, o, page.Source{}, machine.Machine{}))
	if o.name() != "suspects-quiet.md" || !strings.Contains(text, "nobody is to blame") || !strings.Contains(text, "1.0 hours") {
		t.Errorf("%s:\n%s", o.name(), text)
	}
}

func TestPageOfAnInterruptedRunSaysSo(t *testing.T) {
	calm := []quiet{{load: load{Pattern: ring, Detail: "nobody computes"}, Length: time.Hour}}
	text := string(markdown(report{calm: calm, stopped: errors.New("a job ended")}, options{faults: 300}, page.Source{}, machine.Machine{}))
	if !strings.Contains(text, "ended early, so parts are missing: a job ended.") || !strings.Contains(text, "1.0 hours") {
		t.Errorf("it does not say so:\n%s", text)
	}
	for _, missing := range []string{"What it costs", "What was not right", "suspects.svg"} {
		if strings.Contains(text, missing) {
			t.Errorf("%q in\n%s", missing, text)
		}
	}
}

func TestLoadsAreChosenByARegularExpression(t *testing.T) {
	chosen, err := options{loads: "ring.*(20 ms$|half)"}.chosenLoads()
	if err != nil || len(chosen) != 2 {
		t.Errorf("%v, %v", chosen, err)
	}
	if _, err := (options{loads: "rings"}).chosenLoads(); err == nil || !strings.Contains(err.Error(), "matches none of") {
		t.Errorf("%v", err)
	}
}
