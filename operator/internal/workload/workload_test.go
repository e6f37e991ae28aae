package workload

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"
)

func parse(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		t.Fatal(err)
	}
	return u
}

const pytorchJob = `{apiVersion: kubeflow.org/v1, kind: PyTorchJob, spec: {pytorchReplicaSpecs: {
  Worker: {template: {spec: {containers: [{name: pytorch}, {name: logger}]}}},
  Master: {template: {metadata: {labels: {app: x}}, spec: {containers: [{name: pytorch}]}}}}}}`

func TestTemplatesAreChangedInPlace(t *testing.T) {
	job := parse(t, pytorchJob)
	templates, err := Templates(job)
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, template := range templates {
		paths = append(paths, template.Path)
		if err := template.Add(map[string]string{"l": "1"}, map[string]string{"a": "2"}); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]string{"spec.pytorchReplicaSpecs.Master.template", "spec.pytorchReplicaSpecs.Worker.template"}, paths); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"pytorch", "logger"}, templates[1].Containers()); diff != "" {
		t.Error(diff)
	}
	want := parse(t, `{apiVersion: kubeflow.org/v1, kind: PyTorchJob, spec: {pytorchReplicaSpecs: {
  Worker: {template: {metadata: {labels: {l: "1"}, annotations: {a: "2"}}, spec: {containers: [{name: pytorch}, {name: logger}]}}},
  Master: {template: {metadata: {labels: {app: x, l: "1"}, annotations: {a: "2"}}, spec: {containers: [{name: pytorch}]}}}}}}`)
	if diff := cmp.Diff(want.Object, job.Object); diff != "" {
		t.Error(diff)
	}
}

func TestMalformedJobsAreErrors(t *testing.T) {
	for text, want := range map[string]string{
		`{apiVersion: kubeflow.org/v1, kind: PyTorchJob, spec: {}}`:                                 "spec.pytorchReplicaSpecs is not an object",
		`{apiVersion: kubeflow.org/v1, kind: PyTorchJob, spec: {pytorchReplicaSpecs: {Master: 3}}}`: "spec.pytorchReplicaSpecs.Master is not an object",
		`{apiVersion: batch/v1, kind: Job, spec: {template: []}}`:                                   "spec.template is not an object",
		`{apiVersion: apps/v1, kind: Deployment, spec: {template: {}}}`:                             "kind Deployment.apps",
	} {
		if _, err := Templates(parse(t, text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func TestKnown(t *testing.T) {
	if !Known(schema.GroupKind{Group: "batch", Kind: "Job"}) || Known(schema.GroupKind{Group: "apps", Kind: "Deployment"}) {
		t.Error("Jobs are known, Deployments are not")
	}
}
