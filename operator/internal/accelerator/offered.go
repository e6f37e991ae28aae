package accelerator

import (
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// sharingLabel describes how a GPU is offered several times. A pod can request only one of such GPUs.
const sharingLabel = "nvidia.com/gpu.sharing-strategy"

// productLabel names the GPUs. Where they are divided and offered as if they were whole (MIG strategy single), the name
// contains partOfProduct, such as NVIDIA-A100-SXM4-40GB-MIG-1g.5gb.
const productLabel, partOfProduct = "nvidia.com/gpu.product", "-MIG-"

// sameDevices are other names of devices that the first name offers too. A pod cannot get one device by two names.
var sameDevices = map[corev1.ResourceName][]corev1.ResourceName{
	"aws.amazon.com/neuron": {"aws.amazon.com/neurondevice", "aws.amazon.com/neuroncore"},
}

// Offered returns the accelerators that a pod has to request to get a whole node, whichever of the nodes it is on: of
// each kind, as many as every node offers. Shared ones are left out.
func Offered(nodes ...*corev1.Node) corev1.ResourceList {
	var offered corev1.ResourceList
	for i, node := range nodes {
		own := ofNode(node)
		if i == 0 {
			offered = own
			continue
		}
		for name, count := range offered {
			if other, ok := own[name]; !ok {
				delete(offered, name)
			} else if other.Cmp(count) < 0 {
				offered[name] = other
			}
		}
	}
	return offered
}

// WholeGPUs is the number of GPUs of a kind, [NVIDIA] or [AMD], that a pod can get of the node for itself and, of
// NVIDIA's, undivided. NCCL takes no parts of GPUs, and no GPU twice.
func WholeGPUs(node *corev1.Node, kind corev1.ResourceName) int64 {
	if kind == NVIDIA && (divided(node) || timeSliced(node)) {
		return 0
	}
	count := ofNode(node)[kind]
	return count.Value()
}

// divided reports whether parts of NVIDIA's GPUs are offered as if they were whole.
func divided(node *corev1.Node) bool {
	return strings.Contains(node.Labels[productLabel], partOfProduct)
}

// timeSliced reports whether each of NVIDIA's GPUs is offered several times.
func timeSliced(node *corev1.Node) bool {
	replicas, err := strconv.Atoi(node.Labels[gpu+replicasSuffix])
	return err == nil && replicas > 1
}

func ofNode(node *corev1.Node) corev1.ResourceList {
	offered := corev1.ResourceList{}
	if s := node.Labels[sharingLabel]; s != "" && s != "none" {
		return offered
	}
	for name, count := range node.Status.Allocatable {
		if IsResource(name) && name != "nvidia.com/gpu.shared" && count.Sign() > 0 {
			offered[name] = count.DeepCopy()
		}
	}
	for name, others := range sameDevices {
		if _, ok := offered[name]; ok {
			for _, other := range others {
				delete(offered, other)
			}
		}
	}
	return offered
}
