// Package nodedrain knows how nodes look that are emptied of their pods.
package nodedrain

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// taints are the keys of the taints NoSchedule of what drains nodes and does not cordon them.
var taints = []string{
	"karpenter.sh/disrupted",         // Karpenter 1.0 and later: https://karpenter.sh/docs/concepts/disruption
	"karpenter.sh/disruption",        // Karpenter before
	"ToBeDeletedByClusterAutoscaler", // the cluster autoscaler: utils/taints/taints.go, where cordon-node-before-terminating is off
}

// Of reports whether somebody drains the node, or has cordoned it, which a drain begins with: new pods do not run there, and those that
// run are to leave.
func Of(node *corev1.Node) bool {
	return node.Spec.Unschedulable || slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule && slices.Contains(taints, t.Key)
	})
}
