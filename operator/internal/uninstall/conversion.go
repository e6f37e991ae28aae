package uninstall

import (
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/operator/internal/conversion"
	"evenkeel.dev/evenkeel/operator/internal/kube/sweep"
)

var definitionKind = schema.GroupVersionKind{
	Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition",
}

// uninstaller is the field manager of what an uninstall changes of the CRDs.
const uninstaller = client.FieldOwner("evenkeel-uninstall")

// Conversion is the step after which the CRDs of the release serve only the version in which objects are stored. The
// API server reads these without a webhook. It could read no object in the other version while the webhook is gone, and
// the garbage collector of Kubernetes, which reads the newest version of every kind, may wait for that.
func (r Release) Conversion(c client.Client) Step {
	return Step{"serve the stored version of the CRDs alone", func(ctx context.Context) ([]sweep.Item, error) {
		var items []sweep.Item
		for _, name := range conversion.Definitions() {
			definition := &unstructured.Unstructured{}
			definition.SetGroupVersionKind(definitionKind)
			if err := c.Get(ctx, client.ObjectKey{Name: name}, definition); client.IgnoreNotFound(err) != nil {
				return nil, fmt.Errorf("read the CustomResourceDefinition %s: %w", name, err)
			}
			namespace, _, err := unstructured.NestedString(
				definition.Object, "spec", "conversion", "webhook", "clientConfig", "service", "namespace")
			if err != nil {
				return nil, fmt.Errorf("the CustomResourceDefinition %s: %w", name, err)
			}
			if namespace == "" || namespace != r.Namespace {
				continue
			}
			items = append(items, sweep.Item{Name: "CustomResourceDefinition " + name, Remove: func(ctx context.Context) error {
				return serveStored(ctx, c, definition)
			}})
		}
		return items, nil
	}}
}

// serveStored removes the versions that are not stored, and the webhook that converts to them. The definition is not
// decoded into a Go type, which might lack fields of its schema.
func serveStored(ctx context.Context, c client.Client, definition *unstructured.Unstructured) error {
	before := definition.DeepCopy()
	versions, _, err := unstructured.NestedSlice(definition.Object, "spec", "versions")
	if err != nil {
		return err
	}
	var stored []any
	for _, version := range versions {
		if object, is := version.(map[string]any); is && object["storage"] == true {
			stored = append(stored, version)
		}
	}
	if err := unstructured.SetNestedSlice(definition.Object, stored, "spec", "versions"); err != nil {
		return err
	}
	none := map[string]any{"strategy": "None"}
	if err := unstructured.SetNestedMap(definition.Object, none, "spec", "conversion"); err != nil {
		return err
	}
	if err := c.Patch(ctx, definition, client.MergeFrom(before), uninstaller); err != nil {
		return err
	}
	// Nobody owns what was written: another server-side apply of the chart would have a conflict.
	before = definition.DeepCopy()
	own := func(entry metav1.ManagedFieldsEntry) bool { return entry.Manager == string(uninstaller) }
	definition.SetManagedFields(slices.DeleteFunc(definition.GetManagedFields(), own))
	return c.Patch(ctx, definition, client.MergeFrom(before), uninstaller)
}
