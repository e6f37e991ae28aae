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

// OfJob is a job that waits as a whole. With an error it lacks what of its pods makes no sense.
func OfJob(job *unstructured.Unstructured) (gate.Job, error) {
	waits := gate.Job{Profile: job.GetAnnotations()[evenkeel.ProfileKey], Since: job.GetCreationTimestamp().Time}
	templates, err := workload.Templates(job)
	all := []error{err}
	for _, t := range templates {
		spec, err := t.PodSpec()
		if err != nil {
			all = append(all, err)
			continue
		}
		waits.Pods = append(waits.Pods, spec)
	}
	if err := errors.Join(all...); err != nil {
		return waits, fmt.Errorf("%s %s/%s: %w", job.GetKind(), job.GetNamespace(), job.GetName(), err)
	}
	return waits, nil
}

// OfPods are pods of one job that wait: at least one.
func OfPods(pods []*corev1.Pod) gate.Job {
	waits := gate.Job{Profile: pods[0].Labels[evenkeel.ProfileKey], Since: pods[0].CreationTimestamp.Time}
	for _, pod := range pods {
		if pod.CreationTimestamp.Time.Before(waits.Since) {
			waits.Since = pod.CreationTimestamp.Time
		}
		waits.Pods = append(waits.Pods, &pod.Spec)
	}
	return waits
}
