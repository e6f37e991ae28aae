// Package plot draws the two kinds of chart that the results pages need, as SVG.
package plot

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

// A Reference is a line across a chart at a value, such as a limit.
type Reference struct {
	At    float64
	Label string
}

const (
	width            = 760
	rowHeight        = 30
	top, bottom      = 46, 44
	right            = 24
	nameWidth        = 250 // of Dots
	axisWidth        = 58  // of Lines
	linesHeight      = 260
	legendLineHeight = 18
	dotRadius        = 4
)

// colours can be distinguished in grey, and by people with red-green colour blindness.
var colours = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"}

func colour(i int) string { return colours[i%len(colours)] }

// Dots has a row for each name, with a dot for each value and a bar at the median.
type Dots struct {
	Title, X   string
	References []Reference
	rows       []row
}

type row struct {
	name   string
	values []float64
}

// Add adds a row.
func (d *Dots) Add(name string, values []float64) { d.rows = append(d.rows, row{name, values}) }

// SVG returns the drawing.
func (d *Dots) SVG() []byte {
	high := 0.0
	for _, m := range d.References {
		high = max(high, m.At)
	}
	for _, r := range d.rows {
		for _, v := range r.values {
			high = max(high, v)
		}
	}
	x := newScale(high, nameWidth, width-right)
	base := float64(top + rowHeight*len(d.rows))
	c := newCanvas(d.Title, base+bottom)
	for _, tick := range x.ticks {
		c.line(x.at(tick), top, x.at(tick), base, "#ddd", "")
		c.text(x.at(tick), base+16, "middle", x.label(tick))
	}
	c.text((nameWidth+width-right)/2, base+34, "middle", d.X)
	for _, m := range d.References {
		c.line(x.at(m.At), top, x.at(m.At), base, "#000", "4 3")
		c.text(x.at(m.At), top-4, "end", m.Label)
	}
	for i, r := range d.rows {
		y := float64(top + rowHeight*i + rowHeight/2)
		c.text(nameWidth-10, y+4, "end", r.name)
		if len(r.values) == 0 {
			c.text(nameWidth+6, y+4, "start", "failed")
			continue
		}
		for _, v := range r.values {
			fmt.Fprintf(c, `<circle cx="%.1f" cy="%.1f" r="%d" fill="%s" fill-opacity="0.5"/>`+"\n", x.at(v), y, dotRadius, colour(i))
		}
		median := stats.Median(r.values)
		fmt.Fprintf(c, `<rect x="%.1f" y="%.1f" width="3" height="%d" fill="%s"/>`+"\n", x.at(median)-1.5, y-10, 20, colour(i))
	}
	return c.end()
}

// Lines has a line for each series of points, from left to right.
type Lines struct {
	Title, X, Y string
	References  []Reference
	// LogX makes the horizontal axis logarithmic, from the least point on.
	LogX   bool
	series []line
}

type line struct {
	name   string
	colour string
	points [][2]float64
}

// Add adds a line. A line without a name has the colour of the line before.
func (l *Lines) Add(name string, points [][2]float64) {
	colours := 0
	for _, s := range l.series {
		if s.name != "" {
			colours++
		}
	}
	if name == "" {
		colours = max(colours-1, 0)
	}
	l.series = append(l.series, line{name, colour(colours), points})
}

