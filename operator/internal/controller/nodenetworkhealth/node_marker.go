package nodenetworkhealth

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/kube/debounce"
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
)

const fieldOwner = client.FieldOwner("evenkeel-nodenetworkhealth")

// debounceDelay is how long changes are collected, since each pass is over all nodes.
const debounceDelay = 300 * time.Millisecond

// NodeMarker maintains condition, label and taint of all nodes. Each pass is over all nodes, since the number of nodes that may
// be labeled depends on all of them.
type NodeMarker struct {
	Clock clock.PassiveClock
	// Delays scales how long changes are collected.
	Delays debounce.Scale

	client client.Client
	live   client.Reader
}

// singleRequest is the only request of this controller.
var singleRequest = []reconcile.Request{{NamespacedName: types.NamespacedName{Name: "nodes"}}}

// NodeChanged passes changes that can affect a decision about checks or markers. A kubelet's heartbeats cannot.
var NodeChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	before, after := e.ObjectOld.(*corev1.Node), e.ObjectNew.(*corev1.Node)
	return !equality.Semantic.DeepEqual(before.Labels, after.Labels) ||
		!equality.Semantic.DeepEqual(before.Spec.Taints, after.Spec.Taints) ||
		!equality.Semantic.DeepEqual(before.Status.Conditions, after.Status.Conditions)
}}

// SetupWithManager starts the controller with the manager.
func (m *NodeMarker) SetupWithManager(mgr manager.Manager) error {
	m.client, m.live = mgr.GetClient(), mgr.GetAPIReader()
	all := debounce.Handler(m.Delays.Of(debounceDelay), handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return singleRequest }))
	return builder.ControllerManagedBy(mgr).Named("nodenetworkhealth-marker").
		Watches(&corev1.Node{}, all, builder.WithPredicates(NodeChanged)).
		Watches(&evenkeel.NodeNetworkHealth{}, all).
		Watches(&evenkeel.NetworkCheckPolicy{}, all, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Complete(m)
}

// Reconcile updates the nodes whose markers differ from the desired ones.
func (m *NodeMarker) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	nodes, healths, policies, err := ListAll(ctx, m.client)
	if err != nil {
		return reconcile.Result{}, err
	}
	now := m.Clock.Now()
	marks, counts := health.Evaluate(nodes, healths, policies, now)
	var all []error
	for i := range nodes {
		all = append(all, m.updateNode(ctx, &nodes[i], marks[nodes[i].Name]))
	}
	if err := errors.Join(all...); err != nil {
		return reconcile.Result{}, err
	}
	var next time.Duration
	for _, c := range counts {
		if left := c.NextStale.Sub(now); !c.NextStale.IsZero() && (next == 0 || left < next) {
			next = max(left, time.Millisecond)
		}
	}
	return reconcile.Result{RequeueAfter: next}, nil
}

// ListAll lists nodes, policies and the health of the nodes by name. They may be the cache's own: nobody may change them.
func ListAll(ctx context.Context, c client.Reader) ([]corev1.Node, map[string]*evenkeel.NodeNetworkHealthStatus, []evenkeel.NetworkCheckPolicy, error) {
	var nodes corev1.NodeList
	var states evenkeel.NodeNetworkHealthList
	var policies evenkeel.NetworkCheckPolicyList
	for _, list := range []client.ObjectList{&nodes, &states, &policies} {
		if err := c.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return nil, nil, nil, fmt.Errorf("list %T: %w", list, err)
		}
	}
	uids := map[string]types.UID{}
	for i := range nodes.Items {
		uids[nodes.Items[i].Name] = nodes.Items[i].UID
	}
	healths := map[string]*evenkeel.NodeNetworkHealthStatus{}
	for i := range states.Items {
		// The health of an earlier node of the same name does not count.
		if s := &states.Items[i]; len(s.OwnerReferences) > 0 && s.OwnerReferences[0].UID == uids[s.Name] {
			healths[s.Name] = &s.Status
		}
	}
	return nodes.Items, healths, policies.Items, nil
}

