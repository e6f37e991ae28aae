package jobgate

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// FromJob describes a job that waits as a whole. With an error it lacks the pod templates that are invalid.
func FromJob(job *unstructured.Unstructured) (gate.Job, error) {
	annotations := job.GetAnnotations()
	gated := gate.Job{Profile: annotations[evenkeel.ProfileKey], OptOut: annotations[evenkeel.GateKey] == evenkeel.GateDisabled, Since: job.GetCreationTimestamp().Time}
	templates, err := workload.Templates(job)
	all := []error{err}
	for _, t := range templates {
		spec, err := t.PodSpec()
		if err != nil {
			all = append(all, err)
			continue
		}
		gated.AddTemplate(spec, t.Pods)
	}
	if err := errors.Join(all...); err != nil {
		return gated, fmt.Errorf("%s %s/%s: %w", job.GetKind(), job.GetNamespace(), job.GetName(), err)
	}
	return gated, nil
}

// FromPods describes gated pods of one job, at least one. One that its user has opted out opens the gate of all.
func FromPods(pods []*corev1.Pod) gate.Job {
	gated := gate.Job{Profile: pods[0].Labels[evenkeel.ProfileKey], Since: pods[0].CreationTimestamp.Time}
	for _, pod := range pods {
		if pod.CreationTimestamp.Time.Before(gated.Since) {
			gated.Since = pod.CreationTimestamp.Time
		}
		gated.OptOut = gated.OptOut || pod.Annotations[evenkeel.GateKey] == evenkeel.GateDisabled
		gated.Pods = append(gated.Pods, &pod.Spec)
	}
	return gated
}
