package experiment

import (
	"slices"
	"strconv"
)

// A Sweep is many points in one run, such as sizes of messages. The case's headline and More are measured at each of
// them.
type Sweep struct {
	Of     string    // what the points are, such as "elements"
	Points []float64 // above zero, in increasing order
	More   []Quantity
}

// At is the quantity at a point of a sweep.
func (q Quantity) At(point float64) Quantity {
	text := Point(point)
	q.Name, q.Title = q.Name+"@"+text, q.Title+" at "+text
	return q
}

// Point is a point of a sweep in words.
func Point(point float64) string { return strconv.FormatFloat(point, 'f', -1, 64) }

// Sweeps reports whether a quantity is measured at each point of a sweep.
func (c Case) Sweeps(q Quantity) bool {
	return c.Sweep != nil && (q == c.Headline || slices.Contains(c.Sweep.More, q))
}

// Headlines are the quantities by which contenders are compared: the headline, in a sweep at each point.
func (c Case) Headlines() []Quantity {
	if c.Sweep == nil {
		return []Quantity{c.Headline}
	}
	var all []Quantity
	for _, point := range c.Sweep.Points {
		all = append(all, c.Headline.At(point))
	}
	return all
}
