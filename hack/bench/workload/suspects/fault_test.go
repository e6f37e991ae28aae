package suspects

import (
	"reflect"
	"slices"
	"testing"
)

func drawMany(seed uint64, k Kind, p Pattern) []fault {
	var all []fault
	for round := range 50 {
		all = append(all, draw(seed, k, p, round))
	}
	return all
}

func TestASeedDrawsTheSameFaultsOfEveryKindAndAmount(t *testing.T) {
	for _, k := range Kinds {
		for _, p := range Patterns {
			all := drawMany(1, k, p)
			if !reflect.DeepEqual(all, drawMany(1, k, p)) || reflect.DeepEqual(all, drawMany(2, k, p)) {
				t.Errorf("%s: the seed does not decide what is drawn", k)
			}
			for _, amount := range append(amounts[k], 0)[:max(len(amounts[k]), 1)] {
				if !slices.ContainsFunc(all, func(f fault) bool { return f.Kind == k && f.Amount == amount }) {
					t.Errorf("no %s (%g) among %d", k, amount, len(all))
				}
			}
			for _, f := range all {
				switch {
				case f.Kind == two && (f.Both[0].touches(f.Both[1].Host) || f.Both[1].touches(f.Both[0].Host)):
					t.Errorf("two faults of one host: %s", f)
				case f.Kind == path && (f.Peer == f.Host || p == Ring && f.Peer != (f.Host+1)%Hosts):
					t.Errorf("no path of the job: %s, %s", f, p)
				}
			}
		}
	}
	if drawMany(1, egress, Ring)[0].Host == drawMany(1, egress, Ring)[1].Host && drawMany(1, egress, Ring)[1].Host == drawMany(1, egress, Ring)[2].Host {
		t.Error("rounds draw the same fault")
	}
}

// names is a verdict on a host, and on the path to a peer if there is one.
func names(class, host, peer string) verdict {
	s := suspect{Class: class, Host: host}
	if peer != "" {
		s.Peer = &struct{ Host string }{peer}
	}
	return verdict{Suspects: []suspect{s}}
}

func orCard(v verdict) verdict {
	v.Suspects[0].OrCard = true
	return v
}

func TestAVerdictIsRightThatNamesPlaceAndClass(t *testing.T) {
	card := fault{Kind: egress, Host: 2}
	inRing := fault{Kind: delay, Host: 2}
	between := fault{Kind: path, Host: 2, Peer: 5}
	slowed := fault{Kind: behind, Host: 4}
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
