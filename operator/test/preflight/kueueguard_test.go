package preflight

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// servesOnly writes the definition of one of Kueue's kinds with one of its versions only, and returns the file.
func servesOnly(t *testing.T, source, version string) string {
	t.Helper()
	text, err := os.ReadFile(source)
	if err != nil {
		t.Fatal(err)
	}
	crd := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(text, &crd.Object); err != nil {
		t.Fatalf("%s: %v", source, err)
	}
	versions, _, err := unstructured.NestedSlice(crd.Object, "spec", "versions")
	if err != nil {
		t.Fatalf("%s: %v", source, err)
	}
	var kept []any
	for _, v := range versions {
		if v := v.(map[string]any); v["name"] == version {
			v["storage"] = true
			kept = append(kept, v)
		}
	}
	if err := unstructured.SetNestedSlice(crd.Object, kept, "spec", "versions"); err != nil || len(kept) == 0 {
		t.Fatalf("%s has no version %s: %v", source, version, err)
	}
	if text, err = yaml.Marshal(crd.Object); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), filepath.Base(source))
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// An API server reads the parameters of policies for every request that a policy's rules match, whoever sends it. So a guard that
// cannot read them must not deny anything: this one is about the objects of Kueue, which would stop.
func TestKueueGuardStopsNobodyElse(t *testing.T) {
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	module, err := apiserver.Source(root, "kueue", "sigs.k8s.io/kueue")
	if err != nil {
		t.Fatal(err)
	}
	var definitions []string
	for _, kind := range []string{"workloads", "admissionchecks"} {
		source := filepath.Join(module, "config", "components", "crd", "bases", "kueue.x-k8s.io_"+kind+".yaml")
		definitions = append(definitions, servesOnly(t, source, "v1beta2"))
	}
	// An API server that has read a parameter once goes on with it: this one starts after Kueue's upgrade.
	fresh, stop, err := apiserver.Start(t.TempDir(), definitions...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	someone, err := client.New(fresh, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	if err := someone.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}); err != nil {
		t.Fatal(err)
	}
	workload := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(`{apiVersion: kueue.x-k8s.io/v1beta2, kind: Workload, metadata: {name: w, namespace: default}, spec: {
  podSets: [{name: main, count: 1, template: {spec: {restartPolicy: Never, containers: [{name: c, image: i, resources: {}}]}}}]}}`), &workload.Object); err != nil {
		t.Fatal(err)
	}
	if err := someone.Create(t.Context(), workload); err != nil {
		t.Fatal(err)
	}
	patch := func(ctx context.Context, c client.Client, kind, status string, options ...client.SubResourcePatchOption) error {
		text := fmt.Sprintf(`{"status": {"conditions": [{"type": %q, "status": %q, "reason": "r", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}`, kind, status)
		return c.Status().Patch(ctx, workload.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(text)), options...)
	}
	for release, arguments := range map[string][]string{
		"offline": nil,
		"older":   {"--api-versions", "kueue.x-k8s.io/v1beta1/AdmissionCheck"},
		"current": {"--api-versions", "kueue.x-k8s.io/v1beta2/AdmissionCheck"},
	} {
		objects, err := apiserver.Chart(root, namespace, append([]string{"--set", "fullnameOverride=" + release}, arguments...)...)
		if err != nil {
			t.Fatal(err)
		}
		for _, object := range objects {
			if kind := object.GetKind(); strings.HasPrefix(kind, "ClusterRole") || strings.HasPrefix(kind, "ValidatingAdmissionPolicy") {
				if err := someone.Create(t.Context(), object); err != nil {
					t.Fatal(err)
				}
			}
		}
		controller, err := client.New(apiserver.As(fresh, namespace, release+"-controller"), client.Options{Scheme: scheme})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, release+": the guard works", func(ctx context.Context) (bool, error) {
			err := patch(ctx, controller, "Admitted", "True", client.DryRunAll)
			return err != nil && strings.Contains(err.Error(), "ValidatingAdmissionPolicy"), nil
		})
		for _, status := range []string{"True", "False"} {
			if err := patch(t.Context(), someone, "QuotaReserved", status); err != nil {
				t.Errorf("%s: Kueue may not reserve quota: %v", release, err)
			}
		}
		if err := patch(t.Context(), controller, "Admitted", "True"); err == nil || !strings.Contains(err.Error(), "may change the states of AdmissionChecks only") {
			t.Errorf("%s: the controller admits a workload: %v", release, err)
		}
	}
}
