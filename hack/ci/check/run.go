package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/ci/check/affected"
	"evenkeel.dev/evenkeel/hack/ci/check/report"
	"evenkeel.dev/evenkeel/hack/ci/check/results"
	"evenkeel.dev/evenkeel/hack/ci/check/schedule"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// runOptions are those of a run of stages.
type runOptions struct {
	parallel int
	failFast bool
	all      bool
	list     bool // print what would run, and run nothing
	since    string
	// kubernetes is the minor version of the API server of stage operator; empty: the local cluster's.
	kubernetes string
}

// kubernetesStage is the stage that runs on API servers of several versions.
const kubernetesStage = "operator"

// versioned refuses a version of Kubernetes that there is not, or that stages would not run on.
func (o runOptions) versioned(chosen []stage) error {
	if o.kubernetes == "" {
		return nil
	}
	if !slices.Contains(toolbox.OlderKubernetes, o.kubernetes) {
		return fmt.Errorf("there is no API server of Kubernetes %s: there are %s", o.kubernetes, strings.Join(toolbox.OlderKubernetes, ", "))
	}
	if got := names(chosen); !slices.Equal(got, []string{kubernetesStage}) {
		return fmt.Errorf("only stage %s runs on another version of Kubernetes, and not %s", kubernetesStage, strings.Join(got, ", "))
	}
	return nil
}

// runStages runs the named stages, or the usual ones.
func runStages(ctx context.Context, named []string, o runOptions) error {
	if o.all && len(named) > 0 {
		return errors.New("either stages by their names, or --all")
	}
	if o.all {
		named = names(slices.Concat(stages, extra))
	}
	chosen, err := choose(named)
	if err != nil {
		return err
	}
	if err := o.versioned(chosen); err != nil {
		return err
	}
	var leftOut []string
	if o.since != "" {
		root, err := toolbox.Root()
		if err != nil {
			return err
		}
		choice, err := since(ctx, root, o.since)
		if err != nil {
			return err
		}
		if choice.Unknown != "" {
			fmt.Printf("%s: no stage is known to depend on it, so that all run\n", choice.Unknown)
		}
		before := chosen
		chosen = slices.DeleteFunc(slices.Clone(chosen), func(s stage) bool { return !slices.Contains(choice.Stages, s.Name) })
		for _, s := range chosen {
			fmt.Printf("%-10s because of %s\n", s.Name, choice.Why[s.Name])
		}
		for _, s := range before {
			if !slices.Contains(choice.Stages, s.Name) {
				leftOut = append(leftOut, fmt.Sprintf("%s: no change since %s affects it", s.Name, o.since))
			}
		}
		for _, s := range extra {
			if slices.Contains(choice.Stages, s.Name) && len(named) == 0 {
				leftOut = append(leftOut, fmt.Sprintf("%s: %s affects it, but it runs only when it is named (STAGE=%s)", s.Name, choice.Why[s.Name], s.Name))
			}
		}
		if len(chosen) == 0 {
			fmt.Printf("%s\n\nno change since %s affects a stage\n\n%s\n", strings.Join(leftOut, "\n"), o.since, results.Counts{})
			return nil
		}
	}
	if o.list {
		fmt.Printf("%s\n", strings.Join(append(names(chosen), leftOut...), "\n"))
		return nil
	}
	if err := asRoot(chosen); err != nil {
		return err
	}
	s, err := newSession(newConsole(os.Stdout, time.Now))
	if err != nil {
		return err
	}
	s.kubernetes = o.kubernetes
	return s.runAndReport(ctx, chosen, o, leftOut)
}

// choose returns the named stages, or the usual ones, in the order of the tables.
func choose(named []string) ([]stage, error) {
	if len(named) == 0 {
		return stages, nil
	}
	all := slices.Concat(stages, extra)
	for _, name := range named {
		if !slices.ContainsFunc(all, func(s stage) bool { return s.Name == name }) {
			return nil, fmt.Errorf("there is no stage %s: there are %s", name, strings.Join(names(all), ", "))
		}
	}
	return slices.DeleteFunc(all, func(s stage) bool { return !slices.Contains(named, s.Name) }), nil
}

// since finds the stages that changes since a commit can affect.
func since(ctx context.Context, root, ref string) (affected.Choice, error) {
	changed, err := affected.Changed(ctx, root, ref)
	if err != nil {
		return affected.Choice{}, err
	}
	var all []affected.Stage
	for _, s := range slices.Concat(stages, extra) {
		all = append(all, s.Stage)
	}
	graph, err := affected.Load(ctx, root, all)
	if err != nil {
		return affected.Choice{}, err
	}
	return affected.Choose(changed, all, graph), nil
}

func asRoot(chosen []stage) error {
	if os.Geteuid() == 0 {
		return nil
	}
	var need []string
	for _, s := range chosen {
		if s.root {
			need = append(need, s.Name)
		}
	}
	if len(need) == 0 {
		return nil
	}
	return fmt.Errorf("%s: these stages create namespaces or change roots; run them as root, or choose others with STAGE", strings.Join(need, ", "))
}

func names(list []stage) []string {
	var all []string
	for _, s := range list {
		all = append(all, s.Name)
	}
	return all
}

