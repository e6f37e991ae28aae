package networkcheck

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/jobs"
	"evenkeel.dev/evenkeel/operator/internal/preflight/ncclout"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
)

// LogReader reads the log of a container.
type LogReader interface {
	// Tail returns the end of the log of the container jobs.Container, whole lines but for the first.
	Tail(ctx context.Context, namespace, pod string) ([]byte, error)
}

// PodLogs reads logs from the API server.
type PodLogs struct{ Clientset kubernetes.Interface }

// Limits of what is read of a log. Only a malfunctioning benchmark writes more.
const (
	maxLogLines = 5000
	maxLogBytes = 8 << 20
)

// Tail implements LogReader.
func (l PodLogs) Tail(ctx context.Context, namespace, pod string) ([]byte, error) {
	lines, size := int64(maxLogLines), int64(maxLogBytes)
	stream, err := l.Clientset.CoreV1().Pods(namespace).GetLogs(pod, &corev1.PodLogOptions{Container: jobs.Container, TailLines: &lines, LimitBytes: &size}).Stream(ctx)
	if err != nil {
		return nil, fmt.Errorf("log of pod %s: %w", pod, err)
	}
	defer stream.Close()
	text, err := io.ReadAll(io.LimitReader(stream, maxLogBytes))
	if err != nil {
		return nil, fmt.Errorf("log of pod %s: %w", pod, err)
	}
	return text, nil
}

// permanentWaitReasons are reasons of waiting containers that do not go away by waiting.
var permanentWaitReasons = []string{
	"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "SignatureValidationFailed",
	"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff",
}

// blockingReason explains why a run cannot have a result, by the status of its pods; empty if it can. Ranks that ended
// by themselves do not count: their logs have the result.
func blockingReason(pods []corev1.Pod) string {
	for i := range pods {
		pod := &pods[i]
		if why := podBlockingReason(pod); why != "" {
			where := ""
			if pod.Spec.NodeName != "" {
				where = " on " + pod.Spec.NodeName
			}
			return fmt.Sprintf("pod %s%s: %s", pod.Name, where, why)
		}
	}
	return ""
}

func podBlockingReason(pod *corev1.Pod) string {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.DisruptionTarget && c.Status == corev1.ConditionTrue {
			return joinReason(c.Reason, c.Message)
		}
	}
	if pod.Status.Phase == corev1.PodFailed && pod.Status.Reason != "" && len(terminatedStates(pod)) == 0 {
		return joinReason(pod.Status.Reason, pod.Status.Message)
	}
	if pod.Status.Reason == "Evicted" || pod.Status.Reason == "NodeLost" || pod.Status.Reason == "Preempting" {
		return joinReason(pod.Status.Reason, pod.Status.Message)
	}
	for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if w := c.State.Waiting; w != nil && slices.Contains(permanentWaitReasons, w.Reason) {
			return joinReason(w.Reason, w.Message)
		}
	}
	for _, t := range terminatedStates(pod) {
		switch {
		case t.Reason == "OOMKilled" || t.Reason == "ContainerCannotRun" || t.Reason == "StartError":
			return joinReason(t.Reason, t.Message)
		case t.ExitCode > 128:
			return fmt.Sprintf("its process was ended by signal %d", t.ExitCode-128)
		}
	}
	return ""
}

func terminatedStates(pod *corev1.Pod) []*corev1.ContainerStateTerminated {
	var all []*corev1.ContainerStateTerminated
	for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if t := c.State.Terminated; t != nil && (t.ExitCode != 0 || c.Name == jobs.Container) {
			all = append(all, t)
		}
	}
	return all
}

// pendingReason describes what a timed-out run or its pods wait for.
func pendingReason(job runJob, pods []corev1.Pod, wanted int) string {
	if job.suspended { // not by this controller
		return fmt.Sprintf("%s is suspended, as Kueue does with manageJobsWithoutQueueName: let its managedJobsNamespaceSelector exclude the namespace %s", job.GetName(), job.GetNamespace())
	}
	if len(pods) < wanted {
		return fmt.Sprintf("%d of its %d pods exist", len(pods), wanted)
	}
	for i := range pods {
		pod := &pods[i]
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				return fmt.Sprintf("pod %s is not scheduled: %s", pod.Name, c.Message)
			}
		}
		if pod.Status.Phase == corev1.PodPending {
			return fmt.Sprintf("pod %s on %s has not started", pod.Name, pod.Spec.NodeName)
		}
	}
	return "its pods still run"
}

func joinReason(reason, message string) string {
	return strings.TrimSuffix(reason+": "+strings.Join(strings.Fields(message), " "), ": ")
}

// parseMeasurement returns the result of a run whose processes ended by themselves.
func parseMeasurement(log []byte, options evenkeel.CheckOptions) preflight.Measurement {
	report, err := ncclout.Parse(log)
	m := preflight.Measurement{Outcome: pairing.Measured, BusBW: report.PeakBusBW(), Wrong: report.OutOfBounds, Networks: report.Networks}
	switch {
	case err == nil && options.Runner.Type == evenkeel.RunnerBench:
		m.LatencyUS, m.Devices = report.LatencyUS, report.Devices
	case err == nil && options.Sweep.Collective == evenkeel.CollectiveAllReduce:
		m.LatencyUS = report.HalfSmallestUS() // and NCCL uses all devices
	case err == nil:
	case report.Failure != nil && report.Failure.Kind == ncclout.FailureRun:
		m.Outcome, m.BusBW, m.Detail = pairing.Broken, 0, report.Failure.Line
	case report.Failure != nil && report.Failure.Kind == ncclout.FailureDriver:
		m = faultMeasurement("no usable GPU driver: " + report.Failure.Line)
	case report.Failure != nil && report.Failure.Kind == ncclout.FailureVersion:
		m = faultMeasurement("the check's image or plugin has another version (see runner.image, preflight.benchImage and the profile's plugin): " + report.Failure.Line)
	default:
		m = faultMeasurement(err.Error())
	}
	m.LockedMemory = report.LockedMemory
	return m
}

func faultMeasurement(detail string) preflight.Measurement {
	return preflight.Measurement{Outcome: pairing.Fault, Detail: detail}
}

// rankPods is the number of pods that run ranks.
func rankPods(pods []corev1.Pod) (count int) {
	for i := range pods {
		if pods[i].Labels[evenkeel.RoleKey] == evenkeel.RoleRank {
			count++
		}
	}
	return count
}

// resultPod returns the pod whose log contains the results: the launcher of an MPIJob, else rank 0.
func resultPod(pods []corev1.Pod) *corev1.Pod {
	for i := range pods {
		labels := pods[i].Labels
		if labels[evenkeel.RoleKey] == evenkeel.RoleLauncher || labels["batch.kubernetes.io/job-completion-index"] == "0" && labels[evenkeel.RoleKey] == evenkeel.RoleRank {
			return &pods[i]
		}
	}
	return nil
}
