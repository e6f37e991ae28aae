// Package sweep removes many things from a cluster: in parallel, and pass by pass until none is found any more. It keeps no state,
// so what was interrupted is continued by starting it again.
package sweep

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// maxParallel is the number of requests at a time. More would take the API server's attention from everybody else.
	maxParallel = 50
	// pageSize is the number of objects that are read at a time.
	pageSize = 500
	// maxIdlePasses is the number of passes after which none of the remaining things could be removed, and passDelay the time
	// between two passes.
	maxIdlePasses = 3
	passDelay     = time.Second
	// maxErrors is the number of errors that are reported of a pass.
	maxErrors = 3
)

// An Item is one thing to remove.
type Item struct {
	// Name is what people call it, such as "node gpu-17".
	Name string
	// Remove removes it. Where somebody else changed or removed it meanwhile, it returns nil, and the next pass finds it again.
	Remove func(context.Context) error
}

// A Sweep removes all items that a list finds.
type Sweep struct {
	List func(context.Context) ([]Item, error)
	// Progress, if not nil, is told after each item how many of the pass are done, and how many it has.
	Progress func(done, of int)
	// Clock is replaced in tests.
	Clock clock.Clock
}

// Run removes items until the list finds none. It returns the number of removed ones, and an error if some remain.
func (s Sweep) Run(ctx context.Context) (removed int, err error) {
	before, idle := 0, 0
	for pass := 0; ; pass++ {
		items, err := s.List(ctx)
		if err != nil || len(items) == 0 {
			return removed, err
		}
		if pass > 0 {
			if idle++; len(items) < before {
				idle = 0
			}
			if err := s.wait(ctx); err != nil {
				return removed, err
			}
		}
		done, err := s.pass(ctx, items)
		removed += done
		switch {
		case ctx.Err() != nil:
			return removed, errors.Join(err, fmt.Errorf("stopped with %d left: %w", len(items)-done, context.Cause(ctx)))
		case idle >= maxIdlePasses:
			return removed, errors.Join(err, fmt.Errorf("%d could not be removed, such as %s", len(items), items[0].Name))
		}
		before = len(items)
	}
}

// pass removes the items, and returns how many of them without an error.
func (s Sweep) pass(ctx context.Context, items []Item) (done int, err error) {
	var mu sync.Mutex
	var workers sync.WaitGroup
	var all []error
	finished, failed := 0, 0
	next := make(chan Item)
	for range min(maxParallel, len(items)) {
		workers.Go(func() {
			for item := range next {
				err := item.Remove(ctx)
				mu.Lock()
				finished++
				if err != nil {
					if failed++; failed <= maxErrors {
						all = append(all, fmt.Errorf("%s: %w", item.Name, err))
					}
				}
				if s.Progress != nil {
					s.Progress(finished, len(items))
				}
				mu.Unlock()
			}
		})
	}
	func() {
		defer close(next)
		for _, item := range items {
			select {
			case <-ctx.Done():
				return
			case next <- item:
			}
		}
	}()
	workers.Wait()
	if failed > maxErrors {
		all = append(all, fmt.Errorf("and %d more errors", failed-maxErrors))
	}
	return finished - failed, errors.Join(all...)
}

func (s Sweep) wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return fmt.Errorf("stopped: %w", context.Cause(ctx))
	case <-s.Clock.After(passDelay):
		return nil
	}
}

// Pages lists objects in pages, and calls visit for each page: a list of all nodes of a large cluster takes more memory than a
// small container has.
func Pages(ctx context.Context, c client.Reader, list client.ObjectList, visit func() error, options ...client.ListOption) error {
	for token := ""; ; {
		page := append([]client.ListOption{client.Limit(pageSize), client.Continue(token)}, options...)
		if err := c.List(ctx, list, page...); err != nil {
			return err
		}
		if err := visit(); err != nil {
			return err
		}
		of, ok := list.(metav1.ListInterface)
		if !ok || of.GetContinue() == "" {
			return nil
		}
		token = of.GetContinue()
	}
}
