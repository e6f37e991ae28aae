package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// images are the images that nodes report: by default the 50 largest of each node. So a missing image proves nothing.
type images struct {
	nodes int
	// hosts are the registries, with the nodes that have an image from there.
	hosts map[string]map[string]bool
	// old are images with accelerators' nodes that have them, whose names say that the plugin cannot be loaded.
	old map[string][]string
}

func (s *images) add(node *corev1.Node) {
	if s.hosts == nil {
		s.hosts, s.old = map[string]map[string]bool{}, map[string][]string{}
	}
	s.nodes++
	for _, image := range node.Status.Images {
		for _, name := range image.Names {
			if host := registry(name); strings.ContainsAny(name, ":@") && !strings.HasPrefix(name, "<none>") && host != "localhost" {
				s.from(host, node.Name)
			}
		}
		// One image has several names: one says enough.
		if i := slices.IndexFunc(image.Names, func(name string) bool { return oldDistribution(name) != "" }); i >= 0 && accelerator.Has(node) {
			s.old[image.Names[i]] = append(s.old[image.Names[i]], node.Name)
		}
	}
}

// from says that the node has an image from the registry.
func (s *images) from(host, node string) {
	if s.hosts == nil {
		s.hosts = map[string]map[string]bool{}
	}
	if s.hosts[host] == nil {
		s.hosts[host] = map[string]bool{}
	}
	s.hosts[host][node] = true
}

// registries says from where nodes pull images, for those who are about to choose a registry.
func (s *images) registries() []Finding {
	if len(s.hosts) == 0 {
		return nil
	}
	var known []string
	for _, host := range slices.SortedFunc(maps.Keys(s.hosts), func(a, b string) int {
		if more := len(s.hosts[b]) - len(s.hosts[a]); more != 0 {
			return more
		}
		return strings.Compare(a, b)
	}) {
		known = append(known, fmt.Sprintf("%s (%d)", host, len(s.hosts[host])))
	}
	return []Finding{{"registries", OK, fmt.Sprintf("of %s, so many have images from these registries: %s", counted(s.nodes, "node"), text.List(known, maxNamed)), "push Evenkeel's images to one that all nodes pull from: docs/install.md"}}
}

// registry is the host of an image's name.
func registry(image string) string {
	first, _, more := strings.Cut(image, "/")
	if !more || !strings.ContainsAny(first, ".:") && first != "localhost" {
		return "docker.io"
	}
	return first
}
