package reductionservice

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/reduction"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// observeRDMA sets the condition RDMA: whether the servers of a job with an RDMA device have the device too. If they do
// not, it returns an Event: ranks reach the servers by TCP then, or the servers wait for a node.
func observeRDMA(service *evenkeel.ReductionService, job *unstructured.Unstructured, nodes []corev1.Node, allReady bool, status *evenkeel.ReductionServiceStatus, now time.Time) []pendingEvent {
	device := service.Spec.Transport.RDMA.ResourceName
	condition := metav1.Condition{Type: evenkeel.ConditionRDMA, Status: metav1.ConditionFalse, ObservedGeneration: service.Generation}
	offering, all := 0, 0
	if device != "" {
		offering, all = reduction.CountOffering(service, nodes)
	}
	severity := corev1.EventTypeNormal
	switch {
	case device == "" && jobDevice(job) == "":
		return nil
	case device == "":
		condition.Reason = evenkeel.ReasonServersUseTCP
		condition.Message = fmt.Sprintf("servers have no RDMA device and use TCP: when the job was created, not every node that they may run on offered %s: select nodes that do in spec.reduction.server.nodeSelector of the NetworkProfile", jobDevice(job))
	case allReady || offering > 0:
		condition.Status, condition.Reason, condition.Message = metav1.ConditionTrue, evenkeel.ReasonServersHaveDevice, "each server has "+device
		if !allReady {
			condition.Message = fmt.Sprintf("each server gets %s; %d of the %d nodes that they may run on offer it", device, offering, all)
		}
	default:
		severity, condition.Reason = corev1.EventTypeWarning, evenkeel.ReasonNoNodeHasDevice
		condition.Message = fmt.Sprintf("servers wait for a node: none of the %d that they may run on offers %s: check the device plugin there, and spec.reduction.server of the NetworkProfile", all, device)
	}
	before := meta.FindStatusCondition(service.Status.Conditions, evenkeel.ConditionRDMA)
	if before == nil || before.Status != condition.Status {
		condition.LastTransitionTime = metav1.NewTime(now.Truncate(time.Second))
	}
	meta.SetStatusCondition(&status.Conditions, condition)
	if condition.Status == metav1.ConditionTrue || before != nil && before.Reason == condition.Reason {
		return nil
	}
	return []pendingEvent{{severity, ReasonNoRDMA, "reduction " + condition.Message, now}}
}

// jobDevice is the device that the job got when it was created, or empty if there is none.
func jobDevice(job *unstructured.Unstructured) string {
	templates, err := workload.Templates(job)
	if err != nil {
		return ""
	}
	for _, t := range templates {
		if device, _, _ := strings.Cut(t.Annotations()[evenkeel.RDMAResourceKey], "="); device != "" {
			return device
		}
	}
	return ""
}
