package inject

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
)

// defaultContainerKey is kubectl's annotation with the pod's main container (KEP-2227). Service meshes set it where they add theirs.
const defaultContainerKey = "kubectl.kubernetes.io/default-container"

// companions are the names of containers that other injectors add, or that teams copy from manuals. They run no training. The chart's
// admission policy has the same list.
var companions = []string{
	"istio-proxy", "linkerd-proxy", "consul-dataplane", "daprd", // meshes
	"fluent-bit", "fluentd", "filebeat", "promtail", // logs
	"otc-container", "datadog-agent-injected", "datadog-agent", // traces and metrics
	"vault-agent", "cloud-sql-proxy", "gke-gcsfuse-sidecar", // secrets and storage
	"metrics-logger-and-collector", // Katib
}

// trainers are the names by which kinds of jobs find the container that trains: PyTorchJob's, and TrainJob's.
var trainers = []string{"pytorch", "node"}

// Companions returns the names of containers that get nothing unless the user names them.
func Companions() []string { return slices.Clone(companions) }

// selectContainers returns the containers that run training: those the user named, else those that request accelerators, else the one
// that runs the job. Companions are none of the latter two.
func selectContainers(pod *corev1.Pod, r Resolved) ([]*corev1.Container, error) {
	var all, gpu, named []*corev1.Container
	var names []string
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		names = append(names, c.Name)
		if slices.Contains(r.Containers, c.Name) {
			named = append(named, c)
		}
		if slices.Contains(companions, c.Name) {
			continue
		}
		all = append(all, c)
		if accelerator.Requests(c) {
			gpu = append(gpu, c)
		}
	}
	for _, name := range r.Containers {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("annotation %s names the container %q; the pod has %s", evenkeel.ContainersKey, name, strings.Join(names, ", "))
		}
	}
	switch {
	case len(named) > 0:
		return named, nil
	case len(gpu) > 0:
		return gpu, nil
	default:
		return mainContainer(all, pod.Annotations[defaultContainerKey]), nil
	}
}

// mainContainer returns the container that runs the job: the pod's default container, else the one with a name that its kind gives it,
// else the first. It returns none of none.
func mainContainer(all []*corev1.Container, byDefault string) []*corev1.Container {
	for _, names := range [][]string{{byDefault}, trainers} {
		if at := slices.IndexFunc(all, func(c *corev1.Container) bool { return slices.Contains(names, c.Name) }); at >= 0 {
			return all[at : at+1]
		}
	}
	return all[:min(1, len(all))]
}
