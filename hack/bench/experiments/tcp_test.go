package experiments

import (
	"slices"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// Links drawn at random are always the same, so that results stay comparable.
func TestDrawnLinksAreFixedAndInRange(t *testing.T) {
	var names []string
	for _, of := range transfers(true) {
		if strings.HasPrefix(of.name, "links-") {
			names = append(names, of.name)
		}
	}
	if want := []string{"links-670-200-50", "links-330-320-140-90", "links-620-550-370-360-330-80"}; !slices.Equal(names, want) {
		t.Errorf("%q, want %q: results of other links are no longer comparable", names, want)
	}
	for count := 2; count <= 32; count++ {
		for _, link := range drawnLinks(count) {
			if link.Rate < 50*netns.Mbit || link.Rate > netns.Gbit {
				t.Errorf("%d links: one of %s", count, link.Rate)
			}
		}
	}
}

func TestUnshapedNetworkHasNoWireLimit(t *testing.T) {
	for _, of := range transfers(false) {
		c := of.asCase()
		if (c.Limit > 0) != (len(rates(of.network)) > 0) {
			t.Errorf("%s: a limit of %f on %d links", of.name, c.Limit, len(rates(of.network)))
		}
	}
}
