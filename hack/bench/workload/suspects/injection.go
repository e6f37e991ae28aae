// Package suspects has jobs whose ranks look for whom they wait for: with faults injected, with nobody to blame, and
// with what looking costs.
package suspects

import (
	"context"
	"errors"
	"fmt"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

const (
	// CalmTime is how long a job runs before its fault. Ranks learn how late each usually is.
	CalmTime = 40 * time.Second
	// VerdictTime is how long a verdict may take.
	VerdictTime = 45 * time.Second
	// settleTime is what a fault's cost leaves out of its beginning, and costTime how long it is measured.
	settleTime = 3 * time.Second
	costTime   = 7 * time.Second
	// InjectionTimeout is for starting a job and for its network as well.
	InjectionTimeout = CalmTime + VerdictTime + startTime + time.Minute
)

// Quantities of [Injection]. Right, Nobody, OrCard and Named are of faults that cost enough: see [Weigh].
var (
	// Named is how long after a fault it was named, of those that were named rightly.
	Named = experiment.Quantity{Name: "named", Title: "named after", Unit: "s", Digits: 1, LowerIsBetter: true}
	// Right is whether the first verdict named the fault's place and class, and nobody was named before; Nobody whether
	// there was no verdict in time.
	Right  = experiment.Quantity{Name: "right", Title: "right", Statistic: experiment.Share}
	Nobody = experiment.Quantity{Name: "nobody", Title: "nobody named", Statistic: experiment.Share, LowerIsBetter: true}
	// Wrong is whether the first verdict named another place or class, or somebody was named before the fault, which Early
	// says.
	Wrong = experiment.Quantity{Name: "wrong", Title: "wrong", Statistic: experiment.Share, LowerIsBetter: true}
	Early = experiment.Quantity{Name: "early", Title: "named before the fault", Statistic: experiment.Share, LowerIsBetter: true}
	// OrCard is whether a right verdict on a card says that it is a path, or one of its cards.
	OrCard = experiment.Quantity{Name: "or_card", Title: "right, as a path or its cards", Statistic: experiment.Share}
	// Calm is what the job carried before the fault, and Faulty with it.
	Calm   = experiment.Quantity{Name: "calm", Title: "carried before", Unit: "MB/s", Digits: 1}
	Faulty = experiment.Quantity{Name: "faulty", Title: "carried with it", Unit: "MB/s", Digits: 1}
	// Cost is the share of the job's traffic that is gone, and Costly whether that is enough for somebody to be named.
	Cost   = experiment.Quantity{Name: "cost", Title: "cost", Unit: "%", LowerIsBetter: true}
	Costly = experiment.Quantity{Name: "costly", Title: "costly", Statistic: experiment.Share}
)

// An Injection is a job of a pattern, with a fault of a kind that the seed and the round draw.
type Injection struct {
	Kind    Kind
	Pattern Pattern
}

// Plugin runs the job with the plugin.
func (w Injection) Plugin(name string) experiment.Contender {
	return experiment.Contender{Name: name, Run: w.run}
}

func (w Injection) run(ctx context.Context, r experiment.Run) (_ experiment.Measured, err error) {
	f := draw(r.Seed, w.Kind, w.Pattern, r.Round)
	j, err := begin(ctx, r, Load{Pattern: w.Pattern})
	if err != nil {
		return experiment.Measured{}, err
	}
	defer func() { err = errors.Join(err, j.close()) }()
	found := finding{fault: f}
	if err := found.observe(ctx, j); err != nil {
		return experiment.Measured{}, err
	}
	return found.measured(), nil
}

// A finding is what a run has found.
type finding struct {
	fault        fault
	early        bool // somebody was named before the fault began
	named        bool // somebody was named within the time
	first        verdict
	after        time.Duration // the fault's begin
	calm, faulty float64       // bytes a second
	unsaid       string        // what the ranks say that name nobody
}

// observe injects the fault into a job that has run for a time, and watches whom the ranks name.
func (r *finding) observe(ctx context.Context, j *job) (err error) {
	early := func() bool { r.first, r.early = j.suspected(); return r.early }
	// The first half is for ranks to come into step.
	if _, err := await(ctx, CalmTime/2, early); err != nil || r.early {
		return err
	}
	before, since, err := j.mark()
	if err != nil {
		return err
	}
	if _, err := await(ctx, CalmTime/2, early); err != nil || r.early {
		return err
	}
	if r.calm, err = j.rate(before, since); err != nil {
		return err
	}
	end, err := r.fault.inject(ctx, j)
	defer func() { err = errors.Join(err, stop(end)) }()
	if err != nil {
		return err
	}
	injected := time.Now()
	look := func() bool {
		if !r.named {
			r.first, r.named = j.suspected()
			r.after = time.Since(injected)
		}
		return r.named
	}
	if _, err := await(ctx, settleTime, func() bool { look(); return false }); err != nil {
		return err
	}
	if before, since, err = j.mark(); err != nil {
		return err
	}
	if _, err := await(ctx, VerdictTime-settleTime, look); err != nil {
		return err
	}
	if err := pause(ctx, costTime-time.Since(since)); err != nil {
		return err
	}
	r.faulty, err = j.rate(before, since)
	r.unsaid = j.unsuspecting()
	return err
}

// measured is the finding as quantities, before faults are weighed. Its note says what was named.
func (r *finding) measured() experiment.Measured {
	share := func(is bool) float64 {
		if is {
			return 1
		}
		return 0
	}
	right := r.named && !r.early && r.fault.isRight(r.first)
	got := map[experiment.Quantity]float64{
		Right: share(right), Nobody: share(!r.named && !r.early), Wrong: share(r.early || r.named && !right), Early: share(r.early),
	}
	if right {
		got[Named], got[OrCard] = r.after.Seconds(), share(r.fault.mayBePath(r.first.Suspects[0]))
	}
	// A fault before which somebody was named has not begun.
	if !r.early {
		got[Calm], got[Faulty] = r.calm/1e6, r.faulty/1e6
	}
	said := r.first.Text
	switch {
	case r.early:
		said = "before the fault: " + said
	case !r.named:
		said = "nobody was named: " + r.unsaid
	}
	return experiment.Measured{Values: got, Note: fmt.Sprintf("%s: %s", r.fault, said)}
}
