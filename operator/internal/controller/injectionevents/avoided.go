package injectionevents

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
)

const (
	// maxReported is the maximum number of jobs remembered. Then all are forgotten, which costs one request for each; no
	// Event is repeated. It is more than the jobs of a large cluster, since a controller that starts sees their pods in no
	// order.
	maxReported = 1 << 14
	// maxNamed is the maximum number of nodes named in an Event.
	maxNamed = 5
)

// unhealthyIndex is the index of the nodes that failed a check.
const unhealthyIndex = "evenkeel.dev/unhealthy"

func unhealthy(node client.Object) []string {
	if node.GetLabels()[evenkeel.HealthKey] == evenkeel.UnhealthyValue {
		return []string{"true"}
	}
	return nil
}

// recordAvoidedNodes records an Event on the pod's job: which nodes that failed a check it would otherwise fit on.
func (c *Reconciler) recordAvoidedNodes(ctx context.Context, pod *metav1.PartialObjectMetadata) error {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil {
		return nil
	}
	var bad corev1.NodeList
	if err := c.client.List(ctx, &bad, client.MatchingFields{unhealthyIndex: "true"}); err != nil {
		return fmt.Errorf("list unhealthy nodes: %w", err)
	}
	if len(bad.Items) == 0 {
		return nil
	}
	slices.SortFunc(bad.Items, func(a, b corev1.Node) int { return strings.Compare(a.Name, b.Name) })
	all := joinNames(bad.Items)
	if c.reported[owner.UID] == all {
		return nil
	}
	whole := &corev1.Pod{} // only metadata is cached
	if err := c.live.Get(ctx, client.ObjectKeyFromObject(pod), whole); err != nil {
		return client.IgnoreNotFound(err)
	}
	if e := NodesAvoidedEvent(whole, owner, bad.Items, c.clock.Now()); e != nil {
		if err := events.Write(ctx, c.client, e); err != nil {
			return err
		}
		metrics.Job(metrics.AvoidedNodes)
	}
	if len(c.reported) >= maxReported {
		clear(c.reported)
	}
	c.reported[owner.UID] = all
	return nil
}

func joinNames(nodes []corev1.Node) string {
	var all []string
	for i := range nodes {
		all = append(all, nodes[i].Name)
	}
	return strings.Join(all, " ")
}

// NodesAvoidedEvent returns the Event about the bad nodes that the pod's job avoids, or nil if there are none.
func NodesAvoidedEvent(pod *corev1.Pod, owner *metav1.OwnerReference, bad []corev1.Node, now time.Time) *corev1.Event {
	avoided := inject.AvoidedNodes(pod, bad)
	if len(avoided) == 0 {
		return nil
	}
	var described []string
	for _, name := range avoided[:min(len(avoided), maxNamed)] {
		node := &bad[slices.IndexFunc(bad, func(n corev1.Node) bool { return n.Name == name })]
		for _, condition := range node.Status.Conditions {
			if condition.Type == evenkeel.ConditionNodeHealthy {
				name += " (" + condition.Reason + ")"
			}
		}
		described = append(described, name)
	}
	if more := len(avoided) - maxNamed; more > 0 {
		described = append(described, fmt.Sprintf("and %d more", more))
	}
	about := corev1.ObjectReference{APIVersion: owner.APIVersion, Kind: owner.Kind, Namespace: pod.Namespace, Name: owner.Name, UID: owner.UID}
	message := fmt.Sprintf("avoids nodes that failed a network check: %s; kubectl evenkeel check why %s", strings.Join(described, ", "), avoided[0])
	return events.New(about, corev1.EventTypeNormal, ReasonNodesAvoided, message, now)
}
