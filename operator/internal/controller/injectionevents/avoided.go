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
	// maxTold jobs are remembered; then all are forgotten, which costs a call for each and says nothing twice.
	maxTold = 4096
	// maxNamed nodes are named in an Event.
	maxNamed = 5
)

// keptOff tells the pod's job which nodes that failed a check it would have run on.
func (c *Controller) keptOff(ctx context.Context, pod *metav1.PartialObjectMetadata) error {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil {
		return nil
	}
	var bad corev1.NodeList
	if err := c.client.List(ctx, &bad, client.MatchingLabels{evenkeel.HealthKey: evenkeel.UnhealthyValue}); err != nil {
		return fmt.Errorf("list unhealthy nodes: %w", err)
	}
	if len(bad.Items) == 0 {
		return nil
	}
	slices.SortFunc(bad.Items, func(a, b corev1.Node) int { return strings.Compare(a.Name, b.Name) })
	all := names(bad.Items)
	if c.told[owner.UID] == all {
		return nil
	}
	whole := &corev1.Pod{} // what is watched of pods is less than this needs
	if err := c.live.Get(ctx, client.ObjectKeyFromObject(pod), whole); err != nil {
		return client.IgnoreNotFound(err)
	}
	if e := KeptOff(whole, owner, bad.Items, c.now()); e != nil {
		if err := events.Write(ctx, c.client, e); err != nil {
			return err
		}
		metrics.Job(metrics.KeptOff)
	}
	if len(c.told) >= maxTold {
		clear(c.told)
	}
	c.told[owner.UID] = all
	return nil
}

func names(nodes []corev1.Node) string {
	var all []string
	for i := range nodes {
		all = append(all, nodes[i].Name)
	}
	return strings.Join(all, " ")
}

// KeptOff is the Event about the nodes that the pod's job keeps off; nil if it does off none of these, which failed a check.
func KeptOff(pod *corev1.Pod, owner *metav1.OwnerReference, bad []corev1.Node, now time.Time) *corev1.Event {
	kept := inject.KeptOff(pod, bad)
	if len(kept) == 0 {
		return nil
	}
	var told []string
	for _, name := range kept[:min(len(kept), maxNamed)] {
		node := &bad[slices.IndexFunc(bad, func(n corev1.Node) bool { return n.Name == name })]
		for _, condition := range node.Status.Conditions {
			if condition.Type == evenkeel.ConditionNodeHealthy {
				name += " (" + condition.Reason + ")"
			}
		}
		told = append(told, name)
	}
	if more := len(kept) - maxNamed; more > 0 {
		told = append(told, fmt.Sprintf("and %d more", more))
	}
	about := corev1.ObjectReference{APIVersion: owner.APIVersion, Kind: owner.Kind, Namespace: pod.Namespace, Name: owner.Name, UID: owner.UID}
	message := fmt.Sprintf("kept off nodes that failed a network check: %s; kubectl evenkeel check why %s", strings.Join(told, ", "), kept[0])
	return events.New(about, corev1.EventTypeNormal, ReasonKeptOff, message, now)
}
