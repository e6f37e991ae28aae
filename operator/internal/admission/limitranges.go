package admission

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
)

// fitLimitRanges changes the resources of the init container to what the LimitRanges of the namespace allow, once for each job.
// Cached serves LimitRanges.
func fitLimitRanges(ctx context.Context, cached client.Reader, namespace string, r *inject.Resolved) error {
	if r.Delivery != evenkeel.DeliveryInitContainer {
		return nil
	}
	var ranges corev1.LimitRangeList
	if err := cached.List(ctx, &ranges, client.InNamespace(namespace)); err != nil {
		return fmt.Errorf("list the LimitRanges of namespace %s: %w", namespace, err)
	}
	r.FitLimitRanges(ranges.Items)
	return nil
}
