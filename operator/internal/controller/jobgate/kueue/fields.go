package kueue

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/openapi"
	"k8s.io/client-go/openapi3"
)

// optionalFields reports which fields of a workload's check the cluster's CRD has. Kueue got them in different
// versions. A field that the CRD lacks makes the API server refuse the whole state.
type optionalFields struct {
	// requeueAfterSeconds delays the next attempt after Retry. Without it, Kueue makes that at once.
	requeueAfterSeconds bool
	// retryCount is Kueue's count of the attempts.
	retryCount bool
}

// readFields reads the schema of the served CRD.
func readFields(client openapi.Client, kind schema.GroupVersionKind) (optionalFields, error) {
	document, err := openapi3.NewRoot(client).GVSpec(kind.GroupVersion())
	if err != nil {
		return optionalFields{}, fmt.Errorf("read the schema of %s: %w", kind.GroupVersion(), err)
	}
	for _, s := range document.Components.Schemas {
		kinds, _ := s.Extensions["x-kubernetes-group-version-kind"].([]any)
		if !slices.ContainsFunc(kinds, func(k any) bool { m, ok := k.(map[string]any); return ok && m["kind"] == kind.Kind }) {
			continue
		}
		checks := s.Properties["status"].Properties["admissionChecks"].Items
		if checks == nil || checks.Schema == nil {
			break
		}
		_, requeue := checks.Schema.Properties["requeueAfterSeconds"]
		_, count := checks.Schema.Properties["retryCount"]
		return optionalFields{requeueAfterSeconds: requeue, retryCount: count}, nil
	}
	return optionalFields{}, fmt.Errorf("the schema of %s has no status.admissionChecks for %s", kind.GroupVersion(), kind.Kind)
}
