// Package statusapply writes statuses by server-side apply: once for each change, and nothing of what others write beside it.
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

// Apply applies the status after to an object of ours that was read with the status before, both pointers, if they differ.
// An object that was deleted since has none, which is no error; one that was made anew under the same name keeps its own.
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
