package workload

import "testing"

func TestPairsHaveProcessorsOfTheirOwn(t *testing.T) {
	for _, c := range []struct {
		pairs, pair, all int
		want             string
	}{
		{1, 0, 16, "0-15"},
		{4, 0, 16, "0-3"},
		{4, 3, 16, "12-15"},
		{3, 2, 16, "10-14"},
		{8, 7, 2, "1-1"},
		{8, 2, 2, "0-0"},
	} {
		if got := (Pairs{Count: c.pairs, Pinned: true}).processors(c.pair, c.all); got != c.want {
			t.Errorf("pair %d of %d on %d processors has %s, want %s", c.pair, c.pairs, c.all, got, c.want)
		}
	}
	if got := (Pairs{Count: 4}).processors(3, 16); got != "0-15" {
		t.Errorf("a pair that is not pinned has %s, want all", got)
	}
}
