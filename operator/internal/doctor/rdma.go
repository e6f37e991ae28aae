package doctor

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// Labels of Node Feature Discovery: by its own rules, which begin with custom-, and by those that network operators
// bring. A card of vendor 15b3 can do RDMA.
const feature = "feature.node.kubernetes.io/"

var (
	cardLabels   = []string{feature + "custom-rdma.capable", feature + "rdma.capable", feature + "pci-15b3.present"}
	moduleLabels = []string{feature + "custom-rdma.available", feature + "custom-rdma.enabled", feature + "rdma.available"}
)

// An absence is why a node offers no RDMA device, and what helps.
type absence struct {
	applies func(*corev1.Node) bool
	why, do string
}

// absences lists the most certain one first.
var absences = []absence{
	{func(n *corev1.Node) bool { return has(n, cardLabels[:2]) && !has(n, moduleLabels) },
		"Node Feature Discovery finds a card there, but not its kernel modules", "load ib_uverbs, rdma_ucm and the module of the card on these nodes"},
	{func(n *corev1.Node) bool { return has(n, cardLabels) },
		"Node Feature Discovery finds a card there, but no device plugin offers it", "does the device plugin's DaemonSet run there, and does its configuration name their cards? docs/rdma.md"},
	{func(*corev1.Node) bool { return true },
		"no device plugin offers one there", "if they should: does the device plugin's DaemonSet run there, and does its configuration name their cards?"},
}

func has(node *corev1.Node, labels []string) bool {
	return slices.ContainsFunc(labels, func(label string) bool { return node.Labels[label] == "true" })
}

// rdma reports which nodes offer RDMA devices, and what keeps the others from it as far as the API shows.
func rdma(nodes []corev1.Node, profiles []evenkeel.NetworkProfile) []Finding {
	wanted := map[string]bool{}
	for _, p := range profiles {
		wanted[p.Spec.Transport.RDMA.ResourceName] = true
	}
	offering, dead, ended := map[string][]string{}, map[string][]string{}, map[string][]string{}
	without := make([][]string, len(absences))
	for i := range nodes {
		node, found := &nodes[i], false
		for name, capacity := range node.Status.Capacity {
			if !strings.HasPrefix(string(name), inject.RDMADomain) && !wanted[string(name)] {
				continue
			}
			found = true
			free := node.Status.Allocatable[name]
			to := offering
			switch {
			case capacity.Sign() <= 0:
				to = ended
			case free.Sign() <= 0:
				to = dead
			}
			to[string(name)] = append(to[string(name)], node.Name)
		}
		if !found {
			why := slices.IndexFunc(absences, func(a absence) bool { return a.applies(node) })
			without[why] = append(without[why], node.Name)
		}
	}
	var all []Finding
	for _, name := range slices.Sorted(maps.Keys(offering)) {
		all = append(all, Finding{"rdma", OK, fmt.Sprintf("%s with %s: %s", counted(len(offering[name]), "node"), name, text.List(sorted(offering[name]), maxNamed)), ""})
	}
	for _, name := range slices.Sorted(maps.Keys(dead)) {
		all = append(all, Finding{"rdma", Problem, fmt.Sprintf("%s with %s, but none that works: %s", counted(len(dead[name]), "node"), name, text.List(sorted(dead[name]), maxNamed)), "look at the log of the RDMA device plugin on these nodes, and at their ports (rdma link)"})
	}
	for _, name := range slices.Sorted(maps.Keys(ended)) {
		f := Finding{"rdma", Note, fmt.Sprintf("%s on which a device plugin offered %s and has ended: %s", counted(len(ended[name]), "node"), name, text.List(sorted(ended[name]), maxNamed)), "if it should run: kubectl get pods -A --field-selector spec.nodeName=" + ended[name][0]}
		if wanted[name] {
			f.Status = Problem
		}
		all = append(all, f)
	}
	last := len(absences) - 1
	if len(all) == 0 && len(without[last]) == len(nodes) {
		return []Finding{{"rdma", OK, "no node offers an RDMA device: jobs use TCP. Whether nodes have RDMA hardware cannot be seen from the API", "with such hardware, install a device plugin: docs/rdma.md"}}
	}
	for i, names := range without {
		if len(names) > 0 {
			all = append(all, Finding{"rdma", Note, fmt.Sprintf("%s without an RDMA device, as %s: %s", counted(len(names), "node"), absences[i].why, text.List(sorted(names), maxNamed)), absences[i].do})
		}
	}
	return all
}

// devicePlugin matches the names of the DaemonSets of RDMA device plugins, and of their images.
var devicePlugin = regexp.MustCompile(`rdma-shared-d|rdma-device-plugin|sriov-network-device-plugin|sriov-device-plugin`)

// devicePlugins reports on how many nodes a device plugin for RDMA runs.
func (d *Doctor) devicePlugins(ctx context.Context, _ *state) ([]Finding, error) {
	var all []Finding
	page := &appsv1.DaemonSetList{}
	err := d.pages(ctx, page, func() error {
		for i := range page.Items {
			set := &page.Items[i]
			if !devicePlugin.MatchString(set.Name) && !slices.ContainsFunc(set.Spec.Template.Spec.Containers, func(c corev1.Container) bool { return devicePlugin.MatchString(c.Image) }) {
				continue
			}
			ready, desired := set.Status.NumberReady, set.Status.DesiredNumberScheduled
			f := Finding{"rdma", OK, fmt.Sprintf("the device plugin %s/%s is ready on %d of %d nodes", set.Namespace, set.Name, ready, desired), ""}
			switch {
			case desired == 0:
				f.Status, f.Message, f.Do = Note, fmt.Sprintf("the device plugin %s/%s is for no node", set.Namespace, set.Name), "see the node selector of this DaemonSet"
			case ready < desired:
				f.Status, f.Do = Note, fmt.Sprintf("kubectl -n %s describe daemonset %s", set.Namespace, set.Name)
				if ready == 0 {
					f.Status = Problem
				}
			}
			all = append(all, f)
		}
		page.Items = nil
		return nil
	})
	if err != nil {
		return all, fmt.Errorf("list daemonsets: %w", err)
	}
	return all, nil
}

// gpuDirect reports for which profiles messages of GPUs are copied through host memory, though jobs get an RDMA device.
func gpuDirect(nodes []corev1.Node, profiles []evenkeel.NetworkProfile) []Finding {
	if !slices.ContainsFunc(nodes, func(n corev1.Node) bool { return accelerator.Has(&n) }) {
		return nil
	}
	var all []Finding
	for _, p := range profiles {
		if p.Spec.Transport.Mode != evenkeel.TransportRDMA && meta.IsStatusConditionTrue(p.Status.Conditions, evenkeel.ConditionRDMA) {
			all = append(all, Finding{"rdma", Note, p.Name + ": mode Auto does without GPUDirect: messages are copied through host memory, as TCP may carry some of them",
				"if GPUs and cards of the nodes can do it, set spec.transport.mode: RDMA; peers that cannot use RDMA then fail: docs/rdma.md#6-gpu-memory-gpudirect"})
		}
	}
	return all
}
