package reductionservice

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/reduction"
	"evenkeel.dev/evenkeel/operator/internal/text"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// Reasons of the Events on jobs.
const (
	ReasonReady   = "EvenkeelReductionReady"
	ReasonLost    = "EvenkeelReductionServerLost"
	ReasonRefused = "EvenkeelReductionRefused"
	ReasonNoRDMA  = "EvenkeelReductionWithoutRDMA"

	ReasonImagesDiffer = "EvenkeelReductionImagesDiffer"
	ReasonDraining     = "EvenkeelReductionNodeDraining"
	ReasonKeyReplaced  = "EvenkeelReductionKeyReplaced"
)

// maxMessage is the maximum length of a condition's message.
const maxMessage = 1024

// A pendingEvent is an Event to record on the job, about what is so since a time.
type pendingEvent struct {
	severity, reason, message string
	since                     time.Time
}

// observeStatus returns the status of the servers, and the Events about what changed.
func observeStatus(service *evenkeel.ReductionService, job *unstructured.Unstructured, pods []corev1.Pod, nodes []corev1.Node, now time.Time) (*evenkeel.ReductionServiceStatus, []pendingEvent) {
	servers := int(*service.Spec.Replicas)
	var absent []string // servers that are not ready
	why := map[string]string{}
	for i := range servers {
		name := reduction.Pod(service.Name, i)
		at := slices.IndexFunc(pods, func(p corev1.Pod) bool { return p.Name == name })
		if at >= 0 && ready(&pods[at]) {
			continue
		}
		absent = append(absent, name)
		why[name] = fmt.Sprintf("it has no pod: the Events of StatefulSet %s say why, if the API server refuses it", service.Name)
		if at >= 0 {
			why[name] = notReadyReason(&pods[at])
		}
	}
	before := meta.FindStatusCondition(service.Status.Conditions, evenkeel.ConditionAvailable)
	complete := before != nil && (before.Status == metav1.ConditionTrue || before.Reason == evenkeel.ReasonServerLost)

	status := service.Status.DeepCopy()
	present := int32(servers - len(absent))
	status.ReadyReplicas, status.ObservedGeneration, status.LostServers = &present, service.Generation, nil
	status.Endpoints = reduction.Endpoints(service.Name, service.Namespace, servers)
	condition := metav1.Condition{Type: evenkeel.ConditionAvailable, Status: metav1.ConditionFalse, ObservedGeneration: service.Generation}
	suspended, _ := workload.Suspended(job)
	var pending []pendingEvent
	switch {
	case workload.Finished(job):
		condition.Reason, condition.Message = evenkeel.ReasonJobFinished, "the job has ended, and its servers with it"
	case suspended:
		condition.Reason, condition.Message = evenkeel.ReasonJobSuspended, "the job is suspended, and its servers are stopped"
	case len(absent) == 0:
		condition.Status, condition.Reason = metav1.ConditionTrue, evenkeel.ReasonAllReady
		condition.Message = fmt.Sprintf("%d of %d servers are ready", servers, servers)
		if !complete {
			pending = append(pending, pendingEvent{corev1.EventTypeNormal, ReasonReady, fmt.Sprintf("all %d reduction servers of ReductionService %s are ready", servers, service.Name), now})
		}
	case complete:
		condition.Reason, status.LostServers = evenkeel.ReasonServerLost, absent
		for _, name := range absent {
			if !slices.Contains(service.Status.LostServers, name) {
				pending = append(pending, pendingEvent{corev1.EventTypeWarning, ReasonLost, fmt.Sprintf(
					"reduction server %s was lost at %s: %s. Operations that wait for it fail with an error that names it; a new server of the same name serves processes that start later",
					name, now.UTC().Format(time.RFC3339), why[name]), now})
			}
		}
	default:
		condition.Reason = evenkeel.ReasonStarting
	}
	if condition.Message == "" {
		condition.Message = describe(servers, absent, why)
	}
	if before == nil || before.Status != condition.Status {
		condition.LastTransitionTime = metav1.NewTime(now.Truncate(time.Second))
	}
	meta.SetStatusCondition(&status.Conditions, condition)
	if !suspended && !workload.Finished(job) {
		pending = append(pending, observeRDMA(service, job, nodes, len(absent) == 0, status, now)...)
		pending = append(pending, observeImages(service, job, status, now)...)
		pending = append(pending, observeDrain(service, pods, nodes, status, now)...)
	} else {
		meta.RemoveStatusCondition(&status.Conditions, evenkeel.ConditionDraining)
	}
	return status, pending
}

// describe lists the servers that are not ready, and why.
func describe(servers int, absent []string, why map[string]string) string {
	var parts []string
	for _, name := range absent {
		parts = append(parts, name+": "+why[name])
	}
	return text.Clip(fmt.Sprintf("%d of %d servers are ready; %s", servers-len(absent), servers, strings.Join(parts, "; ")), maxMessage)
}

func ready(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && isTrue(pod, corev1.PodReady)
}

func isTrue(pod *corev1.Pod, kind corev1.PodConditionType) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == kind && c.Status == corev1.ConditionTrue })
}

// notReadyReason explains why a pod is not ready, by its status.
func notReadyReason(pod *corev1.Pod) string {
	on := ""
	if pod.Spec.NodeName != "" {
		on = " on node " + pod.Spec.NodeName
	}
	if pod.DeletionTimestamp != nil {
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.DisruptionTarget && c.Status == corev1.ConditionTrue {
				return "its pod" + on + " is being removed: " + c.Message
			}
		}
		return "its pod" + on + " is being removed"
	}
	for _, c := range pod.Status.ContainerStatuses {
		ended := c.State.Terminated
		if ended == nil {
			ended = c.LastTerminationState.Terminated
		}
		switch waits := c.State.Waiting; {
		case ended != nil:
			return fmt.Sprintf("its container%s ended with status %d (%s)", on, ended.ExitCode, ended.Reason)
		case waits != nil && waits.Message != "":
			return fmt.Sprintf("its container%s waits: %s: %s", on, waits.Reason, waits.Message)
		}
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return "its pod has no node: " + c.Message
		}
	}
	return "its pod" + on + " is not ready"
}
