package nodedrain

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestOf(t *testing.T) {
	taint := func(key string, effect corev1.TaintEffect) corev1.NodeSpec {
		return corev1.NodeSpec{Taints: []corev1.Taint{{Key: "other", Effect: corev1.TaintEffectNoSchedule}, {Key: key, Effect: effect}}}
	}
	for name, test := range map[string]struct {
		spec corev1.NodeSpec
		want bool
	}{
		"a node in use":                    {corev1.NodeSpec{}, false},
		"cordoned":                         {corev1.NodeSpec{Unschedulable: true}, true},
		"by Karpenter":                     {taint("karpenter.sh/disrupted", corev1.TaintEffectNoSchedule), true},
		"by Karpenter before 1.0":          {taint("karpenter.sh/disruption", corev1.TaintEffectNoSchedule), true},
		"by the cluster autoscaler":        {taint("ToBeDeletedByClusterAutoscaler", corev1.TaintEffectNoSchedule), true},
		"a candidate of the autoscaler":    {taint("DeletionCandidateOfClusterAutoscaler", corev1.TaintEffectPreferNoSchedule), false},
		"Karpenter's key, another effect":  {taint("karpenter.sh/disrupted", corev1.TaintEffectPreferNoSchedule), false},
		"a taint that keeps some pods out": {taint("nvidia.com/gpu", corev1.TaintEffectNoSchedule), false},
	} {
		if got := Of(&corev1.Node{Spec: test.spec}); got != test.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
