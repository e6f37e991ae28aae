package kueue

import (
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// slim reduces a workload to what is read of it. Most are queued, run or have finished: of these the pod templates are not needed,
// which are nearly all of it. Elastic jobs keep what was assigned to them.
func slim(object any) (any, error) {
	workload, ok := object.(*unstructured.Unstructured)
	if !ok {
		return object, nil
	}
	workload.SetManagedFields(nil)
	if workload.GetKind() != kindWorkload {
		return workload, nil
	}
	annotations := map[string]string{}
	for _, key := range []string{elasticKey, replacesKey} {
		if value, has := workload.GetAnnotations()[key]; has {
			annotations[key] = value
		}
	}
	workload.SetAnnotations(annotations)
	workload.SetLabels(nil)
	workload.SetOwnerReferences(nil)
	status, _ := workload.Object["status"].(map[string]any)
	kept := map[string]any{}
	for _, field := range []string{"conditions", "admissionChecks", "admission"} {
		if value, has := status[field]; has {
			kept[field] = value
		}
	}
	workload.Object["status"] = kept
	if !mayWait(status) {
		delete(workload.Object, "spec")
		if annotations[elasticKey] == "" { // the slice that replaces it is decided by what it has
			delete(kept, "admission")
		}
	}
	return workload, nil
}

// mayWait reports whether the workload has its quota and a check that is pending.
func mayWait(status map[string]any) bool {
	has := func(field, key, value, and, is string) bool {
		items, _ := status[field].([]any)
		for _, item := range items {
			if m, ok := item.(map[string]any); ok && m[key] == value && (and == "" || m[and] == is) {
				return true
			}
		}
		return false
	}
	return has("conditions", "type", "QuotaReserved", "status", "True") && !has("conditions", "type", "Finished", "status", "True") &&
		has("admissionChecks", "state", statePending, "", "")
}
