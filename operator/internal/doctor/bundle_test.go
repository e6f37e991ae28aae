package doctor

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// TestBundleRedacts: whatever looks like a secret is gone, wherever it is.
func TestBundleRedacts(t *testing.T) {
	object := map[string]any{}
	text := `{"metadata":{"name":"x","managedFields":[{}],"annotations":{"kubectl.kubernetes.io/last-applied-configuration":"hidden-1","evenkeel.dev/profile":"default","evenkeel.dev/environment":"hidden-2"}},
		"spec":{"environment":[{"name":"EVENKEEL_JOB_KEY","value":"hidden-3"},{"name":"EVENKEEL_FLOWS","value":"8"}],
		"template":{"spec":{"containers":[{"name":"key","args":["--log-level=info","--api-token=hidden-6","--password","hidden-7","--image-pull-secrets=visible"],
			"env":[{"name":"WANDB_API_TOKEN","value":"hidden-4"},{"name":"DB_PASSWORD","value":"hidden-5"},{"name":"HTTPS_PROXY","value":"http://me:hidden-8@proxy.example.com:3128"}]}]},
			"metadata":{"annotations":{"vault.example.com/login":"hidden-9"}}},"podAnnotations":{"other.example.com/x":"hidden-10"}}}`
	if err := json.Unmarshal([]byte(text), &object); err != nil {
		t.Fatal(err)
	}
	redact(object)
	after := fmt.Sprint(object)
	if strings.Contains(after, "hidden") || strings.Contains(after, "managedFields") || !strings.Contains(after, "value:8") || !strings.Contains(after, "default") || !strings.Contains(after, "@proxy.example.com:3128") || !strings.Contains(after, "=visible") {
		t.Error(after)
	}
}

