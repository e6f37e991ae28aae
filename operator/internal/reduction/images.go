package reduction

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// CompareImages says whether a plugin image and an image of reduction servers have the same version, by their tags. Peers of one
// version have one protocol; others may refuse each other. A digest alone says nothing about the version, so without tags it is
// Unknown. It returns status, reason and message of the condition ImagesMatch.
func CompareImages(plugin, servers string) (status metav1.ConditionStatus, reason, message string) {
	pluginTag, serversTag := tag(plugin), tag(servers)
	switch {
	case plugin == "":
		return metav1.ConditionUnknown, evenkeel.ReasonNotComparable, "the plugin is part of the training image (delivery Preinstalled): it has to be of the same version as the reduction servers, " + servers
	case pluginTag == "" || serversTag == "":
		return metav1.ConditionUnknown, evenkeel.ReasonNotComparable, fmt.Sprintf(
			"plugin %s and reduction servers %s cannot be compared: write the version before the digest, name:version@sha256:..., in both", plugin, servers)
	case strings.TrimPrefix(pluginTag, "v") != strings.TrimPrefix(serversTag, "v"):
		return metav1.ConditionFalse, evenkeel.ReasonTagsDiffer, fmt.Sprintf(
			"the plugin has the tag %s and the reduction servers have %s, so they may refuse each other: set spec.plugin.image and spec.reduction.image of the NetworkProfile to images of one version", pluginTag, serversTag)
	}
	return metav1.ConditionTrue, evenkeel.ReasonSameTag, fmt.Sprintf("plugin and reduction servers have the tag %s", pluginTag)
}

// tag is the tag of an image reference; empty: it has none.
func tag(image string) string {
	name, _, _ := strings.Cut(image, "@")
	_, tag, _ := strings.Cut(name[strings.LastIndex(name, "/")+1:], ":") // before a slash, a colon is that of a port
	return tag
}
