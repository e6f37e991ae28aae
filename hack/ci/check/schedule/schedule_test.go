package schedule

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
)

// A world runs fake jobs, which end when they are told to.
type world struct {
	ends    map[string]chan error
	started []string
	ended   []string
	errs    map[string]error
	result  chan error
}

// start runs jobs in a bubble of synctest.
func start(ctx context.Context, o Options, jobs ...Job) *world {
	w := &world{ends: map[string]chan error{}, errs: map[string]error{}, result: make(chan error, 1)}
	for i := range jobs {
		end := make(chan error)
		w.ends[jobs[i].Name] = end
		jobs[i].Run = func(ctx context.Context) error {
			select {
			case err := <-end:
				return err
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	}
	o.Started = func(name string) { w.started = append(w.started, name) }
	o.Ended = func(name string, err error) {
		w.ended = append(w.ended, name)
		w.errs[name] = err
	}
	go func() { w.result <- Run(ctx, jobs, o) }()
	synctest.Wait()
	return w
}

func (w *world) end(name string, err error) {
	w.ends[name] <- err
	synctest.Wait()
}

// now are the jobs that run.
func (w *world) now() string {
	return strings.Join(slices.DeleteFunc(slices.Clone(w.started), func(name string) bool { return slices.Contains(w.ended, name) }), " ")
}

func (w *world) want(t *testing.T, running string) {
	t.Helper()
	if got := w.now(); got != running {
		t.Fatalf("%q run, not %q", got, running)
	}
}

func TestBusyJobsTakeTurnsAndWaitingOnesRunBesideThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t.Context(), Options{Parallel: 3}, Job{Name: "a"}, Job{Name: "b"}, Job{Name: "w", Weight: Waits}, Job{Name: "x", Weight: Waits}, Job{Name: "y", Weight: Waits})
		w.want(t, "a w x")
		w.end("a", nil)
		w.want(t, "w x b")
		w.end("w", nil)
		w.want(t, "x b y")
		for _, name := range []string{"x", "y", "b"} {
			w.end(name, nil)
		}
		if err := <-w.result; err != nil {
			t.Error(err)
		}
	})
}

func TestParallelBoundsJobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t.Context(), Options{Parallel: 1}, Job{Name: "a", Weight: Waits}, Job{Name: "b", Weight: Waits})
		w.want(t, "a")
		w.end("a", nil)
		w.want(t, "b")
		w.end("b", nil)
	})
}

func TestJobsApartTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t.Context(), Options{Parallel: 3}, Job{Name: "a", Weight: Waits}, Job{Name: "b", Weight: Waits, Apart: []string{"a", "c"}}, Job{Name: "c", Weight: Waits})
		w.want(t, "a c")
		w.end("a", nil)
		w.want(t, "c")
		w.end("c", nil)
		w.want(t, "b")
		w.end("b", nil)
	})
}

func TestJobAloneHoldsBackTheLaterOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t.Context(), Options{Parallel: 3}, Job{Name: "a"}, Job{Name: "alone", Weight: Alone}, Job{Name: "b", Weight: Waits})
		w.want(t, "a")
		w.end("a", nil)
		w.want(t, "alone")
		w.end("alone", nil)
		w.want(t, "b")
		w.end("b", nil)
	})
}

func TestJobsWaitForWhatTheyNeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t.Context(), Options{Parallel: 3}, Job{Name: "test", Needs: []string{"build"}, After: []string{"first", "absent"}},
			Job{Name: "build", Weight: Waits}, Job{Name: "first", Weight: Waits})
		w.want(t, "build first")
		w.end("build", nil)
		w.want(t, "first")
		w.end("first", errors.New("broken")) // After is only an order
		w.want(t, "test")
		w.end("test", nil)
	})
}

func TestFailureStopsOnlyWhatNeedsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t.Context(), Options{Parallel: 2}, Job{Name: "build"}, Job{Name: "test", Needs: []string{"build"}}, Job{Name: "later", Needs: []string{"test"}}, Job{Name: "other"})
		w.end("build", errors.New("broken"))
		w.want(t, "other")
		w.end("other", nil)
		for _, name := range []string{"test", "later"} {
			if !errors.Is(w.errs[name], ErrNotRun) {
				t.Errorf("%s ended with %v", name, w.errs[name])
			}
		}
		if w.errs["other"] != nil {
			t.Errorf("other ended with %v", w.errs["other"])
		}
	})
}

func TestFailFastEndsTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t.Context(), Options{Parallel: 2, FailFast: true}, Job{Name: "a"}, Job{Name: "b", Weight: Waits}, Job{Name: "c"})
		w.end("a", errors.New("broken"))
		w.want(t, "")
		if err := w.errs["b"]; err == nil || errors.Is(err, ErrNotRun) || err.Error() != "a failed" {
			t.Errorf("b ended with %v", err)
		}
		if !errors.Is(w.errs["c"], ErrNotRun) {
			t.Errorf("c ended with %v", w.errs["c"])
		}
	})
}

func TestInterruptEndsAllJobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, interrupt := context.WithCancelCause(t.Context())
		w := start(ctx, Options{Parallel: 1}, Job{Name: "a"}, Job{Name: "b"})
		interrupt(errors.New("interrupted"))
		synctest.Wait()
		w.want(t, "")
		if !reflect.DeepEqual(w.ended, []string{"a", "b"}) || !errors.Is(w.errs["b"], ErrNotRun) {
			t.Errorf("%v ended, with %v", w.ended, w.errs)
		}
	})
}

func TestBadTablesAreRefused(t *testing.T) {
	for want, jobs := range map[string][]Job{
		"two jobs have the name a":       {{Name: "a"}, {Name: "a"}},
		"job a needs b, which is no job": {{Name: "a", Needs: []string{"b"}}},
		"job a needs itself":             {{Name: "a", Needs: []string{"b"}}, {Name: "b", After: []string{"a"}}},
	} {
		if err := Run(t.Context(), jobs, Options{}); err == nil || err.Error() != want {
			t.Errorf("%v, not %s", err, want)
		}
	}
}
