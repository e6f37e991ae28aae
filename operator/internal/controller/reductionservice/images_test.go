package reductionservice

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// A job keeps its plugin, and its profile may have got other servers since. One Event says so, before any pod runs.
func TestReductionImagesOfAJobDiffer(t *testing.T) {
	job := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "batch/v1", "kind": "Job", "spec": map[string]any{"template": map[string]any{
		"metadata": map[string]any{"annotations": map[string]any{evenkeel.PluginImageKey: "plugin:1.0.0@sha256:" + strings.Repeat("0", 64)}},
	}}}}
	one := int32(1)
	service := &evenkeel.ReductionService{Spec: evenkeel.ReductionServiceSpec{Replicas: &one}}
	for _, step := range []struct {
		image  string
		status metav1.ConditionStatus
		events int
	}{
		{"servers:1.0.0", metav1.ConditionTrue, 0}, {"servers:1.1.0", metav1.ConditionFalse, 1}, {"servers:1.1.0", metav1.ConditionFalse, 0}, {"servers", metav1.ConditionUnknown, 0},
	} {
		service.Spec.Image = step.image
		status, pending := observeStatus(service, job, nil, nil, time.Now())
		if c := meta.FindStatusCondition(status.Conditions, evenkeel.ConditionImagesMatch); c == nil || c.Status != step.status {
			t.Errorf("%s: %+v, want %s", step.image, c, step.status)
		}
		events := 0
		for _, p := range pending {
			if p.reason == ReasonImagesDiffer && p.severity == corev1.EventTypeWarning {
				events++
			}
		}
		if events != step.events {
			t.Errorf("%s: %+v, want %d Events", step.image, pending, step.events)
		}
		service.Status = *status
	}
}
