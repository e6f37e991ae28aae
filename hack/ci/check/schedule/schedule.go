// Package schedule runs jobs that need each other, several at a time.
package schedule

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// A Weight says what may run beside a job.
type Weight int

const (
	// Busy jobs use the processors. At most one runs at a time.
	Busy Weight = iota
	// Waits is a job that mostly waits. It may run beside any other.
	Waits
	// Alone jobs run beside no other.
	Alone
)

// A Job is a set-up or a part of a stage.
type Job struct {
	Name string
	// Needs are the jobs that must have succeeded before.
	Needs []string
	// After are jobs that must have ended before, if they run at all.
	After  []string
	Weight Weight
	// Apart are jobs that must not run at the same time. It suffices that one of two jobs names the other.
	Apart []string
	Run   func(ctx context.Context) error
}

// ErrNotRun is the error of a job that did not run.
var ErrNotRun = errors.New("not run")

// Options say how jobs run.
type Options struct {
	Parallel int  // the maximum number of jobs at a time
	FailFast bool // the first failure ends all others
	// Started and Ended are called when a job starts and when it has ended, one at a time. A job that does not run only
	// ends, with an error that is [ErrNotRun].
	Started func(name string)
	Ended   func(name string, err error)
}

// Run runs the jobs, and returns when all have ended. Of the jobs that could start, the first of the list does, but a
// Busy one comes before the others as long as none runs.
func Run(ctx context.Context, jobs []Job, o Options) error {
	if err := check(jobs); err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	p := &plan{waiting: slices.Clone(jobs), parallel: max(1, o.Parallel), done: map[string]error{}}
	type end struct {
		job Job
		err error
	}
	ends := make(chan end)
	finish := func(name string, err error) {
		p.done[name] = err
		if o.Ended != nil {
			o.Ended(name, err)
		}
		if err != nil && o.FailFast {
			stop(fmt.Errorf("%s failed", name))
		}
	}
	for {
		for {
			job, why, found := p.hopeless(ctx)
			if !found {
				break
			}
			finish(job.Name, fmt.Errorf("%w: %s", ErrNotRun, why))
		}
		for {
			job, found := p.next()
			if !found {
				break
			}
			if o.Started != nil {
				o.Started(job.Name)
			}
			go func() { ends <- end{job, job.Run(ctx)} }()
		}
		if len(p.running) == 0 {
			return nil // no job can be left, as there are no circles
		}
		e := <-ends
		p.running = slices.DeleteFunc(p.running, func(j Job) bool { return j.Name == e.job.Name })
		finish(e.job.Name, e.err)
	}
}

// plan is what has run, runs and is to run.
type plan struct {
	waiting, running []Job
	parallel         int
	done             map[string]error
}

// hopeless removes a waiting job that cannot run any more.
func (p *plan) hopeless(ctx context.Context) (Job, string, bool) {
	for i, job := range p.waiting {
		why := ""
		if ctx.Err() != nil {
			why = context.Cause(ctx).Error()
		}
		for _, need := range job.Needs {
			if p.done[need] != nil {
				why = need + " failed"
			}
		}
		if why != "" {
			p.waiting = slices.Delete(p.waiting, i, i+1)
			return job, why, true
		}
	}
	return Job{}, "", false
}

// next moves the job that is to start now from the waiting ones to the running ones.
func (p *plan) next() (Job, bool) {
	if len(p.running) >= p.parallel {
		return Job{}, false
	}
	var ready []int
	for i, job := range p.waiting {
		if !p.ready(job) {
			continue
		}
		if job.Weight == Alone {
			// The jobs behind it wait, as it would never start otherwise.
			if len(p.running) == 0 && len(ready) == 0 {
				return p.start(i), true
			}
			break
		}
		if p.fits(job) {
			ready = append(ready, i)
		}
	}
	for _, i := range ready {
		if p.waiting[i].Weight == Busy {
			return p.start(i), true
		}
	}
	if len(ready) > 0 {
		return p.start(ready[0]), true
	}
	return Job{}, false
}

func (p *plan) start(i int) Job {
	job := p.waiting[i]
	p.waiting = slices.Delete(p.waiting, i, i+1)
	p.running = append(p.running, job)
	return job
}

// ready reports whether what a job needs has ended.
func (p *plan) ready(job Job) bool {
	for _, need := range job.Needs {
		if err, done := p.done[need]; !done || err != nil {
			return false
		}
	}
	left := func(name string) bool {
		is := func(j Job) bool { return j.Name == name }
		return slices.ContainsFunc(p.waiting, is) || slices.ContainsFunc(p.running, is)
	}
	return !slices.ContainsFunc(job.After, left)
}

// fits reports whether a job may run beside those that run.
func (p *plan) fits(job Job) bool {
	return !slices.ContainsFunc(p.running, func(r Job) bool {
		return r.Weight == Alone || r.Weight == Busy && job.Weight == Busy || slices.Contains(job.Apart, r.Name) || slices.Contains(r.Apart, job.Name)
	})
}

// check refuses jobs that could never run.
func check(jobs []Job) error {
	known := map[string]Job{}
	for _, job := range jobs {
		if _, twice := known[job.Name]; twice {
			return fmt.Errorf("two jobs have the name %s", job.Name)
		}
		known[job.Name] = job
	}
	const visited, open = 1, 2
	state := map[string]int{}
	var visit func(name string) error
	visit = func(name string) error {
		switch state[name] {
		case visited:
			return nil
		case open:
			return fmt.Errorf("job %s needs itself", name)
		}
		state[name] = open
		for _, need := range known[name].Needs {
			if _, ok := known[need]; !ok {
				return fmt.Errorf("job %s needs %s, which is no job", name, need)
			}
		}
		for _, before := range slices.Concat(known[name].Needs, known[name].After) {
			if _, ok := known[before]; !ok {
				continue
			}
			if err := visit(before); err != nil {
				return err
			}
		}
		state[name] = visited
		return nil
	}
	for _, job := range jobs {
		if err := visit(job.Name); err != nil {
			return err
		}
	}
	return nil
}
