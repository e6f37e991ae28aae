package netns

import (
	"slices"
	"testing"
)

func TestRates(t *testing.T) {
	for text, want := range map[string][]Rate{
		"1gbit":           {Gbit},
		"3x1gbit,200mbit": {Gbit, Gbit, Gbit, 200 * Mbit},
		"2.5gbit":         {2500 * Mbit},
		"unlimited":       {0},
		"100kbit":         {100 * Kbit},
	} {
		if got, err := ParseRates(text); err != nil || !slices.Equal(got, want) {
			t.Errorf("ParseRates(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "1", "gbit", "-1mbit", "1e9gbit", "nangbit", "infmbit", "0x1gbit", "99x1gbit", "1gbit,", "1 gbit"} {
		if got, err := ParseRates(text); err == nil {
			t.Errorf("ParseRates(%q) = %v, want an error", text, got)
		}
	}
}

func TestRateReadsItsOwnNotation(t *testing.T) {
	for _, rate := range []Rate{0, 100 * Kbit, 1500 * Kbit, 200 * Mbit, Gbit} {
		if got, err := ParseRate(rate.String()); err != nil || got != rate {
			t.Errorf("%s became %v, %v", rate, got, err)
		}
	}
}
