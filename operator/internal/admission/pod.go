// Package admission has the two webhooks: one pins a profile to a job, the other adds the plugin to the job's pods.
package admission

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
)

// Pods is the webhook for pods with the label evenkeel.dev/profile. It reads nothing but the pod. So it answers in
// microseconds, and every pod of a job gets the same, whatever has happened to the profile since. Reports returns the address
// that the plugin reports to, or nothing.
func Pods(scheme *runtime.Scheme, reports func() string) *admission.Webhook {
	return admission.WithDefaulter[*corev1.Pod](scheme, podInjector{reports})
}

type podInjector struct{ reports func() string }

// Default adds the plugin, excludes nodes that failed a check, and adds the scheduling gate where the job asks for it. An
// error refuses the pod; its text is for the user.
func (p podInjector) Default(_ context.Context, pod *corev1.Pod) error {
	err := mutatePod(pod, p.reports())
	switch {
	case err != nil:
		metrics.Pod(metrics.Refused)
	case pod.Annotations[evenkeel.SkippedKey] != "":
		metrics.Pod(metrics.Skipped)
	default:
		metrics.Pod(metrics.Injected)
	}
	return err
}

func mutatePod(pod *corev1.Pod, reports string) error {
	resolved, err := inject.FromPod(pod.Labels, pod.Annotations)
	if err != nil {
		return err
	}
	return inject.Apply(pod, resolved, reports)
}
