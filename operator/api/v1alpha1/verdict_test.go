package v1alpha1

import (
	"slices"
	"testing"
)

func TestVerdictOrder(t *testing.T) {
	list := []Verdict{VerdictPass, VerdictFail, VerdictInconclusive}
	slices.SortFunc(list, WorstFirst)
	if !slices.Equal(list, []Verdict{VerdictFail, VerdictInconclusive, VerdictPass}) {
		t.Errorf("worst first: %v", list)
	}
	for _, test := range []struct{ a, b, worst Verdict }{
		{VerdictPass, VerdictPass, VerdictPass}, {VerdictPass, VerdictInconclusive, VerdictInconclusive},
		{VerdictFail, VerdictInconclusive, VerdictFail}, {VerdictPass, VerdictFail, VerdictFail},
	} {
		if got := Worst(test.a, test.b); got != test.worst || Worst(test.b, test.a) != test.worst {
			t.Errorf("worst of %s and %s: %s", test.a, test.b, got)
		}
		if test.a != test.b && !test.worst.Worse(map[bool]Verdict{true: test.b, false: test.a}[test.worst == test.a]) {
			t.Errorf("%s is not worse", test.worst)
		}
	}
}
