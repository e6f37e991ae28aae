// Package suspend holds jobs until the network of their nodes is proven, as NetworkCheckPolicies ask for. The webhook
// closes the gates when jobs and pods are made; this package opens them. All that it knows lies in the API: what is held
// carries a label, which goes when it may start.
package suspend

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// ReasonStarted is that of the Event about a job that somebody else started.
const ReasonStarted = "EvenkeelGateOpenedByHand"

// Controller opens the gates of jobs and pods.
type Controller struct{ jobgate.Keeper }

// Held selects what is held.
func Held() labels.Selector {
	held, err := labels.NewRequirement(evenkeel.GateKey, selection.Exists, nil)
	if err != nil {
		panic(err) // the key is a constant
	}
	return labels.NewSelector().Add(*held)
}

// SetupWithManager starts the controller with the manager.
func (c *Controller) SetupWithManager(mgr manager.Manager) error {
	watcher, err := c.Watch(mgr, "jobgate-suspend", workload.Suspendable(), Held(), c.look)
	if err != nil {
		return err
	}
	return watcher.Watch(source.Kind(c.Waiting, client.Object(&corev1.Pod{}), jobgate.All))
}

// look opens the gates of all that may start, and asks for the checks that the others wait for.
func (c *Controller) look(ctx context.Context) (reconcile.Result, error) {
	jobs, jobsErr := c.jobs(ctx)
	pods, podsErr := c.pods(ctx)
	var waiting []jobgate.Waiter
	for _, h := range append(jobs, pods...) {
		waiting = append(waiting, jobgate.Waiter{Key: h.key, Told: h.about.UID, Job: h.job, Act: func(ctx context.Context, d gate.Decision, news bool) error {
			return c.act(ctx, h, d, news)
		}})
	}
	result, err := c.Round(ctx, waiting)
	if err := errors.Join(jobsErr, podsErr, err); err != nil {
		return reconcile.Result{}, err
	}
	return result, nil
}

// act tells what was decided, and opens the gate if that was it.
func (c *Controller) act(ctx context.Context, h held, d gate.Decision, news bool) error {
	severity := corev1.EventTypeNormal
	if d.Action == gate.GiveUp {
		severity = corev1.EventTypeWarning
	}
	if news {
		if err := events.Write(ctx, c.Client, events.New(h.about, severity, d.Reason, d.Message, c.Now())); err != nil {
			return err
		}
	}
	if d.Holds() {
		return nil
	}
	return h.open(ctx)
}

// A held is a job, or the pods of one, that waits.
type held struct {
	key   string
	about corev1.ObjectReference
	job   gate.Job
	open  func(context.Context) error
}

// jobs are those that are held by being suspended. Those that are not suspended any more, or now wait for Kueue, are let go.
func (c *Controller) jobs(ctx context.Context) ([]held, error) {
	var found []held
	var all []error
	for _, kind := range workload.Suspendable() {
		if _, served := c.Kinds.Served(kind.GroupKind()); !served {
			continue
		}
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		if err := c.Waiting.List(ctx, list); err != nil {
			all = append(all, fmt.Errorf("list held %s: %w", kind.Kind, err))
			continue
		}
		for i := range list.Items {
			job := &list.Items[i]
			if job.GetDeletionTimestamp() != nil {
				continue
			}
			h := held{
				key:   fmt.Sprintf("%s %s/%s", kind.GroupKind(), job.GetNamespace(), job.GetName()),
				about: corev1.ObjectReference{APIVersion: job.GetAPIVersion(), Kind: job.GetKind(), Namespace: job.GetNamespace(), Name: job.GetName(), UID: job.GetUID()},
				open:  func(ctx context.Context) error { return openJob(ctx, c.Client, job) },
			}
			if suspended, _ := workload.Suspended(job); !suspended || workload.Queued(job) {
				all = append(all, c.letGo(ctx, h, job, suspended))
				continue
			}
			var err error
			h.job, err = jobgate.OfJob(job)
			all = append(all, err)
			found = append(found, h)
		}
	}
	return found, errors.Join(all...)
}

// letGo takes the label from a job that somebody else decides about, and changes nothing else.
func (c *Controller) letGo(ctx context.Context, h held, job *unstructured.Unstructured, suspended bool) error {
	if !suspended {
		e := events.New(h.about, corev1.EventTypeNormal, ReasonStarted, "it was started before its nodes were proven", c.Now())
		if err := events.Write(ctx, c.Client, e); err != nil {
			return err
		}
	}
	return release(ctx, c.Client, job, func(*unstructured.Unstructured) error { return nil })
}

// pods are those with the scheduling gate, by the job that made them.
func (c *Controller) pods(ctx context.Context) ([]held, error) {
	var list corev1.PodList
	if err := c.Waiting.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("list held pods: %w", err)
	}
	abouts := map[types.UID]corev1.ObjectReference{}
	groups := map[types.UID][]*corev1.Pod{}
	for i := range list.Items {
		pod := &list.Items[i]
		if pod.DeletionTimestamp != nil {
			continue
		}
		about := corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
		if o := metav1.GetControllerOfNoCopy(pod); o != nil {
			about = corev1.ObjectReference{APIVersion: o.APIVersion, Kind: o.Kind, Namespace: pod.Namespace, Name: o.Name, UID: o.UID}
		}
		abouts[about.UID] = about
		groups[about.UID] = append(groups[about.UID], pod)
	}
	var found []held
	for _, uid := range slices.Sorted(maps.Keys(groups)) {
		about, pods := abouts[uid], groups[uid]
		open := func(ctx context.Context) error {
			var all []error
			for _, pod := range pods {
				all = append(all, openPod(ctx, c.Client, pod))
			}
			return errors.Join(all...)
		}
		found = append(found, held{key: fmt.Sprintf("pods of %s %s/%s", about.Kind, about.Namespace, about.Name), about: about, job: jobgate.OfPods(pods), open: open})
	}
	return found, nil
}
