package experiments

import (
	"math"
	"slices"
	"testing"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

func TestBoundOfAnAllReduceIsThatOfTheMeanOrOfTheSlowestLink(t *testing.T) {
	const bytes = 16e6
	even := slices.Repeat([]netns.Rate{netns.Gbit}, 8)
	healthy := allReduceBound(bytes, even)
	for _, c := range []struct {
		slow netns.Rate
		want float64 // of the healthy time
	}{
		{netns.Gbit, 1},
		{600 * netns.Mbit, 8 / 7.6},
		{250 * netns.Mbit, 4 / 1.75}, // it sends everything once; a healthy ring sends 7/4
	} {
		rates := slices.Clone(even)
		rates[3] = c.slow
		if got := allReduceBound(bytes, rates) / healthy; math.Abs(got-c.want) > 1e-9 {
			t.Errorf("a link of %s: %v times the healthy time, want %v", c.slow, got, c.want)
		}
	}
}
