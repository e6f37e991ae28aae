//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// zeroes sends elements that are zero until the pod is stopped.
const zeroes = "exec evenkeel-bench allreduce -b 4M -e 4M -n 1000000 -N 0 --check 0"

// What nobody knows who does not have the key: encrypted bytes have no such run.
var readable = make([]byte, 512)

// A capture on a node has the elements of a job in clear, and none of an encrypted one. The key of that is nowhere but
// in its Secret.
func TestNothingOfEncryptedJobIsReadableOnTheNetwork(t *testing.T) {
	ctx := testContext(t)
	if err := toolbox.EnsurePrograms(ctx, os.Stderr, []toolbox.Program{{Name: "tcpdump", Package: "tcpdump"}}); err != nil {
		t.Fatal(err)
	}
	encrypted := fmt.Sprintf(`{apiVersion: evenkeel.dev/v1alpha1, kind: NetworkProfile, metadata: {name: encrypted}, spec: {plugin: {image: %q}, transport: {encryption: Required}}}`, cluster.Images.Plugin)
	if _, err := cluster.KubectlInput(ctx, encrypted, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := cluster.Kubectl(context.Background(), "delete", "networkprofile", "encrypted"); err != nil {
			t.Error(err)
		}
	})
	if _, err := cluster.Kubectl(ctx, "wait", "networkprofile/encrypted", "--for=condition=Ready", "--timeout=120s"); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		profile, says string
		isReadable    bool
	}{
		{"default", "encryption off", true},
		{"encrypted", "encryption required (TLS 1.3)", false},
	} {
		t.Run(test.profile, func(t *testing.T) {
			ctx, ns := testContext(t), newNamespace(t)
			job := trainingJob{profile: test.profile, script: zeroes}
			job.create(ctx, t, ns)
			eventually(ctx, t, "both pods say what is in force", func(ctx context.Context) (bool, error) {
				return strings.Contains(logs(ctx, ns, "train-master-0"), test.says) && strings.Contains(logs(ctx, ns, "train-worker-0"), test.says), nil
			})
			// Packets with data: acknowledgements are shorter.
			captured, err := cluster.Local.Exec(ctx, pod(ctx, t, ns, "train-master-0").Spec.NodeName,
				"tcpdump", "-Z", "root", "-i", "eth0", "-c", "500", "-s", "0", "-U", "-w", "-", "tcp and greater 1200")
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Contains(captured, string(readable)); got != test.isReadable {
				t.Errorf("a run of %d zeroes is in the %d bytes that were captured: %t, want %t", len(readable), len(captured), got, test.isReadable)
			}
			if !test.isReadable {
				keyIsInItsSecretAlone(ctx, t, ns)
			}
		})
	}
}

// keyIsInItsSecretAlone looks for the key of a namespace's job in all that users see of it, and deletes the job.
func keyIsInItsSecretAlone(ctx context.Context, t *testing.T, ns string) {
	t.Helper()
	job := &unstructured.Unstructured{}
	job.SetGroupVersionKind(schema.GroupVersionKind{Group: "kubeflow.org", Version: "v1", Kind: "PyTorchJob"})
	if err := cluster.Client.Get(ctx, client.ObjectKey{Namespace: ns, Name: "train"}, job); err != nil {
		t.Fatal(err)
	}
	name := client.ObjectKey{Namespace: ns, Name: job.GetLabels()["evenkeel.dev/job-key"]}
	var secret corev1.Secret
	if err := cluster.Client.Get(ctx, name, &secret); err != nil {
		t.Fatalf("the Secret that the job's label names: %v", err)
	}
	key := bytes.TrimSpace(secret.Data["job-key"])
	if len(key) != 64 {
		t.Fatalf("the key has %d digits", len(key))
	}
	for _, what := range [][]string{
		{"get", "pods,pytorchjobs,events,configmaps", "-o", "yaml"}, {"describe", "pods"},
		{"logs", "train-master-0"}, {"logs", "train-worker-0"}, {"exec", "train-master-0", "--", "env"},
	} {
		text, err := cluster.Kubectl(ctx, append([]string{"-n", ns}, what...)...)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(text, string(key)) {
			t.Errorf("kubectl %s has the key", strings.Join(what, " "))
		}
	}
	if err := cluster.Client.Delete(ctx, job, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the key is deleted with the job", func(ctx context.Context) (bool, error) {
		err := cluster.Client.Get(ctx, name, &secret)
		return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
	})
}
