package networkprofile

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/nodedrain"
)

// Reasons of the condition RDMA.
const (
	ReasonEveryNode = "EveryNode"
	ReasonMostNodes = "MostNodes"
	ReasonSomeNodes = "SomeNodes"
	ReasonNoDevice  = "NoDevice"
	ReasonAmbiguous = "Ambiguous"
)

// Shares of the nodes, in percent, that have to offer a device so that mode Auto gives it to jobs, and that have to
// offer it so that Auto keeps doing so. The distance between them keeps one failing device plugin from changing the
// transport of every new job.
const (
	minPercentToGive = 90
	minPercentToKeep = 75
)

// observeRDMA sets the RDMA device that jobs of the profile get on these nodes. A pod that requests it runs on no other
// node. With mode RDMA it is the only one offered. With mode Auto most nodes that jobs can run on now have to offer it.
func observeRDMA(profile *evenkeel.NetworkProfile, nodes []*corev1.Node, status *evenkeel.NetworkProfileStatus) {
	transport := profile.Spec.Transport
	if inject.WithoutRDMA(transport) {
		meta.RemoveStatusCondition(&status.Conditions, evenkeel.ConditionRDMA)
		return
	}
	strict := transport.Mode == evenkeel.TransportRDMA
	if !strict { // with mode RDMA, jobs wait for nodes that are away
		nodes = usableNodes(nodes)
	}
	offering := map[string]int32{} // nodes by what they offer
	var having int32
	for _, node := range nodes {
		found := false
		for _, name := range offeredResources(node) {
			if name == transport.RDMA.ResourceName || transport.RDMA.ResourceName == "" && strings.HasPrefix(name, inject.RDMADomain) {
				offering[name]++
				found = true
			}
		}
		if found {
			having++
		}
	}
	names, all := slices.Sorted(maps.Keys(offering)), int32(len(nodes))
	atLeast := func(percent int32) []string {
		return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return offering[name]*100 < all*percent })
	}
	given := profile.Status.RDMAResourceName
	if transport.RDMA.ResourceName != "" && transport.RDMA.ResourceName != given {
		given = ""
	}
	everywhere, most, enough := atLeast(100), atLeast(minPercentToGive), atLeast(minPercentToKeep)
	status.RDMANodes = &having
	value, reason, message := metav1.ConditionFalse, ReasonNoDevice, ""
	otherwise := "; jobs use TCP"
	if strict {
		otherwise = "; jobs are refused"
	}
	gpuDirect := ""
	if !strict && slices.ContainsFunc(nodes, accelerator.Has) {
		gpuDirect = "; mode Auto does without GPUDirect, as TCP may carry some messages: set spec.transport.mode to RDMA for it"
	}
	give := func(name, why, format string, args ...any) {
		status.RDMAResourceName = name
		value, reason, message = metav1.ConditionTrue, why, "jobs get "+name+fmt.Sprintf(format, args...)+gpuDirect
	}
	switch {
	case len(everywhere) == 1:
		give(everywhere[0], ReasonEveryNode, ", which all %d nodes offer", all)
	case !strict && all == 0 && given != "":
		give(given, ReasonNoNodes, " as before; no node is ready and schedulable")
	case !strict && len(names) == 1 && len(most) == 1, !strict && len(enough) == 1 && enough[0] == given:
		name := cmp.Or(given, names[0])
		give(name, ReasonMostNodes, " and run on the %d of %d nodes that offer it", offering[name], all)
	case len(names) > 1:
		reason, message = ReasonAmbiguous, fmt.Sprintf("nodes offer %s: choose one in spec.transport.rdma.resourceName%s", strings.Join(names, ", "), otherwise)
	case len(names) == 1 && strict:
		give(names[0], ReasonSomeNodes, " and run on the %d of %d nodes that offer it", having, all)
	case len(names) == 1:
		reason, message = ReasonSomeNodes, fmt.Sprintf("%d of %d nodes offer %s; jobs use TCP: select those nodes with spec.nodeSelector, or set spec.transport.mode to RDMA", having, all, names[0])
	case transport.RDMA.ResourceName != "" && strict:
		status.RDMAResourceName = transport.RDMA.ResourceName
		message = fmt.Sprintf("none of %d nodes offers %s; jobs wait for one that does", all, transport.RDMA.ResourceName)
	case transport.RDMA.ResourceName != "":
		message = fmt.Sprintf("none of %d nodes offers %s%s", all, transport.RDMA.ResourceName, otherwise)
	default:
		message = fmt.Sprintf("none of %d nodes offers a resource of the domain %s as the RDMA shared device plugin gives it (or name one in spec.transport.rdma.resourceName)%s",
			all, strings.TrimSuffix(inject.RDMADomain, "/"), otherwise)
	}
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: evenkeel.ConditionRDMA, Status: value, Reason: reason, Message: message, ObservedGeneration: profile.Generation,
	})
}

// usableNodes returns the nodes that jobs can run on now: ready and schedulable ones, with accelerators if any node
// has some.
func usableNodes(nodes []*corev1.Node) []*corev1.Node {
	if slices.ContainsFunc(nodes, accelerator.Has) {
		nodes = slices.DeleteFunc(slices.Clone(nodes), func(n *corev1.Node) bool { return !accelerator.Has(n) })
	}
	return slices.DeleteFunc(slices.Clone(nodes), func(n *corev1.Node) bool { return !isUsable(n) })
}

func isUsable(node *corev1.Node) bool {
	return !nodedrain.Of(node) && slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// offeredResources returns the extended resources that pods can get on the node, sorted.
func offeredResources(node *corev1.Node) []string {
	var names []string
	for name, quantity := range node.Status.Allocatable {
		if strings.Contains(string(name), "/") && quantity.Sign() > 0 {
			names = append(names, string(name))
		}
	}
	slices.Sort(names)
	return names
}
