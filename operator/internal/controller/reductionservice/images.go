package reductionservice

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/reduction"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// observeImages sets the condition ImagesMatch: whether the servers have the version of the plugin that the job got when it was
// created. The webhook assigns no servers of another version, but the profile may change before the servers are made.
func observeImages(service *evenkeel.ReductionService, job *unstructured.Unstructured, status *evenkeel.ReductionServiceStatus, now time.Time) []pendingEvent {
	templates, err := workload.Templates(job)
	if err != nil || len(templates) == 0 {
		return nil // such a job got no servers
	}
	condition := metav1.Condition{Type: evenkeel.ConditionImagesMatch, ObservedGeneration: service.Generation}
	condition.Status, condition.Reason, condition.Message = reduction.CompareImages(templates[0].Annotations()[evenkeel.PluginImageKey], service.Spec.Image)
	before := meta.FindStatusCondition(service.Status.Conditions, evenkeel.ConditionImagesMatch)
	if before == nil || before.Status != condition.Status {
		condition.LastTransitionTime = metav1.NewTime(now.Truncate(time.Second))
	}
	meta.SetStatusCondition(&status.Conditions, condition)
	if condition.Status != metav1.ConditionFalse || before != nil && before.Status == condition.Status {
		return nil
	}
	return []pendingEvent{{corev1.EventTypeWarning, ReasonImagesDiffer, "reduction servers: " + condition.Message + "; then create the job again", now}}
}
