package integration

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// waitTimeout is how long a test waits for what has to happen.
const waitTimeout = 90 * time.Second

// eventually polls until the condition holds.
func eventually(t *testing.T, what string, condition func(ctx context.Context) (bool, error)) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, waitTimeout, true, condition); err != nil {
		t.Fatalf("waited in vain until %s: %v", what, err)
	}
}

// newNamespace makes a namespace for one test. The API server alone cannot remove it again.
func newNamespace(t *testing.T, labels map[string]string) string {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-", Labels: labels}}
	if err := admin.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	return ns.Name
}

// remove deletes an object when the test ends.
func remove(t *testing.T, object client.Object) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
		defer cancel()
		if err := admin.Delete(ctx, object); client.IgnoreNotFound(err) != nil {
			t.Errorf("delete %T %s: %v", object, object.GetName(), err)
		}
	})
}

// newProfile makes a profile that goes with the test, and returns it when its status is written.
func newProfile(t *testing.T, name string, spec evenkeel.NetworkProfileSpec) *evenkeel.NetworkProfile {
	t.Helper()
	if spec.Plugin.Image == "" && spec.Plugin.Delivery != evenkeel.DeliveryPreinstalled {
		spec.Plugin.Image = image
	}
	p := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}
	if err := admin.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	remove(t, p)
	waitProfile(t, name, func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	return p
}

// waitProfile waits until the profile is as wanted, and returns it.
func waitProfile(t *testing.T, name string, wanted func(*evenkeel.NetworkProfile) bool) *evenkeel.NetworkProfile {
	t.Helper()
	p := &evenkeel.NetworkProfile{}
	eventually(t, fmt.Sprintf("NetworkProfile %s is as it should be", name), func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKey{Name: name}, p)
		return err == nil && wanted(p), client.IgnoreNotFound(err)
	})
	return p
}

// template is a user's pod template.
func template() map[string]any {
	return map[string]any{
		"metadata": map[string]any{"labels": map[string]any{"app": "train"}},
		"spec": map[string]any{
			"restartPolicy": "Never",
			"containers":    []any{map[string]any{"name": "pytorch", "image": "registry.example.com/train:1", "env": []any{map[string]any{"name": "MINE", "value": "kept"}}}},
		},
	}
}

// newJob is an annotated job of the kind, PyTorchJob or Job, and the paths of its templates.
func newJob(kind, namespace, profile string) (*unstructured.Unstructured, [][]string) {
	object := map[string]any{"apiVersion": "batch/v1", "kind": "Job", "spec": map[string]any{"template": template()}}
	paths := [][]string{{"spec", "template"}}
	if kind == "PyTorchJob" {
		replica := func() map[string]any { return map[string]any{"replicas": int64(1), "template": template()} }
		object = map[string]any{
			"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob",
			"spec": map[string]any{"pytorchReplicaSpecs": map[string]any{"Master": replica(), "Worker": replica()}},
		}
		paths = [][]string{{"spec", "pytorchReplicaSpecs", "Master", "template"}, {"spec", "pytorchReplicaSpecs", "Worker", "template"}}
	}
	job := &unstructured.Unstructured{Object: object}
	job.SetNamespace(namespace)
	job.SetName("train")
	if profile != "" {
		job.SetAnnotations(map[string]string{evenkeel.ProfileKey: profile})
	}
	return job, paths
}

func createJob(t *testing.T, job *unstructured.Unstructured) {
	t.Helper()
	if err := admin.Create(t.Context(), job); err != nil {
		t.Fatal(err)
	}
}

// podOf is the pod that the job's controller would make from the template.
func podOf(t *testing.T, job *unstructured.Unstructured, path []string) *corev1.Pod {
	t.Helper()
	content, found, err := unstructured.NestedMap(job.Object, path...)
	if err != nil || !found {
		t.Fatalf("%s of the job: %v", strings.Join(path, "."), err)
	}
	var tmpl corev1.PodTemplateSpec
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(content, &tmpl); err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{ObjectMeta: tmpl.ObjectMeta, Spec: tmpl.Spec}
	pod.Namespace, pod.GenerateName = job.GetNamespace(), job.GetName()+"-"
	pod.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(job, job.GroupVersionKind())}
	return pod
}

