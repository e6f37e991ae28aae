package cli

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// maxOwners bounds the way from a pod to its job: a LeaderWorkerSet's has a StatefulSet, a leader and a StatefulSet on it.
const maxOwners = 5

// podsOf are the pods of the job: those that its controller made, and those of what that made, as a JobSet's Jobs.
func podsOf(ctx context.Context, cluster client.Client, job *unstructured.Unstructured) ([]corev1.Pod, error) {
	var list corev1.PodList
	if err := cluster.List(ctx, &list, client.InNamespace(job.GetNamespace())); err != nil {
		return nil, fmt.Errorf("list the pods: %w", err)
	}
	t := tree{cluster: cluster, namespace: job.GetNamespace(), below: map[types.UID]bool{job.GetUID(): true}}
	var pods []corev1.Pod
	for i := range list.Items {
		pod := &list.Items[i]
		owner := metav1.GetControllerOfNoCopy(pod)
		// The templates of an annotated job have the label, so that the owners of other pods need not be looked at.
		if owner == nil || owner.UID != job.GetUID() && pod.Labels[evenkeel.ProfileKey] == "" {
			continue
		}
		mine, err := t.holds(ctx, owner, maxOwners)
		if err != nil {
			return nil, err
		}
		if mine {
			pods = append(pods, *pod)
		}
	}
	return pods, nil
}

// A tree is what the job's controller made, and what that made.
type tree struct {
	cluster   client.Client
	namespace string
	// below says of objects whether they belong to it.
	below map[types.UID]bool
}

// holds reports whether the object belongs to the tree, going up at most so many owners.
func (t *tree) holds(ctx context.Context, o *metav1.OwnerReference, most int) (bool, error) {
	if is, known := t.below[o.UID]; known || most == 0 {
		return is, nil
	}
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(schema.FromAPIVersionAndKind(o.APIVersion, o.Kind))
	err := t.cluster.Get(ctx, client.ObjectKey{Namespace: t.namespace, Name: o.Name}, object)
	switch {
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err), meta.IsNoMatchError(err):
		t.below[o.UID] = false
		return false, nil
	case err != nil:
		return false, fmt.Errorf("read the %s %s: %w", o.Kind, o.Name, err)
	}
	is := false
	if owner := metav1.GetControllerOfNoCopy(object); owner != nil {
		if is, err = t.holds(ctx, owner, most-1); err != nil {
			return false, err
		}
	}
	t.below[o.UID] = is
	return is, nil
}

// held are the pods with Evenkeel's scheduling gate.
func held(pods []corev1.Pod) []*corev1.Pod {
	var list []*corev1.Pod
	for i := range pods {
		if slices.ContainsFunc(pods[i].Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool { return g.Name == evenkeel.SchedulingGate }) {
			list = append(list, &pods[i])
		}
	}
	return list
}
