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

// maxOwners bounds the chain of owners from a pod to its job. A LeaderWorkerSet's has a StatefulSet, a leader and another
// StatefulSet in it.
const maxOwners = 5

// podsOf returns the pods of the job, including those that belong to it through other objects, such as the Jobs of a JobSet.
func podsOf(ctx context.Context, cluster client.Client, job *unstructured.Unstructured) ([]corev1.Pod, error) {
	var list corev1.PodList
	if err := cluster.List(ctx, &list, client.InNamespace(job.GetNamespace())); err != nil {
		return nil, fmt.Errorf("list the pods: %w", err)
	}
	t := ownerTree{cluster: cluster, namespace: job.GetNamespace(), members: map[types.UID]bool{job.GetUID(): true}}
	var pods []corev1.Pod
	for i := range list.Items {
		pod := &list.Items[i]
		owner := metav1.GetControllerOfNoCopy(pod)
		// The templates of an annotated job have the label, so the owners of pods without it need not be read.
		if owner == nil || owner.UID != job.GetUID() && pod.Labels[evenkeel.ProfileKey] == "" {
			continue
		}
		mine, err := t.contains(ctx, owner, maxOwners)
		if err != nil {
			return nil, err
		}
		if mine {
			pods = append(pods, *pod)
		}
	}
	return pods, nil
}

// An ownerTree is everything that belongs to a job, directly or through other objects.
type ownerTree struct {
	cluster   client.Client
	namespace string
	// members caches, by UID, whether an object belongs to the tree.
	members map[types.UID]bool
}

// contains reports whether the object belongs to the tree. It follows at most depth owners.
func (t *ownerTree) contains(ctx context.Context, o *metav1.OwnerReference, depth int) (bool, error) {
	if is, known := t.members[o.UID]; known || depth == 0 {
		return is, nil
	}
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(schema.FromAPIVersionAndKind(o.APIVersion, o.Kind))
	err := t.cluster.Get(ctx, client.ObjectKey{Namespace: t.namespace, Name: o.Name}, object)
	switch {
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err), meta.IsNoMatchError(err):
		t.members[o.UID] = false
		return false, nil
	case err != nil:
		return false, fmt.Errorf("read the %s %s: %w", o.Kind, o.Name, err)
	}
	is := false
	if owner := metav1.GetControllerOfNoCopy(object); owner != nil {
		if is, err = t.contains(ctx, owner, depth-1); err != nil {
			return false, err
		}
	}
	t.members[o.UID] = is
	return is, nil
}

// gatedPods returns the pods with Evenkeel's scheduling gate.
func gatedPods(pods []corev1.Pod) []*corev1.Pod {
	var list []*corev1.Pod
	for i := range pods {
		if slices.ContainsFunc(pods[i].Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool { return g.Name == evenkeel.SchedulingGate }) {
			list = append(list, &pods[i])
		}
	}
	return list
}
