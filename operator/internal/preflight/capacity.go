package preflight

import (
	"fmt"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Reasons of stage Capacity.
const (
	ReasonNodeNotFound = "NodeNotFound"
	ReasonNotReady     = "NodeNotReady"
	ReasonCordoned     = "NodeCordoned"
	ReasonTainted      = "NodeTainted"
	ReasonMissingGPUs  = "MissingGPUs"
)

const (
	gpuResource = corev1.ResourceName("nvidia.com/gpu")
	// gpuCountLabel is the number of GPUs in the machine, by the GPU feature discovery.
	gpuCountLabel = "nvidia.com/gpu.count"
)

// Capacity checks what the API says about a node: whether pods with these tolerations can run on it, and whether all of its
// GPUs can be used. It needs no run, and saves one that would end in a timeout.
func Capacity(node *corev1.Node, tolerations []corev1.Toleration) (v evenkeel.Verdict, reason, message string) {
	ready := slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	if !ready {
		return evenkeel.VerdictInconclusive, ReasonNotReady, "the node is not Ready"
	}
	if node.Spec.Unschedulable {
		return evenkeel.VerdictInconclusive, ReasonCordoned, "the node is cordoned"
	}
	for i := range node.Spec.Taints {
		taint := &node.Spec.Taints[i]
		if taint.Effect != corev1.TaintEffectPreferNoSchedule && !slices.ContainsFunc(tolerations, func(t corev1.Toleration) bool { return tolerates(t, taint) }) {
			return evenkeel.VerdictInconclusive, ReasonTainted, fmt.Sprintf("the node has the taint %s, which the check's runner.tolerations do not have", taint.ToString())
		}
	}
	want, err := strconv.ParseInt(node.Labels[gpuCountLabel], 10, 64)
	have := node.Status.Allocatable[gpuResource]
	if err == nil && have.Value() < want {
		return evenkeel.VerdictFail, ReasonMissingGPUs, fmt.Sprintf("%d of the node's %d GPUs can be used", have.Value(), want)
	}
	return "", "", ""
}

func tolerates(t corev1.Toleration, taint *corev1.Taint) bool {
	return (t.Effect == "" || t.Effect == taint.Effect) && (t.Key == "" || t.Key == taint.Key) &&
		(t.Operator == corev1.TolerationOpExists || t.Value == taint.Value)
}
