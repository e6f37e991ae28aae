// Package runner measures an experiment: its contenders in turns, on a machine that is quiet where it can be, with a
// record of each run.
package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/utils/clock"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// A Plugin is another plugin that runs in turn with the subject, as that does.
type Plugin struct {
	Name    string
	Library string // path
}

// A Runner measures one experiment.
type Runner struct {
	Experiment experiment.Experiment
	Only       *regexp.Regexp // names of cases; nil for all
	Fresh      bool           // the selected cases are measured anew
	Rounds     int
	Programs   experiment.Programs
	Plugins    []Plugin
	Setting    experiment.Setting
	Command    string // for samples
	// Wait is the time that all runs together may wait for a quiet machine.
	Wait  time.Duration
	Store *Store
	// Measured is called after each case, so that a page is there before all is measured; nil if nothing is to be done.
	Measured func() error
	Out      io.Writer
	Clock    clock.PassiveClock
	Probe    Probe
}

// A contender is one of the experiment's with the programs that it runs with.
type contender struct {
	experiment.Contender
	programs experiment.Programs
	library  string // see experiment.Sample
}

// Run measures what the store lacks of the selected cases. When ctx ends it stops, and what has been measured stays in
// the store.
func (r *Runner) Run(ctx context.Context) (err error) {
	var cases []experiment.Case
	for _, c := range r.Experiment.Cases(r.Setting.Quick) {
		if r.Only == nil || r.Only.MatchString(c.Name) {
			cases = append(cases, c)
		}
	}
	if r.Experiment.Open != nil {
		end, failure := r.Experiment.Open(ctx, r.Out)
		if failure != nil {
			return fmt.Errorf("%s: %w", r.Experiment.Name, failure)
		}
		defer func() { err = errors.Join(err, end()) }()
	}
	machineIsQuiet := &quiet{probe: r.Probe, clock: r.Clock, left: r.Wait}
	for _, c := range cases {
		if err := r.measure(ctx, c, machineIsQuiet); err != nil {
			if ctx.Err() != nil {
				return errors.New("interrupted: the same command goes on where it stopped")
			}
			return fmt.Errorf("%s: %w", c.Name, err)
		}
		if r.Measured == nil {
			continue
		}
		if err := r.Measured(); err != nil {
			return err
		}
	}
	return nil
}

// contenders are those of a case, and the other plugins after the subject's.
func (r *Runner) contenders(c experiment.Case) ([]contender, error) {
	own, err := Digest(r.Programs.Library)
	if err != nil {
		return nil, err
	}
	var all []contender
	for _, of := range c.Contenders {
		all = append(all, contender{of, r.Programs, own})
		if of.Name != r.Experiment.SubjectName() {
			continue
		}
		for _, p := range r.Plugins {
			library, err := Digest(p.Library)
			if err != nil {
				return nil, err
			}
			others := []experiment.Contender{of}
			others[0].Name = p.Name
			if r.Experiment.DriverOnly {
				others = nil
				if c.Others != nil {
					if others, err = c.Others(p.Name, p.Library); err != nil {
						return nil, err
					}
				}
			}
			for _, of := range others {
				other := contender{of, r.Programs, library}
				other.programs.Library = p.Library
				all = append(all, other)
			}
		}
	}
	return all, nil
}

// measure runs the contenders of a case in turn, as far as the store lacks their samples.
func (r *Runner) measure(ctx context.Context, c experiment.Case, q *quiet) (err error) {
	contenders, err := r.contenders(c)
	if err != nil {
		return err
	}
	if err := r.keep(c, contenders); err != nil {
		return err
	}
	rounds, n := r.Rounds, len(contenders)
	if c.Once {
		rounds = 1
	}
	type turn struct{ round, position int }
	var turns []turn
	for round := range rounds {
		for position := range n {
			if !r.has(c.Name, contenders[(position+round)%n].Name, round) {
				turns = append(turns, turn{round, position})
			}
		}
	}
	fmt.Fprintf(r.Out, "\n%s: %s, %d of %d runs are there\n", c.Name, c.Title, rounds*n-len(turns), rounds*n)
	if len(turns) == 0 {
		return nil
	}
	var lab *netns.Lab
	if c.Network != nil && !c.Anew {
		if lab, err = r.up(ctx, c); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, lab.Down(context.WithoutCancel(ctx))) }()
	}
	for _, t := range turns {
		// Each round begins with the next contender, so that none has always the same neighbour in time.
		of := contenders[(t.position+t.round)%n]
		sample := experiment.Sample{
			Experiment: r.Experiment.Name, Case: c.Name, Contender: of.Name, Round: t.round, Position: t.position,
			Setting: r.Setting, Command: r.Command, Library: of.library, Load: machine.Describe().Load,
		}
		isQuiet := false
		if sample.BusyBefore, isQuiet, err = q.await(ctx); err != nil {
			return err
		}
		sample.NotQuiet = !isQuiet
		r.runOnce(ctx, c, of, lab, &sample)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := r.Store.Append(sample); err != nil {
			return err
		}
		fmt.Fprintf(r.Out, "  %2d of %d  %-40s %s\n", t.round+1, rounds, of.Name, line(c, sample))
	}
	return nil
}

