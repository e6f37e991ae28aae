package inject

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func TestHold(t *testing.T) {
	closed := map[string]string{evenkeel.GateKey: evenkeel.GateClosed}
	for name, test := range map[string]struct {
		labels map[string]string
		spec   corev1.PodSpec
		gates  int
	}{
		"no label":       {nil, corev1.PodSpec{}, 0},
		"label":          {closed, corev1.PodSpec{}, 1},
		"placed already": {closed, corev1.PodSpec{NodeName: "n"}, 0}, // the API refuses a gate on such a pod
		"another's gate": {closed, corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: "another"}}}, 2},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: test.labels}, Spec: test.spec}
		for range 2 { // twice changes nothing
			Hold(pod)
			if len(pod.Spec.SchedulingGates) != test.gates {
				t.Errorf("%s: %v", name, pod.Spec.SchedulingGates)
			}
		}
	}
}
