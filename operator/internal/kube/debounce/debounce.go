// Package debounce delays the reconciliation after an event, so that a burst of events, such as the ends of many runs, causes one
// reconciliation.
package debounce

import (
	"context"
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// A Scale multiplies the delays of a controller; zero is one. Tests make it small.
type Scale float64

// Of returns the delay by the scale.
func (s Scale) Of(delay time.Duration) time.Duration {
	if s == 0 {
		return delay
	}
	return time.Duration(float64(s) * float64(delay))
}

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// A delayedQueue adds requests after a delay. A request that is added again meanwhile is added once.
type delayedQueue struct {
	queue
	delay time.Duration
}

func (q delayedQueue) Add(request reconcile.Request) { q.AddAfter(request, q.delay) }

// Handler wraps the handler: its requests are enqueued after the delay.
func Handler(delay time.Duration, h handler.EventHandler) handler.EventHandler {
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) { h.Create(ctx, e, delayedQueue{q, delay}) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) { h.Update(ctx, e, delayedQueue{q, delay}) },
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) { h.Delete(ctx, e, delayedQueue{q, delay}) },
	}
}
