package accelerator

import (
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// NCCL takes whole GPUs, each of them once.
func TestAcceleratorWholeGPUs(t *testing.T) {
	for name, test := range map[string]struct {
		labels   map[string]string
		resource corev1.ResourceName
		want     int64
	}{
		"whole":                   {map[string]string{"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, "nvidia.com/gpu", 8},
		"shared":                  {map[string]string{"nvidia.com/gpu.sharing-strategy": "time-slicing"}, "nvidia.com/gpu", 0},
		"shared, by its replicas": {map[string]string{"nvidia.com/gpu.replicas": "4"}, "nvidia.com/gpu", 0},
		"not shared":              {map[string]string{"nvidia.com/gpu.replicas": "1", "nvidia.com/gpu.sharing-strategy": "none"}, "nvidia.com/gpu", 8},
		"shared by another name":  {nil, "nvidia.com/gpu.shared", 0},
		"divided":                 {map[string]string{"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"}, "nvidia.com/gpu", 0},
		"divided, mixed":          {nil, "nvidia.com/mig-1g.10gb", 0},
		"AMD's":                   {nil, "amd.com/gpu", 8},
		"AMD's, partitions":       {nil, "amd.com/cpx_nps4", 0},
		"Intel's":                 {nil, "gpu.intel.com/xe", 0},
		"none":                    {nil, "cpu", 0},
	} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: test.labels}, Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{test.resource: resource.MustParse("8")}}}
		for _, kind := range []corev1.ResourceName{NVIDIA, AMD} {
			want := test.want
			if kind != test.resource {
				want = 0
			}
			if got := WholeGPUs(node, kind); got != want {
				t.Errorf("%s: %d of %s, want %d", name, got, kind, want)
			}
		}
	}
}

func TestAcceleratorsOffered(t *testing.T) {
	node := func(labels map[string]string, pairs ...string) *corev1.Node {
		n := &corev1.Node{}
		n.Labels = labels
		n.Status.Allocatable = corev1.ResourceList{"cpu": resource.MustParse("64")}
		for i := 0; i < len(pairs); i += 2 {
			n.Status.Allocatable[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
		}
		return n
	}
	for name, test := range map[string]struct {
		nodes []*corev1.Node
		want  string
	}{
		"none":             {[]*corev1.Node{node(nil)}, ""},
		"all":              {[]*corev1.Node{node(nil, "nvidia.com/gpu", "8"), node(nil, "nvidia.com/gpu", "8")}, "nvidia.com/gpu=8"},
		"the smaller":      {[]*corev1.Node{node(nil, "nvidia.com/gpu", "8"), node(nil, "nvidia.com/gpu", "4")}, "nvidia.com/gpu=4"},
		"no common kind":   {[]*corev1.Node{node(nil, "nvidia.com/gpu", "8"), node(nil, "amd.com/gpu", "8")}, ""},
		"lost":             {[]*corev1.Node{node(nil, "nvidia.com/gpu", "0")}, ""},
		"parts":            {[]*corev1.Node{node(nil, "nvidia.com/gpu", "1", "nvidia.com/mig-1g.10gb", "7")}, "nvidia.com/gpu=1 nvidia.com/mig-1g.10gb=7"},
		"shared":           {[]*corev1.Node{node(map[string]string{sharingLabel: "time-slicing"}, "nvidia.com/gpu", "32")}, ""},
		"shared, so named": {[]*corev1.Node{node(nil, "nvidia.com/gpu.shared", "32")}, ""},
		"two names":        {[]*corev1.Node{node(nil, "aws.amazon.com/neuron", "16", "aws.amazon.com/neuroncore", "32")}, "aws.amazon.com/neuron=16"},
	} {
		offered := Offered(test.nodes...)
		var got []string
		for _, key := range slices.Sorted(maps.Keys(offered)) {
			count := offered[key]
			got = append(got, string(key)+"="+count.String())
		}
		if text := strings.Join(got, " "); text != test.want {
			t.Errorf("%s: %q, want %q", name, text, test.want)
		}
	}
}
