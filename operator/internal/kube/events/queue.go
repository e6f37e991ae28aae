package events

import (
	"context"
	"sync"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

const (
	// maxQueued is the maximum number of Events that wait to be written. It bounds memory.
	maxQueued = 256
	// namespaceRate and totalRate are the Events per second that are written about the objects of one namespace and of all, after
	// namespaceBurst and totalBurst. Whoever reaches the webhook's port can ask for Events, and an API server keeps each for an hour: so
	// much is at most 40 MB in its database.
	namespaceRate, namespaceBurst = 0.5, 50
	totalRate, totalBurst         = 5, 200
	// maxNamespaces is the maximum number of namespaces whose rates are kept. Then all are forgotten. The total remains.
	maxNamespaces = 4096
)

// A Queue writes Events in the background, so that no request waits for them. What does not fit, or exceeds a rate, is dropped: an
// Event is a hint.
type Queue struct {
	client  client.Writer
	clock   clock.PassiveClock
	waiting chan *corev1.Event

	mu         sync.Mutex
	total      *rate.Limiter
	namespaces map[string]*rate.Limiter
}

// NewQueue returns an empty queue. Events are written once it is started.
func NewQueue(c client.Writer, now clock.PassiveClock) *Queue {
	return &Queue{
		client: c, clock: now, waiting: make(chan *corev1.Event, maxQueued),
		total: rate.NewLimiter(totalRate, totalBurst), namespaces: map[string]*rate.Limiter{},
	}
}

// Add queues Events. It never waits, and returns how many were dropped.
func (q *Queue) Add(list ...*corev1.Event) (dropped int) {
	for _, e := range list {
		if !q.allow(e.Namespace) {
			dropped++
			continue
		}
		select {
		case q.waiting <- e:
		default:
			dropped++
		}
	}
	return dropped
}

// allow reports whether the rates permit one more Event in the namespace. One that its namespace has spent costs the others nothing.
func (q *Queue) allow(namespace string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	own := q.namespaces[namespace]
	if own == nil {
		if len(q.namespaces) >= maxNamespaces {
			clear(q.namespaces)
		}
		own = rate.NewLimiter(namespaceRate, namespaceBurst)
		q.namespaces[namespace] = own
	}
	now := q.clock.Now()
	return own.AllowN(now, 1) && q.total.AllowN(now, 1)
}

// Start writes Events until the context ends, for manager.Runnable.
func (q *Queue) Start(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-q.waiting:
			// A namespace that does not exist has no Events.
			if err := Write(ctx, q.client, e); client.IgnoreNotFound(err) != nil && ctx.Err() == nil {
				log.FromContext(ctx).Error(err, "an Event is lost")
			}
		}
	}
}

// NeedLeaderElection is false: each replica writes what it was asked about.
func (q *Queue) NeedLeaderElection() bool { return false }
