package workload

import (
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// finishedConditions are the conditions of jobs that have ended, successfully or not.
var finishedConditions = []string{"Succeeded", "Complete", "Completed", "Failed"}

// finishedPhases are the phases of ended jobs of a kind without conditions (Volcano's Job).
var finishedPhases = []string{"Completed", "Failed", "Aborted", "Terminated"}

// Finished reports whether the job has ended.
func Finished(job *unstructured.Unstructured) bool {
	if phase, _, _ := unstructured.NestedString(job.Object, "status", "state", "phase"); slices.Contains(finishedPhases, phase) {
		return true
	}
	conditions, _, _ := unstructured.NestedSlice(job.Object, "status", "conditions") // a new job has none
	return slices.ContainsFunc(conditions, func(item any) bool {
		c, ok := item.(map[string]any)
		kind, _ := c["type"].(string)
		return ok && c["status"] == "True" && slices.Contains(finishedConditions, kind)
	})
}
