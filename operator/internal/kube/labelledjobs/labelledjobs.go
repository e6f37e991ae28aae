// Package labelledjobs watches the jobs of all kinds that have a label. A kind may be served later than the program
// starts.
package labelledjobs

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// listTimeout bounds the first listing of a kind of job, which is tried again.
const listTimeout = 30 * time.Second

// Jobs are the jobs with a label, and other objects that are cached with them.
type Jobs struct {
	// Cache holds the jobs, and the objects passed to New. The manager's cache holds other Jobs and pods.
	Cache cache.Cache

	label string
	mu    sync.Mutex
	// kinds of jobs that are watched and listed.
	kinds []schema.GroupVersionKind
}

// New returns the jobs with the label, and adds their cache to the manager.
func New(mgr manager.Manager, label string, byObject map[client.Object]cache.ByObject) (*Jobs, error) {
	watched, err := cache.New(mgr.GetConfig(), cache.Options{
		HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
		DefaultLabelSelector: Exists(label),
		ByObject:             byObject,
		DefaultTransform:     cache.TransformStripManagedFields(),
		// Otherwise reading a kind that is not watched would start a watch.
		ReaderFailOnMissingInformer: true,
	})
	if err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	if err := mgr.Add(watched); err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	return &Jobs{Cache: watched, label: label}, nil
}

// Exists selects objects with the label.
func Exists(label string) labels.Selector {
	r, err := labels.NewRequirement(label, selection.Exists, nil)
	if err != nil {
		panic(err) // the labels are constants
	}
	return labels.NewSelector().Add(*r)
}

// Named enqueues the object that the label names, in the namespace of the one that has it.
func Named(label string) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(_ context.Context, object client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: object.GetNamespace(), Name: object.GetLabels()[label]}}}
	})
}

// Watch watches every kind of job as soon as the cluster serves it. The cluster is asked every poll.
func (j *Jobs) Watch(ctx context.Context, mgr manager.Manager, poll time.Duration, watch func(*unstructured.Unstructured) error) {
	missing := workload.Kinds()
	// It ends when all kinds are watched, or with the manager.
	_ = wait.PollUntilContextCancel(ctx, poll, true, func(ctx context.Context) (bool, error) {
		missing = slices.DeleteFunc(missing, func(kind schema.GroupKind) bool {
			mapping, err := mgr.GetRESTMapper().RESTMapping(kind)
			if err != nil {
				return false // not served, or currently unknown
			}
			job := &unstructured.Unstructured{}
			job.SetGroupVersionKind(mapping.GroupVersionKind)
			if err = j.list(ctx, job); err == nil {
				err = watch(job)
			}
			if err != nil && ctx.Err() == nil {
				mgr.GetLogger().Error(err, "watch jobs", "kind", mapping.GroupVersionKind.String(), "label", j.label)
			}
			return err == nil
		})
		return len(missing) == 0, nil
	})
}

// list waits until all jobs of the kind are listed. Before that, a job that is not found may exist.
func (j *Jobs) list(ctx context.Context, job *unstructured.Unstructured) error {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	if _, err := j.Cache.GetInformer(ctx, job); err != nil {
		return fmt.Errorf("list: %w", err)
	}
	if !j.Cache.WaitForCacheSync(ctx) {
		return fmt.Errorf("not listed within %s", listTimeout)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if kind := job.GroupVersionKind(); !slices.Contains(j.kinds, kind) {
		j.kinds = append(j.kinds, kind)
	}
	return nil
}

// Find returns the job whose label has the value: the one of the owners, if there are some, else the oldest. Nil: there
// is none, or its kind is not listed yet.
func (j *Jobs) Find(ctx context.Context, namespace, value string, owners []metav1.OwnerReference) (*unstructured.Unstructured, error) {
	j.mu.Lock()
	kinds := slices.Clone(j.kinds)
	j.mu.Unlock()
	var found *unstructured.Unstructured
	for _, kind := range kinds {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		if err := j.Cache.List(ctx, list, client.InNamespace(namespace), client.MatchingLabels{j.label: value}); err != nil {
			return nil, fmt.Errorf("list %s: %w", list.GetKind(), err)
		}
		for i := range list.Items {
			job := &list.Items[i]
			if slices.ContainsFunc(owners, func(o metav1.OwnerReference) bool { return o.UID == job.GetUID() }) {
				return job, nil
			}
			if len(owners) == 0 && (found == nil || job.GetCreationTimestamp().Time.Before(found.GetCreationTimestamp().Time)) {
				found = job
			}
		}
	}
	return found, nil
}
