package reduction

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

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
		{"", "servers:1.1.0", evenkeel.ReasonNotComparable, metav1.ConditionUnknown},
	} {
		status, reason, message := CompareImages(test.plugin, test.servers)
		if status != test.status || reason != test.reason || message == "" {
			t.Errorf("%q and %q: %s %s: %s; want %s %s", test.plugin, test.servers, status, reason, message, test.status, test.reason)
		}
	}
}
