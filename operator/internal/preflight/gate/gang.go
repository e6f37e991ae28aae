package gate

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"

	"evenkeel.dev/evenkeel/operator/internal/accelerator"
)

// gang is the pods of a job for which nodes need room: those with accelerators, or all if none has any.
type gang struct {
	count int
	// kinds are the accelerators that one pod requests, each combination once.
	kinds []map[corev1.ResourceName]int64
}

// newGang counts the pods, one spec for each.
func newGang(pods []*corev1.PodSpec) gang {
	requests := map[*corev1.PodSpec]map[corev1.ResourceName]int64{}
	with := 0
	for _, spec := range pods {
		if _, known := requests[spec]; !known {
			requests[spec] = accelerators(spec)
		}
		if len(requests[spec]) > 0 {
			with++
		}
	}
	g := gang{count: len(pods)}
	if with > 0 {
		g.count = with
		for _, spec := range distinct(pods) {
			if len(requests[spec]) > 0 {
				g.kinds = append(g.kinds, requests[spec])
			}
		}
	}
	return g
}

// distinct returns each spec once.
func distinct(pods []*corev1.PodSpec) []*corev1.PodSpec {
	seen := make(map[*corev1.PodSpec]bool, 4)
	return slices.DeleteFunc(slices.Clone(pods), func(spec *corev1.PodSpec) bool {
		had := seen[spec]
		seen[spec] = true
		return had
	})
}

func accelerators(spec *corev1.PodSpec) map[corev1.ResourceName]int64 {
	counts := map[corev1.ResourceName]int64{}
	for name, quantity := range resource.PodRequests(&corev1.Pod{Spec: *spec}, resource.PodResourcesOptions{}) {
		if accelerator.IsResource(name) && quantity.Sign() > 0 {
			counts[name] = quantity.Value()
		}
	}
	return counts
}

// room is how many of the pods fit on the node beside what is used of it. Of pods without accelerators it is one.
func (g gang) room(node *corev1.Node, used map[corev1.ResourceName]int64) int {
	if len(g.kinds) == 0 {
		return 1
	}
	most := 0
	for _, kind := range g.kinds {
		fit := -1
		for name, want := range kind {
			offered := node.Status.Allocatable[name]
			n := int(max(0, offered.Value()-used[name]) / want)
			if fit < 0 || n < fit {
				fit = n
			}
		}
		most = max(most, fit)
	}
	return most
}
