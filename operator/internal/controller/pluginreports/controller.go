package pluginreports

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"evenkeel.dev/evenkeel/operator/internal/kube/debounce"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/pluginstatus"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

const (
	// settleTime is how long reports of a job are collected.
	settleTime = 5 * time.Second
	// maxRead is the maximum number of pods read for one Event.
	maxRead  = 20
	jobIndex = "evenkeel.dev/job"
)

// Reconciler writes Events on jobs about pods that run without the plugin. It watches metadata only.
type Reconciler struct {
	// Clock is the time of the cluster.
	Clock clock.PassiveClock
	// Times are how long pods may take to report.
	Times Times
	// Delays scales how long reports of a job are collected, and how long none may have come before they are told.
	Delays debounce.Scale

	client client.Client
	live   client.Reader
	// said holds the last Event of each job, so that it is not written again.
	said map[types.NamespacedName]string
}

// SetupWithManager starts the controller with the manager.
func (c *Reconciler) SetupWithManager(mgr manager.Manager) error {
	c.client, c.live, c.said = mgr.GetClient(), mgr.GetAPIReader(), map[types.NamespacedName]string{}
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), podMetadata(), jobIndex, func(pod client.Object) []string {
		return []string{string(workload.JobOf(pod).UID)}
	}); err != nil {
		return fmt.Errorf("index pods by job: %w", err)
	}
	// Pods of a job report together: they are looked at together.
	collect := func(queue workqueue.TypedRateLimitingInterface[reconcile.Request], pod client.Object) {
		if _, expected := pluginstatus.Of(pod); expected {
			job := types.NamespacedName{Namespace: pod.GetNamespace(), Name: string(workload.JobOf(pod).UID)}
			queue.AddAfter(reconcile.Request{NamespacedName: job}, c.Delays.Of(settleTime))
		}
	}
	return builder.ControllerManagedBy(mgr).Named("pluginreports").
		WatchesMetadata(&corev1.Pod{}, handler.Funcs{
			CreateFunc: func(_ context.Context, e event.CreateEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
				collect(queue, e.Object)
			},
			UpdateFunc: func(_ context.Context, e event.UpdateEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
				before, _ := pluginstatus.Of(e.ObjectOld)
				if after, _ := pluginstatus.Of(e.ObjectNew); before != after {
					collect(queue, e.ObjectNew)
				}
			},
		}).
		Complete(c)
}

// Reconcile writes the Event of one job, whose UID is the request's name.
func (c *Reconciler) Reconcile(ctx context.Context, job reconcile.Request) (reconcile.Result, error) {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PodList"))
	if err := c.client.List(ctx, list, client.InNamespace(job.Namespace), client.MatchingFields{jobIndex: job.Name}); err != nil {
		return reconcile.Result{}, fmt.Errorf("list the job's pods: %w", err)
	}
	if len(list.Items) == 0 {
		delete(c.said, job.NamespacedName)
		return reconcile.Result{}, nil
	}
	now, times := c.Clock.Now(), c.Times
	times.Quiet = c.Delays.Of(times.Quiet)
	found := decide(list.Items, times, now)
	if !found.again.IsZero() {
		return reconcile.Result{RequeueAfter: max(found.again.Sub(now), c.Delays.Of(time.Second))}, nil
	}
	missing, again, err := c.running(ctx, found, now)
	if err != nil {
		return reconcile.Result{}, err
	}
	reason, severity, message := found.describe(missing)
	if message != "" && c.said[job.NamespacedName] != message {
		about := workload.JobOf(&list.Items[0])
		if err := events.Write(ctx, c.client, events.New(about, severity, reason, message, now)); err != nil {
			return reconcile.Result{}, err
		}
		for range missing {
			metrics.Pod(metrics.NotReported)
		}
		c.said[job.NamespacedName] = message
	}
	return reconcile.Result{RequeueAfter: again}, nil
}

// running returns the silent pods that have run long enough to report. The others are examined again later.
func (c *Reconciler) running(ctx context.Context, found findings, now time.Time) (missing []string, again time.Duration, err error) {
	for i := range found.silent[:min(len(found.silent), maxRead)] {
		pod := &corev1.Pod{}
		if err := c.live.Get(ctx, client.ObjectKeyFromObject(&found.silent[i]), pod); client.IgnoreNotFound(err) != nil {
			return nil, 0, fmt.Errorf("read pod %s: %w", found.silent[i].Name, err)
		}
		switch since := runningSince(pod); {
		case pod.Status.Phase == corev1.PodPending:
			again = found.grace
		case pod.Status.Phase != corev1.PodRunning:
		case now.Sub(since) >= found.grace:
			missing = append(missing, pod.Name)
		default:
			again = max(again, found.grace-now.Sub(since))
		}
	}
	return missing, again, nil
}

// runningSince is when the last of the pod's containers started.
func runningSince(pod *corev1.Pod) time.Time {
	var since time.Time
	for _, s := range pod.Status.ContainerStatuses {
		if s.State.Running != nil && s.State.Running.StartedAt.After(since) {
			since = s.State.Running.StartedAt.Time
		}
	}
	return since
}
