// Package flightrecord compares the flight records of a job's ranks: which call each rank is in, and which call hangs. It is pure. The
// records come from the job's own processes, and nothing in them is trusted.
package flightrecord

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"evenkeel.dev/evenkeel/operator/internal/text"
)

const (
	// Version is the version of the format.
	Version = 1
	// MaxRecord is the most bytes of one record.
	MaxRecord = 4 << 20
	// MaxRanks is the most ranks of a group.
	MaxRanks = 1 << 17

	maxGroups = 4096
	maxCalls  = 16384
	maxName   = 100
	maxText   = 400
)

// Kinds of calls.
const (
	collective = "collective"
	send       = "send"
	receive    = "receive"
)

// States of calls.
const (
	scheduled = "scheduled"
	started   = "started"
	completed = "completed"
	failed    = "failed"
)

// A Record is what one rank tells of its calls: `evenkeel/flight_recorder.py` writes it.
type Record struct {
	Version int `json:"version"`
	// Rank is the rank in the job.
	Rank int `json:"rank"`
	// TimeNS is when it was written, in nanoseconds since 1970 of the rank's clock.
	TimeNS int64   `json:"time_ns"`
	Groups []Group `json:"groups"`
	Calls  []Call  `json:"calls"`
}

// A Group is a process group.
type Group struct {
	// ID is the same on all ranks, and no other group's.
	ID   string `json:"id"`
	Name string `json:"name"`
	// Rank is this rank in the group's numbers, and Ranks are the members by their numbers in the job.
	Rank  int   `json:"rank"`
	Ranks []int `json:"ranks"`
	// WaitsFor are those that the calls in progress wait for, in the group's numbers.
	WaitsFor []int `json:"waits_for"`
}

// A Call is one of the last calls of a group's tag, or of the messages to or from a rank.
type Call struct {
	// Group is the [Group.ID].
	Group string `json:"group"`
	Kind  string `json:"kind"`
	Tag   uint32 `json:"tag"`
	// Peer is the other rank of a message, or the root, in the group's numbers; nil: none, or a receive from any rank.
	Peer      *int   `json:"peer"`
	Number    int64  `json:"number"`
	Operation string `json:"operation"`
	// Type is the type of the elements; empty: unknown.
	Type string `json:"type"`
	// InputBytes and OutputBytes are what the rank passes and gets.
	InputBytes  int64  `json:"input_bytes"`
	OutputBytes int64  `json:"output_bytes"`
	State       string `json:"state"`
	// CreatedNS, StartedNS and EndedNS are in nanoseconds since 1970; 0: not yet.
	CreatedNS int64 `json:"created_ns"`
	StartedNS int64 `json:"started_ns"`
	EndedNS   int64 `json:"ended_ns"`
	// Failure is the text of the error; empty: it has not failed.
	Failure string `json:"failure"`
}

