package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/pluginstatus"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// maxNamespaces bounds the namespaces looked at for each profile.
const maxNamespaces = 50

// plugin says in which running pods NCCL uses the plugin.
func plugin(pods []corev1.Pod) []Finding {
	var loaded int
	var unseen, silent, failed, pulling []string
	why := ""
	for i := range pods {
		pod := &pods[i]
		name := pod.Namespace + "/" + pod.Name
		for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
			if w := s.State.Waiting; w != nil && (w.Reason == "ErrImagePull" || w.Reason == "ImagePullBackOff") {
				pulling = append(pulling, name+" ("+s.Image+")")
			}
		}
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
	add(pulling, Problem, "pods that wait for an image", "kubectl describe pod says whether the registry, its name or a Secret is wrong")
	add(silent, Note, "running pods that have not reported that NCCL uses the plugin", "NCCL may not have started; an image with a glibc before 2.28 cannot load it (NCCL_DEBUG=INFO says so); or UDP port 9640 of Evenkeel's namespace is closed to them")
	return append(all, Finding{"glibc", Unknown, "the API does not show which glibc an image has; pods that report the plugin have 2.28 or later", "for another image: docker run --rm IMAGE ldd --version"})
}

// versions says which versions of the plugin run.
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

// registries says whether the Secrets that profiles name exist where jobs need them, and are for the plugin's registry.
func (d *Doctor) registries(ctx context.Context, s *state) ([]Finding, error) {
	var all []Finding
	for _, p := range s.profiles {
		if p.Spec.Plugin.Image == "" {
			continue
		}
		host := registry(p.Spec.Plugin.Image)
		if len(p.Spec.ImagePullSecrets) == 0 {
			all = append(all, Finding{"registries", OK, fmt.Sprintf("profile %s pulls from %s without a Secret. Whether nodes reach it shows when a pod starts", p.Name, host), ""})
			continue
		}
		inUse := map[string]bool{}
		for i := range s.pods {
			if s.pods[i].Labels[evenkeel.ProfileKey] == p.Name {
				inUse[s.pods[i].Namespace] = true
			}
		}
		if len(inUse) == 0 {
			all = append(all, Finding{"registries", Note, fmt.Sprintf("profile %s pulls from %s with %s; no job uses it now", p.Name, host, strings.Join(p.Spec.ImagePullSecrets, ", ")), "these Secrets have to exist in the namespaces of its jobs"})
		}
		names := slices.Sorted(maps.Keys(inUse))
		for _, namespace := range names[:min(len(names), maxNamespaces)] {
			for _, name := range p.Spec.ImagePullSecrets {
				all = append(all, d.pullSecret(ctx, namespace, name, p.Name, host))
			}
		}
	}
	return all, nil
}

// pullSecret looks at the names of registries in a Secret, and at nothing else of it.
func (d *Doctor) pullSecret(ctx context.Context, namespace, name, profile, host string) Finding {
	where := fmt.Sprintf("Secret %s/%s of profile %s", namespace, name, profile)
	secret := &corev1.Secret{}
	switch err := d.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, secret); {
	case apierrors.IsNotFound(err):
		return Finding{"registries", Problem, where + " does not exist", fmt.Sprintf("kubectl -n %s create secret docker-registry %s --docker-server=%s ...", namespace, name, host)}
	case err != nil:
		return Finding{"registries", Unknown, where + ": " + err.Error(), "run it as somebody who may read it"}
	}
	var config struct {
		Auths map[string]json.RawMessage `json:"auths"`
	}
	if err := json.Unmarshal(secret.Data[corev1.DockerConfigJsonKey], &config); err != nil {
		return Finding{"registries", Problem, where + " is not of the type " + string(corev1.SecretTypeDockerConfigJson), "create it with kubectl create secret docker-registry"}
	}
	var known []string
	for entry := range config.Auths {
		at, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(entry, "https://"), "http://"), "/")
		if known = append(known, at); at == host || host == "docker.io" && at == "index.docker.io" {
			return Finding{"registries", OK, where + " is for " + host, ""}
		}
	}
	return Finding{"registries", Problem, fmt.Sprintf("%s is for %s, but the plugin comes from %s", where, text.List(sorted(known), maxNamed), host), "add that registry to it"}
}

// registry is the host of an image's name.
func registry(image string) string {
	first, _, more := strings.Cut(image, "/")
	if !more || !strings.ContainsAny(first, ".:") && first != "localhost" {
		return "docker.io"
	}
	return first
}

// enforceKey is the label of Pod Security Admission.
const enforceKey = "pod-security.kubernetes.io/enforce"

// namespaces says where Pod Security Admission refuses pods of a profile.
func (d *Doctor) namespaces(ctx context.Context, s *state) ([]Finding, error) {
	var all []Finding
	seen := map[string]bool{}
	for i := range s.pods {
		pod := &s.pods[i]
		name := pod.Namespace + " " + pod.Labels[evenkeel.ProfileKey]
		if seen[name] || len(seen) >= maxNamespaces {
			continue
		}
		seen[name] = true
		ns := namespaceMetadata()
		if err := d.Client.Get(ctx, client.ObjectKey{Name: pod.Namespace}, ns); err != nil {
			return all, client.IgnoreNotFound(err)
		}
		level := ns.Labels[enforceKey]
		if level == "" || level == "privileged" {
			continue
		}
		f := Finding{"security", OK, fmt.Sprintf("namespace %s enforces %s, which what Evenkeel adds fits", pod.Namespace, level), ""}
		for _, p := range s.profiles {
			if p.Name == pod.Labels[evenkeel.ProfileKey] && p.Spec.Transport.RDMA.MemoryLock == evenkeel.MemoryLockCapability {
				f = Finding{"security", Problem, fmt.Sprintf("namespace %s enforces %s, which refuses the capability IPC_LOCK of profile %s", pod.Namespace, level, p.Name), "raise the memory limit of the container runtime and set memoryLock: RuntimeDefault (docs/rdma.md)"}
			}
		}
		all = append(all, f)
	}
	return all, nil
}