// runAndReport runs stages, writes their results and prints the slowest tests, the failed ones, the stages and the
// total. It closes the session.
func (s *session) runAndReport(ctx context.Context, chosen []stage, o runOptions, leftOut []string) error {
	started := time.Now()
	err := s.execute(ctx, s.jobsOf(chosen), o)
	err = errors.Join(err, s.cleanUp(), s.close())
	run := report.Run{
		Commit: toolbox.Commit(context.Background(), s.root, "."), Command: commandLine(), Started: started, Took: time.Since(started),
		Jobs: s.jobs, Results: s.results, LeftOut: leftOut, Stages: s.summary(chosen),
	}
	err = errors.Join(err, report.Write(s.out, run))
	s.console.plain(s.closing(run))
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	if err != nil {
		return err
	}
	if n := results.Count(s.results).Failed; n > 0 {
		return fmt.Errorf("%d failed", n)
	}
	return nil
}

// execute runs jobs, and reports those that do not run.
func (s *session) execute(ctx context.Context, jobs []schedule.Job, o runOptions) error {
	stop := s.watch()
	defer stop()
	return schedule.Run(ctx, jobs, schedule.Options{Parallel: o.parallel, FailFast: o.failFast, Ended: func(name string, err error) {
		if !errors.Is(err, schedule.ErrNotRun) {
			return
		}
		stage, isStage := stageOf(name)
		if !isStage {
			return // the parts that need it say so
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.results = append(s.results, results.Result{Stage: stage, Name: "(" + name + ")", Outcome: results.Failed, Output: err.Error() + "\n"})
		s.console.print(name, "FAIL "+err.Error())
	}})
}

// stageOf returns the stage whose part a job is.
func stageOf(job string) (string, bool) {
	for _, s := range slices.Concat(stages, extra, checkStages) {
		for _, p := range s.parts {
			if jobName(s, p) == job {
				return s.Name, true
			}
		}
	}
	return "", false
}

// jobsOf makes the jobs of stages: each part after the set-ups that it needs.
func (s *session) jobsOf(chosen []stage) []schedule.Job {
	var jobs []schedule.Job
	added := map[string]bool{}
	var add func(name string)
	add = func(name string) {
		if added[name] {
			return
		}
		added[name] = true
		i := slices.IndexFunc(setUps, func(u setUp) bool { return u.name == name })
		if i < 0 {
			panic("no set-up " + name) // a test checks the tables
		}
		u := setUps[i]
		for _, need := range u.needs {
			add(need)
		}
		jobs = append(jobs, s.job(u.name, "", u.weight, u.needs, nil, u.apart, u.run))
	}
	for _, st := range chosen {
		for _, p := range st.parts {
			needs := p.needs
			if s.repeats {
				needs = slices.Concat(needs, p.again)
			}
			for _, need := range needs {
				add(need)
			}
			jobs = append(jobs, s.job(jobName(st, p), st.Name, p.weight, needs, nil, p.apart, p.run))
		}
	}
	return jobs
}

// summary is what each stage came to. Set-ups have a line if one failed.
func (s *session) summary(chosen []stage) []report.Stage {
	counts := map[string]*results.Counts{}
	for _, r := range s.results {
		if counts[r.Stage] == nil {
			counts[r.Stage] = &results.Counts{}
		}
		counts[r.Stage].Add(r)
	}
	var all []report.Stage
	if c := counts[setUpStage]; c != nil && c.Failed > 0 {
		all = append(all, report.Stage{Name: setUpStage, About: "what tests need", Counts: *c})
	}
	for _, st := range chosen {
		line := report.Stage{Name: st.Name, About: st.about}
		if c := counts[st.Name]; c != nil {
			line.Counts = *c
		}
		// Its parts may run at different times, with others between them.
		for _, j := range s.jobs {
			if j.Stage == st.Name {
				line.Took += j.Took
			}
		}
		all = append(all, line)
	}
	return all
}

// closing is the end of what is printed. Its last line is the total.
func (s *session) closing(run report.Run) string {
	var b strings.Builder
	if slow := results.Slowest(run.Results, report.SlowestCount); len(slow) > 0 {
		fmt.Fprintf(&b, "\nthe slowest tests and set-ups:\n")
		for _, r := range slow {
			fmt.Fprintf(&b, "%8s  %-8s %s %s\n", report.Duration(r.Self), r.Stage, short(r.Program), r.Name)
		}
	}
	lists := []struct {
		title   string
		outcome results.Outcome
	}{{"skipped", results.Skipped}, {"failed", results.Failed}}
	for _, l := range lists {
		title := "\n" + l.title + ":\n"
		for _, r := range run.Results {
			if r.Outcome != l.outcome {
				continue
			}
			about := r.Reason
			if file := s.files[r.ID()]; file != "" {
				about = s.relative(file)
			}
			fmt.Fprintf(&b, "%s%-8s %s %s  %s\n", title, r.Stage, short(r.Program), r.Name, about)
			title = ""
		}
	}
	for i, line := range run.LeftOut {
		if i == 0 {
			b.WriteString("\nleft out:\n")
		}
		fmt.Fprintf(&b, "%s\n", line)
	}
	b.WriteString("\n")
	for _, st := range run.Stages {
		fmt.Fprintf(&b, "%-10s %4d passed, %d failed, %d skipped  %7s\n", st.Name, st.Counts.Passed, st.Counts.Failed, st.Counts.Skipped, report.Duration(st.Took))
	}
	fmt.Fprintf(&b, "\n%s for people and %s for CI are in %s, with a log of each job; all took %s\n",
		report.PageFile, report.JUnitFile, s.relative(s.out), report.Duration(run.Took))
	fmt.Fprintf(&b, "\n%s\n", results.Count(run.Results))
	return b.String()
}

// commandLine is how people start this program.
func commandLine() string {
	return strings.Join(append([]string{"go run ./hack/ci/check"}, os.Args[1:]...), " ")
}
