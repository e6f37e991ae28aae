package experiment

import (
	"math"
	"time"
)

// A Sample is the record of one run.
type Sample struct {
	Experiment string `json:"experiment"`
	Case       string `json:"case"`
	Contender  string `json:"contender"`
	Round      int    `json:"round"`    // from 0
	Position   int    `json:"position"` // in the round, from 0
	// Start is the run's, in UTC. Seconds is how long it took, with its preparation.
	Start   time.Time `json:"start"`
	Seconds float64   `json:"seconds"`
	Setting
	Command string `json:"command"` // what measured it
	Library string `json:"library"` // the first digits of the plugin's SHA-256
	Network string `json:"network,omitempty"`
	// Load is the machine's load average before the run, and BusyBefore the share of the processors that other programs
	// used.
	Load       float64 `json:"load_before"`
	BusyBefore float64 `json:"busy_before"`
	NotQuiet   bool    `json:"not_quiet,omitempty"`
	// Busy is the share of the processors that all programs used during the run.
	Busy       float64          `json:"busy"`
	Quantities map[string]Value `json:"quantities,omitempty"`
	Trace      [][2]float64     `json:"trace,omitempty"`
	Versions   string           `json:"versions,omitempty"`
	Drawing    string           `json:"drawing,omitempty"` // SVG
	Note       string           `json:"note,omitempty"`
	Failure    string           `json:"failure,omitempty"`
}

// A Setting is what the samples of a case have in common. With another one, all of them are measured anew.
type Setting struct {
	Commit     string `json:"commit"` // with a note if there were changes
	Machine    string `json:"machine"`
	Driver     string `json:"driver"` // the first digits of its SHA-256
	Quick      bool   `json:"quick,omitempty"`
	Congestion string `json:"congestion,omitempty"`
	Seed       uint64 `json:"seed,omitempty"`
}

// A Value is a number with its unit.
type Value struct {
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
}

// Value is a quantity of a run. It is not ok if the run failed or did not measure it.
func (s Sample) Value(q Quantity) (value float64, ok bool) {
	if s.Failure != "" {
		return 0, false
	}
	v, ok := s.Quantities[q.Name]
	if !ok && q.Reached {
		return math.Inf(1), true
	}
	return v.Value, ok
}

// Set records what a run measured.
func (s *Sample) Set(m Measured) {
	s.Trace, s.Versions, s.Drawing, s.Note, s.Quantities = m.Trace, m.Versions, m.Drawing, m.Note, map[string]Value{}
	for q, value := range m.Values {
		s.Quantities[q.Name] = Value{value, q.Unit}
	}
}
