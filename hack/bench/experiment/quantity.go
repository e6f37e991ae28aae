package experiment

import (
	"fmt"
	"math"
)

// A Quantity is something that a run measures.
type Quantity struct {
	Name          string // in samples
	Title         string // on pages
	Unit          string // of samples and pages
	Digits        int    // after the point, on pages
	LowerIsBetter bool
	Statistic     Statistic // of several runs
	// Reached is whether a run without it has not reached it: a time that counts as infinite.
	Reached bool
}

// A Statistic is what a page shows of several runs.
type Statistic int

const (
	Median Statistic = iota
	Mean             // of counts that are zero in most runs
	Share            // of the runs that have 1, where others have 0
)

// Format is a value with its unit.
func (q Quantity) Format(value float64) string {
	switch {
	case math.IsInf(value, 0):
		return "never"
	case q.Unit == "":
		return fmt.Sprintf("%.*f", q.Digits, value)
	}
	return fmt.Sprintf("%.*f %s", q.Digits, value, q.Unit)
}

// Better reports whether a value is better than another.
func (q Quantity) Better(value, than float64) bool {
	if q.LowerIsBetter {
		return value < than
	}
	return value > than
}

// A Goal is what the subject has to reach: a figure, or a share of what a reference reaches.
type Goal struct {
	Of Quantity
	// Worst is whether every run has to reach it; else their median.
	Worst  bool
	Figure float64
	// Share is of the reference's median; zero if there is a figure.
	Share float64
	// Reference is by default the case's best contender of those that are references.
	Reference Reference
	// Contender is by default the experiment's subject.
	Contender string
	// From and To bound the points of a sweep that the goal is about; without To there is no upper bound.
	From, To float64
	// Points is the share of those points at which the goal has to be reached; all of them if zero.
	Points float64
	Limit  string // what is known of why it is missed
}

// A Reference is a contender of a case, of the goal's own if there is none. An empty contender of another case is the
// subject.
type Reference struct{ Case, Contender string }