// SVG returns the drawing.
func (l *Lines) SVG() []byte {
	smallestX, largestX, largestY := math.Inf(1), 0.0, 0.0
	for _, m := range l.References {
		largestY = max(largestY, m.At)
	}
	var names []line
	for _, s := range l.series {
		for _, p := range s.points {
			smallestX, largestX, largestY = min(smallestX, p[0]), max(largestX, p[0]), max(largestY, p[1])
		}
		if s.name != "" {
			names = append(names, s)
		}
	}
	base := float64(top + linesHeight)
	x, y := newScale(largestX, axisWidth, width-right), newScale(largestY, base, top)
	if l.LogX {
		x = newLogScale(smallestX, largestX, axisWidth, width-right)
	}
	c := newCanvas(l.Title, base+bottom+float64(legendLineHeight*len(names)))
	for _, tick := range x.ticks {
		c.line(x.at(tick), top, x.at(tick), base, "#eee", "")
		c.text(x.at(tick), base+16, "middle", x.label(tick))
	}
	for _, tick := range y.ticks {
		c.line(axisWidth, y.at(tick), width-right, y.at(tick), "#ddd", "")
		c.text(axisWidth-6, y.at(tick)+4, "end", y.label(tick))
	}
	c.text((axisWidth+width-right)/2, base+34, "middle", l.X)
	c.text(axisWidth-6, top-8, "end", l.Y)
	for _, m := range l.References {
		c.line(axisWidth, y.at(m.At), width-right, y.at(m.At), "#000", "4 3")
		c.text(width-right, y.at(m.At)-4, "end", m.Label)
	}
	for _, s := range l.series {
		var path []string
		for _, p := range s.points {
			path = append(path, fmt.Sprintf("%.1f,%.1f", x.at(p[0]), y.at(p[1])))
		}
		fmt.Fprintf(c, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.5" stroke-opacity="0.7"/>`+"\n", strings.Join(path, " "), s.colour)
	}
	for i, s := range names {
		at := base + bottom + float64(legendLineHeight*i)
		c.line(axisWidth, at, axisWidth+20, at, s.colour, "")
		c.text(axisWidth+28, at+4, "start", s.name)
	}
	return c.end()
}

// A scale maps values to a part of the drawing: linear from zero, or logarithmic from the least value.
type scale struct {
	low, high, from, to float64
	log                 bool
	ticks               []float64
	digits              int
}

func newLogScale(low, high, from, to float64) scale {
	if !(low > 0) || !(high > low) || math.IsInf(high, 0) {
		low, high = 1, 10
	}
	s := scale{low: low, high: high, from: from, to: to, log: true}
	for tick := math.Pow(10, math.Ceil(math.Log10(low)-1e-9)); tick <= high*(1+1e-9); tick *= 10 {
		s.ticks = append(s.ticks, tick)
	}
	return s
}

func newScale(high, from, to float64) scale {
	if !(high > 0) || math.IsInf(high, 0) {
		high = 1
	}
	high *= 1.04
	// The step is 1, 2 or 5 times a power of ten, for at most 8 of them.
	power := math.Pow(10, math.Floor(math.Log10(high/8)))
	step := power
	for _, factor := range []float64{2, 5, 10} {
		if high/step > 8 {
			step = factor * power
		}
	}
	s := scale{high: high, from: from, to: to, digits: max(0, -int(math.Floor(math.Log10(step)+1e-9)))}
	for i := 0; float64(i)*step <= high; i++ {
		s.ticks = append(s.ticks, float64(i)*step)
	}
	return s
}

func (s scale) at(value float64) float64 {
	if s.log {
		return s.from + (s.to-s.from)*math.Log(value/s.low)/math.Log(s.high/s.low)
	}
	return s.from + (s.to-s.from)*value/s.high
}

func (s scale) label(value float64) string { return fmt.Sprintf("%.*f", s.digits, value) }

// A canvas is an unfinished drawing.
type canvas struct{ bytes.Buffer }

func newCanvas(title string, height float64) *canvas {
	c := &canvas{}
	fmt.Fprintf(c, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %.0f" width="%d" height="%.0f" font-family="sans-serif" font-size="12">`+"\n", width, height, width, height)
	fmt.Fprintf(c, `<rect width="%d" height="%.0f" fill="#fff"/>`+"\n", width, height)
	fmt.Fprintf(c, `<text x="10" y="18" font-size="14" font-weight="bold">%s</text>`+"\n", html.EscapeString(title))
	return c
}

func (c *canvas) line(x1, y1, x2, y2 float64, colour, dashes string) {
	if dashes != "" {
		dashes = fmt.Sprintf(` stroke-dasharray="%s"`, dashes)
	}
	fmt.Fprintf(c, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"%s/>`+"\n", x1, y1, x2, y2, colour, dashes)
}

func (c *canvas) text(x, y float64, anchor, text string) {
	fmt.Fprintf(c, `<text x="%.1f" y="%.1f" text-anchor="%s">%s</text>`+"\n", x, y, anchor, html.EscapeString(text))
}

func (c *canvas) end() []byte {
	c.WriteString("</svg>\n")
	return c.Bytes()
}
