package reductionservice

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const hca = "rdma/hca"

// The condition RDMA of a service, and the Event about it: once, as long as nothing changes.
func TestObserveRDMA(t *testing.T) {
	has := func(count string) []corev1.Node {
		return []corev1.Node{{Status: corev1.NodeStatus{
			Allocatable: corev1.ResourceList{"cpu": resource.MustParse("8"), "memory": resource.MustParse("8Gi"), hca: resource.MustParse(count)},
			Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		}}}
	}
	job := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "batch/v1", "kind": "Job", "spec": map[string]any{"template": map[string]any{
		"metadata": map[string]any{"annotations": map[string]any{evenkeel.RDMAResourceKey: hca + "=1"}},
	}}}}
	one := int32(1)
	running := []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: "s-0"}, Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}}}
	service := &evenkeel.ReductionService{ObjectMeta: metav1.ObjectMeta{Name: "s"}, Spec: evenkeel.ReductionServiceSpec{Replicas: &one}}
	for _, step := range []struct {
		name, device string
		nodes        []corev1.Node
		pods         []corev1.Pod
		reason, news string
	}{
		{"TCP", "", has("8"), nil, evenkeel.ReasonServersUseTCP, "not every node that they may run on offered rdma/hca"},
		{"TCP still", "", has("8"), nil, evenkeel.ReasonServersUseTCP, ""},
		{"nowhere", hca, has("0"), nil, evenkeel.ReasonNoNodeHasDevice, "none of the 1 that they may run on offers rdma/hca"},
		{"nowhere still", hca, has("0"), nil, evenkeel.ReasonNoNodeHasDevice, ""},
		{"there", hca, has("8"), nil, evenkeel.ReasonServersHaveDevice, ""},
		{"running", hca, has("8"), running, evenkeel.ReasonServersHaveDevice, ""},
		{"running, and all are given away", hca, has("0"), running, evenkeel.ReasonServersHaveDevice, ""},
		{"lost, and nowhere to go", hca, has("0"), nil, evenkeel.ReasonNoNodeHasDevice, "servers wait for a node"},
	} {
		service.Spec.Transport.RDMA.ResourceName = step.device
		status, news := observeStatus(service, job, step.pods, step.nodes, time.Now())
		c := meta.FindStatusCondition(status.Conditions, evenkeel.ConditionRDMA)
		if c == nil || c.Reason != step.reason || (c.Status == metav1.ConditionTrue) != (step.reason == evenkeel.ReasonServersHaveDevice) {
			t.Errorf("%s: %+v, want %s", step.name, c, step.reason)
		}
		events := ""
		for _, n := range news {
			if n.reason == ReasonNoRDMA {
				events += n.message
			}
		}
		if step.news == "" && events != "" || !strings.Contains(events, step.news) {
			t.Errorf("%s: the Events are %q, want %q", step.name, events, step.news)
		}
		service.Status = *status
	}

	service.Spec.Transport.RDMA.ResourceName, service.Status = "", evenkeel.ReductionServiceStatus{}
	status, _ := observeStatus(service, &unstructured.Unstructured{}, nil, nil, time.Now())
	if c := meta.FindStatusCondition(status.Conditions, evenkeel.ConditionRDMA); c != nil {
		t.Errorf("%+v of a job that has no device", c)
	}
}
