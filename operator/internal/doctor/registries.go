package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// maxNamespaces bounds the namespaces in which Secrets are read, for each that a profile names.
const maxNamespaces = 50

// A pullError is why a node does not get an image, by what the container runtime writes.
type pullError struct {
	pattern *regexp.Regexp
	why, do string
}

// pullErrors begins with those whose words others contain too.
var pullErrors = []pullError{
	{regexp.MustCompile(`(?i)x509|certificate`), "nodes do not trust its certificate", "give the container runtime on the nodes its CA"},
	{regexp.MustCompile(`(?i)too ?many ?requests|rate limit`), "it limits how much may be pulled", "pull with credentials, or from a mirror"},
	{regexp.MustCompile(`(?i)no match for platform|exec format`), "the image is not for the processor of the nodes", "publish it for both kinds: docs/install.md#processors"},
	{regexp.MustCompile(`(?i)unauthorized|forbidden|denied|authorization failed|failed to authorize|authentication required|no basic auth|\b40[13]\b`), "it refuses the credentials, or the image does not exist", "see the image's name, and the Secrets for registries that the pods name"},
	{regexp.MustCompile(`(?i)no such host|timeout|deadline exceeded|connection refused|connection reset|unreachable|no route to host|server misbehaving|\bEOF\b`), "nodes do not reach it", "see DNS, firewall and proxy of the nodes' container runtime"},
	{regexp.MustCompile(`(?i)not found|manifest unknown|name unknown|invalid reference|couldn't parse image`), "it does not have the image", "see the image's name and digest"},
}

// pullReasons are the reasons of containers that wait for an image.
var pullReasons = []string{"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "RegistryUnavailable", "SignatureValidationFailed"}

// quotedImage finds the image in the message of a waiting container. It may be a volume's image and not the
// container's.
var quotedImage = regexp.MustCompile(`image "([^"]+)"`)

// pulls reports for which images pods wait, and why: pods of jobs, and Evenkeel's own.
func (d *Doctor) pulls(ctx context.Context, s *state) ([]Finding, error) {
	pods := s.pods
	selectors := []client.ListOption{client.HasLabels{evenkeel.CheckKey}}
	for i := range s.deployments {
		if selector := s.deployments[i].Spec.Selector; selector != nil {
			selectors = append(selectors, client.MatchingLabels(selector.MatchLabels))
		}
	}
	for _, selected := range selectors {
		own, err := d.listPods(ctx, client.InNamespace(d.Namespace), selected)
		if err != nil && !errors.Is(err, errEnough) {
			return waitingForImages(pods), err
		}
		pods = slices.Concat(pods, own)
	}
	return waitingForImages(pods), nil
}

func waitingForImages(pods []corev1.Pod) []Finding {
	type failure struct{ host, image, why, do string }
	waiting := map[failure][]string{}
	for i := range pods {
		pod := &pods[i]
		name := pod.Namespace + "/" + pod.Name
		for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
			w := c.State.Waiting
			if w == nil || !slices.Contains(pullReasons, w.Reason) {
				continue
			}
			f := failure{image: c.Image, why: "the API does not say why", do: "kubectl describe pod has the reason in its Events"}
			if quoted := quotedImage.FindStringSubmatch(w.Message); quoted != nil {
				f.image = quoted[1]
			}
			f.host = registry(f.image)
			// The name of an image may have any word.
			message := strings.ReplaceAll(w.Message, f.image, "")
			if i := slices.IndexFunc(pullErrors, func(e pullError) bool { return e.pattern.MatchString(message) }); i >= 0 {
				f.why, f.do = pullErrors[i].why, pullErrors[i].do
			}
			if !slices.Contains(waiting[f], name) {
				waiting[f] = append(waiting[f], name)
			}
		}
	}
	var all []Finding
	for _, f := range slices.SortedFunc(maps.Keys(waiting), func(a, b failure) int {
		return cmp.Or(strings.Compare(a.image, b.image), strings.Compare(a.why, b.why))
	}) {
		names := waiting[f]
		all = append(all, Finding{"registries", Problem, fmt.Sprintf("%s: %s for %s, as %s: %s", f.host, theyWait(len(names)), f.image, f.why, text.List(sorted(names), maxNamed)), f.do})
	}
	return all
}

func theyWait(n int) string {
	if n == 1 {
		return "1 pod waits"
	}
	return fmt.Sprintf("%d pods wait", n)
}

