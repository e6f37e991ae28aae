// Package preflight decides how a check proceeds and what it found: the next stage, the runs to start, the verdicts. It is pure.
// [Decide] derives everything from the options and the [Record], so that a restarted controller continues where it was.
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

// Record has the nodes and all results of a check. It is kept outside of the check's status, which stays small however many
// nodes there are.
type Record struct {
	// Started is when the nodes were chosen.
	Started time.Time `json:"started"`
	// Launcher is what starts the runs, never Auto.
	Launcher evenkeel.Launcher `json:"launcher"`
	// Plugin is the profile at that time, as annotations of pods, so that all runs use the same.
	Plugin map[string]string `json:"plugin"`
	// Transport is the transport that every run has to use; empty: the plugin chooses.
	Transport string `json:"transport,omitempty"`
	// Nodes are the selected nodes. The list never changes: everything that is derived depends on it.
	Nodes []Node `json:"nodes"`
	// Networks that carried runs, each once.
	Networks []ncclout.Network `json:"networks,omitempty"`
	// Runs that have ended, in the order in which the controller saw it.
	Runs []Run `json:"runs,omitempty"`
	// Finished is when the verdicts were final; zero before.
	Finished time.Time `json:"finished,omitzero"`
	// Ended is set if the check ended early, and says why.
	Ended string `json:"ended,omitempty"`
}

// Node is a selected node.
type Node struct {
	Name string `json:"name"`
	Pool string `json:"pool,omitempty"`
	// Verdict, Reason and Message are the findings of stage Capacity; empty if the node is fine.
	Verdict evenkeel.Verdict `json:"verdict,omitempty"`
	Reason  string           `json:"reason,omitempty"`
	Message string           `json:"message,omitempty"`
	// RDMA is set if the node offers the device that jobs get.
	RDMA bool `json:"rdma,omitempty"`
}

// Run is the result of a run that has ended.
type Run struct {
	Stage evenkeel.Stage `json:"stage"`
	Round int            `json:"round"`
	Index int            `json:"index"`
	// Nodes are indexes into Record.Nodes.
	Nodes   []int           `json:"nodes"`
	Outcome pairing.Outcome `json:"outcome"`
	// BusBW is the peak over all sizes, GB/s. Wrong is the number of wrong elements.
	BusBW float64 `json:"busBW,omitempty"`
	Wrong int64   `json:"wrong,omitempty"`
	// Networks are indexes into Record.Networks.
	Networks []int `json:"networks,omitempty"`
	// LockedMemory is the limit of memory that its processes may lock, bytes; negative: no limit; nil: unknown.
	LockedMemory *int64 `json:"lockedMemory,omitempty"`
	// InUse are indexes into Record.Nodes: nodes of the run that somebody else used meanwhile.
	InUse []int `json:"inUse,omitempty"`
	// Detail is text for people.
	Detail string `json:"detail,omitempty"`
}

// Measurement is what the log of a run says.
type Measurement struct {
	Outcome  pairing.Outcome
	BusBW    float64
	Wrong    int64
	Networks []ncclout.Network
	// LockedMemory is as in [Run].
	LockedMemory *int64
	// InUse are the names of nodes of the run that somebody else used meanwhile.
	InUse  []string
	Detail string
}

// maxDetail keeps the record of thousands of failing runs within the size limit of a ConfigMap.
const maxDetail = 240

// Add records the result of a run. A second result of the same run is ignored. It reports whether this was the first.
func (r *Record) Add(w PlannedRun, m Measurement) bool {
	if r.Has(w) {
		return false
	}
	run := Run{Stage: w.Stage, Round: w.Round, Index: w.Index, Outcome: m.Outcome, BusBW: m.BusBW, Wrong: m.Wrong, LockedMemory: m.LockedMemory, Detail: text.Clip(m.Detail, maxDetail)}
	for _, name := range w.Nodes {
		at := slices.IndexFunc(r.Nodes, func(n Node) bool { return n.Name == name })
		run.Nodes = append(run.Nodes, at)
		if slices.Contains(m.InUse, name) {
			run.InUse = append(run.InUse, at)
		}
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

// Has reports whether the run has a result.
func (r *Record) Has(w PlannedRun) bool {
	return slices.ContainsFunc(r.Runs, func(run Run) bool {
		return run.Stage == w.Stage && run.Round == w.Round && run.Index == w.Index
	})
}

// names returns the names of the run's nodes, and of the networks that carried it.
func (r *Record) names(run *Run) (nodes, networks []string) {
	for _, at := range run.Nodes {
		nodes = append(nodes, r.Nodes[at].Name)
	}
	for _, at := range run.Networks {
		networks = append(networks, r.Networks[at].Name)
	}
	return nodes, networks
}

// transports returns the transports of the run's networks, each once; "" stands for an unknown one.
func (r *Record) transports(run *Run) []string {
	var all []string
	for _, at := range run.Networks {
		if t := r.Networks[at].Transport; !slices.Contains(all, t) {
			all = append(all, t)
		}
	}
	return all
}

// Encode returns the record as JSON.
func (r *Record) Encode() (string, error) {
	text, err := json.Marshal(r)
	return string(text), err
}

// Decode reads the result of Encode. Others may have changed the text, so every index in it is checked.
func Decode(text string) (*Record, error) {
	r := &Record{}
	if err := json.Unmarshal([]byte(text), r); err != nil {
		return nil, fmt.Errorf("the record: %w", err)
	}
	for i := range r.Runs {
		run := &r.Runs[i]
		out := func(length int) func(int) bool { return func(at int) bool { return at < 0 || at >= length } }
		if slices.ContainsFunc(run.Nodes, out(len(r.Nodes))) || slices.ContainsFunc(run.InUse, out(len(r.Nodes))) || slices.ContainsFunc(run.Networks, out(len(r.Networks))) || len(run.Nodes) == 0 {
			return nil, fmt.Errorf("the record: run %d names a node or network that it does not have", i)
		}
	}
	return r, nil
}