// Parse reads and checks a record. The error is one line.
func Parse(data []byte) (*Record, error) {
	if len(data) > MaxRecord {
		return nil, fmt.Errorf("it has %d bytes, and the most is %d", len(data), MaxRecord)
	}
	r := &Record{}
	decoder := json.NewDecoder(bytes.NewReader(data))
	if err := decoder.Decode(r); err != nil {
		return nil, fmt.Errorf("it is no JSON of a flight record: %w", err)
	}
	if decoder.More() {
		return nil, errors.New("more follows its JSON")
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	return r, nil
}

func (r *Record) check() error {
	switch {
	case r.Version != Version:
		return fmt.Errorf("version is %d: this program reads %d", r.Version, Version)
	case r.Rank < 0 || r.Rank >= MaxRanks:
		return fmt.Errorf("rank is %d: 0 to %d", r.Rank, MaxRanks-1)
	case r.TimeNS < 0:
		return fmt.Errorf("time_ns is %d: nanoseconds since 1970", r.TimeNS)
	case len(r.Groups) > maxGroups || len(r.Calls) > maxCalls:
		return fmt.Errorf("it has %d groups and %d calls: at most %d and %d", len(r.Groups), len(r.Calls), maxGroups, maxCalls)
	}
	groups := map[string]*Group{}
	for i := range r.Groups {
		g := &r.Groups[i]
		if err := g.check(r.Rank); err != nil {
			return fmt.Errorf("group %d: %w", i, err)
		}
		if groups[g.ID] != nil {
			return fmt.Errorf("group %d: the id of another one", i)
		}
		groups[g.ID] = g
	}
	for i := range r.Calls {
		if err := r.Calls[i].check(groups[r.Calls[i].Group]); err != nil {
			return fmt.Errorf("call %d: %w", i, err)
		}
	}
	return nil
}

func (g *Group) check(rank int) error {
	if len(g.Ranks) > MaxRanks || g.Rank < 0 || g.Rank >= len(g.Ranks) || g.Ranks[g.Rank] != rank {
		return fmt.Errorf("rank %d of %d is not rank %d of the job", g.Rank, len(g.Ranks), rank)
	}
	seen := make(map[int]bool, len(g.Ranks))
	for _, member := range g.Ranks {
		if member < 0 || member >= MaxRanks || seen[member] {
			return fmt.Errorf("rank %d of the job: each once, 0 to %d", member, MaxRanks-1)
		}
		seen[member] = true
	}
	if i := slices.IndexFunc(g.WaitsFor, func(rank int) bool { return rank < 0 || rank >= len(g.Ranks) }); i >= 0 {
		return fmt.Errorf("it waits for rank %d of %d", g.WaitsFor[i], len(g.Ranks))
	}
	g.ID, g.Name = clean(g.ID, maxName), clean(g.Name, maxName)
	return nil
}

func (c *Call) check(g *Group) error {
	switch {
	case g == nil:
		return errors.New("its group is not listed")
	case !slices.Contains([]string{collective, send, receive}, c.Kind):
		return fmt.Errorf("kind is %q: %s, %s or %s", clean(c.Kind, maxName), collective, send, receive)
	case !slices.Contains([]string{scheduled, started, completed, failed}, c.State):
		return fmt.Errorf("state is %q: %s, %s, %s or %s", clean(c.State, maxName), scheduled, started, completed, failed)
	case c.Number < 0 || c.InputBytes < 0 || c.OutputBytes < 0 || c.CreatedNS < 0 || c.StartedNS < 0 || c.EndedNS < 0:
		return errors.New("a number is below 0")
	case c.Peer != nil && (*c.Peer < 0 || *c.Peer >= len(g.Ranks)):
		return fmt.Errorf("peer is %d of %d ranks", *c.Peer, len(g.Ranks))
	case c.Kind == send && c.Peer == nil:
		return errors.New("it is sent to no rank")
	}
	c.Group = g.ID
	c.Operation, c.Type, c.Failure = clean(c.Operation, maxName), clean(c.Type, maxName), clean(c.Failure, maxText)
	return nil
}

// clean makes a text fit to be printed: one line without control characters.
func clean(s string, limit int) string {
	printable := func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}
	return text.Clip(strings.Join(strings.Fields(strings.Map(printable, strings.ToValidUTF8(s, " "))), " "), limit)
}

// group returns the group of this id; nil: the rank is no member, or has no call of it.
func (r *Record) group(id string) *Group {
	if i := slices.IndexFunc(r.Groups, func(g Group) bool { return g.ID == id }); i >= 0 {
		return &r.Groups[i]
	}
	return nil
}

// age is how long a call had lasted when the record was written.
func (r *Record) age(c *Call) time.Duration {
	since := c.StartedNS
	if since == 0 {
		since = c.CreatedNS
	}
	return max(0, time.Duration(r.TimeNS-since))
}

// Failed reports whether a call failed: the record stays true after its process has ended.
func (r *Record) Failed() bool {
	return slices.ContainsFunc(r.Calls, func(c Call) bool { return c.State == failed })
}

// hangs reports whether a call that has not completed has failed, or takes so long that it is not merely in progress.
func (r *Record) hangs(c *Call) bool { return c.State == failed || r.age(c) >= minHang }