// TestBundleRedactsTexts: logs and messages of others may have secrets anywhere.
func TestBundleRedactsTexts(t *testing.T) {
	for text, want := range map[string]string{
		"Authorization: Bearer hidden-hidden":                                         "",
		`{"level":"info","token":"hidden"}`:                                           `{"level":"info","token":"(redacted)"}`,
		`{"msg":"got {\"password\":\"hidden\",\"n\":1}"}`:                             `{"msg":"got {\"password\":\"(redacted)\",\"n\":1}"}`,
		"dial https://user:hidden@registry.example.com/v2/: EOF":                      "dial https://(redacted)@registry.example.com/v2/: EOF",
		"EVENKEEL_JOB_KEY=hidden flows=8":                                             "EVENKEEL_JOB_KEY=(redacted) flows=8",
		"jwt eyJhbGciOiJSUzI1NiJ9.eyJoaWRkZW4iOjF9.hidden-signature end":              "jwt (redacted) end",
		"-----BEGIN RSA PRIVATE KEY-----\nhidden\n-----END RSA PRIVATE KEY-----\nend": "(redacted)\nend",
		"-----BEGIN PRIVATE KEY-----\nhidden, cut off":                                "(redacted)",
		`reconciled {"NetworkProfile":"default","key":"ml/job-1"}`:                    `reconciled {"NetworkProfile":"default","key":"ml/job-1"}`,
		"docker.io/library/x@sha256:0123: not found":                                  "docker.io/library/x@sha256:0123: not found",
	} {
		if got := redactText(text); strings.Contains(got, "hidden") || want != "" && got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

// bundleOf is what the bundle has, by name.
func bundleOf(t *testing.T, d *Doctor, findings []Finding) map[string]string {
	t.Helper()
	var written bytes.Buffer
	if err := d.WriteBundle(t.Context(), &written, findings); err != nil {
		t.Fatal(err)
	}
	zipped, err := gzip.NewReader(&written)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for archive := tar.NewReader(zipped); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		files[strings.TrimPrefix(header.Name, "evenkeel-bundle/")] = string(text)
	}
}

// TestBundleInSharedNamespace: Evenkeel's namespace has somebody else's pods too. What is theirs stays out.
func TestBundleInSharedNamespace(t *testing.T) {
	object := func(name string, labels map[string]string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "shared", Name: name, Labels: labels}
	}
	event := func(name, kind, about string) *corev1.Event {
		return &corev1.Event{ObjectMeta: object(name, nil), InvolvedObject: corev1.ObjectReference{Kind: kind, Name: about, APIVersion: "v1"}, Message: "token=hidden of " + about}
	}
	owned := func(name, kind, owner string) metav1.ObjectMeta {
		meta := object(name, nil)
		meta.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: owner}}
		return meta
	}
	restarted := &corev1.Pod{ObjectMeta: owned("evenkeel-controller-1", "ReplicaSet", "evenkeel-controller-rs"), Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "controller"}}}}
	restarted.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "controller", RestartCount: 3}}
	var logs []string
	clientset := answers(true)
	clientset.PrependReactor("get", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.GetSubresource() == "log" {
			logs = append(logs, fmt.Sprintf("%+v", action.(clienttesting.GenericAction).GetValue()))
		}
		return false, nil, nil
	})
	d := &Doctor{Clientset: clientset, Namespace: "shared", Client: clusterOf(t, interceptor.Funcs{},
		&appsv1.Deployment{ObjectMeta: object("evenkeel-controller", chart)}, &appsv1.ReplicaSet{ObjectMeta: owned("evenkeel-controller-rs", "Deployment", "evenkeel-controller")}, &appsv1.Deployment{ObjectMeta: object("stranger", nil)}, restarted,
		&corev1.Pod{ObjectMeta: object("check-pod", map[string]string{evenkeel.CheckKey: "c"})},
		&corev1.Pod{ObjectMeta: object("stranger-pod", map[string]string{evenkeel.ProfileKey: "default"}), Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "x", Env: []corev1.EnvVar{{Name: "WHAT", Value: "theirs"}}}}}},
		event("e1", "Pod", "evenkeel-controller-gone"), event("e2", "Pod", "stranger-pod"),
	)}
	files := bundleOf(t, d, []Finding{{"admission", Problem, "https://me:hidden@proxy.example.com refused", ""}})
	for name, want := range map[string]string{"deployments.json": "evenkeel-controller", "pods.json": "check-pod", "events.json": "evenkeel-controller-gone", "findings.json": "proxy.example.com", "networkcheckpolicies.json": "[]",
		"logs/evenkeel-controller-1.controller.log": "", "logs/evenkeel-controller-1.controller.previous.log": ""} {
		if text, ok := files[name]; !ok || !strings.Contains(text, want) {
			t.Errorf("%s: %t, lacks %q", name, ok, want)
		}
	}
	for name, text := range files {
		if strings.Contains(text, "stranger") || strings.Contains(text, "theirs") || strings.Contains(text, "hidden") {
			t.Errorf("%s: %s", name, text)
		}
	}
	if len(logs) != 2 || !strings.Contains(logs[1], "Previous:true") {
		t.Errorf("logs: %q", logs)
	}
}

// TestBundleOfLargeCluster: a list that does not end is cut off, and the bundle says so.
func TestBundleOfLargeCluster(t *testing.T) {
	d := &Doctor{Clientset: answers(true), Namespace: "evenkeel-system", Client: clusterOf(t, interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			nodes, ok := list.(*unstructured.UnstructuredList)
			if !ok || !strings.HasPrefix(nodes.GetKind(), "Node") || strings.HasPrefix(nodes.GetKind(), "NodeNetwork") {
				return c.List(ctx, list, options...)
			}
			var all client.ListOptions
			all.ApplyOptions(options)
			nodes.SetContinue("more")
			for i := range all.Limit {
				nodes.Items = append(nodes.Items, unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"name": fmt.Sprint("n", i)}}})
			}
			return nil
		},
	})}
	files := bundleOf(t, d, nil)
	if want := fmt.Sprintf("Node: there are more than %d", maxObjects); !strings.Contains(files["errors.txt"], want) || strings.Count(files["nodes.json"], `"name"`) != maxObjects {
		t.Errorf("%d nodes, %s", strings.Count(files["nodes.json"], `"name"`), files["errors.txt"])
	}
}