// registries reports which registries are used, which nodes are known to have pulled from them, and whether the Secrets
// for them exist where they are needed and are for that registry.
func (d *Doctor) registries(ctx context.Context, s *state) ([]Finding, error) {
	for i := range s.pods {
		if image := inject.DeliveredImage(&s.pods[i].Spec); image != "" && s.pods[i].Status.Phase == corev1.PodRunning {
			s.images.from(registry(image), s.pods[i].Spec.NodeName)
		}
	}
	var all []Finding
	for i := range s.profiles {
		p := &s.profiles[i]
		if p.Spec.Plugin.Image == "" {
			continue
		}
		host := registry(p.Spec.Plugin.Image)
		reached := "Whether nodes reach it shows when a pod starts"
		if n := len(s.images.hosts[host]); n > 0 {
			reached = counted(n, "node") + " with an image from there"
		}
		with := "without a Secret"
		if secrets := p.Spec.ImagePullSecrets; len(secrets) > 0 {
			with = "with " + strings.Join(secrets, ", ")
		}
		all = append(all, Finding{"registries", OK, fmt.Sprintf("profile %s pulls from %s %s. %s", p.Name, host, with, reached), ""})
		if len(p.Spec.ImagePullSecrets) > 0 && s.listed["pods"] {
			all = append(all, d.profileSecrets(ctx, p, host, s.pods)...)
		}
	}
	for _, use := range ownSecrets(s) {
		found := d.pullSecret(ctx, d.Namespace, use.secret, use.host)
		all = append(all, found.finding(fmt.Sprintf("Secret %s of Evenkeel's Deployments", use.secret), []string{d.Namespace}))
	}
	return all, nil
}

// profileSecrets looks at the profile's Secrets in the namespaces of its jobs.
func (d *Doctor) profileSecrets(ctx context.Context, p *evenkeel.NetworkProfile, host string, pods []corev1.Pod) []Finding {
	inUse := map[string]bool{}
	for i := range pods {
		if pods[i].Labels[evenkeel.ProfileKey] == p.Name {
			inUse[pods[i].Namespace] = true
		}
	}
	names := slices.Sorted(maps.Keys(inUse))
	if len(names) == 0 {
		return []Finding{{"registries", Note, fmt.Sprintf("profile %s: no job uses it now, so that no Secret was looked at", p.Name), "these Secrets have to exist in the namespaces of its jobs"}}
	}
	var all []Finding
	if more := len(names) - maxNamespaces; more > 0 {
		names = names[:maxNamespaces]
		all = append(all, Finding{"registries", Note, fmt.Sprintf("profile %s: its Secrets were looked at in %d namespaces, and not in %d others", p.Name, maxNamespaces, more), ""})
	}
	for _, secret := range p.Spec.ImagePullSecrets {
		where := map[secretState][]string{}
		for _, namespace := range names {
			found := d.pullSecret(ctx, namespace, secret, host)
			where[found] = append(where[found], namespace)
		}
		for _, found := range slices.SortedFunc(maps.Keys(where), func(a, b secretState) int { return strings.Compare(a.what, b.what) }) {
			all = append(all, found.finding(fmt.Sprintf("Secret %s of profile %s", secret, p.Name), where[found]))
		}
	}
	return all
}

// A secretUse is a Secret that pods of Evenkeel's Deployments pull with.
type secretUse struct{ secret, host string }

func ownSecrets(s *state) []secretUse {
	var all []secretUse
	for i := range s.deployments {
		for _, secret := range s.deployments[i].Spec.Template.Spec.ImagePullSecrets {
			if use := (secretUse{secret.Name, registry(imageOf(&s.deployments[i]))}); !slices.Contains(all, use) {
				all = append(all, use)
			}
		}
	}
	return all
}

// secretState is what was found out about a Secret: the same in many namespaces is one line.
type secretState struct {
	status   Status
	what, do string
}

func (s secretState) finding(secret string, namespaces []string) Finding {
	return Finding{"registries", s.status, fmt.Sprintf("%s %s, in %s: %s", secret, s.what, counted(len(namespaces), "namespace"), text.List(namespaces, maxNamed)), s.do}
}

// pullSecret looks at the names of registries in a Secret, and at nothing else of it.
func (d *Doctor) pullSecret(ctx context.Context, namespace, name, host string) secretState {
	secret := &corev1.Secret{}
	switch err := d.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, secret); {
	case apierrors.IsNotFound(err):
		return secretState{Problem, "does not exist", fmt.Sprintf("kubectl -n NAMESPACE create secret docker-registry %s --docker-server=%s ...", name, host)}
	case apierrors.IsForbidden(err):
		return secretState{Unknown, "is one that you may not read", "run it as somebody who may read it"}
	case err != nil:
		return secretState{Unknown, "could not be read: " + err.Error(), "try again"}
	}
	var config struct {
		Auths map[string]json.RawMessage `json:"auths"`
	}
	err := json.Unmarshal(secret.Data[corev1.DockerConfigJsonKey], &config)
	if old := secret.Data[corev1.DockerConfigKey]; old != nil {
		err = json.Unmarshal(old, &config.Auths)
	}
	if err != nil {
		return secretState{Problem, "is not of the type " + string(corev1.SecretTypeDockerConfigJson), "create it with kubectl create secret docker-registry"}
	}
	var known []string
	for entry := range config.Auths {
		at, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(entry, "https://"), "http://"), "/")
		if known = append(known, at); isFor(at, host) {
			return secretState{OK, "is for " + host, ""}
		}
	}
	return secretState{Problem, fmt.Sprintf("is for %s, but the image comes from %s", text.List(sorted(known), maxNamed), host), "add that registry to it"}
}

// isFor reports whether credentials for an entry of a Secret are for the registry. As for the kubelet, * is part of one
// label.
func isFor(entry, host string) bool {
	if host == "docker.io" && entry == "index.docker.io" {
		return true
	}
	matched, err := path.Match(entry, host)
	return err == nil && matched && strings.Count(entry, ".") == strings.Count(host, ".")
}
