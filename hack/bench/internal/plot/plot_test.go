package plot

import (
	"bytes"
	"encoding/xml"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
)

// texts are the texts of a drawing, which must be XML without undefined coordinates.
func texts(t *testing.T, svg []byte) []string {
	t.Helper()
	if bytes.Contains(svg, []byte("NaN")) || bytes.Contains(svg, []byte("Inf")) {
		t.Errorf("undefined coordinates:\n%s", svg)
	}
	var all []string
	inText := false
	for decoder := xml.NewDecoder(bytes.NewReader(svg)); ; {
		token, err := decoder.Token()
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatalf("%v:\n%s", err, svg)
		}
		switch token := token.(type) {
		case xml.StartElement:
			inText = token.Name.Local == "text"
		case xml.EndElement:
			inText = false
		case xml.CharData:
			if inText {
				all = append(all, string(token))
			}
		}
	}
}

func TestDotsShowNamesValuesAndFailures(t *testing.T) {
	d := Dots{Title: "a < b", X: "GB/s", References: []Reference{{0.5, "limit"}}}
	d.Add("x & y", []float64{0.1, 0.2, 0.4, math.Inf(1)})
	d.Add("none", nil)
	svg := d.SVG()
	all := texts(t, svg)
	for _, want := range []string{"a < b", "x & y", "none", "failed", "limit", "GB/s", "0.4"} {
		if !slices.Contains(all, want) {
			t.Errorf("no text %q in %q", want, all)
		}
	}
	if got := strings.Count(string(svg), "fill-opacity:0.49"); got != 3 {
		t.Errorf("%d dots, want 3:\n%s", got, svg)
	}
	if got := strings.Count(string(svg), "stroke:#0072B2"); got != 1 {
		t.Errorf("%d bars at a median, want 1", got)
	}
}

func TestLinesWithoutANameKeepTheColour(t *testing.T) {
	l := Lines{Title: "t", X: "seconds", Y: "GB/s", References: []Reference{{3, "4 links"}}}
	for _, name := range []string{"one", "", "two"} {
		l.Add(name, [][2]float64{{1, 1}, {10, 2}, {100, 1}})
	}
	l.Add("", nil)
	for _, l.LogX = range []bool{false, true} {
		svg := l.SVG()
		all := texts(t, svg)
		for _, want := range []string{"one", "two", "seconds", "4 links", "100"} {
			if !slices.Contains(all, want) {
				t.Errorf("no text %q in %q", want, all)
			}
		}
		// Two lines and the one in the legend; one and that in the legend. A faint colour loses a bit of each of its parts.
		for colour, want := range map[string]int{"#0071B1": 3, "#D45D00": 2, "#009D72": 0} {
			if got := strings.Count(string(svg), "stroke:"+colour); got != want {
				t.Errorf("logarithmic %t: %d lines of colour %s, want %d", l.LogX, got, colour, want)
			}
		}
	}
}

func TestTicks(t *testing.T) {
	for high, labels := range map[float64]string{
		0.48: "0.0 0.1 0.2 0.3 0.4",
		5:    "0 1 2 3 4 5",
		120:  "0 20 40 60 80 100 120",
		0.02: "0.000 0.005 0.010 0.015 0.020",
	} {
		var got []string
		for _, tick := range (ticks{}).Ticks(0, high) {
			got = append(got, tick.Label)
		}
		if strings.Join(got, " ") != labels {
			t.Errorf("up to %v: %v, want %s", high, got, labels)
		}
	}
	if all := (ticks{log: true}).Ticks(1, 5e6); len(all) < 7 || all[6].Label != "1000000" {
		t.Errorf("of a logarithmic axis up to 5000000: %v", all)
	}
}

func TestDrawingsOfNothing(t *testing.T) {
	texts(t, (&Dots{}).SVG())
	texts(t, (&Lines{LogX: true}).SVG())
}
