package suspend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// OpenAll opens every gate, as if no policy existed. The client reads without a cache.
func OpenAll(ctx context.Context, c client.Client) error {
	var all []error
	for _, kind := range workload.Suspendable() {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		switch err := c.List(ctx, list, client.MatchingLabelsSelector{Selector: GatedSelector()}); {
		case meta.IsNoMatchError(err), apierrors.IsNotFound(err): // the cluster has no such jobs
		case err != nil:
			all = append(all, fmt.Errorf("list gated %s: %w", kind.Kind, err))
		}
		for i := range list.Items {
			job := &list.Items[i]
			if workload.Queued(job) {
				all = append(all, removeGateLabel(ctx, c, job, func(*unstructured.Unstructured) error { return nil }))
				continue
			}
			all = append(all, openJob(ctx, c, job))
		}
	}
	var pods corev1.PodList
	if err := c.List(ctx, &pods, client.MatchingLabelsSelector{Selector: GatedSelector()}); err != nil {
		all = append(all, fmt.Errorf("list gated pods: %w", err))
	}
	for i := range pods.Items {
		all = append(all, openPod(ctx, c, &pods.Items[i]))
	}
	return errors.Join(all...)
}

// openJob resumes a suspended job.
func openJob(ctx context.Context, c client.Client, job *unstructured.Unstructured) error {
	return removeGateLabel(ctx, c, job, func(j *unstructured.Unstructured) error { return workload.Suspend(j, false) })
}

// removeGateLabel removes the label from the job and makes the change. If somebody changed the job meanwhile it does nothing:
// that change is another event.
func removeGateLabel(ctx context.Context, c client.Client, job *unstructured.Unstructured, change func(*unstructured.Unstructured) error) error {
	opened := job.DeepCopy()
	labels := opened.GetLabels()
	delete(labels, evenkeel.GatedKey)
	opened.SetLabels(labels)
	if err := change(opened); err != nil {
		return err
	}
	err := c.Patch(ctx, opened, client.MergeFromWithOptions(job, client.MergeFromWithOptimisticLock{}))
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("open the gate of %s %s/%s: %w", job.GetKind(), job.GetNamespace(), job.GetName(), err)
	}
	return nil
}

// openPod removes the scheduling gate from a pod.
func openPod(ctx context.Context, c client.Client, pod *corev1.Pod) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID, "labels": map[string]any{evenkeel.GatedKey: nil}},
		"spec":     map[string]any{"schedulingGates": []any{map[string]any{"$patch": "delete", "name": evenkeel.SchedulingGate}}},
	})
	if err != nil {
		return err
	}
	err = c.Patch(ctx, pod.DeepCopy(), client.RawPatch(types.StrategicMergePatchType, patch))
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("open the gate of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}
