package preflight

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/doctor"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// suspendJobs suspends new Jobs whose names have the prefix, until the test ends. Kueue's webhook does so in namespaces where it
// manages jobs without a queue name.
func suspendJobs(t *testing.T, prefix string) {
	t.Helper()
	apiserver.Needs(t, "1.36", "MutatingAdmissionPolicy v1")
	policy := &unstructured.Unstructured{}
	text := fmt.Sprintf(`{apiVersion: admissionregistration.k8s.io/v1, kind: MutatingAdmissionPolicy, metadata: {name: %[1]s}, spec: {
  failurePolicy: Fail, reinvocationPolicy: Never,
  matchConstraints: {resourceRules: [{apiGroups: [batch], apiVersions: [v1], resources: [jobs], operations: [CREATE]}]},
  matchConditions: [{name: named, expression: "(object.metadata.?name.orValue('') + object.metadata.?generateName.orValue('')).startsWith('%[1]s')"}],
  mutations: [{patchType: ApplyConfiguration, applyConfiguration: {expression: "Object{spec: Object.spec{suspend: true}}"}}]}}`, prefix)
	if err := yaml.Unmarshal([]byte(text), &policy.Object); err != nil {
		t.Fatal(err)
	}
	binding := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"policyName": prefix}}}
	binding.SetGroupVersionKind(policy.GroupVersionKind().GroupVersion().WithKind("MutatingAdmissionPolicyBinding"))
	binding.SetName(prefix)
	for _, object := range []client.Object{policy, binding} {
		if err := admin.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := admin.Delete(context.Background(), object); client.IgnoreNotFound(err) != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, "the API server has read the policy", func(ctx context.Context) (bool, error) {
		job := &batchv1.Job{}
		job.Namespace, job.Name = namespace, prefix+"-probe"
		job.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "c"}}}
		err := admin.Create(ctx, job, client.DryRunAll)
		return job.Spec.Suspend != nil && *job.Spec.Suspend, err
	})
}

// The doctor says what of Kueue's configuration keeps checks from running, and jobs from being proven.
func TestDoctorKnowsKueue(t *testing.T) {
	clientset, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	d := &doctor.Doctor{Client: admin, Clientset: clientset, Namespace: namespace, Now: time.Now()}
	examined := func() string {
		t.Helper()
		findings, err := d.Examine(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var lines []string
		for _, f := range findings {
			if f.Check == "kueue" {
				lines = append(lines, fmt.Sprintf("%s %s; do: %s", f.Status, f.Message, f.Do))
			}
		}
		return strings.Join(lines, "\n")
	}
	const suspended, unproven = "Problem new Jobs in the namespace " + namespace + " are suspended", "nobody proves the nodes of jobs in 1 ClusterQueue: unproven. NetworkCheckPolicy doctor gates jobs"
	admissionCheck(t, "doctor", "doctor")
	newQueue(t, "proven", "doctor")
	newQueue(t, "unproven", "theirs")
	// MultiKueue sends the jobs of this one to clusters whose ClusterQueues have the check.
	kueueObject(t, `{apiVersion: kueue.x-k8s.io/v1beta2, kind: AdmissionCheck, metadata: {name: dispatched}, spec: {controllerName: kueue.x-k8s.io/multikueue}}`)
	newQueue(t, "dispatched", "dispatched")
	if text := examined(); strings.Contains(text, suspended) || strings.Contains(text, "nobody proves") {
		t.Errorf("nothing suspends Jobs, and no policy gates any:\n%s", text)
	}
	newPolicy(t, "doctor", func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.JobStart = evenkeel.SwitchEnabled })
	suspendJobs(t, "evenkeel-doctor")
	text := examined()
	for _, want := range []string{suspended, "managedJobsNamespaceSelector", unproven, "spec.admissionChecksStrategy"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
}