// createPod creates the pod, which is then as the API server stored it.
func createPod(t *testing.T, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	if err := admin.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	return pod
}

// labelledPod is a pod as the workload webhook would have its template, without a job.
func labelledPod(namespace string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: "labelled-", Namespace: namespace,
			Labels: map[string]string{evenkeel.ProfileKey: "default"},
			Annotations: map[string]string{
				evenkeel.PluginImageKey: image, evenkeel.DeliveryKey: "InitContainer",
				evenkeel.PluginPathKey: "/plugin", evenkeel.ConflictPolicyKey: "Keep",
			},
		},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "pytorch", Image: "registry.example.com/train:1"}}},
	}
}

func plainPod(namespace string) *corev1.Pod {
	pod := labelledPod(namespace)
	pod.Labels, pod.Annotations = nil, nil
	return pod
}

// dryRun asks what the API server would do, without a trace.
func dryRun(ctx context.Context, object client.Object) error {
	return admin.Create(ctx, object, client.DryRunAll)
}

func variable(c *corev1.Container, name string) string {
	for _, e := range c.Env {
		if e.Name == name {
			return e.Value
		}
	}
	return ""
}

// refused fails the test unless the error is a refusal whose text has all the parts.
func refused(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("it was accepted")
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the refusal lacks %q: %v", part, err)
		}
	}
}

// warnings are what the API server told a user.
type warnings struct {
	mu   sync.Mutex
	text []string
}

// HandleWarningHeader is called by the client for each warning of an answer.
func (w *warnings) HandleWarningHeader(_ int, _, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = append(w.text, text)
}

// take returns the warnings since the last call.
func (w *warnings) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := w.text
	w.text = nil
	return text
}

// newUser is the administrator with an ear for warnings.
func newUser(t *testing.T) (client.Client, *warnings) {
	t.Helper()
	told, heard := rest.CopyConfig(config), &warnings{}
	told.WarningHandler = heard
	user, err := client.New(told, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return user, heard
}

// A kindSource is the file of a CustomResourceDefinition in another project's module.
type kindSource struct{ tool, module, file string }

var jobSetSource = kindSource{"jobset", "sigs.k8s.io/jobset", "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"}

var mpiJobSource = kindSource{"cluster", "github.com/kubeflow/mpi-operator", "manifests/base/kubeflow.org_mpijobs.yaml"}

// installKinds installs kinds, which uninstall removes again, at the end of the test at the latest. It skips the test on an API server
// that is older than the rules of their definitions.
func installKinds(t *testing.T, sources ...kindSource) (uninstall func()) {
	t.Helper()
	uninstall, refusal := tryKinds(t, sources...)
	if refusal != "" {
		t.Skip(refusal)
	}
	return uninstall
}

// tryKinds is installKinds for tests that can do without the kinds: refusal says why an older API server refuses them.
func tryKinds(t *testing.T, sources ...kindSource) (uninstall func(), refusal string) {
	t.Helper()
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, s := range sources {
		folder, err := apiserver.Source(root, s.tool, s.module)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, filepath.Join(folder, filepath.FromSlash(s.file)))
	}
	definitions := envtest.CRDInstallOptions{Paths: files}
	uninstall = func() {
		t.Helper()
		if err := envtest.UninstallCRDs(config, definitions); err != nil {
			t.Error(err)
		}
	}
	_, err = envtest.InstallCRDs(config, definitions)
	if apiserver.Older(t) && apierrors.IsInvalid(err) {
		uninstall()
		return nil, "an older API server refuses the definition: " + err.Error()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(uninstall)
	return uninstall, ""
}
