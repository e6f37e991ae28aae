// Package nodeuse knows which pods use the accelerators of which nodes. It watches all pods, and keeps a few words
// about each that uses an accelerator, since a cluster may have a hundred thousand. Pods of checks do not count.
package nodeuse

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/component-helpers/resource"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/kube/debounce"
	"evenkeel.dev/evenkeel/operator/internal/kube/slim"
)

// usingPods selects pods that have a node and have not ended.
var usingPods = fields.ParseSelectorOrDie("spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed")

// maxRemembered is the number of nodes at which unused nodes, such as deleted ones, are dropped.
const maxRemembered = 1 << 14

// changeDelay is how long changes are collected before controllers are notified.
const changeDelay = 500 * time.Millisecond

// Tracker knows the use of all nodes.
type Tracker struct {
	// Namespace is the one whose checks' pods do not count.
	Namespace string
	Clock     clock.PassiveClock
	// Delays scales how long changes are collected.
	Delays debounce.Scale

	mu        sync.Mutex
	nodes     map[string]*node
	listeners []chan struct{}
	synced    chan struct{}
	syncOnce  sync.Once
	// requested holds the requests of pods. Most pods request the same.
	requested slim.Pool[[]count]
}

// node is the use of one node.
type node struct {
	pods map[types.UID]usingPod
	// left is when the last of its pods went, and last that pod's name.
	left time.Time
	last string
}

// usingPod is what is kept of a pod.
type usingPod struct {
	name         string // with its namespace
	accelerators []count
}

// use is the form of a pod in transit. The first list is kept in this form until it is complete.
type use struct {
	uid          types.UID
	name         string // with its namespace
	node         string
	accelerators []count // nil: it uses none
}

// noUse is the form of a pod without accelerators in transit.
var noUse = &use{}

type count struct {
	name  corev1.ResourceName
	count int64
}

// New returns a tracker. The namespace is the one whose checks' pods do not count.
func New(namespace string, c clock.PassiveClock) *Tracker {
	return &Tracker{Namespace: namespace, Clock: c, nodes: map[string]*node{}, synced: make(chan struct{})}
}

// readLimit is the number of pods that Read reads at a time.
const readLimit = 500

// Read returns a tracker that knows the use of this moment. Without a namespace, no check's pods count.
func Read(ctx context.Context, from client.Reader, namespace string) (*Tracker, error) {
	t := New(namespace, clock.RealClock{})
	var pods corev1.PodList
	for {
		if err := from.List(ctx, &pods, client.Limit(readLimit), client.Continue(pods.Continue)); err != nil {
			return nil, fmt.Errorf("list pods: %w", err)
		}
		for i := range pods.Items {
			if phase := pods.Items[i].Status.Phase; phase == corev1.PodSucceeded || phase == corev1.PodFailed {
				continue
			}
			if err := t.Add(&pods.Items[i]); err != nil {
				return nil, err
			}
		}
		if pods.Continue == "" {
			return t, nil
		}
	}
}

// SetupWithManager makes the tracker watch while the manager leads.
func (t *Tracker) SetupWithManager(mgr manager.Manager) error {
	config := rest.CopyConfig(mgr.GetConfig())
	// All pods of the cluster come this way when the controller starts: as JSON, each would leave much more garbage.
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	clientset, err := kubernetes.NewForConfigAndClient(config, mgr.GetHTTPClient())
	if err != nil {
		return fmt.Errorf("client for pods: %w", err)
	}
	watch := cache.NewListWatchFromClient(clientset.CoreV1().RESTClient(), "pods", metav1.NamespaceAll, usingPods)
	return mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		cache.NewReflectorWithOptions(watch, &corev1.Pod{}, t, cache.ReflectorOptions{Name: "nodeuse"}).RunWithContext(ctx)
		return nil
	}))
}

// User returns the name of a pod that uses accelerators of the node now; empty if there is none.
func (t *Tracker) User(nodeName string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := t.nodes[nodeName]; n != nil {
		return n.user()
	}
	return ""
}

func (n *node) user() string {
	first := ""
	for _, u := range n.pods {
		if first == "" || u.name < first {
			first = u.name
		}
	}
	return first
}

// UserSince returns the name of a pod that used accelerators of the node at some time after since; empty if none is
// known to have. Times of the API have whole seconds, so use that ended in the same second does not count.
func (t *Tracker) UserSince(nodeName string, since time.Time) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.nodes[nodeName]
	switch {
	case n == nil:
		return ""
	case len(n.pods) > 0:
		return n.user()
	case n.left.Truncate(time.Second).After(since):
		return n.last
	}
	return ""
}

// Left returns when the last pod that used accelerators of the node went. It is zero if none did since the controller
// started, or if one uses them now.
func (t *Tracker) Left(nodeName string) time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := t.nodes[nodeName]; n != nil && len(n.pods) == 0 {
		return n.left
	}
	return time.Time{}
}

