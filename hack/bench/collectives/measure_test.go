package main

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"
)

// A contender with a limit that never ends is left out, and the others go on.
func TestContenderThatDoesNotEndIsLeftOut(t *testing.T) {
	good := contender{name: "good", run: func(context.Context, task) (map[int]figure, error) { return map[int]figure{1: {1, 2}}, nil }}
	starts := 0
	stuck := contender{name: "stuck", tries: 2, limit: time.Millisecond, run: func(ctx context.Context, _ task) (map[int]figure, error) {
		starts++
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}}
	var m measured
	if err := m.measure(t.Context(), []contender{stuck, good}, 3, task{ranks: 1, network: loopback}); err != nil {
		t.Fatal(err)
	}
	if starts != stuck.tries || !slices.Equal(m.without, []string{"stuck"}) || len(m.rounds) != 3 {
		t.Errorf("started %d times, left out %v, %d rounds", starts, m.without, len(m.rounds))
	}
	for _, round := range m.rounds {
		if round["good"][1] != (figure{1, 2}) || round["stuck"] != nil {
			t.Errorf("a round has %v", round)
		}
	}
	broken := contender{name: "broken", tries: 2, run: func(context.Context, task) (map[int]figure, error) { return nil, errors.New("it broke") }}
	if err := m.measure(t.Context(), []contender{broken}, 1, task{network: loopback}); err == nil {
		t.Error("a contender without a limit is left out")
	}
}
