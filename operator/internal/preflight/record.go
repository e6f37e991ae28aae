// Package preflight decides how a check proceeds and what it found: the next stage, the runs to start, the verdicts. It
// is pure. [Decide] derives everything from the options and the [Record], so that a restarted controller continues
// where it was.
package preflight

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/ncclout"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// Record holds the nodes and all results of a check. It is kept outside of the check's status, which stays small
// however many nodes there are.
type Record struct {
	// Started is when the nodes were chosen.
	Started time.Time `json:"started"`
	// Launcher is what starts the runs, never Auto.
	Launcher evenkeel.Launcher `json:"launcher"`
	// Runner is the benchmark, and GPUsPerNode how many GPUs it uses of each node; empty in reports of earlier versions.
	Runner      evenkeel.RunnerType `json:"runner,omitempty"`
	GPUsPerNode *int32              `json:"gpusPerNode,omitempty"`
	// Image is what the pods of all runs have; empty in reports of earlier versions.
	Image string `json:"image,omitempty"`
	// Plugin is the profile at that time, as annotations of pods, so that all runs use the same.
	Plugin map[string]string `json:"plugin"`
	// Transport is the transport that every run has to use; empty: the plugin chooses.
	Transport string `json:"transport,omitempty"`
	// Pools is what was known of the nodes' pools at that time.
	Pools map[string]Pool `json:"pools,omitempty"`
	// Nodes are the selected nodes. The list never changes: everything that is derived depends on it.
	Nodes []Node `json:"-"`
	// Networks that carried runs, each once.
	Networks []ncclout.Network `json:"-"`
	// Runs that have ended, in the order in which the controller saw it.
	Runs []Run `json:"-"`
	// Finished is when the verdicts were final; zero before.
	Finished time.Time `json:"finished,omitzero"`
	// Ended is set if the check ended early, and says why.
	Ended string `json:"ended,omitempty"`
}

// Node is a selected node.
type Node struct {
	Name string `json:"name"`
	// UID tells it from a later node of the same name. It is empty in reports of earlier versions, and where there was no
	// node.
	UID  types.UID `json:"uid,omitempty"`
	Pool string    `json:"pool,omitempty"`
	// Verdict, Reason and Message are the findings of stage Capacity; empty if the node is fine.
	Verdict evenkeel.Verdict `json:"verdict,omitempty"`
	Reason  string           `json:"reason,omitempty"`
	Message string           `json:"message,omitempty"`
	// RDMA is set if the node offers the device that jobs get.
	RDMA bool `json:"rdma,omitempty"`
	// GPUs are the numbers of whole GPUs that the node offered to runners when the check started. They are not kept.
	GPUs map[evenkeel.RunnerType]int32 `json:"-"`
}

// Pool is what is known of a pool besides the check's own nodes.
type Pool struct {
	// Partial is set if it has more nodes, which could be tested at another time.
	Partial bool `json:"partial,omitempty"`
	// UsualBusBW is the median of what its other nodes reached in earlier checks, GB/s, or 0 if unknown.
	UsualBusBW float64 `json:"usualBusBW,omitempty"`
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
	// LatencyUS is the time of a small message from one node to another, microseconds, or 0 if unknown.
	LatencyUS float64 `json:"latencyUS,omitempty"`
	// Devices is the number of network devices of its nodes if BusBW counts one of them. It is 0 if unknown, or if BusBW
	// counts all.
	Devices int `json:"devices,omitempty"`
	// Networks are indexes into Record.Networks.
	Networks []int `json:"networks,omitempty"`
	// LockedMemory is the limit of memory that its processes may lock, bytes, negative without a limit, or nil if unknown.
	LockedMemory *int64 `json:"lockedMemory,omitempty"`
	// InUse are indexes into Record.Nodes: nodes of the run that somebody else used meanwhile.
	InUse []int `json:"inUse,omitempty"`
	// Detail is text for people.
	Detail string `json:"detail,omitempty"`
}

