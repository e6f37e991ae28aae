// Package suspend opens the gates of jobs and pods when the network of their nodes is proven. The webhook gates jobs
// and pods when they are created, as NetworkCheckPolicies ask for. All state is in the API: gated objects carry a
// label, which is removed when they may start.
package suspend

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
	"evenkeel.dev/evenkeel/operator/internal/kube/debounce"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// ReasonOpenedManually is the reason of the Event about a job that somebody else started.
const ReasonOpenedManually = "EvenkeelGateOpenedManually"

// ReasonNotOpened is the reason of the Event about a job whose gate may not be opened.
const ReasonNotOpened = "EvenkeelGateNotOpened"

// Reconciler opens the gates of jobs and pods.
type Reconciler struct {
	jobgate.Evaluator
	live client.Reader
	// gangs caches the waiting gangs by their keys. It saves requests to the API server.
	gangs map[string]*gang
	// pace limits how many pods are opened a second, and slots how many at a time.
	pace  *rate.Limiter
	slots chan struct{}
}

// openRate is how many pods' gates are opened a second, so that a gang of thousands leaves the API server time for
// others.
const openRate = 500

// GatedSelector selects gated jobs and pods.
func GatedSelector() labels.Selector {
	gated, err := labels.NewRequirement(evenkeel.GatedKey, selection.Exists, nil)
	if err != nil {
		panic(err) // the key is a constant
	}
	return labels.NewSelector().Add(*gated)
}

// SetupWithManager starts the controller with the manager.
func (c *Reconciler) SetupWithManager(mgr manager.Manager) error {
	c.start(mgr.GetAPIReader())
	c.Transform = slimmer()
	watcher, err := c.NewController(mgr, "jobgate-suspend", workload.Suspendable(), GatedSelector(), c.reconcileAll)
	if err != nil {
		return err
	}
	return watcher.Watch(source.Kind(c.WaitingCache, client.Object(&corev1.Pod{}), debounce.Handler(c.Delays.Of(podDelay), jobgate.EnqueueAll)))
}

func (c *Reconciler) start(live client.Reader) {
	c.live, c.gangs = live, map[string]*gang{}
	c.pace, c.slots = rate.NewLimiter(openRate, openRate), make(chan struct{}, jobgate.MaxRequests)
	c.Requesters = jobgate.MaxRequests
}

// reconcileAll opens the gates of everything that may start, and requests the checks that the others wait for.
func (c *Reconciler) reconcileAll(ctx context.Context) (reconcile.Result, error) {
	jobs, jobsErr := c.listGatedJobs(ctx)
	pods, podsErr := c.listGatedPods(ctx)
	var waiting []jobgate.Waiter
	for _, h := range append(jobs, pods...) {
		waiting = append(waiting, jobgate.Waiter{Key: h.key, Subject: h.about.UID, Job: h.job, NotBefore: h.notBefore, Apply: func(ctx context.Context, d gate.Decision, changed bool) error {
			return c.applyDecision(ctx, h, d, changed)
		}})
	}
	result, err := c.Evaluate(ctx, waiting)
	if err := errors.Join(jobsErr, podsErr, err); err != nil {
		return reconcile.Result{}, err
	}
	return result, nil
}

// applyDecision records an Event about a changed decision, and opens the gate if that was decided. A gate does not stay
// closed as no Event can be written.
func (c *Reconciler) applyDecision(ctx context.Context, h gatedJob, d gate.Decision, changed bool) error {
	severity := corev1.EventTypeNormal
	if d.Action == gate.OpenUnproven {
		severity = corev1.EventTypeWarning
	}
	var untold error
	if changed {
		untold = events.Write(ctx, c.Client, events.New(h.about, severity, d.Reason, d.Message, c.Clock.Now()))
	}
	if d.Waits() {
		return untold // so that it is told again
	}
	logUntold(ctx, untold)
	if err := h.open(ctx); err != nil {
		c.sayRefused(ctx, h, err)
		return err
	}
	return nil
}

// logUntold logs that an Event could not be written about what happens all the same.
func logUntold(ctx context.Context, err error) {
	if err != nil {
		log.FromContext(ctx).Info("cannot write an Event", "reason", err.Error())
	}
}

