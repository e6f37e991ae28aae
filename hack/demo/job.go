package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/hack/env"
)

const jobTimeout = 5 * time.Minute

// A jobResult is one run of the job.
type jobResult struct {
	written *unstructured.Unstructured // the job as its user wrote it
	master  podResult
	worker  podResult
}

type podResult struct {
	pod  *corev1.Pod
	logs string
}

// runJob creates the job, after deleting an earlier one, and waits until it is finished.
func runJob(ctx context.Context, cluster *env.Cluster, manifest string, progress io.Writer) (*jobResult, error) {
	ctx, cancel := context.WithTimeout(ctx, jobTimeout)
	defer cancel()
	var written unstructured.Unstructured
	if err := yaml.Unmarshal([]byte(manifest), &written.Object); err != nil {
		return nil, fmt.Errorf("job.yaml: %w", err)
	}
	written.SetNamespace(namespace)
	if err := ensureNamespace(ctx, cluster); err != nil {
		return nil, err
	}
	if _, err := cluster.Kubectl(ctx, "-n", namespace, "delete", "pytorchjob", written.GetName(), "--ignore-not-found", "--cascade=foreground", "--timeout=60s"); err != nil {
		return nil, err
	}
	job := written.DeepCopy()
	if err := cluster.Client.Create(ctx, job); err != nil {
		return nil, fmt.Errorf("create the job: %w", err)
	}
	if err := follow(ctx, cluster.Client, job, progress); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, symptoms(context.WithoutCancel(ctx), cluster, job.GetName()))
	}
	result := &jobResult{written: &written}
	for replica, into := range map[string]*podResult{"master": &result.master, "worker": &result.worker} {
		pod := &corev1.Pod{}
		key := client.ObjectKey{Namespace: namespace, Name: fmt.Sprintf("%s-%s-0", job.GetName(), replica)}
		if err := cluster.Client.Get(ctx, key, pod); err != nil {
			return nil, fmt.Errorf("pod of the %s: %w", replica, err)
		}
		stream, err := cluster.Clientset.CoreV1().Pods(namespace).GetLogs(pod.Name, &corev1.PodLogOptions{Container: "pytorch"}).Stream(ctx)
		if err != nil {
			return nil, fmt.Errorf("logs of %s: %w", pod.Name, err)
		}
		var logs bytes.Buffer
		_, err = io.Copy(&logs, stream)
		stream.Close()
		if err != nil {
			return nil, fmt.Errorf("logs of %s: %w", pod.Name, err)
		}
		into.pod, into.logs = pod, logs.String()
	}
	return result, nil
}

// ensureNamespace creates the demo's namespace. It enforces Kubernetes' strictest pod standard, which the injection
// must meet.
func ensureNamespace(ctx context.Context, cluster *env.Cluster) error {
	const ns = `{apiVersion: v1, kind: Namespace, metadata: {name: ` + namespace + `, labels: {pod-security.kubernetes.io/enforce: restricted}}}`
	_, err := cluster.KubectlInput(ctx, ns, "apply", "-f", "-")
	return err
}

// symptoms are the cluster's warnings and the last log lines of the pods, for the error of a failed job.
func symptoms(ctx context.Context, cluster *env.Cluster, job string) string {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var out strings.Builder
	for _, arguments := range [][]string{
		{"get", "events", "--field-selector=type=Warning", "--sort-by=.lastTimestamp"},
		{"logs", "-l", "training.kubeflow.org/job-name=" + job, "--prefix", "--tail=20"},
	} {
		text, err := cluster.Kubectl(ctx, append([]string{"-n", namespace}, arguments...)...)
		if err != nil {
			text = err.Error()
		}
		fmt.Fprintf(&out, "\n%s", text)
	}
	return out.String()
}

// follow waits until the job is finished and prints each of its conditions.
func follow(ctx context.Context, c client.Client, job *unstructured.Unstructured, progress io.Writer) error {
	started, seen := time.Now(), map[string]bool{}
	live := &unstructured.Unstructured{}
	live.SetGroupVersionKind(schema.GroupVersionKind{Group: "kubeflow.org", Version: "v1", Kind: "PyTorchJob"})
	var failed error
	err := wait.PollUntilContextCancel(ctx, 250*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		if err := c.Get(ctx, client.ObjectKeyFromObject(job), live); err != nil {
			return false, fmt.Errorf("read the job: %w", err)
		}
		conditions, _, _ := unstructured.NestedSlice(live.Object, "status", "conditions")
		for _, item := range conditions {
			condition, _ := item.(map[string]any)
			kind, _ := condition["type"].(string)
			if condition["status"] != "True" || seen[kind] {
				continue
			}
			seen[kind] = true
			fmt.Fprintf(progress, "    %5.1fs  %-10s %v\n", time.Since(started).Seconds(), kind, condition["message"])
			if kind == "Failed" {
				failed = fmt.Errorf("the job failed: %v", condition["message"])
			}
		}
		return seen["Succeeded"] || failed != nil, nil
	})
	if err != nil {
		return fmt.Errorf("the job is not finished after %s: %w", time.Since(started).Round(time.Second), err)
	}
	return failed
}
