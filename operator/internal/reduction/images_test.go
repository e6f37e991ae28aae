package reduction

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// A tag says which protocols an image speaks, or else which version it is.
func TestReductionImagesAreComparedByTag(t *testing.T) {
	digest := "@sha256:" + strings.Repeat("0", 64)
	for _, test := range []struct {
		plugin, servers, reason string
		status                  metav1.ConditionStatus
	}{
		{"r.example.com/plugin:1.2.0" + digest, "r.example.com/servers:1.2.0", evenkeel.ReasonSameTag, metav1.ConditionTrue},
		{"r.example.com/plugin:v1.2.0" + digest, "elsewhere:5000/servers:1.2.0" + digest, evenkeel.ReasonSameTag, metav1.ConditionTrue},
		{"r.example.com/plugin:1.2.0" + digest, "r.example.com/servers:1.1.0" + digest, evenkeel.ReasonTagsDiffer, metav1.ConditionFalse},
		{"r.example.com:5000/plugin" + digest, "r.example.com:5000/servers:1.1.0", evenkeel.ReasonNotComparable, metav1.ConditionUnknown},
		{"plugin:1.1.0" + digest, "r.example.com:5000/servers" + digest, evenkeel.ReasonNotComparable, metav1.ConditionUnknown},
		{"r.example.com/plugin:1.2.0-p7.2" + digest, "r.example.com/servers:1.1.0-p7.2", evenkeel.ReasonSameProtocol, metav1.ConditionTrue},
		{"r.example.com/plugin:1.2.0-p7.2" + digest, "r.example.com/servers:1.2.0-p7.3", evenkeel.ReasonProtocolsDiffer, metav1.ConditionFalse},
		{"r.example.com/plugin:dev-p8.2" + digest, "r.example.com/servers:dev-p7.2", evenkeel.ReasonProtocolsDiffer, metav1.ConditionFalse},
		{"r.example.com/plugin:1.2.0-p7.2" + digest, "r.example.com/servers:v1.2.0", evenkeel.ReasonSameTag, metav1.ConditionTrue},
		{"r.example.com/plugin:1.2.0-p7.2" + digest, "r.example.com/servers:1.3.0", evenkeel.ReasonTagsDiffer, metav1.ConditionFalse},
		{"r.example.com/plugin:1.2.0-p7" + digest, "r.example.com/servers:1.2.0", evenkeel.ReasonTagsDiffer, metav1.ConditionFalse},
		{"", "servers:1.1.0", evenkeel.ReasonNotComparable, metav1.ConditionUnknown},
	} {
		status, reason, message := CompareImages(test.plugin, test.servers)
		if status != test.status || reason != test.reason || message == "" {
			t.Errorf("%q and %q: %s %s: %s; want %s %s", test.plugin, test.servers, status, reason, message, test.status, test.reason)
		}
	}
}
