// Package networkprofile writes the status of NetworkProfiles: what jobs created now would get, given the nodes.
package networkprofile

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/kube/debounce"
	"evenkeel.dev/evenkeel/operator/internal/kube/statusapply"
)

const fieldOwner = client.FieldOwner("evenkeel-networkprofile")

// nodesDelay is how long changes of nodes are collected: each status is of all of them, and a check marks thousands one
// after the other.
const nodesDelay = 500 * time.Millisecond

// Reconciler writes the status of NetworkProfiles.
type Reconciler struct {
	// ReductionImage is the installation's image of reduction servers, or empty if it has none.
	ReductionImage string
	// Delays scales how long changes are collected.
	Delays debounce.Scale

	client client.Client
}

// Cached reduces each cached node to what decisions about delivery, checks, markers and gates need. In a large cluster,
// nodes have megabytes of images and conditions.
func Cached() map[client.Object]cache.ByObject {
	return map[client.Object]cache.ByObject{&corev1.Node{}: {Transform: func(object any) (any, error) {
		node, ok := object.(*corev1.Node)
		if !ok {
			return object, nil
		}
		node.ManagedFields, node.Annotations, node.Spec = nil, nil, corev1.NodeSpec{Taints: node.Spec.Taints, Unschedulable: node.Spec.Unschedulable}
		var conditions []corev1.NodeCondition
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady || c.Type == evenkeel.ConditionNodeHealthy {
				c.LastHeartbeatTime = metav1.Time{} // changes with every heartbeat
				conditions = append(conditions, c)
			}
		}
		node.Status = corev1.NodeStatus{NodeInfo: node.Status.NodeInfo, Conditions: conditions, Allocatable: node.Status.Allocatable}
		return node, nil
	}}}
}

// SetupWithManager starts the controller with the manager.
func (c *Reconciler) SetupWithManager(mgr manager.Manager) error {
	c.client = mgr.GetClient()
	return builder.ControllerManagedBy(mgr).Named("networkprofile").
		For(&evenkeel.NetworkProfile{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&corev1.Node{}, debounce.Handler(c.Delays.Of(nodesDelay), handler.EnqueueRequestsFromMapFunc(c.allProfiles)), builder.WithPredicates(nodeChanged)).
		Watches(&evenkeel.NodeNetworkHealth{}, debounce.Handler(c.Delays.Of(nodesDelay), handler.EnqueueRequestsFromMapFunc(c.tunedProfiles))).
		Complete(c)
}

// nodeChanged passes changes that can affect a decision. A kubelet's heartbeats cannot.
var nodeChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	before, after := e.ObjectOld.(*corev1.Node), e.ObjectNew.(*corev1.Node)
	return !equality.Semantic.DeepEqual(before.Labels, after.Labels) ||
		before.Status.NodeInfo.KubeletVersion != after.Status.NodeInfo.KubeletVersion ||
		before.Status.NodeInfo.ContainerRuntimeVersion != after.Status.NodeInfo.ContainerRuntimeVersion ||
		isUsable(before) != isUsable(after) || !slices.Equal(offeredResources(before), offeredResources(after))
}}

func (c *Reconciler) allProfiles(ctx context.Context, _ client.Object) []reconcile.Request {
	var profiles evenkeel.NetworkProfileList
	if err := c.client.List(ctx, &profiles); err != nil {
		return nil // the cache is closing
	}
	requests := make([]reconcile.Request, 0, len(profiles.Items))
	for _, p := range profiles.Items {
		requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Name: p.Name}})
	}
	return requests
}

// tunedProfiles are those whose status depends on what checks measured.
func (c *Reconciler) tunedProfiles(ctx context.Context, _ client.Object) []reconcile.Request {
	var profiles evenkeel.NetworkProfileList
	if err := c.client.List(ctx, &profiles); err != nil {
		return nil // the cache is closing
	}
	var requests []reconcile.Request
	for _, p := range profiles.Items {
		if p.Spec.Tuner.Source == evenkeel.TunerPreflight {
			requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Name: p.Name}})
		}
	}
	return requests
}

// healths returns what checks found, by node; nil where the profile does not depend on it.
func (c *Reconciler) healths(ctx context.Context, profile *evenkeel.NetworkProfile) (map[string]*evenkeel.NodeNetworkHealthStatus, error) {
	if profile.Spec.Tuner.Source != evenkeel.TunerPreflight {
		return nil, nil
	}
	var list evenkeel.NodeNetworkHealthList
	if err := c.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil { // they are read only
		return nil, fmt.Errorf("list NodeNetworkHealths: %w", err)
	}
	healths := make(map[string]*evenkeel.NodeNetworkHealthStatus, len(list.Items))
	for i := range list.Items {
		healths[list.Items[i].Name] = &list.Items[i].Status
	}
	return healths, nil
}

// Reconcile observes the nodes and writes the status, if it changed.
func (c *Reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	profile := &evenkeel.NetworkProfile{}
	if err := c.client.Get(ctx, request.NamespacedName, profile); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	var nodes corev1.NodeList
	if err := c.client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil { // they are read only
		return reconcile.Result{}, fmt.Errorf("list nodes: %w", err)
	}
	healths, err := c.healths(ctx, profile)
	if err != nil {
		return reconcile.Result{}, err
	}
	status := Observe(profile, nodes.Items, healths, c.ReductionImage)
	// That one is of another owner.
	meta.RemoveStatusCondition(&profile.Status.Conditions, evenkeel.ConditionDefaultApplied)
	meta.RemoveStatusCondition(&status.Conditions, evenkeel.ConditionDefaultApplied)
	return reconcile.Result{}, statusapply.Apply(ctx, c.client, fieldOwner, profile, &profile.Status, &status)
}
