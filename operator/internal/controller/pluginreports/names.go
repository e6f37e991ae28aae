package pluginreports

import (
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// podNames maps the UIDs of the cached pods to their names. An index of the cache would keep two sets for each pod,
// which take more memory than the pod.
type podNames struct {
	mu    sync.RWMutex
	named map[types.UID]types.NamespacedName
}

func newPodNames() *podNames { return &podNames{named: map[types.UID]types.NamespacedName{}} }

// of returns the name of the pod.
func (p *podNames) of(uid types.UID) (name types.NamespacedName, known bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	name, known = p.named[uid]
	return name, known
}

// OnAdd implements cache.ResourceEventHandler.
func (p *podNames) OnAdd(object any, _ bool) { p.replace(nil, object) }

// OnUpdate implements cache.ResourceEventHandler. The strings are taken from the new object, so that they do not keep
// the old one in memory.
func (p *podNames) OnUpdate(before, after any) { p.replace(before, after) }

// OnDelete implements cache.ResourceEventHandler.
func (p *podNames) OnDelete(object any) {
	if unknown, is := object.(cache.DeletedFinalStateUnknown); is {
		object = unknown.Obj
	}
	p.replace(object, nil)
}

func (p *podNames) replace(before, after any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pod, ok := before.(*metav1.PartialObjectMetadata); ok {
		delete(p.named, pod.UID)
	}
	if pod, ok := after.(*metav1.PartialObjectMetadata); ok {
		p.named[pod.UID] = types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
	}
}
