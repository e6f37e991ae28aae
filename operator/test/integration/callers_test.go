package integration

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// A caller reaches the webhook's port as any pod of the cluster can, and has no certificate and no token.
type caller struct {
	t *testing.T
	c *http.Client
}

func newCaller(t *testing.T) caller {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} // an attacker verifies nothing
	t.Cleanup(transport.CloseIdleConnections)
	return caller{t, &http.Client{Timeout: waitTimeout, Transport: transport}}
}

// posts a review of a new object that no API server has, and returns the answer.
func (c caller) posts(path, namespace, object string) *admissionv1.AdmissionResponse {
	c.t.Helper()
	body, err := json.Marshal(admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request:  &admissionv1.AdmissionRequest{UID: types.UID("forged"), Operation: admissionv1.Create, Namespace: namespace, Object: runtime.RawExtension{Raw: []byte(object)}},
	})
	if err != nil {
		c.t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(c.t.Context(), http.MethodPost, fmt.Sprintf("https://localhost:%d%s", install.port, path), bytes.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := c.c.Do(request)
	if err != nil {
		c.t.Fatal(err)
	}
	defer response.Body.Close()
	var review admissionv1.AdmissionReview
	if err := json.NewDecoder(response.Body).Decode(&review); err != nil || review.Response == nil {
		c.t.Fatalf("%s: %s, %v", path, response.Status, err)
	}
	return review.Response
}

// TestWebhookCallersCannotFloodEvents: of thousands of objects that do not exist, few get an Event, and none in a namespace about which
// no API server asks.
func TestWebhookCallersCannotFloodEvents(t *testing.T) {
	const posts = 2000
	ns, c := newNamespace(t, nil), newCaller(t)
	post := func(namespace string, i int) {
		t.Helper()
		object := fmt.Sprintf(`{"apiVersion":"apps/v1","kind":"StatefulSet","metadata":{"name":"forged-%d","uid":"%d","annotations":{"evenkeel.dev/profile":"default"}},"spec":{"template":{}}}`, i, i)
		if response := c.posts("/validate-without-effect", namespace, object); !response.Allowed {
			t.Fatalf("%+v", response)
		}
	}
	start := time.Now()
	for _, namespace := range []string{metav1.NamespaceSystem, systemNamespace, "no-such-namespace"} {
		post(namespace, 0)
	}
	for i := range posts {
		post(ns, i)
	}
	// What is queued last is written last.
	last := newNamespace(t, nil)
	post(last, 0)
	forged := func(namespace string) int {
		t.Helper()
		var list corev1.EventList
		if err := admin.List(t.Context(), &list, client.InNamespace(namespace), client.MatchingFields{"reason": "EvenkeelNotInjected"}); err != nil {
			t.Fatal(err)
		}
		return len(list.Items)
	}
	eventually(t, "the last Event is written", func(context.Context) (bool, error) { return forged(last) == 1, nil })
	if got, most := forged(ns), 51+int(time.Since(start).Seconds()/2); got == 0 || got > most {
		t.Errorf("%d Events of %d forged reviews, want 1 to %d", got, posts, most)
	}
	for _, namespace := range []string{metav1.NamespaceSystem, systemNamespace} {
		if got := forged(namespace); got > 0 {
			t.Errorf("%d Events in %s", got, namespace)
		}
	}
}

// TestWebhookCallersMakeNothing: a caller gets the patch that a job would get, and nothing is made for it, no key either.
func TestWebhookCallersMakeNothing(t *testing.T) {
	newEncryptedProfile(t, "called", nil)
	ns, c := newNamespace(t, nil), newCaller(t)
	const containers = `"spec":{"containers":[{"name":"c","image":"registry.example.com/train:1"}]}`
	const asks = `"annotations":{"evenkeel.dev/profile":"called"}`
	job := c.posts("/mutate-workload", ns, `{"apiVersion":"batch/v1","kind":"Job","metadata":{"name":"forged",`+asks+`},"spec":{"template":{`+containers+`}}}`)
	pod := c.posts("/mutate-annotated-pod", ns, `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"forged",`+asks+`},`+containers+`}`)
	if !job.Allowed || !strings.Contains(string(job.Patch), image) {
		t.Errorf("the answer about a job: %+v, %s", job, job.Patch)
	}
	if pod.Allowed && len(pod.Patch) == 0 {
		t.Errorf("the answer about a pod: %+v", pod)
	}
	// The controller makes keys of the jobs that it sees. It has seen this one when it has made the other's.
	existing, _ := encryptedJob(t, "Job", ns, "called", "")
	made := keyOf(t, existing).Name
	var secrets corev1.SecretList
	var jobs batchv1.JobList
	var pods corev1.PodList
	var services evenkeel.ReductionServiceList
	for _, list := range []client.ObjectList{&secrets, &jobs, &pods, &services} {
		if err := admin.List(t.Context(), list, client.InNamespace(ns)); err != nil {
			t.Fatal(err)
		}
	}
	if len(secrets.Items) != 1 || secrets.Items[0].Name != made || len(jobs.Items) != 1 || len(pods.Items) != 0 || len(services.Items) != 0 {
		t.Errorf("%d Secrets, %d jobs, %d pods and %d services, want the job that exists and its key", len(secrets.Items), len(jobs.Items), len(pods.Items), len(services.Items))
	}
}

// TestWebhookAsksForClientCertificate: with the CA of its clients, a webhook answers the API server, and nobody else.
func TestWebhookAsksForClientCertificate(t *testing.T) {
	dir := t.TempDir()
	own := secret(t)
	for _, key := range []string{corev1.TLSCertKey, corev1.TLSPrivateKeyKey} {
		if err := os.WriteFile(filepath.Join(dir, key), own.Data[key], 0o600); err != nil {
			t.Fatal(err)
		}
	}
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig, err := install.kubeconfig("evenkeel-webhook")
	if err != nil {
		t.Fatal(err)
	}
	p, err := launch(install.binary, kubeconfig, []string{"webhook", "--cert-source=Supplied", "--cert-dir=" + dir, fmt.Sprintf("--port=%d", port),
		"--client-ca=" + filepath.Join(install.work, apiserver.IdentityFile), "--client-name=" + apiserver.IdentityName})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.stop(); err != nil {
			t.Error(err)
		}
	})
	response, err := newCaller(t).c.Post(fmt.Sprintf("https://localhost:%d/mutate-workload", port), "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusUnauthorized {
		t.Errorf("a caller without a certificate gets %s", response.Status)
	}

	// The chart's own webhook leaves the installation's namespace alone, so that only this one can answer there.
	hooks := &admissionregistrationv1.MutatingWebhookConfiguration{}
	if err := admin.Get(t.Context(), client.ObjectKey{Name: "evenkeel"}, hooks); err != nil {
		t.Fatal(err)
	}
	hook, to := hooks.Webhooks[0], int32(port)
	hook.ClientConfig.Service.Port = &to
	hook.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: systemNamespace}}
	only := &admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "authenticated"}, Webhooks: []admissionregistrationv1.MutatingWebhook{hook}}
	if err := admin.Create(t.Context(), only); err != nil {
		t.Fatal(err)
	}
	remove(t, only)
	eventually(t, "the API server is answered", func(ctx context.Context) (bool, error) {
		job, templates := newJob("Job", systemNamespace, "default")
		err := dryRun(ctx, job)
		labels, _, _ := unstructured.NestedStringMap(job.Object, append(append([]string{}, templates[0]...), "metadata", "labels")...)
		return labels[evenkeel.ProfileKey] == "default", err
	})
}
