//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// testContext ends with the test, and well before the timeout of the whole run.
func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// newNamespace creates a namespace that enforces the restricted pod standard. It is deleted after the test.
func newNamespace(t *testing.T) string {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		GenerateName: "e2e-", Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"},
	}}
	if err := cluster.Client.Create(t.Context(), ns); err != nil {
		t.Fatalf("create a namespace: %v", err)
	}
	t.Cleanup(func() {
		if err := cluster.Client.Delete(context.Background(), ns); err != nil {
			t.Errorf("delete namespace %s: %v", ns.Name, err)
		}
	})
	return ns.Name
}

// A trainingJob is a PyTorchJob with a master and a worker, or more of these, on different nodes.
type trainingJob struct {
	profile string // empty: not annotated
	// workers is the number of workers (default: 1).
	workers int64
	// reduction is the number of reduction servers; empty: none.
	reduction string
	image     string // default: the bench image
	script    string // run by sh in each pod
	env       map[string]string
}

func (j trainingJob) object(namespace string) *unstructured.Unstructured {
	image := j.image
	if image == "" {
		image = cluster.Images.Bench
	}
	variables := []any{map[string]any{"name": "NCCL_DEBUG", "value": "INFO"}}
	for name, value := range j.env {
		variables = append(variables, map[string]any{"name": name, "value": value})
	}
	replica := func(count int64) map[string]any {
		return map[string]any{"replicas": count, "restartPolicy": "Never", "template": map[string]any{
			"metadata": map[string]any{"labels": map[string]any{"app": "e2e"}},
			"spec": map[string]any{
				"affinity": map[string]any{"podAntiAffinity": map[string]any{"requiredDuringSchedulingIgnoredDuringExecution": []any{
					map[string]any{"topologyKey": "kubernetes.io/hostname", "labelSelector": map[string]any{"matchLabels": map[string]any{"app": "e2e"}}},
				}}},
				"terminationGracePeriodSeconds": int64(1),
				"securityContext":               map[string]any{"runAsNonRoot": true, "runAsUser": int64(65532), "seccompProfile": map[string]any{"type": "RuntimeDefault"}},
				"containers": []any{map[string]any{
					"name": "pytorch", "image": image, "command": []any{"sh", "-c", j.script}, "env": variables,
					"securityContext": map[string]any{"allowPrivilegeEscalation": false, "capabilities": map[string]any{"drop": []any{"ALL"}}},
				}},
			},
		}}
	}
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob",
		"metadata": map[string]any{"name": "train", "namespace": namespace},
		"spec":     map[string]any{"pytorchReplicaSpecs": map[string]any{"Master": replica(1), "Worker": replica(max(1, j.workers))}},
	}}
	if j.profile != "" {
		object.SetAnnotations(map[string]string{"evenkeel.dev/profile": j.profile})
	}
	if j.reduction != "" {
		annotations := object.GetAnnotations()
		annotations["evenkeel.dev/reduction"] = j.reduction
		object.SetAnnotations(annotations)
	}
	return object
}

// create creates the job and reports its pods' logs when the test fails.
func (j trainingJob) create(ctx context.Context, t *testing.T, namespace string) {
	t.Helper()
	if err := cluster.Client.Create(ctx, j.object(namespace)); err != nil {
		t.Fatalf("create the PyTorchJob: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			pods := []string{"train-master-0"}
			for i := range max(1, j.workers) {
				pods = append(pods, fmt.Sprintf("train-worker-%d", i))
			}
			for _, pod := range pods {
				out, err := cluster.Kubectl(context.Background(), "-n", namespace, "describe", "pod", pod)
				t.Logf("%s: %s %v\n%s", pod, logs(context.Background(), namespace, pod), err, out)
			}
		}
	})
}

// waitJob waits until the job has one of the conditions and returns its type.
func waitJob(ctx context.Context, t *testing.T, namespace string, conditions ...string) string {
	t.Helper()
	job := &unstructured.Unstructured{}
	job.SetGroupVersionKind(schema.GroupVersionKind{Group: "kubeflow.org", Version: "v1", Kind: "PyTorchJob"})
	var reached string
	eventually(ctx, t, fmt.Sprintf("the job is %s", strings.Join(conditions, " or ")), func(ctx context.Context) (bool, error) {
		if err := cluster.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: "train"}, job); err != nil {
			return false, err
		}
		list, _, _ := unstructured.NestedSlice(job.Object, "status", "conditions")
		for _, item := range list {
			condition, _ := item.(map[string]any)
			for _, want := range conditions {
				if condition["type"] == want && condition["status"] == "True" {
					reached = want
					return true, nil
				}
			}
		}
		return false, nil
	})
	return reached
}

func pod(ctx context.Context, t *testing.T, namespace, name string) *corev1.Pod {
	t.Helper()
	p := &corev1.Pod{}
	if err := cluster.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, p); err != nil {
		t.Fatalf("read pod %s: %v", name, err)
	}
	return p
}

func logs(ctx context.Context, namespace, name string) string {
	raw, err := cluster.Clientset.CoreV1().Pods(namespace).GetLogs(name, &corev1.PodLogOptions{Container: "pytorch"}).DoRaw(ctx)
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

// eventually polls until the condition holds; the test's deadline ends the wait.
func eventually(ctx context.Context, t *testing.T, what string, condition wait.ConditionWithContextFunc) {
	t.Helper()
	if err := wait.PollUntilContextCancel(ctx, 200*time.Millisecond, true, condition); err != nil {
		t.Fatalf("timed out waiting until %s: %v", what, err)
	}
}

// plainPod is a pod that meets the restricted standard and sleeps.
func plainPod(namespace string, labels map[string]string) *corev1.Pod {
	yes, no, user := true, false, int64(65532)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "plain-", Namespace: namespace, Labels: labels},
		Spec: corev1.PodSpec{
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: &yes, RunAsUser: &user, SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{
				Name: "plain", Image: cluster.Images.Bench, Command: []string{"sleep", "600"},
				SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: &no, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}},
			}},
		},
	}
}
