package integration

import (
	"os"
	"path/filepath"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// newCheck is a good one.
func newCheck(change func(*evenkeel.NetworkCheckSpec)) *evenkeel.NetworkCheck {
	c := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{GenerateName: "check-", Namespace: "default"}}
	c.Spec.Nodes.Selector = &metav1.LabelSelector{}
	c.Spec.Runner.Type = evenkeel.RunnerBench
	if change != nil {
		change(&c.Spec)
	}
	return c
}

func TestCheckValidation(t *testing.T) {
	two, large, small := int32(2), int64(1<<20), int64(4096)
	for want, change := range map[string]func(*evenkeel.NetworkCheckSpec){
		"selector":          func(s *evenkeel.NetworkCheckSpec) { s.Nodes.Names = []string{"a"} },
		"needs rails":       func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Pairs", "Rails"} },
		"name Pairs too":    func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Gang"} },
		"Unsupported value": func(s *evenkeel.NetworkCheckSpec) { s.Stages = []evenkeel.Stage{"Guess"} },
		"stage RDMA needs the runner Bench": func(s *evenkeel.NetworkCheckSpec) {
			s.Stages = []evenkeel.Stage{"RDMA"}
			s.Runner = evenkeel.RunnerSpec{Type: "NCCLTests", Image: "x", GPUsPerNode: &two}
		},
		"needs image and gpusPerNode":  func(s *evenkeel.NetworkCheckSpec) { s.Runner.Type = evenkeel.RunnerNCCLTests },
		"uses no GPU":                  func(s *evenkeel.NetworkCheckSpec) { s.Runner.GPUsPerNode = &two },
		"has the collective AllReduce": func(s *evenkeel.NetworkCheckSpec) { s.Sweep.Collective = evenkeel.CollectiveBroadcast },
		"minBytes is larger":           func(s *evenkeel.NetworkCheckSpec) { s.Sweep.MinBytes, s.Sweep.MaxBytes = &large, &small },
		"finds its ranks by MPI": func(s *evenkeel.NetworkCheckSpec) {
			s.Runner = evenkeel.RunnerSpec{Type: "NCCLTests", Launcher: "IndexedJob", Image: "x", GPUsPerNode: &two}
		},
		"spec.maxConcurrentNodes": func(s *evenkeel.NetworkCheckSpec) { one := int32(1); s.MaxConcurrentNodes = &one },
	} {
		t.Run(want, func(t *testing.T) { refused(t, dryRun(t.Context(), newCheck(change)), want) })
	}
	long := newCheck(nil)
	long.Name = "a-name-that-is-longer-than-what-a-label-takes-which-is-63-characters"
	refused(t, dryRun(t.Context(), long), "at most 63")
}

func TestCheckIsImmutable(t *testing.T) {
	c := newCheck(func(s *evenkeel.NetworkCheckSpec) {
		least := resource.MustParse("340G")
		s.Thresholds.MinBusBandwidth = &least
	})
	if err := admin.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	remove(t, c)
	refused(t, admin.Patch(t.Context(), c.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"spec": {"profileName": "another"}}`))), "create another")
	if err := admin.Patch(t.Context(), c, client.RawPatch("application/merge-patch+json", []byte(`{"metadata": {"labels": {"mine": "kept"}}}`))); err != nil {
		t.Errorf("labels are not the spec: %v", err)
	}
}

func TestPolicyValidation(t *testing.T) {
	policy := func(change func(*evenkeel.NetworkCheckPolicySpec)) *evenkeel.NetworkCheckPolicy {
		p := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{GenerateName: "policy-"}}
		p.Spec.Check.Runner.Type = evenkeel.RunnerBench
		change(&p.Spec)
		return p
	}
	for want, change := range map[string]func(*evenkeel.NetworkCheckPolicySpec){
		"timeZone goes with schedule": func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.TimeZone = "Etc/UTC" },
		"a field of its own":          func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.Schedule = "TZ=Etc/UTC 0 3 * * *" },
		"spec.onFail.taint":           func(s *evenkeel.NetworkCheckPolicySpec) { s.OnFail.Taint = "Perhaps" },
		"spec.triggers.jobStart":      func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.JobStart = "Perhaps" },
		"spec.gate.onTimeout":         func(s *evenkeel.NetworkCheckPolicySpec) { s.Gate.OnTimeout = "Fail" },
		"spec.gate.timeoutSeconds":    func(s *evenkeel.NetworkCheckPolicySpec) { zero := int32(0); s.Gate.TimeoutSeconds = &zero },
		"spec.freshnessSeconds":       func(s *evenkeel.NetworkCheckPolicySpec) { zero := int32(0); s.FreshnessSeconds = &zero },
		"needs rails":                 func(s *evenkeel.NetworkCheckPolicySpec) { s.Check.Stages = []evenkeel.Stage{"Pairs", "Rails"} },
	} {
		t.Run(want, func(t *testing.T) { refused(t, dryRun(t.Context(), policy(change)), want) })
	}
}

func TestSampleChecksAndPolicies(t *testing.T) {
	for _, name := range []string{"networkcheck.yaml", "networkcheckpolicy.yaml"} {
		text, err := os.ReadFile(filepath.Join("..", "..", "..", "config", "samples", name))
		if err != nil {
			t.Fatal(err)
		}
		object := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict(text, &object.Object); err != nil {
			t.Fatal(err)
		}
		// A field that the kind does not have is an error, not a warning.
		if err := admin.Create(t.Context(), object, client.DryRunAll, client.FieldValidation("Strict")); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
