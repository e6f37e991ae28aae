package networkprofile

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/version"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/nodeos"
	"evenkeel.dev/evenkeel/operator/internal/reduction"
)

// Reasons of the condition Ready.
const (
	ReasonResolved        = "Resolved"
	ReasonNoNodes         = "NoNodes"
	ReasonNodesTooOld     = "NodesTooOld"
	ReasonInvalidSelector = "InvalidSelector"
)

// The first versions in which image volumes are enabled by default.
var (
	imageVolumeKubelet  = version.MustParseGeneric("1.35.0")
	imageVolumeRuntimes = map[string]*version.Version{
		"containerd": version.MustParseGeneric("2.1.0"),
		"cri-o":      version.MustParseGeneric("1.31.0"),
	}
)

// Observe returns the status of the profile on a cluster with these nodes. Healths are by node, and needed where the
// profile has a tuner. ReductionImage is the installation's image. If it is empty, no job gets reduction servers.
func Observe(profile *evenkeel.NetworkProfile, nodes []corev1.Node, healths map[string]*evenkeel.NodeNetworkHealthStatus, reductionImage string) evenkeel.NetworkProfileStatus {
	status := evenkeel.NetworkProfileStatus{ObservedGeneration: profile.Generation, Conditions: slices.Clone(profile.Status.Conditions)}
	ready := func(value metav1.ConditionStatus, reason, format string, args ...any) evenkeel.NetworkProfileStatus {
		meta.SetStatusCondition(&status.Conditions, metav1.Condition{
			Type: evenkeel.ConditionReady, Status: value, Reason: reason, Message: fmt.Sprintf(format, args...), ObservedGeneration: profile.Generation,
		})
		return status
	}

	if _, err := selector(profile.Spec.NamespaceSelector); err != nil {
		return ready(metav1.ConditionFalse, ReasonInvalidSelector, "namespaceSelector: %v", err)
	}
	selected, err := selector(profile.Spec.NodeSelector)
	if err != nil {
		return ready(metav1.ConditionFalse, ReasonInvalidSelector, "nodeSelector: %v", err)
	}
	var matched, capable int32
	var lacking string // one node that cannot, as an example for the message
	var chosen []*corev1.Node
	for i := range nodes {
		if !selected.Matches(labels.Set(nodes[i].Labels)) || nodeos.IsWindows(&nodes[i]) {
			continue
		}
		matched++
		chosen = append(chosen, &nodes[i])
		if MountsImages(&nodes[i]) {
			capable++
		} else if lacking == "" || nodes[i].Name < lacking {
			lacking = nodes[i].Name
		}
	}
	status.MatchedNodes, status.ImageVolumeNodes = &matched, &capable
	observeRDMA(profile, chosen, &status)
	observeTuner(profile, chosen, healths, &status)
	observeImages(profile, reductionImage, &status)

	plugin := profile.Spec.Plugin
	if plugin.Delivery != evenkeel.DeliveryPreinstalled {
		_, digest, _ := strings.Cut(plugin.Image, "@")
		status.Plugin = evenkeel.PluginStatus{Image: plugin.Image, Digest: digest}
	}
	status.Delivery = plugin.Delivery
	if plugin.Delivery == "" || plugin.Delivery == evenkeel.DeliveryAuto {
		status.Delivery = evenkeel.DeliveryInitContainer // it works everywhere, and which nodes a job's pods get is not known here
		if matched > 0 && capable == matched {
			status.Delivery = evenkeel.DeliveryImageVolume
		}
	}
	switch {
	case matched == 0:
		return ready(metav1.ConditionTrue, ReasonNoNodes, "no node matches nodeSelector; jobs get delivery %s", status.Delivery)
	case status.Delivery == evenkeel.DeliveryImageVolume && capable < matched:
		return ready(metav1.ConditionFalse, ReasonNodesTooOld,
			"%d of %d nodes, such as %s, cannot mount images (Kubernetes 1.35 with containerd 2.1 or CRI-O 1.31): pods there will not start; delivery Auto would use the init container",
			matched-capable, matched, lacking)
	default:
		return ready(metav1.ConditionTrue, ReasonResolved, "jobs get delivery %s; %d of %d nodes can mount images", status.Delivery, capable, matched)
	}
}

// observeImages sets the condition ImagesMatch, where jobs can get reduction servers.
func observeImages(profile *evenkeel.NetworkProfile, reductionImage string, status *evenkeel.NetworkProfileStatus) {
	if reductionImage == "" || reduction.MaxServers(profile) == 0 {
		meta.RemoveStatusCondition(&status.Conditions, evenkeel.ConditionImagesMatch)
		return
	}
	value, reason, message := reduction.CompareImages(inject.Resolve(profile, "").Image, cmp.Or(profile.Spec.Reduction.Image, reductionImage))
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: evenkeel.ConditionImagesMatch, Status: value, Reason: reason, Message: message, ObservedGeneration: profile.Generation,
	})
}

// selector converts the label selector of a profile. An absent one selects everything.
func selector(s *metav1.LabelSelector) (labels.Selector, error) {
	if s == nil {
		return labels.Everything(), nil
	}
	return metav1.LabelSelectorAsSelector(s)
}

// MountsImages reports whether the node can mount an image as a volume. Versions that cannot be parsed count as too
// old.
func MountsImages(node *corev1.Node) bool {
	info := node.Status.NodeInfo
	name, number, _ := strings.Cut(info.ContainerRuntimeVersion, "://")
	return atLeast(info.KubeletVersion, imageVolumeKubelet) && imageVolumeRuntimes[name] != nil && atLeast(number, imageVolumeRuntimes[name])
}

func atLeast(text string, minimum *version.Version) bool {
	v, err := version.ParseGeneric(text)
	return err == nil && v.AtLeast(minimum)
}
