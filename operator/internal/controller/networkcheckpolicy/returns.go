package networkcheckpolicy

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"evenkeel.dev/evenkeel/operator/internal/nodedrain"
)

// returns knows when nodes were given back that were drained or cordoned, since the controller started: nodes do not say it.
type returns struct {
	clock clock.PassiveClock

	mu sync.Mutex
	at map[string]time.Time // by node
}

// watch is a predicate that notes what happens to nodes, and passes what the next one does.
func (r *returns) watch(next predicate.Predicate) predicate.Predicate {
	return predicate.Funcs{
		CreateFunc:  next.Create,
		GenericFunc: next.Generic,
		UpdateFunc: func(e event.UpdateEvent) bool {
			if nodedrain.Of(e.ObjectOld.(*corev1.Node)) && !nodedrain.Of(e.ObjectNew.(*corev1.Node)) {
				r.note(e.ObjectNew.GetName(), r.clock.Now())
			}
			return next.Update(e)
		},
		DeleteFunc: func(e event.DeleteEvent) bool {
			r.note(e.Object.GetName(), time.Time{})
			return next.Delete(e)
		},
	}
}

// note notes when a node was given back; zero: it is gone.
func (r *returns) note(node string, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.at == nil {
		r.at = map[string]time.Time{}
	}
	if r.at[node] = at; at.IsZero() {
		delete(r.at, node)
	}
}

// of is when the node was last given back; zero: never, as far as is known.
func (r *returns) of(node string) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.at[node]
}
