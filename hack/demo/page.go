package main

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/hack/env"
)

// page prints the job's results. Everything on it is read from the cluster and from the pods' logs.
func page(out io.Writer, result *jobResult) error {
	injected, err := injection(result)
	if err != nil {
		return err
	}
	connections := grep(result.master.logs, "# Network", "#  Rank", "connection closed")
	connections = append(connections, grep(result.worker.logs, "connection closed")...)
	if len(grep(result.master.logs, "# Network: Evenkeel")) == 0 {
		return fmt.Errorf("the job succeeded, but its log does not name Evenkeel as the network:\n%s", result.master.logs)
	}
	p := func(format string, args ...any) { fmt.Fprintf(out, format, args...) }
	p("\n%s\n", rule("Evenkeel demo"))
	p("PyTorchJob %s/%s succeeded: master on node %s, worker on node %s.\n", namespace, result.written.GetName(), result.master.pod.Spec.NodeName, result.worker.pod.Spec.NodeName)
	p("\n%s\n%s", rule("1. What was injected (the template as written, and the pod that ran)"), injected)
	p("\n%s\n", rule("2. The network that was used"))
	for _, line := range connections {
		p("%s\n", line)
	}
	p("\n%s\n", rule("3. Bandwidth, every element checked"))
	for _, line := range table(result.master.logs) {
		p("%s\n", line)
	}
	return nil
}

// next prints commands to continue with.
func next(out io.Writer, cluster *env.Cluster, result *jobResult, plugin string) {
	p := func(format string, args ...any) { fmt.Fprintf(out, format, args...) }
	p("\n%s\n", rule("Next steps"))
	p("  export KUBECONFIG=%s PATH=%s:%s:$PATH\n", cluster.Kubeconfig, filepath.Dir(plugin), filepath.Dir(cluster.KubectlPath()))
	p("  kubectl get networkprofiles,nodehealth,netcheck -A\n  kubectl -n %s get pytorchjobs,pods,events\n  kubectl -n %s logs %s\n  kubectl evenkeel --help\n", namespace, namespace, result.master.pod.Name)
	if cluster.Local != nil {
		p("  slow a link yourself: go run ./hack/cluster link %s %s --name local\n  stop the cluster: make cluster ACTION=down\n", slowNode, slowRate)
	}
}

// injection is a unified diff between the user's pod template and the pod that ran, in the fields that the webhook may
// change. It omits what Kubernetes and the training-operator add to every pod.
func injection(result *jobResult) (string, error) {
	written, _, err := unstructured.NestedMap(result.written.Object, "spec", "pytorchReplicaSpecs", "Master", "template")
	if err != nil {
		return "", fmt.Errorf("job.yaml: %w", err)
	}
	template := &corev1.PodTemplateSpec{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(written, template); err != nil {
		return "", fmt.Errorf("job.yaml: %w", err)
	}
	ran := result.master.pod
	before, err := yaml.Marshal(parts(template.ObjectMeta, template.Spec))
	if err != nil {
		return "", fmt.Errorf("template: %w", err)
	}
	after, err := yaml.Marshal(parts(ran.ObjectMeta, ran.Spec))
	if err != nil {
		return "", fmt.Errorf("pod: %w", err)
	}
	dir, err := os.MkdirTemp("", "evenkeel-demo-")
	if err != nil {
		return "", fmt.Errorf("diff: %w", err)
	}
	defer os.RemoveAll(dir)
	for name, content := range map[string][]byte{"template": before, "pod": after} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return "", fmt.Errorf("diff: %w", err)
		}
	}
	cmd := exec.Command("diff", "-u", "--label", "template of job.yaml", "--label", "pod "+ran.Name, "template", "pod")
	cmd.Dir = dir
	diff, err := cmd.Output()
	if err != nil && cmd.ProcessState.ExitCode() != 1 { // 1: the files differ
		return "", fmt.Errorf("diff: %w", err)
	}
	return string(diff), nil
}

// parts are the fields of a pod that the injection may change, without those that the cluster adds to every pod.
func parts(meta metav1.ObjectMeta, spec corev1.PodSpec) map[string]any {
	ours := func(key string) bool { return strings.HasPrefix(key, "evenkeel.dev/") }
	labels, annotations := map[string]string{}, map[string]string{}
	for k, v := range meta.Labels {
		if ours(k) || k == "app" {
			labels[k] = v
		}
	}
	for k, v := range meta.Annotations {
		if ours(k) {
			annotations[k] = v
		}
	}
	var volumes []corev1.Volume
	for _, v := range spec.Volumes {
		if v.Projected == nil {
			volumes = append(volumes, v)
		}
	}
	containers := func(list []corev1.Container) []map[string]any {
		var out []map[string]any
		for _, c := range list {
			var env []corev1.EnvVar
			for _, e := range c.Env {
				if strings.HasPrefix(e.Name, "NCCL_") || strings.HasPrefix(e.Name, "EVENKEEL_") || e.Name == "PYTHONPATH" {
					env = append(env, e)
				}
			}
			var mounts []corev1.VolumeMount
			for _, m := range c.VolumeMounts {
				if !strings.HasPrefix(m.MountPath, "/var/run/secrets/kubernetes.io") {
					mounts = append(mounts, m)
				}
			}
			out = append(out, present(map[string]any{"name": c.Name, "image": c.Image, "command": c.Command, "args": c.Args, "env": env, "volumeMounts": mounts}))
		}
		return out
	}
	return map[string]any{
		"metadata": present(map[string]any{"labels": labels, "annotations": annotations}),
		"spec":     present(map[string]any{"initContainers": containers(spec.InitContainers), "containers": containers(spec.Containers), "volumes": volumes}),
	}
}

// present removes empty fields, as in a hand-written manifest.
func present(fields map[string]any) map[string]any {
	maps.DeleteFunc(fields, func(_ string, value any) bool {
		v := reflect.ValueOf(value)
		return v.IsZero() || (v.Kind() == reflect.Map || v.Kind() == reflect.Slice) && v.Len() == 0
	})
	return fields
}

func grep(text string, any ...string) []string {
	var found []string
	for line := range strings.Lines(text) {
		for _, want := range any {
			if strings.Contains(line, want) {
				found = append(found, strings.TrimRight(line, "\n"))
				break
			}
		}
	}
	return found
}

// table is the benchmark's own table: the names of the columns, the rows and the two closing lines.
func table(logs string) []string {
	var rows []string
	for line := range strings.Lines(logs) {
		trimmed := strings.TrimSpace(line)
		fields := strings.Fields(trimmed)
		isRow := len(fields) >= 9 && strings.Trim(fields[0], "0123456789") == ""
		isHead := strings.HasPrefix(trimmed, "#") && (strings.Contains(trimmed, "busbw") || strings.Contains(trimmed, "(us)") || strings.Contains(trimmed, "out-of-place") ||
			strings.Contains(trimmed, "Out of bounds") || strings.Contains(trimmed, "Avg bus"))
		if isRow || isHead {
			rows = append(rows, strings.TrimRight(line, "\n"))
		}
	}
	return rows
}

func rule(title string) string {
	return title + "\n" + string(bytes.Repeat([]byte("-"), len(title)))
}
