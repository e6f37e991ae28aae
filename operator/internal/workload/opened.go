package workload

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// ReadJob reads the job of a kind that cannot be suspended which made the pod of the namespace; nil: there is none, or it is gone.
func ReadJob(ctx context.Context, reader client.Reader, namespace string, pod *corev1.Pod) (*metav1.PartialObjectMetadata, error) {
	kind, name, ok := OfPod(pod)
	if !ok {
		return nil, nil
	}
	job := &metav1.PartialObjectMetadata{}
	job.SetGroupVersionKind(kind)
	switch err := reader.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, job); {
	case apierrors.IsNotFound(err), meta.IsNoMatchError(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read %s %s/%s: %w", kind.Kind, namespace, name, err)
	}
	if kinds[kind.GroupKind()].podLabel == "" && metav1.GetControllerOfNoCopy(pod).UID != job.UID {
		return nil, nil // another one of that name
	}
	return job, nil
}

// OpenedTemplates returns the paths of the job's pod templates whose gate was opened. The job may be nil.
func OpenedTemplates(job *metav1.PartialObjectMetadata) []string {
	if job == nil || job.Annotations[evenkeel.OpenedTemplatesKey] == "" {
		return nil
	}
	return strings.Split(job.Annotations[evenkeel.OpenedTemplatesKey], ",")
}
