package events

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// maxQueued is the maximum number of Events that wait to be written. It bounds memory, and what the API server is asked for by
// whoever creates many objects at once.
const maxQueued = 256

// A Queue writes Events in the background, so that no request waits for them. What does not fit is dropped: an Event is a hint.
type Queue struct {
	client  client.Writer
	waiting chan *corev1.Event
}

// NewQueue returns an empty queue. Events are written once it is started.
func NewQueue(c client.Writer) *Queue {
	return &Queue{client: c, waiting: make(chan *corev1.Event, maxQueued)}
}

// Add queues Events. It never waits, and returns how many were dropped.
func (q *Queue) Add(list ...*corev1.Event) (dropped int) {
	for _, e := range list {
		select {
		case q.waiting <- e:
		default:
			dropped++
		}
	}
	return dropped
}

// Start writes Events until the context ends, for manager.Runnable.
func (q *Queue) Start(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-q.waiting:
			if err := Write(ctx, q.client, e); err != nil && ctx.Err() == nil {
				log.FromContext(ctx).Error(err, "an Event is lost")
			}
		}
	}
}

// NeedLeaderElection is false: each replica writes what it was asked about.
func (q *Queue) NeedLeaderElection() bool { return false }
