package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/pluginstatus"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// plugin says in which running pods NCCL uses the plugin.
func plugin(pods []corev1.Pod) []Finding {
	var loaded int
	var unseen, silent, failed []string
	why := ""
	for i := range pods {
		pod := &pods[i]
		name := pod.Namespace + "/" + pod.Name
		if pod.Status.Phase != corev1.PodRunning {
			continue
		}
		if pod.Annotations[evenkeel.InjectedKey] == "" {
			unseen = append(unseen, name)
		}
		switch s, _ := pluginstatus.Of(pod); s.Outcome {
		case pluginstatus.Loaded:
			loaded++
		case pluginstatus.Failed:
			failed, why = append(failed, name), s.Text
		case pluginstatus.NotReported:
			silent = append(silent, name)
		}
	}
	all := []Finding{{"plugin", OK, fmt.Sprintf("NCCL uses the plugin in %s that run now", counted(loaded, "pod")), ""}}
	add := func(names []string, status Status, message, do string) {
		if len(names) > 0 {
			all = append(all, Finding{"plugin", status, fmt.Sprintf("%s: %d (%s)", message, len(names), text.List(sorted(names), maxNamed)), do})
		}
	}
	add(unseen, Problem, "running pods that neither webhook nor policy saw, and so without the plugin", "create their jobs again")
	add(failed, Problem, "running pods in which the plugin refused to start, "+why, "correct what it names, in spec.environment of the profile or in the container")
	add(silent, Note, "running pods that have not reported that NCCL uses the plugin", "NCCL may not have started; an image with a glibc before 2.28 cannot load it (NCCL_DEBUG=INFO says so); or UDP port 9640 of Evenkeel's namespace is closed to them")
	return all
}

// versions reports which versions of the plugin run.
func versions(pods []corev1.Pod) []Finding {
	count := map[string]int{}
	for i := range pods {
		if pods[i].Status.Phase != corev1.PodRunning {
			continue
		}
		if s, _ := pluginstatus.Of(&pods[i]); s.Version() != "" {
			count[s.Version()]++
		}
	}
	var known []string
	for _, version := range slices.Sorted(maps.Keys(count)) {
		known = append(known, version+": "+counted(count[version], "pod"))
	}
	switch {
	case len(known) == 0:
		return nil
	case len(known) == 1:
		return []Finding{{"versions", OK, known[0], ""}}
	}
	return []Finding{{"versions", Note, text.Clip(strings.Join(known, "; "), maxMessage), "jobs of their own may differ; pods of one job refuse each other if their protocols do (kubectl evenkeel why)"}}
}
