package inject

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Hold keeps the pod from being scheduled until its nodes are proven, if its label asks for that. The scheduling gate is
// added to the pod and not to the job's template, so that pods made when Evenkeel is gone have none.
func Hold(pod *corev1.Pod) {
	if pod.Labels[evenkeel.GateKey] != evenkeel.GateClosed || pod.Spec.NodeName != "" {
		return
	}
	if !slices.ContainsFunc(pod.Spec.SchedulingGates, isGate) {
		pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: evenkeel.SchedulingGate})
	}
}

func isGate(g corev1.PodSchedulingGate) bool { return g.Name == evenkeel.SchedulingGate }
