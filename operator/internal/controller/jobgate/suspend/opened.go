package suspend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// openLatePods opens the gates of those pods whose template's gate has been opened before, and returns the others. All have the
// controller with the UID.
func (c *Reconciler) openLatePods(ctx context.Context, uid types.UID, pods []*corev1.Pod) (waiting []*corev1.Pod, err error) {
	opened, known := c.opened[uid]
	if !known {
		job, err := c.jobOf(ctx, pods[0])
		if err != nil {
			return pods, err
		}
		opened = openedTemplates(job)
		c.opened[uid] = opened
	}
	var all []error
	for _, pod := range pods {
		if slices.Contains(opened, pod.Annotations[evenkeel.TemplateKey]) {
			all = append(all, openPod(ctx, c.Client, pod))
		} else {
			waiting = append(waiting, pod)
		}
	}
	return waiting, errors.Join(all...)
}

// recordOpened writes on the job that the gates of the pods' templates have been opened.
func (c *Reconciler) recordOpened(ctx context.Context, uid types.UID, pods []*corev1.Pod) error {
	job, err := c.jobOf(ctx, pods[0])
	if err != nil || job == nil {
		return err
	}
	opened := openedTemplates(job)
	for _, pod := range pods {
		if path := pod.Annotations[evenkeel.TemplateKey]; path != "" && !slices.Contains(opened, path) {
			opened = append(opened, path)
		}
	}
	slices.Sort(opened)
	if len(opened) == len(openedTemplates(job)) {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": job.UID, "annotations": map[string]any{evenkeel.OpenedTemplatesKey: strings.Join(opened, ",")},
	}})
	if err != nil {
		return err
	}
	err = c.Client.Patch(ctx, job, client.RawPatch(types.MergePatchType, patch))
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) { // a conflict: another job of that name
		return fmt.Errorf("write on %s %s/%s that its gate was opened: %w", job.Kind, job.Namespace, job.Name, err)
	}
	c.opened[uid] = opened
	return nil
}

// jobOf reads the job that made the pod; nil: it is gone, or none that Evenkeel knows.
func (c *Reconciler) jobOf(ctx context.Context, pod *corev1.Pod) (*metav1.PartialObjectMetadata, error) {
	kind, name, ok := workload.OfPod(pod)
	if !ok {
		return nil, nil
	}
	job := &metav1.PartialObjectMetadata{}
	job.SetGroupVersionKind(kind)
	switch err := c.live.Get(ctx, client.ObjectKey{Namespace: pod.Namespace, Name: name}, job); {
	case apierrors.IsNotFound(err), meta.IsNoMatchError(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read %s %s/%s: %w", kind.Kind, pod.Namespace, name, err)
	}
	return job, nil
}

func openedTemplates(job *metav1.PartialObjectMetadata) []string {
	if job == nil || job.Annotations[evenkeel.OpenedTemplatesKey] == "" {
		return nil
	}
	return strings.Split(job.Annotations[evenkeel.OpenedTemplatesKey], ",")
}