// Used returns the accelerators of the node that pods have requested.
func (t *Tracker) Used(nodeName string) map[corev1.ResourceName]int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	used := map[corev1.ResourceName]int64{}
	if n := t.nodes[nodeName]; n != nil {
		for _, u := range n.pods {
			for _, a := range u.accelerators {
				used[a.name] += a.count
			}
		}
	}
	return used
}

// Source returns a source of requests: the function returns the requests to make when the use of a node changes; nil
// makes none. A controller that watches it starts when the use of all nodes is known.
func (t *Tracker) Source(requests handler.MapFunc) *Changes { return &Changes{t, requests} }

// Changes is a source of requests for a controller.
type Changes struct {
	tracker  *Tracker
	requests handler.MapFunc
}

// Start implements source.Source.
func (c *Changes) Start(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	if c.requests == nil {
		return nil
	}
	changed := make(chan struct{}, 1)
	c.tracker.mu.Lock()
	c.tracker.listeners = append(c.tracker.listeners, changed)
	c.tracker.mu.Unlock()
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-changed:
				for _, request := range c.requests(ctx, nil) {
					queue.AddAfter(request, c.tracker.Delays.Of(changeDelay))
				}
			}
		}
	}()
	return nil
}

// WaitForSync implements source.SyncingSource.
func (c *Changes) WaitForSync(ctx context.Context) error {
	select {
	case <-c.tracker.synced:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the pods of the cluster could not be listed: %w", context.Cause(ctx))
	}
}

// Transformer implements cache.TransformingStore, so that the first list is not kept as whole pods.
func (t *Tracker) Transformer() cache.TransformFunc {
	return func(object any) (any, error) {
		if pod, ok := object.(*corev1.Pod); ok {
			return t.useOf(pod), nil
		}
		return object, nil
	}
}

// useOf returns the use of a pod.
func (t *Tracker) useOf(pod *corev1.Pod) *use {
	if (t.Namespace == "" || pod.Namespace == t.Namespace) && pod.Labels[evenkeel.CheckKey] != "" {
		return noUse
	}
	if !accelerator.RequestedBy(&pod.Spec) {
		return noUse
	}
	requested, key := []count{}, []byte{} // a claim is use, whatever it claims
	for name, quantity := range resource.PodRequests(pod, resource.PodResourcesOptions{}) {
		if accelerator.IsResource(name) {
			requested, key = append(requested, count{name, quantity.Value()}), fmt.Appendf(key, "%s %d ", name, quantity.Value())
		}
	}
	return &use{
		uid: pod.UID, name: pod.Namespace + "/" + pod.Name, node: pod.Spec.NodeName,
		accelerators: t.requested.Get(key, func() []count { return requested }),
	}
}

func (t *Tracker) toUse(object any) *use {
	switch o := object.(type) {
	case *use:
		return o
	case *corev1.Pod:
		return t.useOf(o)
	}
	return nil
}

// Add implements cache.ReflectorStore.
func (t *Tracker) Add(object any) error {
	u := t.toUse(object)
	if u == nil || u.accelerators == nil || u.node == "" {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.nodes[u.node]
	if n == nil {
		if len(t.nodes) >= maxRemembered {
			maps.DeleteFunc(t.nodes, func(_ string, n *node) bool { return len(n.pods) == 0 })
		}
		n = &node{pods: map[types.UID]usingPod{}}
		t.nodes[u.node] = n
	}
	_, had := n.pods[u.uid]
	n.pods[u.uid] = usingPod{u.name, u.accelerators}
	if !had {
		t.notify()
	}
	return nil
}

// Update implements cache.ReflectorStore.
func (t *Tracker) Update(object any) error { return t.Add(object) }

// Delete implements cache.ReflectorStore.
func (t *Tracker) Delete(object any) error {
	u := t.toUse(object)
	if u == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := t.nodes[u.node]; n != nil {
		if _, had := n.pods[u.uid]; had {
			t.remove(n, u.uid)
			t.notify()
		}
	}
	return nil
}

func (t *Tracker) remove(n *node, uid types.UID) {
	n.last = n.pods[uid].name
	n.left = t.Clock.Now()
	delete(n.pods, uid)
}

// Replace implements cache.ReflectorStore.
func (t *Tracker) Replace(objects []any, _ string) error {
	present := map[types.UID]bool{}
	for _, object := range objects {
		if u := t.toUse(object); u != nil {
			present[u.uid] = true
			if err := t.Add(u); err != nil {
				return err
			}
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, n := range t.nodes {
		for _, uid := range slices.Collect(maps.Keys(n.pods)) {
			if !present[uid] {
				t.remove(n, uid)
			}
		}
	}
	t.notify()
	t.syncOnce.Do(func() { close(t.synced) })
	return nil
}

// Resync implements cache.ReflectorStore.
func (t *Tracker) Resync() error { return nil }

func (t *Tracker) notify() {
	for _, listener := range t.listeners {
		select {
		case listener <- struct{}{}:
		default: // the pending change is looked at after this one
		}
	}
}
