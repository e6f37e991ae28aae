package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
)

// explainEnvironment prints what ConfigMaps set of the variables that the plugin and NCCL read. Evenkeel itself may not read ConfigMaps:
// whoever asks does.
func explainEnvironment(ctx context.Context, cluster client.Client, pods []corev1.Pod, out io.Writer) error {
	var lines []string
	say := func(line string) {
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	known := map[string]map[string]string{}
	var failed error
	for i := range pods {
		pod := &pods[i]
		if pod.Annotations[evenkeel.InjectedKey] == "" {
			continue
		}
		entries := func(name string) map[string]string {
			if data, read := known[name]; read {
				return data
			}
			configMap := &corev1.ConfigMap{}
			err := cluster.Get(ctx, client.ObjectKey{Namespace: pod.Namespace, Name: name}, configMap)
			switch {
			case apierrors.IsForbidden(err):
				say(fmt.Sprintf("you may not read ConfigMap %s, which may set some", name))
			case client.IgnoreNotFound(err) != nil:
				failed = fmt.Errorf("read ConfigMap %s: %w", name, err)
			}
			known[name] = configMap.Data
			return configMap.Data
		}
		resolved, err := inject.FromPod(pod.Labels, pod.Annotations)
		if err != nil {
			resolved = inject.Resolved{} // the admission policy pins nothing
		}
		for j := range pod.Spec.Containers {
			c := &pod.Spec.Containers[j]
			for _, line := range resolved.ExplainEnvFrom(c, entries) {
				say(fmt.Sprintf("container %s: %s", c.Name, line))
			}
		}
	}
	if failed != nil || len(lines) == 0 {
		return failed
	}
	_, err := fmt.Fprintf(out, "\nVariables\n  %s\n", strings.Join(lines, "\n  "))
	return err
}
