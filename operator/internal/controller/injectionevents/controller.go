// Package injectionevents tells users what happened to their pods: it turns what the pod webhook left alone, and pods that it
// never saw, into Events on the pod and on the job that made it; and it tells a job which nodes it is kept off.
package injectionevents

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
)

// Reasons of the Events.
const (
	ReasonSkipped     = "EvenkeelSkipped"
	ReasonNotInjected = "EvenkeelNotInjected"
	ReasonKeptOff     = "EvenkeelKeptOff"
)

// news is how long after a pod was made it is news.
const news = 5 * time.Minute

// Controller writes Events about labelled pods.
type Controller struct {
	client client.Client
	live   client.Reader
	now    func() time.Time
	// told spares the API server what it was told already: for each job, the nodes that it keeps off.
	told map[types.UID]string
}

// Cached keeps of the cluster's pods only those with our label.
func Cached() map[client.Object]cache.ByObject {
	labelled, err := labels.NewRequirement(evenkeel.ProfileKey, selection.Exists, nil)
	if err != nil {
		panic(err) // the key is a constant
	}
	return map[client.Object]cache.ByObject{&corev1.Pod{}: {
		Label:     labels.NewSelector().Add(*labelled),
		Transform: cache.TransformStripManagedFields(),
	}}
}

// SetupWithManager starts the controller with the manager. It watches metadata only.
func (c *Controller) SetupWithManager(mgr manager.Manager) error {
	c.client, c.live, c.now, c.told = mgr.GetClient(), mgr.GetAPIReader(), time.Now, map[types.UID]string{}
	// Reading what is not watched is an error.
	if _, err := mgr.GetCache().GetInformer(context.Background(), &corev1.Node{}); err != nil {
		return fmt.Errorf("watch nodes: %w", err)
	}
	// What the webhook wrote when the pod was created is all there is to say about it.
	created := predicate.Funcs{
		UpdateFunc: func(event.UpdateEvent) bool { return false },
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	}
	return builder.ControllerManagedBy(mgr).Named("injectionevents").
		For(&corev1.Pod{}, builder.OnlyMetadata, builder.WithPredicates(created)).
		Complete(c)
}

// Reconcile writes the pod's Events.
func (c *Controller) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	pod := &metav1.PartialObjectMetadata{}
	pod.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Pod"))
	if err := c.client.Get(ctx, request.NamespacedName, pod); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if err := events.Write(ctx, c.client, Events(pod, c.now())...); err != nil {
		return reconcile.Result{}, err
	}
	// A controller that starts sees all pods anew.
	if c.now().Sub(pod.CreationTimestamp.Time) > news {
		return reconcile.Result{}, nil
	}
	if pod.Annotations[evenkeel.InjectedKey] == "" {
		metrics.Pod(metrics.NotInjected)
		return reconcile.Result{}, nil
	}
	return reconcile.Result{}, c.keptOff(ctx, pod)
}

// Events are what there is to say about the pod: to whoever looks at the pod, and at the job whose controller made it.
func Events(pod *metav1.PartialObjectMetadata, now time.Time) []*corev1.Event {
	severity, reason, message := corev1.EventTypeNormal, ReasonSkipped, ""
	switch skipped := pod.Annotations[evenkeel.SkippedKey]; {
	case pod.Annotations[evenkeel.InjectedKey] == "":
		severity, reason = corev1.EventTypeWarning, ReasonNotInjected
		message = fmt.Sprintf("the pod has the label %s=%s, but Evenkeel did not get to see it: it runs without the plugin", evenkeel.ProfileKey, pod.Labels[evenkeel.ProfileKey])
	case skipped != "":
		message = "left as it was: " + skipped
	default:
		return nil
	}
	about := []corev1.ObjectReference{{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}}
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		about = append(about, ownerOf(pod, owner))
	}
	var all []*corev1.Event
	for _, object := range about {
		all = append(all, events.New(object, severity, reason, message, now))
	}
	return all
}

func ownerOf(pod *metav1.PartialObjectMetadata, owner *metav1.OwnerReference) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: owner.APIVersion, Kind: owner.Kind, Namespace: pod.Namespace, Name: owner.Name, UID: owner.UID}
}
