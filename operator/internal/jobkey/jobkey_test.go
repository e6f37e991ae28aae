package jobkey

import (
	"encoding/hex"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func TestJobKeyNames(t *testing.T) {
	for _, job := range []string{"train", "a.b", "9", "", "gpu-", strings.Repeat("a", 63), strings.Repeat("long.", 50)} {
		first, second := Name(job, types.UID("1")), Name(job, types.UID("2"))
		if first == second {
			t.Errorf("%q: a job that is created again has the key of the first: %s", job, first)
		}
		if !IsName(first) || len(validation.IsValidLabelValue(first)) > 0 || len(validation.IsDNS1123Label(first)) > 0 {
			t.Errorf("%q: %q", job, first)
		}
	}
	for _, other := range []string{"", "database", "train-key", "train-key-1234567", "train-key-123456789", "train-key-1234567g", "-key-12345678", "a/b-key-12345678"} {
		if IsName(other) {
			t.Errorf("%q", other)
		}
	}
}

func TestJobKeySecret(t *testing.T) {
	job := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"}}
	job.SetNamespace("ml")
	job.SetName("train")
	job.SetUID("u")
	first, err := New()
	if err != nil {
		t.Fatal(err)
	}
	second, err := New()
	if err != nil {
		t.Fatal(err)
	}
	if raw, err := hex.DecodeString(string(first)); err != nil || len(raw) != 32 || slices.Equal(first, second) {
		t.Errorf("keys of %d and %d digits: %v", len(first), len(second), err)
	}
	s := Secret(job, "train-key-0", first)
	if s.Immutable == nil || !*s.Immutable || len(s.Data) != 1 || string(s.Data["job-key"]) != string(first) || s.Namespace != "ml" || s.Labels[evenkeel.JobKeyKey] != s.Name {
		t.Errorf("%+v", s.ObjectMeta)
	}
	if o := s.OwnerReferences; len(o) != 1 || o[0].UID != "u" || o[0].Kind != "PyTorchJob" || *o[0].Controller {
		t.Errorf("it does not go with its job: %+v", o)
	}
}
