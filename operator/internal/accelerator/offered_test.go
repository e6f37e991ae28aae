package accelerator

import (
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

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