// sayRefused records an Event about a gate that the API server does not let Evenkeel open: the job's user sees no log.
// Guards refuse that where somebody else's webhook changes the job on the way.
func (c *Reconciler) sayRefused(ctx context.Context, h gatedJob, err error) {
	if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
		return
	}
	message := "the API server refuses this: " + strings.ReplaceAll(err.Error(), "\n", "; ")
	refused := events.Once(h.about, corev1.EventTypeWarning, ReasonNotOpened, message, "", c.Clock.Now())
	logUntold(ctx, events.Write(ctx, c.Client, refused))
}

// A gatedJob is a suspended job, or the gated pods of one job.
type gatedJob struct {
	key   string
	about corev1.ObjectReference
	job   gate.Job
	// notBefore is when all of it is there.
	notBefore time.Time
	open      func(context.Context) error
}

// listGatedJobs returns the jobs that Evenkeel suspended. From jobs that somebody resumed, or that now wait for Kueue,
// it removes the label.
func (c *Reconciler) listGatedJobs(ctx context.Context) ([]gatedJob, error) {
	var found []gatedJob
	var all []error
	for _, kind := range workload.Suspendable() {
		if _, served := c.OptionalKinds.Served(kind.GroupKind()); !served {
			continue
		}
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		if err := c.WaitingCache.List(ctx, list); err != nil {
			all = append(all, fmt.Errorf("list gated %s: %w", kind.Kind, err))
			continue
		}
		for i := range list.Items {
			job := &list.Items[i]
			if job.GetDeletionTimestamp() != nil {
				continue
			}
			h := gatedJob{
				key:   fmt.Sprintf("%s %s/%s", kind.GroupKind(), job.GetNamespace(), job.GetName()),
				about: corev1.ObjectReference{APIVersion: job.GetAPIVersion(), Kind: job.GetKind(), Namespace: job.GetNamespace(), Name: job.GetName(), UID: job.GetUID()},
				open:  func(ctx context.Context) error { return openJob(ctx, c.Client, job) },
			}
			// The webhook gates annotated jobs only. The label alone does not make Evenkeel start what others have suspended.
			annotated := job.GetAnnotations()[evenkeel.ProfileKey] != ""
			if suspended, _ := workload.Suspended(job); !suspended || !annotated || workload.Queued(job) {
				all = append(all, c.leaveToOthers(ctx, h, job, suspended))
				continue
			}
			var err error
			h.job, err = jobgate.FromJob(job)
			all = append(all, err)
			found = append(found, h)
		}
	}
	return found, errors.Join(all...)
}

// leaveToOthers removes the label from a job that somebody else starts, and changes nothing else. The answer to that
// says who started the job: what the cache has lacks the field managers. A cache that is behind shows the job again,
// and nothing is said twice.
func (c *Reconciler) leaveToOthers(ctx context.Context, h gatedJob, job *unstructured.Unstructured, suspended bool) error {
	left, err := patchGate(ctx, c.Client, job, nil)
	if err != nil || left == nil || suspended {
		return err
	}
	message := fmt.Sprintf("the job was started by %s before its nodes were proven", cmp.Or(lastManager(left, workload.SuspendPath(left)), "somebody else"))
	// A process that ends now says it all the same: the next one no longer finds the label.
	logUntold(ctx, events.Write(context.WithoutCancel(ctx), c.Client, events.New(h.about, corev1.EventTypeWarning, ReasonOpenedManually, message, c.Clock.Now())))
	return nil
}

// lastManager returns the field manager that last wrote the field; empty if that is not known.
func lastManager(object client.Object, path []string) string {
	var keys []string
	for _, name := range path {
		keys = append(keys, "f:"+name)
	}
	var last metav1.ManagedFieldsEntry
	for _, entry := range object.GetManagedFields() {
		var fields map[string]any
		if entry.FieldsV1 == nil || json.Unmarshal([]byte(entry.FieldsV1.GetRawString()), &fields) != nil {
			continue
		}
		if _, owns, err := unstructured.NestedFieldNoCopy(fields, keys...); err != nil || !owns {
			continue
		}
		if last.Time == nil || entry.Time != nil && last.Time.Before(entry.Time) {
			last = entry
		}
	}
	return last.Manager
}
