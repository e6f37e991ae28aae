// Package optionalwatch watches kinds of CRDs that may be installed while the program runs.
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

// A Watch watches each kind as soon as the cluster serves it.
type Watch struct {
	// Kinds to watch, as unstructured objects in the Cache. A kind without a version is watched in the preferred one.
	Kinds []schema.GroupVersionKind
	Cache cache.Cache
	// Mapper knows which kinds the cluster serves. It is asked every Poll.
	Mapper meta.RESTMapper
	Poll   time.Duration
	// Controller receives the Request for every event that passes the Predicates.
	Controller controller.Controller
	Request    reconcile.Request
	Predicates []predicate.TypedPredicate[*unstructured.Unstructured]
	// Wanted reports whether a kind is to be watched from now on. If it is nil, every kind is.
	Wanted func(schema.GroupKind) bool

	mu     sync.Mutex
	served map[schema.GroupKind]schema.GroupVersionKind
}

// Start polls for the kinds until the context ends.
func (w *Watch) Start(ctx context.Context) error {
	ticker := time.NewTicker(w.Poll)
	defer ticker.Stop()
	for {
		for _, kind := range w.Kinds {
			if _, served := w.Served(kind.GroupKind()); !served && (w.Wanted == nil || w.Wanted(kind.GroupKind())) {
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
			logger.Info("cannot discover the kind yet", "reason", err.Error())
		}
		return
	}
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(mapping.GroupVersionKind)
	// Reading a kind requires that it is watched.
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
	// The first events may have arrived before the kind counted as served, and no others may follow.
	again := source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		queue.Add(w.Request)
		return nil
	})
	if err := w.Controller.Watch(again); err != nil {
		logger.Info("cannot enqueue the existing objects of the kind", "reason", err.Error())
	}
}

// Served returns the kind with the watched version, if it is watched.
func (w *Watch) Served(kind schema.GroupKind) (watched schema.GroupVersionKind, served bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	watched, served = w.served[kind]
	return watched, served
}
