package inject

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// addGate adds the scheduling gate if the pod's label asks for it: the pod is not scheduled until its nodes are proven.
// The gate is added to the pod and not to the job's template, so that pods have none after Evenkeel was uninstalled.
func addGate(pod *corev1.Pod) {
	if pod.Labels[evenkeel.GatedKey] != evenkeel.GatedValue || pod.Spec.NodeName != "" {
		return
	}
	if !slices.ContainsFunc(pod.Spec.SchedulingGates, isOurGate) {
		pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: evenkeel.SchedulingGate})
	}
}

// RemoveGate removes the label from the pod, and the scheduling gate that an earlier call may have added.
func RemoveGate(pod *corev1.Pod) {
	delete(pod.Labels, evenkeel.GatedKey)
	pod.Spec.SchedulingGates = slices.DeleteFunc(pod.Spec.SchedulingGates, isOurGate)
}

func isOurGate(g corev1.PodSchedulingGate) bool { return g.Name == evenkeel.SchedulingGate }
