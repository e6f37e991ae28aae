package suspend

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// readGang reads what of the gang's gate has been opened, by an earlier process maybe, or before its other pods had gone.
func (c *Reconciler) readGang(ctx context.Context, waiting jobgate.Gang) (*gang, error) {
	g := &gang{about: waiting.Job, alone: waiting.Alone()}
	job, err := workload.ReadJob(ctx, c.live, waiting.Pods[0].Namespace, waiting.Pods[0])
	if err != nil {
		return nil, err
	}
	g.opened = workload.OpenedTemplates(job)
	if job != nil {
		g.about.UID = job.UID
	}
	if g.about.UID == "" { // its job is gone
		g.about = workload.JobOf(waiting.Pods[0])
	}
	if waiting.Pods[0].Annotations[evenkeel.TemplateKey] != "" { // the job says what was opened
		return g, nil
	}
	if g.started, err = c.hasStarted(ctx, waiting.Pods[0]); err != nil {
		return nil, err
	}
	return g, nil
}

// hasStarted reports whether a pod of the gang does not wait, whose profile its own annotation asked for.
func (c *Reconciler) hasStarted(ctx context.Context, pod *corev1.Pod) (bool, error) {
	gang := workload.GangSelector(pod)
	if gang == nil {
		return false, nil
	}
	selector := labels.SelectorFromSet(gang)
	for key, operator := range map[string]selection.Operator{evenkeel.GatedKey: selection.DoesNotExist, evenkeel.ProfileKey: selection.Exists} {
		requirement, err := labels.NewRequirement(key, operator, nil)
		if err != nil {
			return false, fmt.Errorf("select the pods of %s/%s's job: %w", pod.Namespace, pod.Name, err)
		}
		selector = selector.Add(*requirement)
	}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PodList"))
	// Of the API server's memory.
	fromMemory := &client.ListOptions{Namespace: pod.Namespace, LabelSelector: selector, Raw: &metav1.ListOptions{ResourceVersion: "0"}}
	if err := c.live.List(ctx, list, fromMemory); err != nil {
		return false, fmt.Errorf("list pods of the same job: %w", err)
	}
	return len(list.Items) > 0, nil
}

// recordOpened writes on the job that the gates of the pods' templates have been opened.
func (c *Reconciler) recordOpened(ctx context.Context, g *gang, pods []*corev1.Pod) error {
	var paths []string
	for _, pod := range pods {
		if path := pod.Annotations[evenkeel.TemplateKey]; path != "" && !slices.Contains(paths, path) {
			paths = append(paths, path)
		}
	}
	if len(paths) == 0 {
		return nil
	}
	job, err := workload.ReadJob(ctx, c.live, pods[0].Namespace, pods[0])
	if err != nil || job == nil {
		return err
	}
	opened := workload.OpenedTemplates(job)
	before := len(opened)
	for _, path := range paths {
		if !slices.Contains(opened, path) {
			opened = append(opened, path)
		}
	}
	if len(opened) == before {
		return nil
	}
	slices.Sort(opened)
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
	g.opened = opened
	return nil
}
