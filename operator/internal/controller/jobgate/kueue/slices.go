package kueue

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Annotations of Workload slices: a job grows by another Workload, which replaces the one that it has
// (https://github.com/kubernetes-sigs/kueue/tree/main/keps/77-dynamically-sized-jobs).
const (
	elasticKey  = group + "/elastic-job"
	replacesKey = group + "/workload-slice-replacement-for"
)

// maxSlices bounds the chain of slices that replace one another.
const maxSlices = 32

// runningSlice returns what was assigned to the slice by which the workload's job runs; nil: the job does not run.
// Slices that were replaced before they were admitted are passed over.
func runningSlice(workload *unstructured.Unstructured,
	all map[string]*unstructured.Unstructured) ([]assignment, error) {
	for range maxSlices {
		name, found := strings.CutPrefix(workload.GetAnnotations()[replacesKey], workload.GetNamespace()+"/")
		if workload = all[workload.GetNamespace()+"/"+name]; !found || workload == nil {
			return nil, nil
		}
		var status workloadStatus
		if err := decodeField(workload, "status", &status); err != nil {
			return nil, err
		}
		if meta.IsStatusConditionTrue(status.Conditions, "Evicted") {
			return nil, nil
		}
		if meta.IsStatusConditionTrue(status.Conditions, "Admitted") && status.Admission != nil {
			return status.Admission.PodSetAssignments, nil
		}
	}
	return nil, nil
}

// byName returns the assignment of a pod set; one without content if there is none.
func byName(all []assignment, name string) assignment {
	if i := slices.IndexFunc(all, func(a assignment) bool { return a.Name == name }); i >= 0 {
		return all[i]
	}
	return assignment{}
}

// hosts are the host names that were assigned.
func (a assignment) hosts() ([]string, error) {
	if a.TopologyAssignment == nil || len(a.TopologyAssignment.Levels) == 0 {
		return nil, nil
	}
	last := len(a.TopologyAssignment.Levels) - 1
	if a.TopologyAssignment.Levels[last] != corev1.LabelHostname {
		return nil, nil
	}
	domains, err := a.TopologyAssignment.domains()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, values := range domains {
		names = append(names, values[last])
	}
	return names, nil
}