// keep drops the samples of a case that were measured with another setting, or with another library under the same
// name, and all where they are to be fresh. The samples of a plugin that is no longer given stay.
func (r *Runner) keep(c experiment.Case, contenders []contender) error {
	kept := slices.DeleteFunc(slices.Clone(r.Store.Samples), func(s experiment.Sample) bool {
		if s.Case != c.Name {
			return false
		}
		at := slices.IndexFunc(contenders, func(of contender) bool { return of.Name == s.Contender })
		return r.Fresh || s.Setting != r.Setting || at >= 0 && contenders[at].library != s.Library
	})
	if len(kept) == len(r.Store.Samples) {
		return nil
	}
	return r.Store.Rewrite(kept)
}

func (r *Runner) has(of, contender string, round int) bool {
	return slices.ContainsFunc(r.Store.Samples, func(s experiment.Sample) bool {
		return s.Case == of && s.Contender == contender && s.Round == round
	})
}

// up makes the network of a case.
func (r *Runner) up(ctx context.Context, c experiment.Case) (*netns.Lab, error) {
	config := *c.Network
	config.Name, config.Congestion = "bench-"+r.Experiment.Name, r.Setting.Congestion
	lab, err := netns.Up(ctx, config)
	if err != nil {
		return nil, err
	}
	if c.SetUp != nil {
		if err := c.SetUp(ctx, lab); err != nil {
			return nil, errors.Join(err, lab.Down(context.WithoutCancel(ctx)))
		}
	}
	return lab, nil
}

// runOnce completes a sample by a run. A failure is part of it.
func (r *Runner) runOnce(ctx context.Context, c experiment.Case, of contender, lab *netns.Lab, sample *experiment.Sample) {
	limit := c.Timeout
	if limit == 0 {
		limit = experiment.DefaultTimeout
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done within %s", limit))
	defer cancel()
	sample.Start = r.Clock.Now().UTC()
	before := machine.ReadCPUTime()
	measured, err := func() (m experiment.Measured, err error) {
		if c.Network != nil && c.Anew {
			if lab, err = r.up(ctx, c); err != nil {
				return m, err
			}
			defer func() { err = errors.Join(err, lab.Down(context.WithoutCancel(ctx))) }()
		}
		if lab != nil {
			sample.Network = lab.Config().String()
		}
		return of.Run(ctx, experiment.Run{Contender: of.Name, Round: sample.Round, Seed: sample.Seed, Programs: of.programs, Lab: lab})
	}()
	sample.Busy, sample.Seconds = before.BusySince(), r.Clock.Since(sample.Start).Seconds()
	if err == nil {
		for q, value := range measured.Values {
			if math.IsNaN(value) || math.IsInf(value, 0) {
				err = fmt.Errorf("the %s is not a number", q.Title)
			}
		}
	}
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause // the other errors follow from it
		}
		sample.Failure = strings.ReplaceAll(err.Error(), "\n", "; ")
		return
	}
	sample.Set(measured)
}

// shownQuantities is how many of them are in a line of progress.
const shownQuantities = 4

// line is one line of progress.
func line(c experiment.Case, s experiment.Sample) string {
	if s.Failure != "" {
		return "FAILED: " + s.Failure
	}
	var words []string
	all := append(c.Headlines(), c.More...)
	for _, q := range all[:min(len(all), shownQuantities)] {
		if value, ok := s.Value(q); ok {
			words = append(words, q.Title+" "+q.Format(value))
		}
	}
	if s.Note != "" {
		words = append(words, s.Note)
	}
	if s.NotQuiet {
		words = append(words, fmt.Sprintf("(not quiet: %.0f %%)", s.BusyBefore*100))
	}
	return strings.Join(words, ", ")
}
