package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/ci/check/results"
	"evenkeel.dev/evenkeel/hack/ci/check/schedule"
)

// flakesOptions are the options of `make test ROUNDS=...`.
type flakesOptions struct {
	rounds, load, parallel int
}

// flakes runs every test of stages several times beside load, and lists those that ever failed.
func flakes(ctx context.Context, named []string, o flakesOptions) (err error) {
	if o.rounds < 1 || o.load < 0 {
		return errors.New("at least one round, and no negative load")
	}
	chosen, err := choose(named)
	if err != nil {
		return err
	}
	if err := asRoot(chosen); err != nil {
		return err
	}
	s, err := newSession(newConsole(os.Stdout, time.Now))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.cleanUp(), s.close()) }()
	s.repeats = true
	jobs := s.jobsOf(chosen)
	// What tests need is made once, without load.
	before, parts := splitSetUps(jobs)
	if err := s.execute(ctx, before, runOptions{parallel: o.parallel}); err != nil {
		return err
	}
	if n := results.Count(s.results).Failed; n > 0 {
		return fmt.Errorf("%d set-ups failed", n)
	}
	stop, err := startLoad(o.load)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	var tally tally
	for round := 1; round <= o.rounds && ctx.Err() == nil; round++ {
		s.console.print("flakes", fmt.Sprintf("round %d of %d beside %d busy processes", round, o.rounds, o.load))
		s.mu.Lock()
		s.results = nil
		s.mu.Unlock()
		if err := s.execute(ctx, parts, runOptions{parallel: o.parallel}); err != nil {
			return err
		}
		if ctx.Err() == nil {
			tally.add(s.results)
		}
	}
	s.console.plain(tally.table(func(id string) string { return s.relative(s.files[id]) }))
	switch failed := tally.failed(); {
	case ctx.Err() != nil:
		return errors.New("interrupted")
	case len(failed) > 0:
		return fmt.Errorf("%d tests failed at least once", len(failed))
	}
	return nil
}

// A tally counts how often each test ran and failed.
type tally struct {
	rounds int
	tests  map[string]*record
}

type record struct {
	id          string
	ran, failed int
}

// add counts the results of a round.
func (t *tally) add(round []results.Result) {
	if t.tests == nil {
		t.tests = map[string]*record{}
	}
	t.rounds++
	for _, r := range round {
		if r.Outcome == results.Skipped || r.Outcome == results.Elsewhere || r.SetUp && r.Outcome != results.Failed {
			continue
		}
		of := t.tests[r.ID()]
		if of == nil {
			of = &record{id: r.ID()}
			t.tests[r.ID()] = of
		}
		of.ran++
		if r.Outcome == results.Failed {
			of.failed++
		}
	}
}

// failed lists the tests that ever failed, the worst first.
func (t *tally) failed() []record {
	var all []record
	for _, r := range t.tests {
		if r.failed > 0 {
			all = append(all, *r)
		}
	}
	slices.SortFunc(all, func(a, b record) int { return cmp.Or(cmp.Compare(b.failed, a.failed), cmp.Compare(a.id, b.id)) })
	return all
}

// table lists those tests, with the file of the first failure's output.
func (t *tally) table(file func(id string) string) string {
	var b strings.Builder
	failed := t.failed()
	if len(failed) > 0 {
		fmt.Fprintf(&b, "\n%-12s %s\n", "failed", "test, and the output of its first failure")
	}
	for _, r := range failed {
		fmt.Fprintf(&b, "%3d of %-5d %s\n%13s%s\n", r.failed, r.ran, strings.ReplaceAll(r.id, modulePrefix, ""), "", file(r.id))
	}
	fmt.Fprintf(&b, "\n%d tests, %d rounds, %d failed at least once\n", len(t.tests), t.rounds, len(failed))
	return b.String()
}

// splitSetUps separates set-ups from parts of stages, which then need them no more.
func splitSetUps(jobs []schedule.Job) (setUps, parts []schedule.Job) {
	for _, job := range jobs {
		if _, isStage := stageOf(job.Name); isStage {
			job.Needs = nil
			parts = append(parts, job)
		} else {
			setUps = append(setUps, job)
		}
	}
	return setUps, parts
}
