package networkprofile

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const image = "registry.example.com/plugin@sha256:0000000000000000000000000000000000000000000000000000000000000000"

func node(name, kubelet, containerRuntime string) corev1.Node {
	return corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"pool": name[:1]}},
		Status:     corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KubeletVersion: kubelet, ContainerRuntimeVersion: containerRuntime}},
	}
}

func TestObserveImageVolumes(t *testing.T) {
	for _, test := range []struct {
		kubelet, runtime string
		want             bool
	}{
		{"v1.37.2", "containerd://2.1.0", true},
		{"v1.35.0-eks-3025e55", "containerd://2.2.1~ds1", true},
		{"v1.36.1+k3s1", "cri-o://1.31.0", true},
		{"v1.34.9", "containerd://2.1.0", false},
		{"v1.37.2", "containerd://2.0.9", false},
		{"v1.37.2", "containerd://1.7.24~ds1", false},
		{"v1.37.2", "cri-o://1.30.9", false},
		{"v1.37.2", "docker://28.0.0", false},
		{"v1.37.2", "", false},
		{"", "containerd://2.1.0", false},
		{"v2", "containerd://x", false},
	} {
		n := node("n", test.kubelet, test.runtime)
		if got := MountsImages(&n); got != test.want {
			t.Errorf("kubelet %q, runtime %q: %t, want %t", test.kubelet, test.runtime, got, test.want)
		}
	}
}

func TestObserveProfile(t *testing.T) {
	modern, old := node("modern", "v1.37.2", "containerd://2.1.4"), node("old", "v1.34.0", "containerd://1.7.0")
	both := []corev1.Node{modern, old}
	windows := node("windows", "v1.37.2", "containerd://2.1.4")
	windows.Labels[corev1.LabelOSStable] = "windows"
	inPool := func(name string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{"pool": name}}
	}
	bad := &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "pool", Operator: "Resembles"}}}
	for _, test := range []struct {
		name              string
		spec              evenkeel.NetworkProfileSpec
		nodes             []corev1.Node
		delivery          evenkeel.Delivery
		matched, capable  int32
		ready             metav1.ConditionStatus
		reason, inMessage string
	}{
		{"all nodes can", evenkeel.NetworkProfileSpec{}, []corev1.Node{modern, modern}, evenkeel.DeliveryImageVolume, 2, 2, "True", ReasonResolved, "ImageVolume"},
		{"one node cannot", evenkeel.NetworkProfileSpec{}, both, evenkeel.DeliveryInitContainer, 2, 1, "True", ReasonResolved, "InitContainer"},
		{"the one that cannot is not selected", evenkeel.NetworkProfileSpec{NodeSelector: inPool("m")}, both, evenkeel.DeliveryImageVolume, 1, 1, "True", ReasonResolved, ""},
		{"Windows does not count", evenkeel.NetworkProfileSpec{}, []corev1.Node{modern, windows}, evenkeel.DeliveryImageVolume, 1, 1, "True", ReasonResolved, "1 of 1"},
		{"no node matches", evenkeel.NetworkProfileSpec{NodeSelector: inPool("x")}, both, evenkeel.DeliveryInitContainer, 0, 0, "True", ReasonNoNodes, "nodeSelector"},
		{"the user insists", evenkeel.NetworkProfileSpec{Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryImageVolume}}, both, evenkeel.DeliveryImageVolume, 2, 1, "False", ReasonNodesTooOld, "old"},
		{"preinstalled", evenkeel.NetworkProfileSpec{Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryPreinstalled}}, both, evenkeel.DeliveryPreinstalled, 2, 1, "True", ReasonResolved, "Preinstalled"},
		{"bad node selector", evenkeel.NetworkProfileSpec{NodeSelector: bad}, both, "", 0, 0, "False", ReasonInvalidSelector, "nodeSelector"},
		{"bad namespace selector", evenkeel.NetworkProfileSpec{NamespaceSelector: bad}, both, "", 0, 0, "False", ReasonInvalidSelector, "namespaceSelector"},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.spec.Plugin.Image = image
			profile := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Generation: 3}, Spec: test.spec}
			status := Observe(profile, test.nodes, nil, "")
			ready := meta.FindStatusCondition(status.Conditions, evenkeel.ConditionReady)
			if ready == nil || ready.Status != test.ready || ready.Reason != test.reason || !strings.Contains(ready.Message, test.inMessage) {
				t.Errorf("condition %+v, want %s %s with %q", ready, test.ready, test.reason, test.inMessage)
			}
			if status.Delivery != test.delivery || status.ObservedGeneration != 3 {
				t.Errorf("delivery %q of generation %d, want %q of 3", status.Delivery, status.ObservedGeneration, test.delivery)
			}
			if test.reason != ReasonInvalidSelector && (*status.MatchedNodes != test.matched || *status.ImageVolumeNodes != test.capable) {
				t.Errorf("%d nodes, %d capable, want %d and %d", *status.MatchedNodes, *status.ImageVolumeNodes, test.matched, test.capable)
			}
		})
	}
}

func TestObserveIsStable(t *testing.T) {
	profile := &evenkeel.NetworkProfile{Spec: evenkeel.NetworkProfileSpec{Plugin: evenkeel.PluginSpec{Image: image}}}
	nodes := []corev1.Node{node("a", "v1.37.2", "containerd://2.1.4")}
	profile.Status = Observe(profile, nodes, nil, "")
	since := metav1.NewTime(time.Now().Add(-time.Hour))
	profile.Status.Conditions[0].LastTransitionTime = since
	again := Observe(profile, append(nodes, nodes...), nil, "")
	if !again.Conditions[0].LastTransitionTime.Equal(&since) {
		t.Error("the condition's time moved though its status did not")
	}
	profile.Status = again
	if third := Observe(profile, append(nodes, nodes...), nil, ""); !equality.Semantic.DeepEqual(again, third) {
		t.Errorf("the same nodes give another status:\n%+v\n%+v", again, third)
	}
}

func TestObserveReductionImages(t *testing.T) {
	spec := evenkeel.NetworkProfileSpec{Plugin: evenkeel.PluginSpec{Image: strings.Replace(image, "@", ":1.1.0@", 1)}}
	profile := &evenkeel.NetworkProfile{Spec: spec}
	profile.Generation = 3
	for _, step := range []struct {
		name, installed, own, reason string
		mode                         evenkeel.ReductionMode
	}{
		{"none installed", "", "", "", ""},
		{"another version", "servers:1.0.0", "", evenkeel.ReasonTagsDiffer, ""},
		{"the profile's own", "servers:1.0.0", "servers:1.1.0", evenkeel.ReasonSameTag, ""},
		{"digest alone", "servers@sha256:0", "", evenkeel.ReasonNotComparable, evenkeel.ReductionAlways},
		{"off", "servers:1.0.0", "", "", evenkeel.ReductionOff},
	} {
		profile.Spec.Reduction.Image, profile.Spec.Reduction.Mode = step.own, step.mode
		profile.Status = Observe(profile, nil, nil, step.installed)
		c := meta.FindStatusCondition(profile.Status.Conditions, evenkeel.ConditionImagesMatch)
		if step.reason == "" {
			if c != nil {
				t.Errorf("%s: %+v, and no job gets servers", step.name, c)
			}
		} else if c == nil || c.Reason != step.reason || c.ObservedGeneration != 3 {
			t.Errorf("%s: %+v, want %s", step.name, c, step.reason)
		}
	}
}