// Measurement is the content of a run's log.
type Measurement struct {
	Outcome pairing.Outcome
	BusBW   float64
	Wrong   int64
	// LatencyUS and Devices are as in [Run].
	LatencyUS float64
	Devices   int
	Networks  []ncclout.Network
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
	run := Run{Stage: w.Stage, Round: w.Round, Index: w.Index, Outcome: m.Outcome, BusBW: m.BusBW, Wrong: m.Wrong, LatencyUS: m.LatencyUS, Devices: m.Devices, LockedMemory: m.LockedMemory, Detail: text.Clip(m.Detail, maxDetail)}
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

// Replaced reports whether another node now has the name of a selected one. Without a UID, one that is younger than the
// record is.
func (r *Record) Replaced(selected *Node, now *corev1.Node) bool {
	if selected.UID == "" {
		return now.CreationTimestamp.After(r.Started)
	}
	return selected.UID != now.UID
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

// head is what a record has once, as JSON. Its lists are lines.
type head struct {
	*Record
	// Count is the number of nodes. A record with fewer is incomplete.
	Count int `json:"nodes"`
}

// line is one item of a record's lists, as JSON. One of its fields is set.
type line struct {
	Node    *Node            `json:"node,omitempty"`
	Network *ncclout.Network `json:"network,omitempty"`
	Run     *Run             `json:"run,omitempty"`
}

// A Mark is a position in a record's lists, which only grow.
type Mark struct{ nodes, networks, runs int }

// EncodeHead returns what the record has besides its lists.
func (r *Record) EncodeHead() (string, error) {
	text, err := json.Marshal(head{Record: r, Count: len(r.Nodes)})
	return string(text), err
}

// EncodeLines returns a line for each item after the mark, and the mark after them.
func (r *Record) EncodeLines(after Mark) ([]string, Mark, error) {
	var items []line
	for i := range r.Nodes[after.nodes:] {
		items = append(items, line{Node: &r.Nodes[after.nodes+i]})
	}
	for i := range r.Networks[after.networks:] { // before the runs that they carried
		items = append(items, line{Network: &r.Networks[after.networks+i]})
	}
	for i := range r.Runs[after.runs:] {
		items = append(items, line{Run: &r.Runs[after.runs+i]})
	}
	lines := make([]string, len(items))
	for i := range items {
		text, err := json.Marshal(&items[i])
		if err != nil {
			return nil, after, fmt.Errorf("the record: %w", err)
		}
		lines[i] = string(text) + "\n"
	}
	return lines, Mark{len(r.Nodes), len(r.Networks), len(r.Runs)}, nil
}

// Decode reads what EncodeHead and EncodeLines wrote. Others may have changed the texts, so every index in them is
// checked.
func Decode(headText string, lines ...string) (*Record, Mark, error) {
	r := &Record{}
	h := head{Record: r}
	if err := json.Unmarshal([]byte(headText), &h); err != nil {
		return nil, Mark{}, fmt.Errorf("the record: %w", err)
	}
	for _, text := range lines {
		for one := range strings.Lines(text) {
			var l line
			if err := json.Unmarshal([]byte(one), &l); err != nil {
				return nil, Mark{}, fmt.Errorf("the record: %w", err)
			}
			switch {
			case l.Node != nil:
				r.Nodes = append(r.Nodes, *l.Node)
			case l.Network != nil:
				r.Networks = append(r.Networks, *l.Network)
			case l.Run != nil:
				r.Runs = append(r.Runs, *l.Run)
			}
		}
	}
	if len(r.Nodes) != h.Count {
		return nil, Mark{}, fmt.Errorf("the record: it has %d of its %d nodes", len(r.Nodes), h.Count)
	}
	for i := range r.Runs {
		run := &r.Runs[i]
		out := func(length int) func(int) bool { return func(at int) bool { return at < 0 || at >= length } }
		if slices.ContainsFunc(run.Nodes, out(len(r.Nodes))) || slices.ContainsFunc(run.InUse, out(len(r.Nodes))) || slices.ContainsFunc(run.Networks, out(len(r.Networks))) || len(run.Nodes) == 0 {
			return nil, Mark{}, fmt.Errorf("the record: run %d names a node or network that it does not have", i)
		}
	}
	return r, Mark{len(r.Nodes), len(r.Networks), len(r.Runs)}, nil
}
