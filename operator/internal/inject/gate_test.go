package inject

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func TestInjectGate(t *testing.T) {
	gated := map[string]string{evenkeel.GatedKey: evenkeel.GatedValue}
	for name, test := range map[string]struct {
		labels map[string]string
		spec   corev1.PodSpec
		gates  int
	}{
		"no label":       {nil, corev1.PodSpec{}, 0},
		"label":          {gated, corev1.PodSpec{}, 1},
		"placed already": {gated, corev1.PodSpec{NodeName: "n"}, 0}, // the API refuses a gate on such a pod
		"another's gate": {gated, corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: "another"}}}, 2},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: test.labels}, Spec: test.spec}
		for range 2 { // twice changes nothing
			addGate(pod)
			if len(pod.Spec.SchedulingGates) != test.gates {
				t.Errorf("%s: %v", name, pod.Spec.SchedulingGates)
			}
		}
	}
}
