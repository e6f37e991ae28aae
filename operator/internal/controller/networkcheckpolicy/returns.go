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

// returns knows when nodes were given back that were drained or cordoned, or started again, since the controller started: nodes do not
// say it. A node that starts again soon enough stays ready.
type returns struct {
	clock clock.PassiveClock

	mu sync.Mutex
	at map[string]time.Time // by node
}

// watch is a predicate that notes what happens to nodes, and passes that and what the next one does.
func (r *returns) watch(next predicate.Predicate) predicate.Predicate {
	return predicate.Funcs{
		CreateFunc:  next.Create,
		GenericFunc: next.Generic,
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.(*corev1.Node), e.ObjectNew.(*corev1.Node)
			boot := before.Status.NodeInfo.BootID
			returned := nodedrain.Of(before) && !nodedrain.Of(after) || boot != "" && boot != after.Status.NodeInfo.BootID
			if returned {
				r.note(after.Name, r.clock.Now())
			}
			return returned || next.Update(e)
		},
		DeleteFunc: func(e event.DeleteEvent) bool {
			r.note(e.Object.GetName(), time.Time{})
			return next.Delete(e)
		},
	}
}

// note notes when a node returned; zero: it is gone.
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

// of is when the node last returned; zero: never, as far as is known.
func (r *returns) of(node string) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.at[node]
}
