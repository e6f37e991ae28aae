package accelerator

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestAcceleratorNames(t *testing.T) {
	for name, want := range map[corev1.ResourceName]bool{
		"nvidia.com/gpu": true, "nvidia.com/gpu.shared": true, "nvidia.com/mig-1g.10gb": true, "amd.com/gpu": true,
		"amd.com/cpx_nps4": true, "amd.com/spx_nps1": true,
		"habana.ai/gaudi": true, "google.com/tpu": true, "aws.amazon.com/neuron": true, "gpu.intel.com/xe": true,
		"nvidia.com/rail0": false, "nvidia.com/hostdev": false, "rdma/hca": false, "cpu": false, "amd.com/nic": false, "amd.com/vnic_nps": false,
	} {
		if IsResource(name) != want {
			t.Errorf("%s: %t", name, !want)
		}
	}
}

func TestAcceleratorRequests(t *testing.T) {
	one, zero := resource.MustParse("1"), resource.MustParse("0")
	for name, test := range map[string]struct {
		resources corev1.ResourceRequirements
		want      bool
	}{
		"limit":          {corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": one}}, true},
		"request":        {corev1.ResourceRequirements{Requests: corev1.ResourceList{"amd.com/gpu": one}}, true},
		"claim":          {corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpus"}}}, true},
		"a network card": {corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/rail0": one}}, false},
		"none of them":   {corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": zero}, Requests: corev1.ResourceList{"nvidia.com/gpu": zero}}, false},
		"nothing":        {corev1.ResourceRequirements{}, false},
	} {
		if got := RequestedBy(&corev1.PodSpec{Containers: []corev1.Container{{}, {Resources: test.resources}}}); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestAcceleratorNodes(t *testing.T) {
	for name, test := range map[string]struct {
		labels      map[string]string
		allocatable corev1.ResourceName
		want        bool
	}{
		"GPUs":                   {nil, "nvidia.com/gpu", true},
		"its plugin ended":       {nil, "nvidia.com/gpu", true},
		"its plugin is to start": {map[string]string{"nvidia.com/gpu.count": "8"}, "cpu", true},
		"labelled":               {map[string]string{"nvidia.com/gpu.present": "true"}, "cpu", true},
		"no GPUs":                {map[string]string{"nvidia.com/gpu.count": "0"}, "cpu", false},
		"a network card":         {nil, "nvidia.com/rail0", false},
	} {
		node := &corev1.Node{}
		node.Labels = test.labels
		node.Status.Allocatable = corev1.ResourceList{test.allocatable: resource.MustParse("0")}
		if Has(node) != test.want {
			t.Errorf("%s: %t", name, !test.want)
		}
	}
}
