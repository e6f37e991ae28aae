// Package suspicions acts on what running jobs report to wait for. It writes Events on the job and on the nodes that it
// names, and keeps suspicions of a node's network in the NodeNetworkHealth, until a check decides them after the job.
// A job's report about a node counts only if the job has a pod there. If the node has accelerators, the pod must use
// some.
package suspicions

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
	"evenkeel.dev/evenkeel/operator/internal/suspects"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// Reasons of the Events.
const (
	// ReasonJobWaits is the reason of the Event on the job.
	ReasonJobWaits = "EvenkeelJobWaits"
	// ReasonNodeSuspected is the reason of the Event on a node whose network a job names.
	ReasonNodeSuspected = "EvenkeelNodeSuspected"
	// ReasonProcessLate is the reason of the Event on a node where a process is late. The node's network is not at fault.
	ReasonProcessLate = "EvenkeelProcessLate"
)

// maxTold is the maximum number of jobs remembered. Beyond it all are dropped, which costs some requests for each.
const maxTold = 4096

// retry is the pause before a conflicting write is repeated.
const retry = time.Second

// Reconciler acts on what jobs report while they run. Of pods it watches metadata only.
type Reconciler struct {
	Clock clock.PassiveClock
	// Poll is the interval at which a job that suspects a node is examined, because its pods' termination is not watched.
	Poll time.Duration

	client client.Client
	live   client.Reader
	// told holds the last report about each job. It saves requests.
	told map[types.NamespacedName]telling
}

// A telling is the last report about a job.
type telling struct {
	key    string
	nodes  []accusation
	events bool // they are written
}

// An accusation is a job's report about a node on which it has a pod.
type accusation struct {
	node  string
	class evenkeel.SuspectClass
}

// SetupWithManager starts the controller with the manager.
func (c *Reconciler) SetupWithManager(mgr manager.Manager) error {
	c.client, c.live, c.told = mgr.GetClient(), mgr.GetAPIReader(), map[types.NamespacedName]telling{}
	add := func(queue workqueue.TypedRateLimitingInterface[reconcile.Request], pod client.Object) {
		queue.Add(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: pod.GetNamespace(), Name: string(workload.JobOf(pod).UID)}})
	}
	said := func(pod client.Object) string { return pod.GetAnnotations()[evenkeel.SuspectsKey] }
	return builder.ControllerManagedBy(mgr).Named("suspicions").
		WatchesMetadata(&corev1.Pod{}, handler.Funcs{
			CreateFunc: func(_ context.Context, e event.CreateEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
				if said(e.Object) != "" {
					add(queue, e.Object)
				}
			},
			UpdateFunc: func(_ context.Context, e event.UpdateEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
				if said(e.ObjectOld) != said(e.ObjectNew) {
					add(queue, e.ObjectNew)
				}
			},
			DeleteFunc: func(_ context.Context, e event.DeleteEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
				if said(e.Object) != "" {
					add(queue, e.Object)
				}
			},
		}).
		// After a restart, the jobs of open suspicions are found by these.
		Watches(&evenkeel.NodeNetworkHealth{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, object client.Object) (requests []reconcile.Request) {
			state, ok := object.(*evenkeel.NodeNetworkHealth)
			if !ok {
				return nil
			}
			for _, s := range state.Status.Suspicions {
				if s.JobEndTime == nil {
					requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Namespace: s.Job.Namespace, Name: s.Job.UID}})
				}
			}
			return requests
		})).
		Complete(c)
}

