package suspend

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/kube/sweep"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// ListGated lists the gated jobs and pods. To remove one is to open its gate, as if no policy existed. The client reads without a
// cache.
func ListGated(ctx context.Context, c client.Client) ([]sweep.Item, error) {
	var items []sweep.Item
	gated := client.MatchingLabelsSelector{Selector: GatedSelector()}
	for _, kind := range workload.Suspendable() {
		jobs := &unstructured.UnstructuredList{}
		jobs.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		err := sweep.Pages(ctx, c, jobs, func() error {
			for _, job := range jobs.Items {
				items = append(items, sweep.Item{
					Name: fmt.Sprintf("gate of %s %s/%s", kind.Kind, job.GetNamespace(), job.GetName()),
					Remove: func(ctx context.Context) error {
						if workload.Queued(&job) {
							_, err := patchGate(ctx, c, &job, nil)
							return err
						}
						return openJob(ctx, c, &job)
					},
				})
			}
			return nil
		}, gated)
		if err != nil && !meta.IsNoMatchError(err) && !apierrors.IsNotFound(err) { // the cluster has no such jobs
			return nil, fmt.Errorf("list gated %ss: %w", kind.Kind, err)
		}
	}
	var pods corev1.PodList
	err := sweep.Pages(ctx, c, &pods, func() error {
		for _, pod := range pods.Items {
			items = append(items, sweep.Item{
				Name:   fmt.Sprintf("gate of pod %s/%s", pod.Namespace, pod.Name),
				Remove: func(ctx context.Context) error { return openPod(ctx, c, &pod) },
			})
		}
		return nil
	}, gated)
	if err != nil {
		return nil, fmt.Errorf("list gated pods: %w", err)
	}
	return items, nil
}

// openJob resumes a suspended job, unless its user wants it to stay suspended.
func openJob(ctx context.Context, c client.Client, job *unstructured.Unstructured) error {
	var resume func(*unstructured.Unstructured) error
	if job.GetLabels()[evenkeel.GatedKey] != evenkeel.GatedSuspendedValue {
		resume = func(j *unstructured.Unstructured) error { return workload.Suspend(j, false) }
	}
	_, err := patchGate(ctx, c, job, resume)
	return err
}

// patchGate removes the label from the job and makes the change, if there is one. It returns the job as the API server answers. If
// somebody changed the job meanwhile it does nothing and returns nil: that change is another event. Somebody may be this process
// itself, before it saw its own change.
func patchGate(ctx context.Context, c client.Client, job *unstructured.Unstructured, change func(*unstructured.Unstructured) error) (*unstructured.Unstructured, error) {
	opened := job.DeepCopy()
	labels := opened.GetLabels()
	delete(labels, evenkeel.GatedKey)
	opened.SetLabels(labels)
	if change != nil {
		if err := change(opened); err != nil {
			return nil, err
		}
	}
	switch err := c.Patch(ctx, opened, client.MergeFromWithOptions(job, client.MergeFromWithOptimisticLock{})); {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("open the gate of %s %s/%s: %w", job.GetKind(), job.GetNamespace(), job.GetName(), err)
	}
	return opened, nil
}

// openPod removes the scheduling gate from a pod. If somebody changed the pod meanwhile it does nothing: that change is another
// event. Somebody may be this process itself, before it saw its own change: admission policies refuse to open a gate twice.
func openPod(ctx context.Context, c client.Client, pod *corev1.Pod) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID, "resourceVersion": pod.ResourceVersion, "labels": map[string]any{evenkeel.GatedKey: nil}},
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
