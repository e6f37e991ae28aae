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

// moment is how long changes are gathered: each look is at all nodes.
const moment = 300 * time.Millisecond

// Marks keeps condition, label and taint of all nodes as they should be. All at once: how many may be marked is a matter
// of all of them.
type Marks struct {
	// Now is the time.
	Now func() time.Time

	client client.Client
	live   client.Reader
}

// everything is the one request of this controller.
var everything = []reconcile.Request{{NamespacedName: types.NamespacedName{Name: "nodes"}}}

// NodeChanged lets through what can change a decision about checks or marks; a kubelet's heartbeats cannot.
var NodeChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	before, after := e.ObjectOld.(*corev1.Node), e.ObjectNew.(*corev1.Node)
	return !equality.Semantic.DeepEqual(before.Labels, after.Labels) ||
		!equality.Semantic.DeepEqual(before.Spec.Taints, after.Spec.Taints) ||
		!equality.Semantic.DeepEqual(before.Status.Conditions, after.Status.Conditions)
}}

// SetupWithManager starts the controller with the manager.
func (m *Marks) SetupWithManager(mgr manager.Manager) error {
	m.client, m.live = mgr.GetClient(), mgr.GetAPIReader()
	all := debounce.Events(moment, handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return everything }))
	return builder.ControllerManagedBy(mgr).Named("nodenetworkhealth-marker").
		Watches(&corev1.Node{}, all, builder.WithPredicates(NodeChanged)).
		Watches(&evenkeel.NodeNetworkHealth{}, all).
		Watches(&evenkeel.NetworkCheckPolicy{}, all, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Complete(m)
}

// Reconcile marks the nodes that are not as they should be.
func (m *Marks) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	nodes, healths, policies, err := Read(ctx, m.client)
	if err != nil {
		return reconcile.Result{}, err
	}
	now := m.Now()
	marks, counts := health.Marks(nodes, healths, policies, now)
	var all []error
	for i := range nodes {
		all = append(all, m.mark(ctx, &nodes[i], marks[nodes[i].Name]))
	}
	if err := errors.Join(all...); err != nil {
		return reconcile.Result{}, err
	}
	var next time.Duration
	for _, c := range counts {
		if left := c.Next.Sub(now); !c.Next.IsZero() && (next == 0 || left < next) {
			next = max(left, time.Millisecond)
		}
	}
	return reconcile.Result{RequeueAfter: next}, nil
}

// Clear takes condition, label and taint from all nodes, as if there were no policy. The client reads without a cache.
func Clear(ctx context.Context, c client.Client) error {
	m := &Marks{Now: time.Now, client: c, live: c}
	var nodes corev1.NodeList
	if err := c.List(ctx, &nodes); err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	var all []error
	for i := range nodes.Items {
		all = append(all, m.mark(ctx, &nodes.Items[i], health.Mark{}))
	}
	return errors.Join(all...)
}

// Read reads what decisions about nodes are made from.
func Read(ctx context.Context, c client.Reader) ([]corev1.Node, map[string]*evenkeel.NodeNetworkHealthStatus, []evenkeel.NetworkCheckPolicy, error) {
	var nodes corev1.NodeList
	var states evenkeel.NodeNetworkHealthList
	var policies evenkeel.NetworkCheckPolicyList
	for _, list := range []client.ObjectList{&nodes, &states, &policies} {
		if err := c.List(ctx, list); err != nil {
			return nil, nil, nil, fmt.Errorf("list %T: %w", list, err)
		}
	}
	uids := map[string]types.UID{}
	for i := range nodes.Items {
		uids[nodes.Items[i].Name] = nodes.Items[i].UID
	}
	healths := map[string]*evenkeel.NodeNetworkHealthStatus{}
	for i := range states.Items {
		// That of an earlier node of the same name says nothing about this one.
		if s := &states.Items[i]; len(s.OwnerReferences) > 0 && s.OwnerReferences[0].UID == uids[s.Name] {
			healths[s.Name] = &s.Status
		}
	}
	return nodes.Items, healths, policies.Items, nil
}

// mark makes one node carry the mark.
func (m *Marks) mark(ctx context.Context, node *corev1.Node, want health.Mark) error {
	if node.Labels[evenkeel.HealthKey] != want.Label {
		object := m.object(node)
		if want.Label != "" {
			object.SetLabels(map[string]string{evenkeel.HealthKey: want.Label})
		}
		if err := m.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(object), fieldOwner, client.ForceOwnership); gone(err) != nil {
			return fmt.Errorf("label node %s: %w", node.Name, err)
		}
	}
	if !same(condition(node), want.Condition) {
		if err := m.tell(ctx, node, want.Condition); gone(err) != nil {
			return fmt.Errorf("write the condition of node %s: %w", node.Name, err)
		}
	}
	if slices.ContainsFunc(node.Spec.Taints, ours) != want.Taint {
		if err := m.taint(ctx, node, want.Taint); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("taint node %s: %w", node.Name, err)
		}
	}
	return nil
}

// gone leaves out that the node was deleted, or made anew, since it was read: that is an event of its own. An apply with
// force has no conflict but with the node's UID.
func gone(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return client.IgnoreNotFound(err)
}

// object is the node for an apply that does not make one where there is none.
func (m *Marks) object(node *corev1.Node) *unstructured.Unstructured {
	object := &unstructured.Unstructured{Object: map[string]any{}}
	object.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	object.SetName(node.Name)
	object.SetUID(node.UID)
	return object
}

func condition(node *corev1.Node) *corev1.NodeCondition {
	for i := range node.Status.Conditions {
		if c := &node.Status.Conditions[i]; c.Type == evenkeel.ConditionNodeHealthy {
			return c
		}
	}
	return nil
}

func same(a, b *corev1.NodeCondition) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Status == b.Status && a.Reason == b.Reason && a.Message == b.Message
}

func (m *Marks) tell(ctx context.Context, node *corev1.Node, want *corev1.NodeCondition) error {
	object := m.object(node)
	var conditions []any
	if want != nil {
		want.LastHeartbeatTime = metav1.NewTime(m.Now())
		want.LastTransitionTime = want.LastHeartbeatTime
		if had := condition(node); had != nil && had.Status == want.Status {
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

func ours(t corev1.Taint) bool { return t.Key == evenkeel.HealthKey }

// taint adds or removes our taint. A node's taints are one list, so it is written only if nobody else has meanwhile.
func (m *Marks) taint(ctx context.Context, node *corev1.Node, want bool) error {
	now := &corev1.Node{}
	if err := m.live.Get(ctx, client.ObjectKey{Name: node.Name}, now); err != nil || now.UID != node.UID {
		return err
	}
	before := now.DeepCopy()
	now.Spec.Taints = slices.DeleteFunc(now.Spec.Taints, ours)
	if want {
		now.Spec.Taints = append(now.Spec.Taints, corev1.Taint{Key: evenkeel.HealthKey, Value: evenkeel.UnhealthyValue, Effect: corev1.TaintEffectNoSchedule})
	}
	return m.client.Patch(ctx, now, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}
