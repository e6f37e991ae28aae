package workload

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

const (
	// MultiKueueController is the name of MultiKueue, as the controller of a job and of an AdmissionCheck.
	MultiKueueController = KueueGroup + "/multikueue"
	// originKey is the label that MultiKueue gives its copies of jobs.
	originKey = KueueGroup + "/multikueue-origin"
)

// RunsElsewhere reports whether MultiKueue runs the job in another cluster, as its field managedBy says. No pod of it
// is made in this one, also when it is not suspended.
func RunsElsewhere(job *unstructured.Unstructured) bool {
	path := kinds[job.GroupVersionKind().GroupKind()].managedBy
	if path == nil {
		return false
	}
	by, _, _ := unstructured.NestedString(job.Object, path...) // not validated yet: an invalid field counts as empty
	return by == MultiKueueController
}

// Copied reports whether MultiKueue copied the job from another cluster. Kueue ends the Workload of a copy whose pods
// have other containers, init containers or tolerations than those of the original.
func Copied(job metav1.Object) bool { return job.GetLabels()[originKey] != "" }
