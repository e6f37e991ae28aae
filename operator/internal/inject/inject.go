// Package inject decides what a pod gets from a profile, and adds it. It is pure: it takes a pod and a [Resolved] profile,
// and returns the pod with additions. It only adds: what the user wrote stays. A second application changes nothing.
package inject

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// Apply makes all changes of the pod webhook: it adds the plugin, which reports to the address, if there is one; it keeps the pod
// away from unhealthy nodes, and gates it where its job asks for that. An error is for the user: it says what is wrong with the pod.
func Apply(pod *corev1.Pod, r Resolved, reports string) error {
	if err := AddPlugin(pod, r); err != nil || forWindows(&pod.Spec) {
		return err
	}
	addReport(pod, r, reports)
	AvoidUnhealthyNodes(pod)
	addGate(pod)
	return nil
}

// AddPlugin adds the plugin to the pod and leaves its scheduling alone. The pods of checks get no more than this, as they
// have to run on unhealthy nodes too.
func AddPlugin(pod *corev1.Pod, r Resolved) error {
	if isInjected(pod, r) {
		restoreInstall(pod, r)
		return nil
	}
	if forWindows(&pod.Spec) {
		return annotate(&injection{pod: pod, resolved: r, skippedOfPod: []string{"the pod: NCCL does not run on Windows"}})
	}
	selected, err := selectContainers(pod, r)
	if err != nil {
		return err
	}
	in := &injection{pod: pod, resolved: r}
	for _, c := range selected {
		in.targets = append(in.targets, &target{Container: c, owned: r.ownedVariables()})
	}
	for _, mutate := range []func(*injection) error{addDelivery, addJobKey, addReduction, addEnvironment, checkEncryption, addPython, addFlightRecorder, addRDMA, annotate} {
		if err := mutate(in); err != nil {
			return err
		}
	}
	return nil
}

// forWindows reports whether the pod says that it is for nodes with Windows.
func forWindows(spec *corev1.PodSpec) bool {
	return spec.OS != nil && spec.OS.Name == corev1.Windows
}

// An injection is one pod on its way through the mutators. Each mutator adds one thing.
type injection struct {
	pod      *corev1.Pod
	resolved Resolved
	// targets are the containers that get the plugin.
	targets []*target
	// skippedOfPod lists what was left alone of the pod itself.
	skippedOfPod []string
}

// A target is one container that gets the plugin.
type target struct {
	*corev1.Container
	// owned are the variables that envFrom does not set.
	owned []string
	// excluded is set where the container mounts something of its own at MountPath: it gets nothing.
	excluded bool
	// usesPlugin is set where NCCL_NET_PLUGIN is Evenkeel's.
	usesPlugin bool
	// hasJobKey is set where the container got the job's key.
	hasJobKey bool
	// usesServers is set where the container got what it needs to use the job's reduction servers.
	usesServers bool
	// skipped lists what was left alone, and why.
	skipped []string
}

func (t *target) skip(format string, args ...any) {
	t.skipped = append(t.skipped, fmt.Sprintf("container %s: ", t.Name)+fmt.Sprintf(format, args...))
}
