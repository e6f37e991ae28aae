// Package audit tells users what happened to their pods: it turns what the pod webhook left alone, and pods that it
// never saw, into Events on the pod and on the job that made it.
package audit

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Reasons of the Events.
const (
	ReasonSkipped     = "EvenkeelSkipped"
	ReasonNotInjected = "EvenkeelNotInjected"
)

// maxMessage is the API's limit for an Event's message.
const maxMessage = 1024

// Controller writes Events about labelled pods.
type Controller struct {
	client client.Client
	now    func() time.Time
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

// SetupWithManager starts the controller with the manager. It reads metadata only.
func (c *Controller) SetupWithManager(mgr manager.Manager) error {
	c.client, c.now = mgr.GetClient(), time.Now
	// What the webhook wrote when the pod was created is all there is to say about it.
	created := predicate.Funcs{
		UpdateFunc: func(event.UpdateEvent) bool { return false },
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	}
	return builder.ControllerManagedBy(mgr).Named("audit").
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
	for _, e := range Events(pod, c.now()) {
		err := c.client.Create(ctx, e)
		switch {
		case err == nil, apierrors.IsAlreadyExists(err), apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		default:
			return reconcile.Result{}, fmt.Errorf("write Event %s about %s %s/%s: %w", e.Reason, e.InvolvedObject.Kind, e.Namespace, e.InvolvedObject.Name, err)
		}
	}
	return reconcile.Result{}, nil
}

// Events are what there is to say about the pod: to whoever looks at the pod, and at the job whose controller made it.
// Their names follow from what they say, so that neither a restart of ours nor a job's thousandth pod says it again.
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
	if len(message) > maxMessage {
		message = message[:maxMessage-3] + "..."
	}
	about := []corev1.ObjectReference{{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}}
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		about = append(about, corev1.ObjectReference{APIVersion: owner.APIVersion, Kind: owner.Kind, Namespace: pod.Namespace, Name: owner.Name, UID: owner.UID})
	}
	var events []*corev1.Event
	for _, object := range about {
		sum := sha256.Sum256([]byte(string(object.UID) + reason + message))
		// An object's name may be as long as an Event's: leave room for the rest.
		name := object.Name[:min(len(object.Name), 200)] + ".evenkeel-" + hex.EncodeToString(sum[:8])
		events = append(events, &corev1.Event{
			ObjectMeta:     metav1.ObjectMeta{Namespace: pod.Namespace, Name: name},
			InvolvedObject: object,
			Type:           severity, Reason: reason, Message: message,
			Source:         corev1.EventSource{Component: "evenkeel"},
			FirstTimestamp: metav1.NewTime(now), LastTimestamp: metav1.NewTime(now), Count: 1,
		})
	}
	return events
}
