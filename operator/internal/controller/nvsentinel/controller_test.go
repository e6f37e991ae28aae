package nvsentinel

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/nvsentinel"
)

func TestNVSentinelEventOfANode(t *testing.T) {
	observed := metav1.NewTime(time.Date(2026, 11, 25, 1, 2, 3, 0, time.UTC))
	const measured = "with gpu-3: 0.1 GB/s, minimum 0.85 GB/s"
	for _, test := range []struct {
		name, label string
		health      evenkeel.Health
		told        bool
		owner       string
		want        string // "fault", "cleared" or nothing
		message     string
	}{
		{name: "it failed", label: "unhealthy", health: evenkeel.HealthUnhealthy, want: "fault", message: "TooSlow: " + measured},
		{name: "it failed and was told", label: "unhealthy", health: evenkeel.HealthUnhealthy, told: true},
		{name: "it failed, as too many others", health: evenkeel.HealthUnhealthy},
		{name: "it passed", label: "healthy", health: evenkeel.HealthHealthy},
		{name: "it passed after a fault", label: "healthy", health: evenkeel.HealthHealthy, told: true, want: "cleared", message: "TooSlow: " + measured},
		{name: "it passed, and the label is behind", label: "unhealthy", health: evenkeel.HealthHealthy},
		{name: "it passed after a fault, and the label is behind", label: "unhealthy", health: evenkeel.HealthHealthy, told: true},
		{name: "no policy selects it any more", health: evenkeel.HealthUnhealthy, told: true, want: "cleared", message: "no longer marked: "},
		{name: "another node had its name", label: "unhealthy", health: evenkeel.HealthUnhealthy, owner: "other"},
		{name: "nothing is known", health: ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			node := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "gpu-17", UID: "uid"}}
			if test.label != "" {
				node.Labels = map[string]string{evenkeel.HealthKey: test.label}
			}
			if test.owner == "" {
				test.owner = "uid"
			}
			bandwidth := resource.MustParse("100M")
			state := &evenkeel.NodeNetworkHealth{ObjectMeta: metav1.ObjectMeta{Name: "gpu-17"}}
			state.OwnerReferences = []metav1.OwnerReference{{UID: "uid"}}
			if test.owner != "uid" {
				state.OwnerReferences[0].UID = "other"
			}
			if test.told {
				state.Annotations = map[string]string{ToldKey: foundAt(state)}
			}
			state.Status = evenkeel.NodeNetworkHealthStatus{
				Health: test.health, Reason: "TooSlow", Message: measured, ObservedTime: &observed, BusBandwidth: &bandwidth,
				History: []evenkeel.HealthResult{{Check: "later", Verdict: evenkeel.VerdictInconclusive}, {Check: "nightly", Verdict: evenkeel.VerdictFail}},
			}
			event := decide(node, state)
			got := ""
			switch {
			case event == nil:
			case event.Healthy && !event.Fatal && event.ErrorCode == "" && event.Action == nvsentinel.ActionNone:
				got = "cleared"
			case !event.Healthy && event.Fatal && event.ErrorCode == nvsentinel.ErrorCode && event.Action == nvsentinel.ActionContactSupport:
				got = "fault"
			default:
				t.Fatalf("half a fault: %+v", event)
			}
			if got != test.want {
				t.Fatalf("%q, want %q", got, test.want)
			}
			if event == nil {
				return
			}
			if event.Node != "gpu-17" || !strings.HasPrefix(event.Message, test.message) || !strings.Contains(event.Message, measured) {
				t.Errorf("%+v", event)
			}
			for _, d := range []nvsentinel.Detail{{Name: "evenkeel.check", Value: "nightly"}, {Name: "evenkeel.observedTime", Value: "2026-11-25T01:02:03Z"}, {Name: "evenkeel.busBandwidthBytesPerSecond", Value: "100000000"}} {
				found := false
				for _, have := range event.Details {
					found = found || have == d
				}
				if !found {
					t.Errorf("%+v lacks %v", event.Details, d)
				}
			}
		})
	}
}
