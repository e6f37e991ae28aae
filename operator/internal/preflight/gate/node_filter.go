package gate

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
)

// NodeFilter returns a function that reports whether one of the pods may run on a node. It considers node selector, affinity,
// tolerations and the size of the node. A pod that gets accelerators by a ResourceClaim needs a node that has some. Pods that run on
// the node already do not count, nor does the health of its network.
func NodeFilter(pods []*corev1.PodSpec) func(*corev1.Node) bool {
	return nodeFilter(pods, accelerator.Has)
}

// nodeFilter is NodeFilter for nodes of which hasAccelerators says which have accelerators.
func nodeFilter(pods []*corev1.PodSpec, hasAccelerators func(*corev1.Node) bool) func(*corev1.Node) bool {
	type kind struct {
		spec     *corev1.PodSpec
		affinity nodeaffinity.RequiredNodeAffinity
		requests corev1.ResourceList
		claims   bool
	}
	kinds := make([]kind, 0, len(pods))
	for _, spec := range pods {
		pod := &corev1.Pod{Spec: *spec}
		kinds = append(kinds, kind{spec, nodeaffinity.GetRequiredNodeAffinity(pod), resource.PodRequests(pod, resource.PodResourcesOptions{}), accelerator.Claims(spec)})
	}
	return func(node *corev1.Node) bool {
		if node.Spec.Unschedulable || !IsReady(node) {
			return false
		}
		for _, k := range kinds {
			if k.spec.NodeName != "" && k.spec.NodeName != node.Name {
				continue
			}
			if ok, err := k.affinity.Match(node); err != nil || !ok {
				continue
			}
			if _, untolerated := scheduling.FindMatchingUntoleratedTaint(klog.Background(), node.Spec.Taints, k.spec.Tolerations, excludesPods, false); untolerated {
				continue
			}
			if k.claims && !hasAccelerators(node) {
				continue
			}
			if fits(node.Status.Allocatable, k.requests) {
				return true
			}
		}
		return false
	}
}

// excludesPods reports whether the taint excludes pods. Those that go when the node's network is proven do not count.
func excludesPods(t *corev1.Taint) bool {
	return t.Effect != corev1.TaintEffectPreferNoSchedule && t.Key != evenkeel.HealthKey && t.Key != evenkeel.ReadinessTaintKey
}

func fits(allocatable, requests corev1.ResourceList) bool {
	for name, want := range requests {
		if have := allocatable[name]; !want.IsZero() && have.Cmp(want) < 0 {
			return false
		}
	}
	return true
}

// IsReady reports whether the node is ready.
func IsReady(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}
