// Package experiment has the types in which an experiment is written down: what runs, on which network, what is read
// from it, and what is asked for. The runner measures experiments, and the page shows them.
package experiment

import (
	"context"
	"io"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// Ours is the name of the contender that most experiments are about.
const Ours = "Evenkeel"

// An Experiment is a table of cases with one page.
type Experiment struct {
	Name    string // of the page and of the samples
	Title   string // of the page
	Summary string // one line for the list
	About   string // Markdown: what is measured, and how to read it
	Notes   string // Markdown: what else there is to say, after the goals
	// Subject is the contender that goals are about and that others are compared with; [Ours] if empty. Other plugins run
	// as it does.
	Subject string
	// DriverOnly is whether the subject is code of the driver and no plugin is measured, so that no other one can run as
	// it does.
	DriverOnly bool
	// Rounds of a full and of a quick run, if no number is given.
	Rounds, QuickRounds int
	// Seeded is whether runs draw from [Run.Seed].
	Seeded bool
	// Checks is whether runs check more than speed, so that one that fails is an error of the whole.
	Checks bool
	// Open prepares what all runs share, where that is needed. The runner calls close at the end. What a machine cannot
	// have is a [MissingError].
	Open func(ctx context.Context, progress io.Writer) (close func() error, err error)
	// Cases are the cases of a full or of a quick run. They are made once for each process, and may keep state between
	// runs.
	Cases func(quick bool) []Case
	// Derive returns the samples with what only all of them together show, for the page; nil if there is nothing. It
	// leaves those that it is given as they are.
	Derive func(samples []Sample) []Sample
}

// A Case is a load on a network.
type Case struct {
	Name  string // letters, digits and dashes
	Title string
	Load  string // in words; empty where the title says all
	// Group is the title of a section of the page that has a row for each of the cases of that group, and one of all their
	// runs. They have the same quantities, and neither a limit nor traces. Empty where the case has a section of its own.
	Group string
	Notes []string
	// Network is made for the case, and needs root; nil where there is none.
	Network *netns.Config
	// Anew makes the network of each run new, so that its connections have other ports.
	Anew bool
	// Once is whether one round is enough, as nothing varies.
	Once bool
	// SetUp configures the network, where that is needed.
	SetUp func(ctx context.Context, lab *netns.Lab) error

	Contenders []Contender
	// Others are the contenders that a file given with --plugin is, under this name, where the experiment is DriverOnly;
	// nil if it takes none.
	Others   func(name, path string) ([]Contender, error)
	Headline Quantity   // of the table, the drawing, and the comparison
	More     []Quantity // in further columns
	Sweep    *Sweep     // of the headline; nil where a run measures it once
	Limit    float64    // of the headline, by the network; zero if only the processors limit it
	Goals    []Goal
	// Traces draws each run over time, with these levels, in place of a dot for each run.
	Traces []Level
	// Timeout of one run; [DefaultTimeout] if zero.
	Timeout time.Duration
}

// DefaultTimeout is how long one run may take.
const DefaultTimeout = 3 * time.Minute

// A Level is a line across a drawing.
type Level struct {
	At    float64
	Label string
}

// A Contender is what runs in turn with others. Its run may not share anything with that of another contender.
type Contender struct {
	Name string
	// Reference is whether goals and losses are counted against it: plain sockets, or another library.
	Reference bool
	// Base is the contender of the case to which it adds something, if there is one: their ratio is what that costs.
	Base string
	// Run runs once. The context ends with the case's timeout. An error is part of the result.
	Run func(ctx context.Context, r Run) (Measured, error)
}

// A Run is what a contender may use.
type Run struct {
	Contender string // its name
	Round     int    // from 0
	Seed      uint64 // what is drawn follows from it and from the round
	Programs
	Lab *netns.Lab // nil where the case has no network
}

// Programs are what is measured, and what drives it.
type Programs struct {
	Library string // the plugin
	Driver  string // evenkeel-bench; evenkeel-reduction-server is beside it
}

// Measured is the result of a run. A quantity that it lacks was not reached if the quantity is one of those, and else
// not measured.
type Measured struct {
	Values map[Quantity]float64
	// Trace has the headline over time: seconds since the start, and the value.
	Trace [][2]float64
	// Versions names the libraries that the run used, with their versions. Empty where the experiment's table has them.
	Versions string
	// Drawing is an SVG of the run. The page shows the first of a case.
	Drawing string
	// Note is what the page says of the run.
	Note string
}

// SubjectName is the contender that the experiment is about.
func (e Experiment) SubjectName() string {
	if e.Subject != "" {
		return e.Subject
	}
	return Ours
}

// A MissingError says what a machine lacks for an experiment, such as a GPU, and what would help.
type MissingError string

func (e MissingError) Error() string { return string(e) }
