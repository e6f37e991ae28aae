// Package accelerator knows the names by which nodes offer accelerators and pods request them.
package accelerator

import (
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// The extended resources of whole GPUs. AMD's device plugin may offer the partitions of GPUs by the same name; RCCL
// takes each of them as a GPU.
const (
	NVIDIA = corev1.ResourceName("nvidia.com/gpu")
	AMD    = corev1.ResourceName("amd.com/gpu")
)

// Labels that NVIDIA's GPU feature discovery puts on a node.
const (
	presentLabel = "nvidia.com/gpu.present"
	countLabel   = "nvidia.com/gpu.count"
)

// resources are the extended resources of accelerators. Devices of other kinds have the same domains, such as
// nvidia.com/rail0, a network card.
var resources = []string{
	string(NVIDIA), "nvidia.com/gpu.shared", string(AMD), "gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi",
	"aws.amazon.com/neuron", "aws.amazon.com/neuroncore", "aws.amazon.com/neurondevice", "google.com/tpu",
	"volcano.sh/gpu-number", "volcano.sh/vgpu-number",
}

// migPrefix begins the resources of the parts of NVIDIA's GPUs, such as nvidia.com/mig-1g.10gb.
const migPrefix = "nvidia.com/mig-"

// amdPartition are the resources of the partitions of AMD's GPUs, where the device plugin names them by their modes of
// computing and of memory: amd.com/cpx_nps4.
var amdPartition = regexp.MustCompile(`^amd\.com/[a-z]+_nps[0-9]+$`)

// Resources returns the names of the extended resources, except the ones that IsResource recognizes by their form.
func Resources() []string { return slices.Clone(resources) }

// IsResource reports whether the extended resource is an accelerator or a part of one.
func IsResource(name corev1.ResourceName) bool {
	return slices.Contains(resources, string(name)) || strings.HasPrefix(string(name), migPrefix) || amdPartition.MatchString(string(name))
}

// Requests reports whether the container requests an accelerator. A ResourceClaim counts as one: what it claims is
// written elsewhere, and pods claim little else.
func Requests(c *corev1.Container) bool {
	if len(c.Resources.Claims) > 0 {
		return true
	}
	for _, list := range []corev1.ResourceList{c.Resources.Limits, c.Resources.Requests} {
		for name, quantity := range list {
			if IsResource(name) && quantity.Sign() > 0 { // charts of CPU jobs say zero
				return true
			}
		}
	}
	return false
}

// RequestedBy reports whether a container of the pod requests an accelerator.
func RequestedBy(spec *corev1.PodSpec) bool {
	return slices.ContainsFunc(spec.Containers, func(c corev1.Container) bool { return Requests(&c) })
}

// Claims reports whether a container of the pod has a ResourceClaim.
func Claims(spec *corev1.PodSpec) bool {
	return slices.ContainsFunc(spec.Containers, func(c corev1.Container) bool { return len(c.Resources.Claims) > 0 })
}

// Has reports whether the node has accelerators. A device plugin that has ended leaves its resource at zero; one that
// has not started yet, or DRA instead of one, leaves only labels.
func Has(node *corev1.Node) bool {
	for name := range node.Status.Allocatable {
		if IsResource(name) {
			return true
		}
	}
	return labelled(node)
}

// Usable reports whether pods can get accelerators of the node: by a resource that a device plugin offers now, or by
// DRA, of which only labels of the node tell.
func Usable(node *corev1.Node) bool { return OffersResource(node) || labelled(node) }

func labelled(node *corev1.Node) bool {
	return node.Labels[presentLabel] == "true" || node.Labels[countLabel] != "" && node.Labels[countLabel] != "0"
}
