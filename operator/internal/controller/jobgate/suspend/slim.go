package suspend

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/kube/slim"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// slimmer returns a function that reduces a gated pod to what its gang is known by and what decides where it may run: thousands may
// wait, and environments, volumes and annotations are nearly all of them. So a gated pod of the cache may be patched with what is to
// change, and never be written as a whole.
func slimmer() func(object any) (any, error) {
	metadata := slim.NewMetadata(append(workload.GangLabels(), evenkeel.GatedKey, evenkeel.ProfileKey), []string{evenkeel.GateKey, evenkeel.TemplateKey})
	var specs slim.Pool[corev1.PodSpec]
	strip := cache.TransformStripManagedFields()
	return func(object any) (any, error) {
		pod, ok := object.(*corev1.Pod)
		if !ok {
			return strip(object)
		}
		spec := placement(&pod.Spec)
		key, err := spec.Marshal()
		if err != nil {
			return nil, fmt.Errorf("pod %s: %w", client.ObjectKeyFromObject(pod), err)
		}
		return &corev1.Pod{ObjectMeta: metadata.Of(pod), Spec: specs.Get(key, func() corev1.PodSpec { return spec })}, nil
	}
}

// placement is what of the spec decides which nodes the pod may run on, and what it takes of them.
func placement(spec *corev1.PodSpec) corev1.PodSpec {
	kept := corev1.PodSpec{NodeName: spec.NodeName, NodeSelector: spec.NodeSelector, Tolerations: spec.Tolerations, Overhead: spec.Overhead}
	if a := spec.Affinity; a != nil && a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		kept.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution}}
	}
	if r := spec.Resources; r != nil {
		kept.Resources = &corev1.ResourceRequirements{Requests: r.Requests}
	}
	kept.InitContainers, kept.Containers = requests(spec.InitContainers), requests(spec.Containers)
	return kept
}

// requests is what the containers take of a node.
func requests(containers []corev1.Container) []corev1.Container {
	var kept []corev1.Container
	for _, c := range containers {
		kept = append(kept, corev1.Container{Resources: corev1.ResourceRequirements{Requests: c.Resources.Requests, Claims: c.Resources.Claims}, RestartPolicy: c.RestartPolicy})
	}
	return kept
}
