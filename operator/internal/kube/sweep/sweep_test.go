package sweep

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
)

// things is a set of names that items remove.
type things struct {
	mu   sync.Mutex
	left map[string]bool
	// remove, if not nil, decides about a removal.
	remove func(name string) (gone bool, err error)
}

func newThings(count int) *things {
	s := &things{left: map[string]bool{}}
	for i := range count {
		s.left[fmt.Sprintf("thing-%04d", i)] = true
	}
	return s
}

func (s *things) list(context.Context) ([]Item, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var items []Item
	for _, name := range slices.Sorted(maps.Keys(s.left)) {
		items = append(items, Item{Name: name, Remove: func(context.Context) error {
			gone, err := true, error(nil)
			if s.remove != nil {
				gone, err = s.remove(name)
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			if gone {
				delete(s.left, name)
			}
			return err
		}})
	}
	return items, nil
}

// instant is a clock whose timers fire at once.
type instant struct{ clock.RealClock }

func (instant) After(time.Duration) <-chan time.Time { return time.After(0) }

func TestSweepIsParallelAndBounded(t *testing.T) {
	s := newThings(3 * maxParallel)
	var now, most atomic.Int32
	// Nothing ends until as many run as may.
	full := make(chan struct{})
	reached := sync.OnceFunc(func() { close(full) })
	s.remove = func(string) (bool, error) {
		running := now.Add(1)
		defer now.Add(-1)
		for {
			before := most.Load()
			if running <= before || most.CompareAndSwap(before, running) {
				break
			}
		}
		if running == maxParallel {
			reached()
		}
		<-full
		return true, nil
	}
	var seen []string
	removed, err := Sweep{List: s.list, Clock: instant{}, Progress: func(done, of int) { seen = append(seen, fmt.Sprintf("%d/%d", done, of)) }}.Run(t.Context())
	if err != nil || removed != 150 || most.Load() > maxParallel || len(seen) != 150 || seen[149] != "150/150" {
		t.Errorf("removed %d, %v, %d at once, progress %v", removed, err, most.Load(), seen)
	}
}

func TestSweepContinuesAfterInterruption(t *testing.T) {
	s := newThings(400)
	ctx, cancel := context.WithCancel(t.Context())
	var count atomic.Int32
	s.remove = func(string) (bool, error) {
		if count.Add(1) == 100 {
			cancel()
		}
		return true, nil
	}
	first, err := Sweep{List: s.list, Clock: instant{}}.Run(ctx)
	if err == nil || !strings.Contains(err.Error(), "stopped with") || first >= 400 {
		t.Errorf("removed %d, %v", first, err)
	}
	second, err := Sweep{List: s.list, Clock: instant{}}.Run(t.Context())
	if err != nil || first+second != 400 || len(s.left) != 0 {
		t.Errorf("removed %d and %d, %d left, %v", first, second, len(s.left), err)
	}
}

func TestSweepRepeatsWhatOthersChanged(t *testing.T) {
	s := newThings(10)
	tries := map[string]int{}
	var mu sync.Mutex
	s.remove = func(name string) (bool, error) {
		mu.Lock()
		defer mu.Unlock()
		tries[name]++
		if name == "thing-0003" && tries[name] < 3 {
			return false, nil // as after a conflict
		}
		if name == "thing-0004" && tries[name] < 2 {
			return false, errors.New("the API server is away")
		}
		return true, nil
	}
	if _, err := (Sweep{List: s.list, Clock: instant{}}).Run(t.Context()); err != nil || len(s.left) != 0 {
		t.Errorf("%v, %d left", err, len(s.left))
	}
}

func TestSweepEndsWhenNothingMoves(t *testing.T) {
	s := newThings(8)
	s.remove = func(name string) (bool, error) {
		return name < "thing-0002", fmt.Errorf("forbidden")
	}
	_, err := Sweep{List: s.list, Clock: clocktesting.NewFakeClock(time.Time{})}.Run(timeout(t))
	if err == nil {
		t.Error("without time there is no second pass")
	}
	_, err = Sweep{List: s.list, Clock: instant{}}.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "6 could not be removed, such as thing-0002") || !strings.Contains(err.Error(), "and 3 more errors") {
		t.Errorf("%v", err)
	}
	failing := func(context.Context) ([]Item, error) { return nil, errors.New("forbidden") }
	if _, err := (Sweep{List: failing, Clock: instant{}}).Run(t.Context()); err == nil {
		t.Error("a list that fails is no error")
	}
}

func timeout(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}
