// Package profile decides who may use a NetworkProfile.
package profile

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Refusal explains why jobs of the namespace may not use the profile; empty: they may. The reader serves metadata of
// namespaces.
func Refusal(ctx context.Context, reader client.Reader, profile *evenkeel.NetworkProfile, namespace string) (string, error) {
	if profile.Spec.NamespaceSelector == nil {
		return "", nil
	}
	selector, err := metav1.LabelSelectorAsSelector(profile.Spec.NamespaceSelector)
	if err != nil {
		return fmt.Sprintf("NetworkProfile %s: namespaceSelector: %v", profile.Name, err), nil
	}
	if selector.Empty() {
		return "", nil
	}
	ns := &metav1.PartialObjectMetadata{}
	ns.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	if err := reader.Get(ctx, client.ObjectKey{Name: namespace}, ns); err != nil {
		return "", fmt.Errorf("read namespace %s: %w", namespace, err)
	}
	if !selector.Matches(labels.Set(ns.Labels)) {
		return fmt.Sprintf("NetworkProfile %s is not for namespace %s: its namespaceSelector asks for %s", profile.Name, namespace, selector), nil
	}
	return "", nil
}