// Reconcile handles one job, whose UID is the request's name.
func (c *Reconciler) Reconcile(ctx context.Context, job reconcile.Request) (reconcile.Result, error) {
	pods := &metav1.PartialObjectMetadataList{}
	pods.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PodList"))
	// They are the cache's own, and only read.
	if err := c.client.List(ctx, pods, client.InNamespace(job.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return reconcile.Result{}, fmt.Errorf("list pods: %w", err)
	}
	now := c.Clock.Now()
	uid := types.UID(job.Name)
	reporter, standing := newest(pods.Items, uid, now)
	var told telling
	var next time.Duration
	if standing == nil {
		delete(c.told, job.NamespacedName)
	} else {
		var err error
		if told, err = c.tell(ctx, job.NamespacedName, reporter, standing, pods.Items); err != nil {
			return reconcile.Result{}, err
		}
		if len(c.told) >= maxTold {
			clear(c.told)
		}
		c.told[job.NamespacedName] = told
		next = max(standing.At.Add(suspects.Lifetime).Sub(now), time.Second)
		if !told.events {
			next = c.Poll
		}
	}
	nodes, about, err := c.suspected(ctx, job.Namespace, uid)
	if err != nil {
		return reconcile.Result{}, err
	}
	if standing != nil {
		about = jobOf(reporter)
		for _, a := range told.nodes {
			if a.class != evenkeel.SuspectLate && !slices.Contains(nodes, a.node) {
				nodes = append(nodes, a.node)
			}
		}
	}
	if len(nodes) == 0 || len(job.Name) > maxUID {
		return reconcile.Result{RequeueAfter: next}, nil
	}
	ended, err := c.ended(ctx, about, nodes)
	if err != nil {
		return reconcile.Result{}, err
	}
	if !ended {
		next = c.Poll
	} else if standing == nil || told.events {
		next = 0
	}
	for _, node := range nodes {
		again, err := c.record(ctx, node, health.JobView{Namespace: job.Namespace, UID: job.Name, Said: saysOf(node, told.nodes, about, standing), Ended: ended})
		if err != nil {
			return reconcile.Result{}, err
		}
		if again {
			next = retry
		}
	}
	return reconcile.Result{RequeueAfter: next}, nil
}

// newest returns the last report of the job's pods, and which pod sent it. It is nil if no report still counts.
func newest(pods []metav1.PartialObjectMetadata, job types.UID, now time.Time) (reporter *metav1.PartialObjectMetadata, said *suspects.Standing) {
	for i := range pods {
		pod := &pods[i]
		if pod.Annotations[evenkeel.SuspectsKey] == "" || workload.JobOf(pod).UID != job {
			continue
		}
		if s, ok := suspects.Of(pod, now); ok && (said == nil || s.At.After(said.At)) {
			reporter, said = pod, s
		}
	}
	return reporter, said
}

// tell writes the Events, once for each change. A repeated Event is counted, so that a wavering job causes no flood of
// Events. If an Event cannot be written, the nodes are recorded all the same, and the Event is tried again.
func (c *Reconciler) tell(ctx context.Context, job types.NamespacedName, reporter *metav1.PartialObjectMetadata, said *suspects.Standing, pods []metav1.PartialObjectMetadata) (telling, error) {
	next := telling{key: fmt.Sprintf("%s%d", said.Key(), said.Recorded.Unix())}
	if before := c.told[job]; before.key == next.key && before.events {
		return before, nil
	}
	for i := range said.Suspects {
		for _, place := range said.Suspects[i].Places() {
			node, err := c.nodeOf(ctx, place, reporter, pods)
			if err != nil {
				return next, err
			}
			a := accusation{node, said.Suspects[i].Class}
			if node != "" && !slices.Contains(next.nodes, a) {
				next.nodes = append(next.nodes, a)
			}
		}
	}
	about := workload.JobOf(reporter)
	var all []*corev1.Event
	for _, a := range next.nodes {
		node := &corev1.Node{}
		if err := c.client.Get(ctx, client.ObjectKey{Name: a.node}, node); client.IgnoreNotFound(err) != nil {
			return next, fmt.Errorf("read node %s: %w", a.node, err)
		}
		if node.Name == "" {
			continue // it was deleted
		}
		severity, reason := corev1.EventTypeWarning, ReasonNodeSuspected
		if a.class == evenkeel.SuspectLate {
			severity, reason = corev1.EventTypeNormal, ReasonProcessLate
		}
		object := corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}
		message := fmt.Sprintf("%s %s/%s: %s", about.Kind, about.Namespace, about.Name, said.Text)
		all = append(all, events.Once(object, severity, reason, message, string(about.UID)+said.Key(), said.Recorded))
	}
	all = append(all, events.Once(about, corev1.EventTypeWarning, ReasonJobWaits, said.Text, said.Key(), said.Recorded))
	if err := events.Write(ctx, c.client, all...); err != nil {
		log.FromContext(ctx).Info("cannot write an Event", "reason", err.Error())
		return next, nil
	}
	for i := range said.Suspects {
		if c.Clock.Now().Sub(said.Recorded) < suspects.Lifetime { // a controller that starts has not heard of it first
			metrics.Suspected(said.Suspects[i].Class)
		}
	}
	next.events = true
	return next, nil
}

// nodeOf returns the node of a process that the reporter names. It is empty if the job has no running pod there that
// counts. The name of the process's pod decides. A process that does not know its pod reports only the node's name.
func (c *Reconciler) nodeOf(ctx context.Context, place suspects.Place, reporter *metav1.PartialObjectMetadata, pods []metav1.PartialObjectMetadata) (string, error) {
	if place.Pod != "" {
		at := slices.IndexFunc(pods, func(p metav1.PartialObjectMetadata) bool {
			return string(p.UID) == place.Pod && workload.SameJob(&p, reporter)
		})
		if at < 0 {
			return "", nil
		}
		pod := &corev1.Pod{} // only metadata is cached
		if err := c.live.Get(ctx, client.ObjectKeyFromObject(&pods[at]), pod); err != nil {
			return "", client.IgnoreNotFound(err)
		}
		if pod.UID != pods[at].UID || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			return "", nil
		}
		return c.accusable(ctx, pod.Spec.NodeName, []corev1.Pod{*pod})
	}
	there := &corev1.PodList{}
	onNode := fields.AndSelectors(unfinished, fields.OneTermEqualSelector("spec.nodeName", place.Host))
	if err := c.live.List(ctx, there, client.InNamespace(reporter.Namespace), client.MatchingFieldsSelector{Selector: onNode}); err != nil {
		return "", fmt.Errorf("list the pods on node %s: %w", place.Host, err)
	}
	own := slices.DeleteFunc(there.Items, func(p corev1.Pod) bool { return !workload.SameJob(&p, reporter) })
	return c.accusable(ctx, place.Host, own)
}

// accusable returns the node's name if one of the job's pods on it counts, or else an empty string. On a node with
// accelerators, only pods that request some count. Other pods cost nothing, so that anybody could run one on every
// node.
func (c *Reconciler) accusable(ctx context.Context, name string, pods []corev1.Pod) (string, error) {
	node := &corev1.Node{}
	if err := c.client.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return "", client.IgnoreNotFound(err)
	}
	if !slices.ContainsFunc(pods, func(p corev1.Pod) bool { return !accelerator.Usable(node) || accelerator.RequestedBy(&p.Spec) }) {
		return "", nil
	}
	return name, nil
}
