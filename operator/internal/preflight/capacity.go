package preflight

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/nodeos"
)

// Reasons of stage Capacity.
const (
	ReasonNodeNotFound = "NodeNotFound"
	ReasonNotReady     = "NodeNotReady"
	ReasonCordoned     = "NodeCordoned"
	ReasonTainted      = "NodeTainted"
	ReasonWindows      = "NodeWindows"
	ReasonMissingGPUs  = "MissingGPUs"
	ReasonGPUsPending  = "GPUsPending"
)

// Capacity checks what the API says about a node: whether pods with these tolerations can run on it, and whether all of
// its GPUs can be used. It needs no run, and saves one that would end in a timeout. DRA are the GPUs that
// ResourceSlices offer there.
func Capacity(node *corev1.Node, tolerations []corev1.Toleration, dra accelerator.DRA) (v evenkeel.Verdict, reason, message string) {
	if reason, message := Unschedulable(node, tolerations); reason != "" {
		return evenkeel.VerdictInconclusive, reason, message
	}
	return devices(node, dra)
}

// Unschedulable explains why pods with these tolerations cannot run on the node, or is empty if they can.
func Unschedulable(node *corev1.Node, tolerations []corev1.Toleration) (reason, message string) {
	ready := slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	if !ready {
		return ReasonNotReady, "the node is not Ready"
	}
	if nodeos.IsWindows(node) {
		return ReasonWindows, "the node runs Windows, and NCCL does not"
	}
	if node.Spec.Unschedulable {
		return ReasonCordoned, "the node is cordoned"
	}
	for i := range node.Spec.Taints {
		taint := &node.Spec.Taints[i]
		if taint.Effect != corev1.TaintEffectPreferNoSchedule && !slices.ContainsFunc(tolerations, func(t corev1.Toleration) bool { return tolerates(t, taint) }) {
			return ReasonTainted, fmt.Sprintf("the node has the taint %s, which the check's runner.tolerations do not have", taint.ToString())
		}
	}
	return "", ""
}

// devices fails a node that offers only some of its GPUs, at once: a device plugin reports all devices in one message,
// so that fewer are not on their way but unhealthy. A node that offers none may have a device plugin that has not
// registered yet, or is being replaced. Where no label says how many there are, and no device plugin offers any, a DRA
// driver's list does.
func devices(node *corev1.Node, dra accelerator.DRA) (v evenkeel.Verdict, reason, message string) {
	counts, settled := accelerator.Counts(node)
	if !settled {
		return evenkeel.VerdictInconclusive, ReasonGPUsPending, "the node's GPUs are being divided anew"
	}
	for _, c := range counts {
		if c.Usable == 0 && dra.Listed > 0 {
			c.Usable = dra.Usable
		}
		switch {
		case c.Usable == 0 && dra.Listed == 0:
			return evenkeel.VerdictInconclusive, ReasonGPUsPending, fmt.Sprintf("the node has %d of %s and offers none yet: its device plugin has not registered them", c.Installed, c.Resource)
		case c.Usable < c.Installed:
			return evenkeel.VerdictFail, ReasonMissingGPUs, fmt.Sprintf("%d of the node's %d GPUs (%s) can be used", c.Usable, c.Installed, c.Resource)
		}
	}
	if len(counts) == 0 && dra.Usable < dra.Listed && !accelerator.OffersResource(node) {
		return evenkeel.VerdictFail, ReasonMissingGPUs, fmt.Sprintf("%d of the node's %d GPUs (ResourceSlices) can be used: the others have a taint", dra.Usable, dra.Listed)
	}
	return "", "", ""
}

func tolerates(t corev1.Toleration, taint *corev1.Taint) bool {
	return (t.Effect == "" || t.Effect == taint.Effect) && (t.Key == "" || t.Key == taint.Key) &&
		(t.Operator == corev1.TolerationOpExists || t.Value == taint.Value)
}