// updateNode gives one node the markers.
func (m *NodeMarker) updateNode(ctx context.Context, node *corev1.Node, want health.Markers) error {
	if node.Labels[evenkeel.HealthKey] != want.Label {
		object := m.applyObject(node)
		if want.Label != "" {
			object.SetLabels(map[string]string{evenkeel.HealthKey: want.Label})
		}
		if err := m.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(object), fieldOwner, client.ForceOwnership); ignoreGone(err) != nil {
			return fmt.Errorf("label node %s: %w", node.Name, err)
		}
	}
	if !sameCondition(healthCondition(node), want.Condition) {
		if err := m.writeCondition(ctx, node, want.Condition); ignoreGone(err) != nil {
			return fmt.Errorf("write the condition of node %s: %w", node.Name, err)
		}
	}
	if !slices.Equal(ourTaints(node), wantedTaints(node, want)) {
		if err := m.updateTaint(ctx, node, want); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("taint node %s: %w", node.Name, err)
		}
	}
	return nil
}

// ignoreGone ignores that the node was deleted or replaced since it was read: that is another event. A forced apply conflicts
// only with the node's UID.
func ignoreGone(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return client.IgnoreNotFound(err)
}

// applyObject returns the node for an apply. With its UID, the apply does not create a deleted node.
func (m *NodeMarker) applyObject(node *corev1.Node) *unstructured.Unstructured {
	object := &unstructured.Unstructured{Object: map[string]any{}}
	object.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	object.SetName(node.Name)
	object.SetUID(node.UID)
	return object
}

func healthCondition(node *corev1.Node) *corev1.NodeCondition {
	for i := range node.Status.Conditions {
		if c := &node.Status.Conditions[i]; c.Type == evenkeel.ConditionNodeHealthy {
			return c
		}
	}
	return nil
}

func sameCondition(a, b *corev1.NodeCondition) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Status == b.Status && a.Reason == b.Reason && a.Message == b.Message
}

func (m *NodeMarker) writeCondition(ctx context.Context, node *corev1.Node, want *corev1.NodeCondition) error {
	object := m.applyObject(node)
	var conditions []any
	if want != nil {
		want.LastHeartbeatTime = metav1.NewTime(m.Clock.Now())
		want.LastTransitionTime = want.LastHeartbeatTime
		if had := healthCondition(node); had != nil && had.Status == want.Status {
			want.LastTransitionTime = had.LastTransitionTime
		}
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(want)
		if err != nil {
			return err
		}
		conditions = append(conditions, fields)
	}
	if err := unstructured.SetNestedSlice(object.Object, conditions, "status", "conditions"); err != nil {
		return err
	}
	return m.client.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(object), fieldOwner, client.ForceOwnership)
}

func isOurTaint(t corev1.Taint) bool { return t.Key == evenkeel.HealthKey }

// ourTaints are the node's taints of our key.
func ourTaints(node *corev1.Node) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(t corev1.Taint) bool { return !isOurTaint(t) })
}

// wantedTaints are [ourTaints] as they should be, one at most. A startup taint is kept, but not added.
func wantedTaints(node *corev1.Node, want health.Markers) []corev1.Taint {
	if want.Taint {
		return []corev1.Taint{{Key: evenkeel.HealthKey, Value: evenkeel.UnhealthyValue, Effect: corev1.TaintEffectNoSchedule}}
	}
	return slices.DeleteFunc(ourTaints(node), func(t corev1.Taint) bool {
		return !want.Unproven || t.Value != evenkeel.UnprovenValue || t.Effect != corev1.TaintEffectNoSchedule
	})
}

// updateTaint adds, keeps or removes the taint. Taints are one list, so it is patched with an optimistic lock.
func (m *NodeMarker) updateTaint(ctx context.Context, node *corev1.Node, want health.Markers) error {
	now := &corev1.Node{}
	if err := m.live.Get(ctx, client.ObjectKey{Name: node.Name}, now); err != nil || now.UID != node.UID {
		return err
	}
	before := now.DeepCopy()
	wanted := wantedTaints(now, want)
	now.Spec.Taints = append(slices.DeleteFunc(now.Spec.Taints, isOurTaint), wanted...)
	return m.client.Patch(ctx, now, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}
