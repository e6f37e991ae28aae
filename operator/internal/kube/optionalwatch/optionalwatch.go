// Package optionalwatch watches kinds that the cluster may come to serve while the program runs.
package optionalwatch

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// A Watch starts to watch each kind when the cluster serves it.
type Watch struct {
	// Kinds to watch, as unstructured objects in the Cache. One without a version is watched in the cluster's preferred one.
	Kinds []schema.GroupVersionKind
	Cache cache.Cache
	// Mapper knows what the cluster serves, and is asked every Poll.
	Mapper meta.RESTMapper
	Poll   time.Duration
	// Controller gets the Request for every event that passes the Predicates.
	Controller controller.Controller
	Request    reconcile.Request
	Predicates []predicate.TypedPredicate[*unstructured.Unstructured]

	mu     sync.Mutex
	served map[schema.GroupKind]schema.GroupVersionKind
}

// Start looks for the kinds until the context ends.
func (w *Watch) Start(ctx context.Context) error {
	ticker := time.NewTicker(w.Poll)
	defer ticker.Stop()
	for {
		for _, kind := range w.Kinds {
			if _, served := w.Served(kind.GroupKind()); !served {
				w.tryWatch(ctx, kind)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func (w *Watch) tryWatch(ctx context.Context, kind schema.GroupVersionKind) {
	logger := log.FromContext(ctx).WithValues("kind", kind.String())
	var wanted []string
	if kind.Version != "" {
		wanted = append(wanted, kind.Version)
	}
	mapping, err := w.Mapper.RESTMapping(kind.GroupKind(), wanted...)
	if err != nil {
		if !meta.IsNoMatchError(err) {
			logger.Info("cannot look for the kind yet", "reason", err.Error())
		}
		return
	}
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(mapping.GroupVersionKind)
	// What is read has to be watched first.
	_, err = w.Cache.GetInformer(ctx, object, cache.BlockUntilSynced(false))
	if err == nil {
		all := handler.TypedEnqueueRequestsFromMapFunc(func(context.Context, *unstructured.Unstructured) []reconcile.Request {
			return []reconcile.Request{w.Request}
		})
		err = w.Controller.Watch(source.Kind(w.Cache, object, all, w.Predicates...))
	}
	if err != nil {
		logger.Info("cannot watch the kind yet", "reason", err.Error())
		return
	}
	w.mu.Lock()
	if w.served == nil {
		w.served = map[schema.GroupKind]schema.GroupVersionKind{}
	}
	w.served[kind.GroupKind()] = mapping.GroupVersionKind
	w.mu.Unlock()
	// The objects' first events may have come before the kind counted as served, and no others may follow.
	again := source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		queue.Add(w.Request)
		return nil
	})
	if err := w.Controller.Watch(again); err != nil {
		logger.Info("cannot look at what there is of the kind", "reason", err.Error())
	}
}

// Served returns the kind with the version that is watched, if it is.
func (w *Watch) Served(kind schema.GroupKind) (watched schema.GroupVersionKind, served bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	watched, served = w.served[kind]
	return watched, served
}
