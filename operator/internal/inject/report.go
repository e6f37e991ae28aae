package inject

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// reportEnv is the address of the controller, to which the plugin reports that it is used. podUIDEnv is the pod it is used in.
	reportEnv = "EVENKEEL_REPORT"
	podUIDEnv = "EVENKEEL_POD_UID"
)

// addReport lets the plugin report to the address, and marks the pod: a report is expected. It does nothing without an address.
func addReport(pod *corev1.Pod, r Resolved, address string) {
	delete(pod.Annotations, evenkeel.SuspectsKey) // of another pod, from which it was copied
	if address == "" {
		return
	}
	expected := false
	for i := range pod.Spec.Containers {
		t := &target{Container: &pod.Spec.Containers[i]}
		if !t.has(pluginEnv, libraryPath(r)) && !t.has(pluginEnv, shortName) {
			continue
		}
		set := func(name string) bool {
			return slices.ContainsFunc(t.Env, func(e corev1.EnvVar) bool { return e.Name == name })
		}
		if !set(reportEnv) {
			t.addEnv(corev1.EnvVar{Name: reportEnv, Value: address})
		}
		if !set(podUIDEnv) {
			uid := &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.uid"}}
			t.Env = append(t.Env, corev1.EnvVar{Name: podUIDEnv, ValueFrom: uid})
		}
		expected = expected || !t.has(reportEnv, "")
	}
	if expected {
		pod.Annotations[evenkeel.PluginStatusKey] = evenkeel.PluginNotReported
	} else {
		delete(pod.Annotations, evenkeel.PluginStatusKey) // of another pod, from which it was copied
	}
}
