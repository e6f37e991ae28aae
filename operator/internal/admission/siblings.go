package admission

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/kube/slim"
)

// Siblings knows what the pods got that asked for a profile themselves, by their owner. It watches no others: the API
// server selects them by their label. A list of an owner's pods would look at every pod of the namespace, for each pod
// that is made there. Of a pod its UID is kept, and whether it waits. What pods got is kept once for all that got the
// same.
type Siblings struct {
	mu     sync.Mutex
	pods   map[types.UID]*sibling
	owners map[ownerKey]*family
	// got holds what pods got. Most pods of an owner got the same.
	got slim.Pool[*inject.Resolved]

	synced   chan struct{}
	syncOnce sync.Once
}

// ownerKey names an owner. UIDs are unique, but a pod's label says whatever its user wrote: so it counts in its
// namespace only.
type ownerKey struct {
	namespace string
	owner     types.UID
}

// A family is the pods of one owner.
type family struct {
	pods map[types.UID]*sibling
	// started is the number of pods that do not wait.
	started int
}

// A sibling is what is kept of a pod.
type sibling struct {
	uid   types.UID
	owner ownerKey
	// got is nil if the pod's annotations are not what Evenkeel wrote.
	got   *inject.Resolved
	waits bool
}

// NewSiblings returns one that knows nothing yet.
func NewSiblings() *Siblings {
	return &Siblings{pods: map[types.UID]*sibling{}, owners: map[ownerKey]*family{}, synced: make(chan struct{})}
}

// SetupWithManager makes it watch while the manager runs.
func (s *Siblings) SetupWithManager(mgr manager.Manager) error {
	source, err := metadata.NewForConfigAndClient(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return fmt.Errorf("client for pods: %w", err)
	}
	pods := source.Resource(corev1.SchemeGroupVersion.WithResource("pods"))
	listWatch := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.LabelSelector = evenkeel.OwnerKey
			return pods.List(ctx, options)
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.LabelSelector = evenkeel.OwnerKey
			return pods.Watch(ctx, options)
		},
	}
	return mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		cache.NewReflectorWithOptions(listWatch, &metav1.PartialObjectMetadata{}, s, cache.ReflectorOptions{Name: "siblings"}).RunWithContext(ctx)
		return nil
	}))
}

// Ready implements healthz.Checker: the pods are listed.
func (s *Siblings) Ready(*http.Request) error {
	select {
	case <-s.synced:
		return nil
	default:
		return errors.New("pods that asked for a profile themselves are not listed yet")
	}
}

// gotFrom returns what a pod of the owner got from the profile of this name.
func (s *Siblings) gotFrom(ctx context.Context, profile string, owner ownerKey) (got inject.Resolved, found bool, err error) {
	if err := s.wait(ctx); err != nil {
		return got, false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if all := s.owners[owner]; all != nil {
		for _, pod := range all.pods {
			if pod.got != nil && pod.got.Profile == profile {
				return *pod.got, true, nil
			}
		}
	}
	return got, false, nil
}

// hasStarted reports whether the owner has a pod that does not wait.
func (s *Siblings) hasStarted(ctx context.Context, owner ownerKey) (bool, error) {
	if err := s.wait(ctx); err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	all := s.owners[owner]
	return all != nil && all.started > 0, nil
}

// wait returns when the pods are listed. The webhook is not ready before, so that this takes no time.
func (s *Siblings) wait(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, maxLookup)
	defer cancel()
	select {
	case <-s.synced:
		return nil
	case <-ctx.Done():
		return s.Ready(nil)
	}
}

// Transformer implements cache.TransformingStore, so that the first list is not kept as whole metadata.
func (s *Siblings) Transformer() cache.TransformFunc {
	return func(object any) (any, error) {
		if pod := s.reduce(object); pod != nil {
			return pod, nil
		}
		return object, nil
	}
}

// reduce returns what is kept of a pod; nil for anything else.
func (s *Siblings) reduce(object any) *sibling {
	pod, ok := object.(*metav1.PartialObjectMetadata)
	if !ok {
		reduced, _ := object.(*sibling)
		return reduced
	}
	reduced := &sibling{
		uid: pod.UID, owner: ownerKey{pod.Namespace, types.UID(pod.Labels[evenkeel.OwnerKey])}, waits: pod.Labels[evenkeel.GatedKey] != "",
	}
	if got, err := inject.FromPod(pod.Labels, pod.Annotations); err == nil {
		reduced.got = s.got.Get(fmt.Appendf(nil, "%q", []any{got.Labels(), got.Annotations()}), func() *inject.Resolved { return &got })
	}
	return reduced
}

// Add implements cache.ReflectorStore.
func (s *Siblings) Add(object any) error {
	if pod := s.reduce(object); pod != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.put(pod)
	}
	return nil
}

// put keeps a pod in the place of what it was before. Its label may name another owner now.
func (s *Siblings) put(pod *sibling) {
	s.remove(pod.uid)
	s.pods[pod.uid] = pod
	all := s.owners[pod.owner]
	if all == nil {
		all = &family{pods: map[types.UID]*sibling{}}
		s.owners[pod.owner] = all
	}
	all.pods[pod.uid] = pod
	if !pod.waits {
		all.started++
	}
}

func (s *Siblings) remove(uid types.UID) {
	pod := s.pods[uid]
	if pod == nil {
		return
	}
	delete(s.pods, uid)
	all := s.owners[pod.owner]
	delete(all.pods, uid)
	if !pod.waits {
		all.started--
	}
	if len(all.pods) == 0 {
		delete(s.owners, pod.owner)
	}
}

// Update implements cache.ReflectorStore.
func (s *Siblings) Update(object any) error { return s.Add(object) }

// Delete implements cache.ReflectorStore.
func (s *Siblings) Delete(object any) error {
	if pod := s.reduce(object); pod != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.remove(pod.uid)
	}
	return nil
}

// Replace implements cache.ReflectorStore.
func (s *Siblings) Replace(objects []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.pods)
	clear(s.owners)
	for _, object := range objects {
		if pod := s.reduce(object); pod != nil {
			s.put(pod)
		}
	}
	s.syncOnce.Do(func() { close(s.synced) })
	return nil
}

// Resync implements cache.ReflectorStore.
func (s *Siblings) Resync() error { return nil }
