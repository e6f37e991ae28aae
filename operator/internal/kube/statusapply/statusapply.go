// Package statusapply writes statuses by server-side apply, once for each change. Fields of other owners stay.
package statusapply

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Apply applies the status after to an object that was read with the status before, if they differ. Both are pointers. If the
// object was deleted since, nothing happens. An object that was created again under the same name keeps its status.
func Apply(ctx context.Context, c client.Client, owner client.FieldOwner, object client.Object, before, after any) error {
	if equality.Semantic.DeepEqual(before, after) {
		return nil
	}
	kind, err := c.GroupVersionKindFor(object)
	if err != nil {
		return err
	}
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(after)
	if err != nil {
		return fmt.Errorf("status of a %s: %w", kind.Kind, err)
	}
	written := &unstructured.Unstructured{Object: map[string]any{"status": fields}}
	written.SetGroupVersionKind(kind)
	written.SetNamespace(object.GetNamespace())
	written.SetName(object.GetName())
	written.SetUID(object.GetUID())
	err = c.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(written), owner, client.ForceOwnership)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("write the status of %s %s: %w", kind.Kind, strings.TrimPrefix(client.ObjectKeyFromObject(object).String(), "/"), err)
	}
	return nil
}
