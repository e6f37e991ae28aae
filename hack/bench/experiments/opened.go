package experiments

import (
	"context"
	"io"
)

// opened is what the runs of an experiment share. Cases get it by get, once the experiment's Open has made it. If it
// can be closed, the runner does so at the end.
func opened[T any](open func(context.Context, io.Writer) (T, error)) (get func() T, Open func(context.Context, io.Writer) (func() error, error)) {
	var it T
	get = func() T { return it }
	return get, func(ctx context.Context, progress io.Writer) (done func() error, err error) {
		if it, err = open(ctx, progress); err != nil {
			return nil, err
		}
		if closer, ok := any(it).(io.Closer); ok {
			return closer.Close, nil
		}
		return func() error { return nil }, nil
	}
}
