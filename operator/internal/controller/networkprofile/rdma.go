package networkprofile

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
)

// Reasons of the condition RDMA.
const (
	ReasonEveryNode = "EveryNode"
	ReasonSomeNodes = "SomeNodes"
	ReasonNoDevice  = "NoDevice"
	ReasonAmbiguous = "Ambiguous"
)

// observeRDMA sets the RDMA device that jobs of the profile get on these nodes. With mode RDMA it is the only one offered. With mode
// Auto it has to be offered by every node, since a pod that requests it runs on no other node.
func observeRDMA(profile *evenkeel.NetworkProfile, nodes []*corev1.Node, status *evenkeel.NetworkProfileStatus) {
	transport := profile.Spec.Transport
	if transport.Mode == evenkeel.TransportTCP {
		meta.RemoveStatusCondition(&status.Conditions, evenkeel.ConditionRDMA)
		return
	}
	strict := transport.Mode == evenkeel.TransportRDMA
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
	everywhere := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return offering[name] < all })
	status.RDMANodes = &having
	value, reason, message := metav1.ConditionFalse, ReasonNoDevice, ""
	otherwise := "; jobs use TCP"
	if strict {
		otherwise = "; jobs are refused"
	}
	switch {
	case len(everywhere) == 1:
		status.RDMAResourceName = everywhere[0]
		value, reason, message = metav1.ConditionTrue, ReasonEveryNode, fmt.Sprintf("jobs get %s, which all %d nodes offer", everywhere[0], all)
	case len(names) > 1:
		reason, message = ReasonAmbiguous, fmt.Sprintf("nodes offer %s: choose one in spec.transport.rdma.resourceName%s", strings.Join(names, ", "), otherwise)
	case len(names) == 1 && strict:
		status.RDMAResourceName = names[0]
		value, reason, message = metav1.ConditionTrue, ReasonSomeNodes, fmt.Sprintf("jobs get %s and run on the %d of %d nodes that offer it", names[0], having, all)
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
