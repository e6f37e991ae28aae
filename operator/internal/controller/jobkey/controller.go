// Package jobkey makes the keys of jobs whose profile requires encryption, and whose users bring none.
//
// The workload webhook names the Secret in a label on the job and its pods, which wait for it. It is owned by the job,
// and so is deleted with it. Jobs with reduction servers share the key of those.
package jobkey

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/jobkey"
	"evenkeel.dev/evenkeel/operator/internal/kube/labelledjobs"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// retry is the interval at which a key that somebody deleted is made again, while the job's pods wait for it.
const retry = time.Minute

// Reconciler makes the keys.
type Reconciler struct {
	// KindPoll is how often the cluster is asked for kinds of jobs that it does not serve yet.
	KindPoll time.Duration

	client client.Client
	live   client.Reader
	jobs   *labelledjobs.Jobs
}

// SetupWithManager starts the controller with the manager.
func (c *Reconciler) SetupWithManager(mgr manager.Manager) error {
	c.client, c.live = mgr.GetClient(), mgr.GetAPIReader()
	jobs, err := labelledjobs.New(mgr, evenkeel.JobKeyKey, nil)
	if err != nil {
		return err
	}
	c.jobs = jobs
	// What the job's controller writes on its status is no concern.
	changed := predicate.Or[client.Object](predicate.GenerationChangedPredicate{}, predicate.LabelChangedPredicate{})
	built, err := controller.New("jobkey", mgr, controller.Options{Reconciler: c})
	if err != nil {
		return err
	}
	return mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		jobs.Watch(ctx, mgr, c.KindPoll, func(job *unstructured.Unstructured) error {
			return built.Watch(source.Kind[client.Object](jobs.Cache, job, labelledjobs.Named(evenkeel.JobKeyKey), changed))
		})
		return nil
	}))
}

// Reconcile makes the key of a job, unless the job runs: its pods have the key that there was, and a second one would
// part them from those that come later. A job that runs in another cluster has its key there.
func (c *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	job, err := c.jobs.Find(ctx, request.Namespace, request.Name, nil)
	if err != nil || job == nil || job.GetDeletionTimestamp() != nil || workload.Finished(job) || workload.RunsElsewhere(job) || !jobkey.IsName(request.Name) {
		return reconcile.Result{}, err
	}
	runs, err := c.runs(ctx, request)
	if err != nil || runs {
		return reconcile.Result{}, err
	}
	if err := c.makeKey(ctx, job, request.Name); err != nil {
		return reconcile.Result{}, err
	}
	if suspended, _ := workload.Suspended(job); suspended {
		return reconcile.Result{}, nil // to be resumed is an event
	}
	return reconcile.Result{RequeueAfter: retry}, nil
}

// runs reports whether a pod of the job has started, and so holds the key.
func (c *Reconciler) runs(ctx context.Context, key reconcile.Request) (bool, error) {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PodList"))
	started := client.MatchingFieldsSelector{Selector: fields.OneTermNotEqualSelector("status.phase", string(corev1.PodPending))}
	if err := c.live.List(ctx, list, client.InNamespace(key.Namespace), client.MatchingLabels{evenkeel.JobKeyKey: key.Name}, started, client.Limit(1)); err != nil {
		return false, fmt.Errorf("list pods with the key %s: %w", key, err)
	}
	return len(list.Items) > 0, nil
}

// makeKey creates the Secret, if there is none. The controller cannot read it.
func (c *Reconciler) makeKey(ctx context.Context, job *unstructured.Unstructured, name string) error {
	key, err := jobkey.New()
	if err != nil {
		return err
	}
	switch err := c.client.Create(ctx, jobkey.Secret(job, name, key)); {
	case err == nil, apierrors.IsAlreadyExists(err), apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil
	case apierrors.IsForbidden(err):
		return fmt.Errorf("create Secret %s/%s: %w", job.GetNamespace(), name, err)
	default: // the error's text might contain the key
		return fmt.Errorf("create Secret %s/%s: %s", job.GetNamespace(), name, apierrors.ReasonForError(err))
	}
}
