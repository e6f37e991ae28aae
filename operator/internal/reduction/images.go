package reduction

import (
	"fmt"
	"regexp"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// protocolSuffix ends a tag that says which protocols the image speaks, as in 0.2.0-p7.2: that among peers, and that
// with reduction servers. The image's label evenkeel.dev/protocol holds the same.
var protocolSuffix = regexp.MustCompile(`-p([0-9]+\.[0-9]+)$`)

// CompareImages reports whether a plugin image and an image of reduction servers speak the same protocols, by their
// tags. Where a tag does not say which, the two have to be of one version, as others may refuse each other. A digest
// alone says nothing about either, so without tags it is Unknown. It returns status, reason and message of the
// condition ImagesMatch.
func CompareImages(plugin, servers string) (status metav1.ConditionStatus, reason, message string) {
	pluginTag, serversTag := tag(plugin), tag(servers)
	pluginProtocol, serversProtocol := protocol(pluginTag), protocol(serversTag)
	const instead = "set spec.plugin.image and spec.reduction.image of the NetworkProfile to images of one version"
	switch {
	case plugin == "":
		return metav1.ConditionUnknown, evenkeel.ReasonNotComparable, "the plugin is part of the training image (delivery Preinstalled): it has to be of the same version as the reduction servers, " + servers
	case pluginTag == "" || serversTag == "":
		return metav1.ConditionUnknown, evenkeel.ReasonNotComparable, fmt.Sprintf(
			"plugin %s and reduction servers %s cannot be compared: write the version before the digest, name:version@sha256:..., in both", plugin, servers)
	case pluginProtocol != "" && pluginProtocol == serversProtocol:
		return metav1.ConditionTrue, evenkeel.ReasonSameProtocol, "plugin and reduction servers speak protocol " + pluginProtocol
	case pluginProtocol != "" && serversProtocol != "":
		return metav1.ConditionFalse, evenkeel.ReasonProtocolsDiffer, fmt.Sprintf(
			"the plugin (%s) speaks protocol %s and the reduction servers (%s) speak %s, so they refuse each other: %s", pluginTag, pluginProtocol, serversTag, serversProtocol, instead)
	case version(pluginTag) != version(serversTag):
		return metav1.ConditionFalse, evenkeel.ReasonTagsDiffer, fmt.Sprintf(
			"the plugin has the tag %s and the reduction servers have %s, so they may refuse each other: %s", pluginTag, serversTag, instead)
	}
	return metav1.ConditionTrue, evenkeel.ReasonSameTag, fmt.Sprintf("plugin and reduction servers have the tag %s", pluginTag)
}

// protocol is what the tag says of protocols; empty: nothing.
func protocol(tag string) string {
	if found := protocolSuffix.FindStringSubmatch(tag); found != nil {
		return found[1]
	}
	return ""
}

// version is the tag without what is said of protocols.
func version(tag string) string {
	return strings.TrimPrefix(protocolSuffix.ReplaceAllString(tag, ""), "v")
}

// tag is the tag of an image reference, or empty if it has none.
func tag(image string) string {
	name, _, _ := strings.Cut(image, "@")
	_, tag, _ := strings.Cut(name[strings.LastIndex(name, "/")+1:], ":") // before a slash, a colon is that of a port
	return tag
}
