// Package admission implements the webhooks. One pins a profile to a job, another adds the plugin to the job's pods,
// and one looks for annotations without an effect.
package admission

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// maxLookup bounds how long a pod waits for what its job says. It is below the least timeout that the chart allows.
const maxLookup = 500 * time.Millisecond

// Pods is the webhook for pods with the label evenkeel.dev/profile. It reads nothing but the pod, so that every pod of
// a job gets the same, whatever has happened to the profile since. Of a gated pod it also reads whether the gate of its
// job was opened: live serves LeaderWorkerSets and Volcano's Jobs. Reports returns the address that the plugin reports
// to, or nothing.
func Pods(scheme *runtime.Scheme, live client.Reader, reports func() string) *admission.Webhook {
	return admission.WithDefaulter[*corev1.Pod](scheme, podInjector{live, reports})
}

type podInjector struct {
	live    client.Reader
	reports func() string
}

// Default adds the plugin, excludes nodes that failed a check, and adds the scheduling gate where the job asks for it.
// An error refuses the pod; its text is for the user.
func (p podInjector) Default(ctx context.Context, pod *corev1.Pod) error {
	late, err := p.isLate(ctx, pod)
	if err != nil {
		// The controller opens it then.
		log.FromContext(ctx).Info("the pod gets a gate, whether or not that of its job was opened", "reason", err.Error())
	}
	if late {
		inject.RemoveGate(pod)
	}
	return injectPod(pod, p.reports())
}

// isLate reports whether the gate of the pod's job was opened before: the rest of it runs, so that this pod does not
// wait.
func (p podInjector) isLate(ctx context.Context, pod *corev1.Pod) (bool, error) {
	template := pod.Annotations[evenkeel.TemplateKey]
	if template == "" || pod.Labels[evenkeel.GatedKey] == "" {
		return false, nil
	}
	request, err := admission.RequestFromContext(ctx)
	if err != nil {
		return false, fmt.Errorf("admission request: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, maxLookup)
	defer cancel()
	job, err := workload.ReadJob(ctx, p.live, request.Namespace, pod)
	return slices.Contains(workload.OpenedTemplates(job), template), err
}

// injectPod makes all changes of a pod whose profile is pinned.
func injectPod(pod *corev1.Pod, reports string) error {
	err := mutatePod(pod, reports)
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
