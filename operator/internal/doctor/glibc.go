package doctor

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"evenkeel.dev/evenkeel/operator/internal/pluginstatus"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// oldDistributions matches what names of images say about distributions whose glibc is older than 2.28.
var oldDistributions = regexp.MustCompile(`(?:^|[^a-z])(ubuntu[-:_]?(?:1[0-7]\.?(?:04|10)|18\.?04)|trusty|xenial|bionic|debian[-:_]?[89]|jessie|stretch|(?:centos|rhel|ubi|oraclelinux)[-:_]?[67]|el[67]|amazonlinux[-:_]?[12])(?:[^a-z0-9]|$)`)

// oldDistribution is what the image's name says about such a distribution; empty: nothing. A digest, a registry and its
// folders say nothing.
func oldDistribution(image string) string {
	name, _, _ := strings.Cut(image, "@")
	if found := oldDistributions.FindStringSubmatch(name[strings.LastIndex(name, "/")+1:]); found != nil {
		return found[1]
	}
	return ""
}

// glibc reports which images cannot load the plugin, by their names: the API does not show what is in an image.
func glibc(pods []corev1.Pod, onNodes map[string][]string) []Finding {
	var all []Finding
	running := map[string][]string{} // by image, the pods
	example := "docker run --rm IMAGE ldd --version"
	for i := range pods {
		pod := &pods[i]
		s, _ := pluginstatus.Of(pod)
		if pod.Status.Phase != corev1.PodRunning || s.Outcome == pluginstatus.Loaded || s.Outcome == pluginstatus.Failed {
			continue
		}
		example = fmt.Sprintf("kubectl -n %s exec %s -- ldd --version", pod.Namespace, pod.Name)
		for _, c := range pod.Spec.Containers {
			if oldDistribution(c.Image) != "" {
				running[c.Image] = append(running[c.Image], pod.Namespace+"/"+pod.Name)
			}
		}
	}
	for _, image := range slices.Sorted(maps.Keys(running)) {
		all = append(all, Finding{"glibc", Problem, fmt.Sprintf("the name of image %s says %s, whose glibc is before 2.28 and cannot load the plugin; %s with it: %s",
			image, oldDistribution(image), counted(len(running[image]), "running pod"), text.List(sorted(running[image]), maxNamed)), "build it on a later distribution; if the name misleads, see: " + example})
	}
	var others []string
	for _, image := range slices.Sorted(maps.Keys(onNodes)) {
		if running[image] == nil {
			others = append(others, fmt.Sprintf("%s (%s)", image, counted(len(onNodes[image]), "node")))
		}
	}
	if len(others) > 0 {
		all = append(all, Finding{"glibc", Note, "names of images on nodes with accelerators say a distribution whose glibc is before 2.28: if jobs of NCCL use them, they cannot load the plugin: " + text.List(others, maxNamed),
			"build these images on a later distribution"})
	}
	return append(all, Finding{"glibc", Unknown, "the API does not show which glibc an image has; pods that report the plugin have 2.28 or later", "for another image: " + example})
}
