package gate

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"

	"evenkeel.dev/evenkeel/operator/internal/accelerator"
)

// gang is the pods of a job that need room on nodes: the pods with accelerators, or all if none has any.
type gang struct {
	count int
	// specs holds one pod of each shape, and shapes is the set of shapes.
	specs  []*corev1.PodSpec
	shapes string
	// kinds are the accelerators that one pod requests, each combination once. It is empty if ResourceClaims provide
	// them.
	kinds []map[corev1.ResourceName]int64
}

// newGang counts the pods of a job.
func newGang(job Job) gang {
	type member struct {
		shape string
		uses  bool
	}
	known := make(map[*corev1.PodSpec]member, 4)
	first := make(map[string]*corev1.PodSpec, 4)
	total, with := 0, 0
	var kinds []map[corev1.ResourceName]int64
	for _, spec := range job.Pods {
		m, had := known[spec]
		if !had {
			requests := resource.PodRequests(&corev1.Pod{Spec: *spec}, resource.PodResourcesOptions{})
			uses := accelerators(requests)
			claims := accelerator.Claims(spec)
			m = member{shapeOf(spec, requests, claims), len(uses) > 0 || claims}
			known[spec] = m
			if first[m.shape] == nil {
				first[m.shape] = spec
				if m.uses {
					kinds = append(kinds, uses)
				}
			}
		}
		count := job.Count(spec)
		total += count
		if m.uses {
			with += count
		}
	}
	g := gang{count: total, kinds: kinds}
	if with > 0 {
		g.count = with
	}
	shapes := make([]string, 0, len(first))
	for shape, spec := range first {
		shapes, g.specs = append(shapes, shape), append(g.specs, spec)
	}
	slices.Sort(shapes)
	g.shapes = strings.Join(shapes, "\n")
	return g
}

// shapeOf returns the fields that decide which nodes a pod may run on, and what it takes of them. Pods of one template
// differ in the rest, such as their names and volumes.
func shapeOf(spec *corev1.PodSpec, requests corev1.ResourceList, claims bool) string {
	shape := struct {
		Node        string
		Selector    map[string]string
		Required    *corev1.NodeSelector
		Tolerations []corev1.Toleration
		Requests    corev1.ResourceList
		Claims      bool
	}{spec.NodeName, spec.NodeSelector, nil, spec.Tolerations, requests, claims}
	if a := spec.Affinity; a != nil && a.NodeAffinity != nil {
		shape.Required = a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	}
	text, err := json.Marshal(shape)
	if err != nil {
		return fmt.Sprintf("%p", spec) // a shape of its own
	}
	return string(text)
}

func accelerators(requests corev1.ResourceList) map[corev1.ResourceName]int64 {
	counts := map[corev1.ResourceName]int64{}
	for name, quantity := range requests {
		if accelerator.IsResource(name) && quantity.Sign() > 0 {
			counts[name] = quantity.Value()
		}
	}
	return counts
}

// room returns how many of the pods fit on the node beside the pods there. It is one for pods without accelerators. It
// is also one for pods with a ResourceClaim instead of a request, on a node with unused accelerators: the pod does not
// tell what it claims.
func (g gang) room(node *corev1.Node, use NodeUse, hasAccelerators func(*corev1.Node) bool) int {
	if len(g.kinds) == 0 {
		return 1
	}
	used := use.Used(node.Name)
	most := 0
	for _, kind := range g.kinds {
		if len(kind) == 0 {
			if hasAccelerators(node) && use.User(node.Name) == "" {
				most = max(most, 1)
			}
			continue
		}
		fit := -1
		for name, want := range kind {
			offered := node.Status.Allocatable[name]
			n := int(max(0, offered.Value()-used[name]) / want)
			if fit < 0 || n < fit {
				fit = n
			}
		}
		most = max(most, fit)
	}
	return most
}
