package integration

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// kubectlApply runs `kubectl apply` on the object, as a user does.
func kubectlApply(t *testing.T, object map[string]any) {
	t.Helper()
	c := clientcmdapi.NewConfig()
	c.Clusters["test"] = &clientcmdapi.Cluster{Server: "https://" + strings.TrimPrefix(config.Host, "https://"), CertificateAuthorityData: config.CAData}
	c.AuthInfos["test"] = &clientcmdapi.AuthInfo{ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}
	c.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "test"}
	c.CurrentContext = "test"
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*c, path); err != nil {
		t.Fatal(err)
	}
	text, err := yaml.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(os.Getenv("KUBEBUILDER_ASSETS"), "kubectl"), "--kubeconfig", path, "--cache-dir", t.TempDir(), "apply", "-f", "-")
	cmd.Stdin = bytes.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("kubectl apply: %v\n%s", err, out)
	}
}

// TestApplyOfUnchangedJobKeepsPlugin: a client-side apply replaces the lists of a custom resource, and so the pod templates in them.
// What Evenkeel wrote there stays.
func TestApplyOfUnchangedJobKeepsPlugin(t *testing.T) {
	_, noJobSets := tryKinds(t, jobSetSource)
	_, pool, ns := newGate(t, "applied", waitRegardless)
	for name, test := range map[string]struct{ text, state string }{
		"gated-set":         {`{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, spec: {replicatedJobs: [{name: a, template: {spec: {template: T}}}, {name: b, template: {spec: {template: T}}}]}}`, "suspended, gated true"},
		"suspended-set":     {`{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, spec: {suspend: true, replicatedJobs: [{name: a, template: {spec: {template: T}}}]}}`, "suspended"},
		"volcanos-job":      {`{apiVersion: batch.volcano.sh/v1alpha1, kind: Job, spec: {minAvailable: 2, tasks: [{name: master, template: T}, {name: worker, replicas: 2, template: T}]}}`, "runs"},
		"suspended-pytorch": {`{apiVersion: kubeflow.org/v1, kind: PyTorchJob, spec: {runPolicy: {suspend: true}, pytorchReplicaSpecs: {Master: {template: T}}}}`, "suspended"},
	} {
		t.Run(name, func(t *testing.T) {
			if strings.Contains(test.text, "JobSet") && noJobSets != "" {
				t.Skip(noJobSets)
			}
			template, err := yaml.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{"app": "x"}}, "spec": map[string]any{
				"restartPolicy": "Never", "nodeSelector": pool, "containers": []any{map[string]any{"name": "c", "image": "registry.example.com/train:1"}},
			}})
			if err != nil {
				t.Fatal(err)
			}
			flow, err := yaml.YAMLToJSON(template)
			if err != nil {
				t.Fatal(err)
			}
			file := &unstructured.Unstructured{}
			if err := yaml.UnmarshalStrict([]byte(strings.ReplaceAll(test.text, "emplate: T", "emplate: "+string(flow))), &file.Object); err != nil {
				t.Fatal(err)
			}
			file.SetNamespace(ns)
			file.SetName(name)
			file.SetAnnotations(map[string]string{evenkeel.ProfileKey: "default"})
			kubectlApply(t, file.Object)
			live := &unstructured.Unstructured{}
			live.SetGroupVersionKind(file.GroupVersionKind())
			written := func() (all []any) {
				t.Helper()
				if err := admin.Get(t.Context(), client.ObjectKeyFromObject(file), live); err != nil {
					t.Fatal(err)
				}
				templates, err := workload.Templates(live)
				if err != nil {
					t.Fatal(err)
				}
				for _, template := range templates {
					all = append(all, template.Path, template.Labels(), template.Annotations())
				}
				return all
			}
			before := written()
			if labels := before[1].(map[string]string); labels[evenkeel.ProfileKey] != "default" {
				t.Fatalf("no profile is pinned to the new job: %v", labels)
			}
			kubectlApply(t, file.Object)
			file.SetAnnotations(map[string]string{evenkeel.ProfileKey: "default", "team": "a"}) // as from the next commit in Git
			kubectlApply(t, file.Object)
			if diff := cmp.Diff(before, written()); diff != "" {
				t.Errorf("kubectl apply of the same file changes what Evenkeel wrote: %s", diff)
			}
			if live.GetAnnotations()["team"] != "a" {
				t.Error("the update was not made")
			}
			if got, err := stateOf(t.Context(), live); err != nil || got != test.state {
				t.Errorf("the job is %q, %v; want %q", got, err, test.state)
			}
		})
	}
}

// keepsTemplates applies a suspended JobSet twice. Its templates keep their annotations, among them one of the key.
func keepsTemplates(t *testing.T, namespace, profile, key string) {
	t.Helper()
	file := &unstructured.Unstructured{}
	text := `{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, spec: {suspend: true, replicatedJobs: [{name: a, template: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: c, image: "registry.example.com/train:1"}]}}}}}]}}`
	if err := yaml.UnmarshalStrict([]byte(text), &file.Object); err != nil {
		t.Fatal(err)
	}
	file.SetNamespace(namespace)
	file.SetName("applied-again")
	file.SetAnnotations(map[string]string{evenkeel.ProfileKey: profile})
	live := file.DeepCopy()
	annotations := func() map[string]string {
		t.Helper()
		kubectlApply(t, file.Object)
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(file), live); err != nil {
			t.Fatal(err)
		}
		templates, err := workload.Templates(live)
		if err != nil || len(templates) != 1 {
			t.Fatalf("%v, %v", templates, err)
		}
		return templates[0].Annotations()
	}
	before := annotations()
	if before[key] == "" {
		t.Fatalf("the new JobSet's template has %v", before)
	}
	file.SetAnnotations(map[string]string{evenkeel.ProfileKey: profile, "team": "a"})
	if diff := cmp.Diff(before, annotations()); diff != "" || live.GetAnnotations()["team"] != "a" {
		t.Errorf("kubectl apply of the same template: %s", diff)
	}
}
