// Package debounce lets a controller look once at what happens within a moment. Many things that end together, such as the
// runs of a check, then cost one write and not one each.
package debounce

import (
	"context"
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// A delayedQueue queue takes what is added a moment later, and what is added again meanwhile only once.
type delayedQueue struct {
	queue
	delay time.Duration
}

func (l delayedQueue) Add(request reconcile.Request) { l.AddAfter(request, l.delay) }

// Handler enqueues what the handler does, a moment later.
func Handler(moment time.Duration, h handler.EventHandler) handler.EventHandler {
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) { h.Create(ctx, e, delayedQueue{q, moment}) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) { h.Update(ctx, e, delayedQueue{q, moment}) },
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) { h.Delete(ctx, e, delayedQueue{q, moment}) },
	}
}
