// Package preflight decides how a check goes on and what it found: which stage is next, what is to be run now, what the
// runs say. It is pure: [Decide] derives everything from the options and the [Record], so that a controller that restarts
// goes on where it was.
package preflight

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/ncclout"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// Record is what a check knows. It is kept outside of the check's status, which stays small however many nodes there are.
type Record struct {
	// Started is when the nodes were chosen.
	Started time.Time `json:"started"`
	// Launcher is what starts the runs, never Auto.
	Launcher evenkeel.Launcher `json:"launcher"`
	// Plugin is the profile as it was then, in the form in which it travels to pods, so that all runs are with the same.
	Plugin map[string]string `json:"plugin"`
	// Transport is what every run has to use; empty: what the plugin chooses.
	Transport string `json:"transport,omitempty"`
	// Nodes are the chosen ones. The list never changes: everything that is derived depends on it.
	Nodes []Node `json:"nodes"`
	// Networks that carried runs, each once.
	Networks []ncclout.Network `json:"networks,omitempty"`
	// Runs that have ended, in the order in which that was seen.
	Runs []Run `json:"runs,omitempty"`
	// Finished is when the verdicts were final; zero before.
	Finished time.Time `json:"finished,omitzero"`
	// Ended is set where the check ended before it knew everything, and says why.
	Ended string `json:"ended,omitempty"`
}

// Node is a chosen one.
type Node struct {
	Name string `json:"name"`
	Pool string `json:"pool,omitempty"`
	// Verdict, Reason and Message are what stage Capacity has against the node; empty if nothing.
	Verdict evenkeel.Verdict `json:"verdict,omitempty"`
	Reason  string           `json:"reason,omitempty"`
	Message string           `json:"message,omitempty"`
	// RDMA says that the node offers the device that jobs get.
	RDMA bool `json:"rdma,omitempty"`
}

// Run is one that has ended.
type Run struct {
	Stage evenkeel.Stage `json:"stage"`
	Round int            `json:"round"`
	Index int            `json:"index"`
	// Nodes are places in Record.Nodes.
	Nodes   []int           `json:"nodes"`
	Outcome pairing.Outcome `json:"outcome"`
	// BusBW is the peak over all sizes, GB/s, and Wrong the wrong elements.
	BusBW float64 `json:"busBW,omitempty"`
	Wrong int64   `json:"wrong,omitempty"`
	// Networks are places in Record.Networks.
	Networks []int `json:"networks,omitempty"`
	// LockedMemory is how much memory its processes may lock, bytes; negative: no limit; nil where it does not say.
	LockedMemory *int64 `json:"lockedMemory,omitempty"`
	// Detail is for people.
	Detail string `json:"detail,omitempty"`
}

// Measurement is what a run came to.
type Measurement struct {
	Outcome  pairing.Outcome
	BusBW    float64
	Wrong    int64
	Networks []ncclout.Network
	// LockedMemory is as in [Run].
	LockedMemory *int64
	Detail       string
}

// maxDetail keeps the record of thousands of failing runs within what a ConfigMap takes.
const maxDetail = 240

// Add records that the work came to this. A second result of the same work is ignored; it reports whether it was the first.
func (r *Record) Add(w PlannedRun, m Measurement) bool {
	if r.Has(w) {
		return false
	}
	run := Run{Stage: w.Stage, Round: w.Round, Index: w.Index, Outcome: m.Outcome, BusBW: m.BusBW, Wrong: m.Wrong, LockedMemory: m.LockedMemory, Detail: text.Clip(m.Detail, maxDetail)}
	for _, name := range w.Nodes {
		run.Nodes = append(run.Nodes, slices.IndexFunc(r.Nodes, func(n Node) bool { return n.Name == name }))
	}
	for _, network := range m.Networks {
		at := slices.Index(r.Networks, network)
		if at < 0 {
			at = len(r.Networks)
			r.Networks = append(r.Networks, network)
		}
		run.Networks = append(run.Networks, at)
	}
	r.Runs = append(r.Runs, run)
	return true
}

// Has reports whether the work has a result.
func (r *Record) Has(w PlannedRun) bool {
	return slices.ContainsFunc(r.Runs, func(run Run) bool {
		return run.Stage == w.Stage && run.Round == w.Round && run.Index == w.Index
	})
}

// names of the nodes of a run, and of the networks that carried it.
func (r *Record) names(run *Run) (nodes, networks []string) {
	for _, at := range run.Nodes {
		nodes = append(nodes, r.Nodes[at].Name)
	}
	for _, at := range run.Networks {
		networks = append(networks, r.Networks[at].Name)
	}
	return nodes, networks
}

// transports that the run's networks used, each once; empty ones where it does not say.
func (r *Record) transports(run *Run) []string {
	var all []string
	for _, at := range run.Networks {
		if t := r.Networks[at].Transport; !slices.Contains(all, t) {
			all = append(all, t)
		}
	}
	return all
}

// Encode gives the record's text.
func (r *Record) Encode() (string, error) {
	text, err := json.Marshal(r)
	return string(text), err
}

// Decode reads what Encode gave. The text lies where others may have changed it, so every place in it is checked.
func Decode(text string) (*Record, error) {
	r := &Record{}
	if err := json.Unmarshal([]byte(text), r); err != nil {
		return nil, fmt.Errorf("the record: %w", err)
	}
	for i := range r.Runs {
		run := &r.Runs[i]
		out := func(length int) func(int) bool { return func(at int) bool { return at < 0 || at >= length } }
		if slices.ContainsFunc(run.Nodes, out(len(r.Nodes))) || slices.ContainsFunc(run.Networks, out(len(r.Networks))) || len(run.Nodes) == 0 {
			return nil, fmt.Errorf("the record: run %d names a node or network that it does not have", i)
		}
	}
	return r, nil
}
