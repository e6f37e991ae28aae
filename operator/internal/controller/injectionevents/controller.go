// Package injectionevents records Events about injection, on pods and on the jobs that created them: what the pod webhook left
// alone, pods that it never saw, and the nodes that a job avoids.
package injectionevents

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/kube/slim"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// Reasons of the Events.
const (
	ReasonSkipped      = "EvenkeelSkipped"
	ReasonNotInjected  = "EvenkeelNotInjected"
	ReasonNodesAvoided = "EvenkeelNodesAvoided"
	ReasonRDMAUnused   = "EvenkeelRDMAUnused"
	ReasonTunerUnset   = "EvenkeelTunerUnset"
)

const (
	// maxPodAge is the age up to which pods are counted and avoided nodes are reported.
	maxPodAge = 5 * time.Minute
	// maxEventAge is the age up to which pods get Events, which the API server keeps for an hour. A controller that starts would make
	// those of all older pods again.
	maxEventAge = time.Hour
)

// Reconciler writes Events about labelled pods.
type Reconciler struct {
	client client.Client
	live   client.Reader
	clock  clock.PassiveClock
	// reported has, for each job, the unhealthy nodes that were considered already. It saves requests to the API server.
	reported map[types.UID]string
}

// Cached restricts the cache to pods with the label of a profile.
func Cached() map[client.Object]cache.ByObject {
	labelled, err := labels.NewRequirement(evenkeel.ProfileKey, selection.Exists, nil)
	if err != nil {
		panic(err) // the key is a constant
	}
	return map[client.Object]cache.ByObject{&corev1.Pod{}: {
		Label:     labels.NewSelector().Add(*labelled),
		Transform: slimmer(),
	}}
}

// slimmer returns a function that reduces a pod to what its Events and the plugin's reports are made of: a cluster may have a hundred
// thousand, and the annotations of each say all that was injected.
func slimmer() func(object any) (any, error) {
	metadata := slim.NewMetadata(append(workload.SameJobLabels(), evenkeel.ProfileKey),
		[]string{evenkeel.InjectedKey, evenkeel.SkippedKey, evenkeel.RDMAUnusedKey, evenkeel.TunerUnsetKey, evenkeel.PluginStatusKey})
	return func(object any) (any, error) {
		if pod, ok := object.(*metav1.PartialObjectMetadata); ok {
			said := pod.Annotations[evenkeel.SuspectsKey]
			pod.ObjectMeta = metadata.Of(pod)
			if said != "" { // it is never the same, and so not worth sharing
				pod.Annotations = maps.Clone(pod.Annotations)
				metav1.SetMetaDataAnnotation(&pod.ObjectMeta, evenkeel.SuspectsKey, said)
			}
		}
		return object, nil
	}
}

// SetupWithManager starts the controller with the manager. It watches metadata only.
func (c *Reconciler) SetupWithManager(mgr manager.Manager) error {
	c.client, c.live, c.clock, c.reported = mgr.GetClient(), mgr.GetAPIReader(), clock.RealClock{}, map[types.UID]string{}
	// A list by label would look at all nodes, for each pod.
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), &corev1.Node{}, unhealthyIndex, unhealthy); err != nil {
		return fmt.Errorf("index nodes by their health: %w", err)
	}
	created := predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool {
			pod, ok := e.Object.(*metav1.PartialObjectMetadata)
			return ok && c.concerns(pod)
		},
		// Everything to report was written by the webhook when the pod was created.
		UpdateFunc: func(event.UpdateEvent) bool { return false },
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	}
	return builder.ControllerManagedBy(mgr).Named("injectionevents").
		For(&corev1.Pod{}, builder.OnlyMetadata, builder.WithPredicates(created)).
		Complete(c)
}

// concerns reports whether the pod is to be reconciled. A controller that starts sees all existing pods as new, and a queue of a hundred
// thousand takes more memory than the pods.
func (c *Reconciler) concerns(pod *metav1.PartialObjectMetadata) bool {
	age := c.clock.Now().Sub(pod.CreationTimestamp.Time)
	return age <= maxPodAge || age <= maxEventAge && len(PodEvents(pod)) > 0
}

// Reconcile writes the pod's Events.
func (c *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	pod := &metav1.PartialObjectMetadata{}
	pod.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Pod"))
	if err := c.client.Get(ctx, request.NamespacedName, pod); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	now := c.clock.Now()
	age := now.Sub(pod.CreationTimestamp.Time)
	if age > maxEventAge {
		return reconcile.Result{}, nil
	}
	if err := events.Write(ctx, c.client, PodEvents(pod)...); err != nil {
		return reconcile.Result{}, err
	}
	if age > maxPodAge {
		return reconcile.Result{}, nil
	}
	if pod.Annotations[evenkeel.InjectedKey] == "" {
		metrics.Pod(metrics.NotInjected)
		return reconcile.Result{}, nil
	}
	return reconcile.Result{}, c.recordAvoidedNodes(ctx, pod)
}

// PodEvents returns the Events about the pod: on the pod itself, and on the job whose controller created it. They happened when the
// pod was created.
func PodEvents(pod *metav1.PartialObjectMetadata) []*corev1.Event {
	self := corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
	job := self
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		job = ownerOf(pod, owner)
	}
	var all []*corev1.Event
	add := func(severity, reason, message string, about ...corev1.ObjectReference) {
		for _, object := range slices.Compact(about) {
			all = append(all, events.New(object, severity, reason, message, pod.CreationTimestamp.Time))
		}
	}
	switch skipped := pod.Annotations[evenkeel.SkippedKey]; {
	case pod.Annotations[evenkeel.InjectedKey] == "":
		add(corev1.EventTypeWarning, ReasonNotInjected, fmt.Sprintf("the pod has the label %s=%s, but neither webhook nor policy saw it: it runs without the plugin", evenkeel.ProfileKey, pod.Labels[evenkeel.ProfileKey]), self, job)
		return all
	case skipped != "":
		severity := corev1.EventTypeNormal
		if strings.Contains(skipped, inject.PluginUnused) {
			severity = corev1.EventTypeWarning
		}
		add(severity, ReasonSkipped, "left unchanged: "+skipped, self, job)
	}
	if why := pod.Annotations[evenkeel.RDMAUnusedKey]; why != "" {
		add(corev1.EventTypeWarning, ReasonRDMAUnused, fmt.Sprintf("NetworkProfile %s: %s", pod.Labels[evenkeel.ProfileKey], why), job)
	}
	if why := pod.Annotations[evenkeel.TunerUnsetKey]; why != "" {
		add(corev1.EventTypeNormal, ReasonTunerUnset, fmt.Sprintf("NetworkProfile %s: no measurements for NCCL's algorithms: %s", pod.Labels[evenkeel.ProfileKey], why), job)
	}
	return all
}

func ownerOf(pod *metav1.PartialObjectMetadata, owner *metav1.OwnerReference) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: owner.APIVersion, Kind: owner.Kind, Namespace: pod.Namespace, Name: owner.Name, UID: owner.UID}
}
