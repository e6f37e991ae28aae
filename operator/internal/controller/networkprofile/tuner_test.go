package networkprofile

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// measured are proven nodes, each with a pass that measured MB/s and microseconds.
func measured(values ...[2]int) ([]corev1.Node, map[string]*evenkeel.NodeNetworkHealthStatus) {
	nodes, healths := fleet(make([]string, len(values))...), map[string]*evenkeel.NodeNetworkHealthStatus{}
	for i, v := range values {
		nodes[i].Labels[evenkeel.HealthKey] = evenkeel.HealthyValue
		bandwidth, latency := resource.MustParse(fmt.Sprintf("%dM", v[0])), int32(v[1])
		healths[nodes[i].Name] = &evenkeel.NodeNetworkHealthStatus{
			Health: evenkeel.HealthHealthy, BusBandwidth: &bandwidth, Measured: evenkeel.MeasuredNetwork{ProfileName: "tuned", LatencyMicroseconds: &latency},
		}
	}
	return nodes, healths
}

func tuned() *evenkeel.NetworkProfile {
	profile := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "tuned"}}
	profile.Spec.Plugin.Image, profile.Spec.Tuner.Source = image, evenkeel.TunerPreflight
	return profile
}

// gets is what jobs get, in Mb/s and microseconds.
func gets(status evenkeel.NetworkProfileStatus) string {
	if status.Tuner.BandwidthMbps == nil || status.Tuner.LatencyMicroseconds == nil {
		return ""
	}
	return fmt.Sprintf("%d %d", *status.Tuner.BandwidthMbps, *status.Tuner.LatencyMicroseconds)
}

func TestObserveTuner(t *testing.T) {
	alike := [2]int{1000, 30}
	one, several := int32(1), int32(2)
	for _, test := range []struct {
		name   string
		values [][2]int
		change func([]corev1.Node, map[string]*evenkeel.NodeNetworkHealthStatus)
		want   string
		says   string
	}{
		{"all alike", [][2]int{alike, alike, alike, alike}, nil, "8000 30", "measured on 4 of 4 nodes"},
		{"one slow node of many", [][2]int{alike, alike, {10, 30}, alike, alike}, nil, "8000 30", "5 of 5"},
		{"a quarter of the nodes is slower", [][2]int{alike, {900, 30}, {900, 30}, alike, alike, alike}, nil, "7200 30", "6 of 6"},
		{"one slow node of few", [][2]int{alike, {500, 30}, alike}, nil, "4000 30", "3 of 3"},
		{"one disturbed latency", [][2]int{alike, {1000, 750}, {1000, 31}}, nil, "8000 31", "3 of 3"},
		{"one node", [][2]int{alike}, nil, "", "1 of 1 nodes count, and 2 have to"},
		{"half of the nodes", [][2]int{alike, alike, alike, alike}, func(n []corev1.Node, h map[string]*evenkeel.NodeNetworkHealthStatus) {
			delete(h, "n0")
			delete(n[1].Labels, evenkeel.HealthKey)
		}, "8000 30", "2 of 4"},
		{"fewer than half", [][2]int{alike, alike, alike, alike, alike}, func(n []corev1.Node, h map[string]*evenkeel.NodeNetworkHealthStatus) {
			n[0].Labels[evenkeel.HealthKey] = evenkeel.UnhealthyValue
			h["n1"].Measured.LatencyMicroseconds = nil
			h["n2"].Measured.Devices = &several
		}, "", "2 of 5 nodes count, and 3 have to: 1 are not proven, the latest pass of 1 measured no latency with this profile, and 1 have several network devices"},
		{"measured long ago, so not proven now", [][2]int{alike, alike}, func(n []corev1.Node, _ map[string]*evenkeel.NodeNetworkHealthStatus) {
			delete(n[0].Labels, evenkeel.HealthKey)
		}, "", "1 of 2"},
		{"failed, and the label is still there", [][2]int{alike, alike}, func(_ []corev1.Node, h map[string]*evenkeel.NodeNetworkHealthStatus) {
			h["n0"].Health = evenkeel.HealthUnhealthy
		}, "", "1 of 2"},
		{"never checked, and somebody set the label", [][2]int{alike, alike}, func(_ []corev1.Node, h map[string]*evenkeel.NodeNetworkHealthStatus) {
			delete(h, "n0")
		}, "", "1 of 2"},
		{"one device", [][2]int{alike, alike}, func(_ []corev1.Node, h map[string]*evenkeel.NodeNetworkHealthStatus) {
			h["n0"].Measured.Devices = &one
		}, "8000 30", "2 of 2"},
		{"another profile was checked", [][2]int{alike, alike}, func(_ []corev1.Node, h map[string]*evenkeel.NodeNetworkHealthStatus) {
			h["n0"].Measured.ProfileName = "rdma"
		}, "", "1 of 2"},
		{"nodes that jobs cannot run on do not count", [][2]int{alike, alike, {1, 1}, {1, 1}}, func(n []corev1.Node, _ map[string]*evenkeel.NodeNetworkHealthStatus) {
			n[2].Spec.Unschedulable = true
			delete(n[3].Status.Allocatable, "nvidia.com/gpu")
		}, "8000 30", "2 of 2"},
		{"too slow for a whole number", [][2]int{{0, 1}, {0, 1}}, nil, "1 1", "2 of 2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			nodes, healths := measured(test.values...)
			if test.change != nil {
				test.change(nodes, healths)
			}
			status := Observe(tuned(), nodes, healths, "")
			c := meta.FindStatusCondition(status.Conditions, evenkeel.ConditionTuner)
			if got := gets(status); got != test.want || c == nil || (c.Status == metav1.ConditionTrue) != (test.want != "") || !strings.Contains(c.Message, test.says) {
				t.Errorf("%q, want %q: %+v", got, test.want, c)
			}
		})
	}
}

func TestObserveTunerKeepsWhatIsNear(t *testing.T) {
	profile := tuned()
	for i, step := range []struct {
		values [][2]int
		want   string
	}{
		{[][2]int{{1000, 30}, {1000, 30}}, "8000 30"},
		{[][2]int{{800, 30}, {1200, 30}}, "8000 30"},
		{[][2]int{{1000, 36}, {1000, 36}}, "8000 30"},
		{[][2]int{{1000, 37}, {1000, 37}}, "8000 37"},
		{[][2]int{{790, 37}, {1000, 37}}, "6320 37"},
		{[][2]int{{790, 37}}, ""},
		{[][2]int{{800, 30}, {1200, 30}}, "6400 30"},
	} {
		nodes, healths := measured(step.values...)
		profile.Status = Observe(profile, nodes, healths, "")
		if got := gets(profile.Status); got != step.want {
			t.Errorf("step %d: %q, want %q", i, got, step.want)
		}
	}
	nodes, healths := measured([2]int{1000, 30}, [2]int{1000, 30})
	profile.Spec.Tuner.Source = evenkeel.TunerNone
	if status := Observe(profile, nodes, healths, ""); gets(status) != "" || meta.FindStatusCondition(status.Conditions, evenkeel.ConditionTuner) != nil {
		t.Errorf("nobody asked for it: %+v", status)
	}
}
