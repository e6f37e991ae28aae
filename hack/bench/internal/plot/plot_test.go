package plot

import (
	"slices"
	"strings"
	"testing"
)

func TestScale(t *testing.T) {
	for high, labels := range map[float64]string{
		0.48: "0.0 0.1 0.2 0.3 0.4",
		5:    "0 1 2 3 4 5",
		0:    "0.0 0.2 0.4 0.6 0.8 1.0",
		120:  "0 20 40 60 80 100 120",
		0.02: "0.000 0.005 0.010 0.015 0.020",
	} {
		s := newScale(high, 0, 100)
		var got []string
		for _, tick := range s.ticks {
			got = append(got, s.label(tick))
		}
		if strings.Join(got, " ") != labels {
			t.Errorf("up to %v: %v, want %s", high, got, labels)
		}
		if at := s.at(high); at < 0 || at > 100 {
			t.Errorf("up to %v: it is at %v, outside the drawing", high, at)
		}
	}
}

func TestLogarithmicScale(t *testing.T) {
	s := newLogScale(1, 10_000, 0, 100)
	for value, at := range map[float64]float64{1: 0, 100: 50, 10_000: 100} {
		if got := s.at(value); got < at-0.01 || got > at+0.01 {
			t.Errorf("%v is at %v, want %v", value, got, at)
		}
	}
	if want := []float64{1, 10, 100, 1000, 10_000}; !slices.Equal(s.ticks, want) {
		t.Errorf("ticks %v, want %v", s.ticks, want)
	}
	if s := newLogScale(0, 0, 0, 100); len(s.ticks) == 0 {
		t.Error("no ticks for nothing")
	}
}

func TestLinesWithoutANameKeepTheColour(t *testing.T) {
	var l Lines
	for _, name := range []string{"one", "", "two", ""} {
		l.Add(name, nil)
	}
	var got []string
	for _, s := range l.series {
		got = append(got, s.colour)
	}
	if want := []string{colours[0], colours[0], colours[1], colours[1]}; !slices.Equal(got, want) {
		t.Errorf("colours %v, want %v", got, want)
	}
}

func TestNamesAreText(t *testing.T) {
	d := Dots{Title: "a < b"}
	d.Add("x & y", []float64{1})
	d.Add("none", nil)
	svg := string(d.SVG())
	for _, want := range []string{"a &lt; b", "x &amp; y", "failed"} {
		if !strings.Contains(svg, want) {
			t.Errorf("no %q in\n%s", want, svg)
		}
	}
}
