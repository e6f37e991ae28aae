package integration

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// MultiKueue runs a job in another cluster, where Evenkeel makes its key and its servers. In this one Kueue resumes it
// too, without pods.
func TestJobThatRunsElsewhereGetsNoObjects(t *testing.T) {
	newEncryptedProfile(t, "dispatched", nil)
	ns := newNamespace(t, nil)
	create := func(name, profile, servers, managedBy string) *unstructured.Unstructured {
		t.Helper()
		job, _ := newJob("PyTorchJob", ns, profile)
		job.SetName(name)
		annotations := job.GetAnnotations()
		if servers != "" {
			annotations[evenkeel.ReductionKey] = servers
		}
		job.SetAnnotations(annotations)
		if managedBy != "" {
			if err := unstructured.SetNestedField(job.Object, managedBy, "spec", "runPolicy", "managedBy"); err != nil {
				t.Fatal(err)
			}
		}
		createJob(t, job)
		return job
	}
	encrypted := create("encrypted-away", "dispatched", "", workload.MultiKueueController)
	reducing := create("reducing-away", "default", "1", workload.MultiKueueController)
	// Those of later jobs are there.
	keyOf(t, create("encrypted", "dispatched", "", ""))
	waitService(t, create("reducing", "default", "1", ""), "is there",
		func(*evenkeel.ReductionService) bool { return true })
	for object, name := range map[client.Object]string{
		&corev1.Secret{}:             encrypted.GetLabels()[evenkeel.JobKeyKey],
		&evenkeel.ReductionService{}: reducing.GetLabels()[evenkeel.ReductionClientKey],
	} {
		if err := admin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: name}, object); name == "" ||
			!apierrors.IsNotFound(err) {
			t.Errorf("%T %q is made in a cluster where the job has no pods: %v", object, name, err)
		}
	}
}
