package networkprofile

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// fleet is a node with GPUs for each word; a word is what the node offers, separated by "+". A colon ends what else there is to
// say of the node: NotReady, cordoned, drained, or cpu where it has no GPUs.
func fleet(words ...string) []corev1.Node {
	var nodes []corev1.Node
	for i, word := range words {
		n := node(fmt.Sprintf("n%d", i), "v1.37.2", "containerd://2.1.4")
		state, offers, found := strings.Cut(word, ":")
		if found {
			word = offers
		}
		ready := corev1.ConditionTrue
		if state == "NotReady" {
			ready = corev1.ConditionFalse
		}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
		n.Spec.Unschedulable = state == "cordoned"
		if state == "drained" {
			n.Spec.Taints = []corev1.Taint{{Key: "karpenter.sh/disrupted", Effect: corev1.TaintEffectNoSchedule}}
		}
		n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8")}
		if state != "cpu" {
			n.Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("8")
		}
		for name := range strings.SplitSeq(word, "+") {
			if name, gone := strings.CutPrefix(name, "-"); gone {
				n.Status.Allocatable[corev1.ResourceName(name)] = resource.MustParse("0") // as a device plugin that ended leaves it
			} else if name != "" {
				n.Status.Allocatable[corev1.ResourceName(name)] = resource.MustParse("1k")
			}
		}
		nodes = append(nodes, n)
	}
	return nodes
}

func TestObserveRDMADevice(t *testing.T) {
	auto, rdma := evenkeel.TransportAuto, evenkeel.TransportRDMA
	for _, test := range []struct {
		name     string
		mode     evenkeel.TransportMode
		resource string
		nodes    []corev1.Node
		want     string
		offering int32
		status   metav1.ConditionStatus
		reason   string
		message  string
	}{
		{"every node", auto, "", fleet("rdma/a", "rdma/a"), "rdma/a", 2, "True", ReasonEveryNode, "all 2 nodes"},
		{"not said is auto", "", "", fleet("rdma/a"), "rdma/a", 1, "True", ReasonEveryNode, "rdma/a"},
		{"some nodes", auto, "", fleet("rdma/a", "", "-rdma/a"), "", 1, "False", ReasonSomeNodes, "1 of 3 nodes offer rdma/a; jobs use TCP"},
		{"some nodes, strict", rdma, "", fleet("rdma/a", ""), "rdma/a", 1, "True", ReasonSomeNodes, "1 of 2"},
		{"a node is not ready", auto, "", fleet("rdma/a", "NotReady:"), "rdma/a", 1, "True", ReasonEveryNode, "which all 1 nodes"},
		{"a node is cordoned", auto, "", fleet("rdma/a", "cordoned:"), "rdma/a", 1, "True", ReasonEveryNode, "which all 1 nodes"},
		{"a node is drained by Karpenter", auto, "", fleet("rdma/a", "drained:"), "rdma/a", 1, "True", ReasonEveryNode, "which all 1 nodes"},
		{"a node has no GPUs", auto, "", fleet("rdma/a", "cpu:"), "rdma/a", 1, "True", ReasonEveryNode, "which all 1 nodes"},
		{"no node has GPUs", auto, "", fleet("cpu:rdma/a", "cpu:rdma/a"), "rdma/a", 2, "True", ReasonEveryNode, "all 2 nodes"},
		{"most nodes", auto, "", fleet("rdma/a", "rdma/a", "rdma/a", "rdma/a", "rdma/a", "rdma/a", "rdma/a", "rdma/a", "rdma/a", ""), "rdma/a", 9, "True", ReasonMostNodes, "9 of 10 nodes"},
		{"many nodes", auto, "", fleet("rdma/a", "rdma/a", "rdma/a", "rdma/a", ""), "", 4, "False", ReasonSomeNodes, "4 of 5 nodes offer rdma/a; jobs use TCP"},
		{"only nodes that are not ready, strict", rdma, "", fleet("NotReady:rdma/a"), "rdma/a", 1, "True", ReasonEveryNode, ""},
		{"none", auto, "", fleet("", "vendor/a"), "", 0, "False", ReasonNoDevice, "none of 2 nodes"},
		{"none, strict", rdma, "", fleet(""), "", 0, "False", ReasonNoDevice, "jobs are refused"},
		{"no nodes", auto, "", nil, "", 0, "False", ReasonNoDevice, "none of 0 nodes"},
		{"the one that every node has", auto, "", fleet("rdma/a+rdma/b", "rdma/b"), "rdma/b", 2, "True", ReasonEveryNode, "rdma/b"},
		{"two", rdma, "", fleet("rdma/a+rdma/b"), "", 1, "False", ReasonAmbiguous, "rdma/a, rdma/b: choose one"},
		{"two, and one is named", auto, "rdma/b", fleet("rdma/a+rdma/b"), "rdma/b", 1, "True", ReasonEveryNode, "rdma/b"},
		{"named, of another domain", auto, "vendor/vf", fleet("vendor/vf"), "vendor/vf", 1, "True", ReasonEveryNode, "vendor/vf"},
		{"named and absent", auto, "rdma/z", fleet("rdma/a"), "", 0, "False", ReasonNoDevice, "none of 1 nodes offers rdma/z; jobs use TCP"},
		{"named and absent, strict", rdma, "rdma/z", fleet("rdma/a"), "rdma/z", 0, "False", ReasonNoDevice, "jobs wait"},
	} {
		t.Run(test.name, func(t *testing.T) {
			profile := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Generation: 3}}
			profile.Spec.Plugin.Image = image
			profile.Spec.Transport = evenkeel.TransportSpec{Mode: test.mode, RDMA: evenkeel.RDMASpec{ResourceName: test.resource}}
			status := Observe(profile, test.nodes, nil, "")
			if status.RDMAResourceName != test.want || *status.RDMANodes != test.offering {
				t.Errorf("device %q of %d nodes, want %q of %d", status.RDMAResourceName, *status.RDMANodes, test.want, test.offering)
			}
			c := meta.FindStatusCondition(status.Conditions, evenkeel.ConditionRDMA)
			if c == nil || c.Status != test.status || c.Reason != test.reason || !strings.Contains(c.Message, test.message) {
				t.Errorf("condition %+v, want %s %s with %q", c, test.status, test.reason, test.message)
			}
			profile.Status, profile.Spec.Transport.Mode = status, evenkeel.TransportTCP
			if status = Observe(profile, test.nodes, nil, ""); status.RDMAResourceName != "" || status.RDMANodes != nil || meta.FindStatusCondition(status.Conditions, evenkeel.ConditionRDMA) != nil {
				t.Errorf("with TCP there is still %+v", status)
			}
		})
	}
}

// GPUDirect is mentioned only where it could be had by mode RDMA: with GPUs, and where jobs get a device.
func TestObserveRDMAMentionsGPUDirect(t *testing.T) {
	for _, test := range []struct {
		name  string
		mode  evenkeel.TransportMode
		nodes []corev1.Node
		want  bool
	}{
		{"GPUs", evenkeel.TransportAuto, fleet("rdma/a", "rdma/a", "cpu:"), true},
		{"GPUs, with mode RDMA", evenkeel.TransportRDMA, fleet("rdma/a", "rdma/a"), false},
		{"no GPUs", evenkeel.TransportAuto, fleet("cpu:rdma/a", "cpu:rdma/a"), false},
		{"no device for jobs", evenkeel.TransportAuto, fleet("rdma/a", ""), false},
	} {
		profile := &evenkeel.NetworkProfile{}
		profile.Spec.Plugin.Image = image
		profile.Spec.Transport.Mode = test.mode
		c := meta.FindStatusCondition(Observe(profile, test.nodes, nil, "").Conditions, evenkeel.ConditionRDMA)
		if got := strings.Contains(c.Message, "GPUDirect"); got != test.want {
			t.Errorf("%s: %q", test.name, c.Message)
		}
	}
}

// TestObserveRDMADeviceIsKept has a device plugin that fails on some nodes: jobs of one hour do not get what those of the next do
// not.
func TestObserveRDMADeviceIsKept(t *testing.T) {
	profile := &evenkeel.NetworkProfile{}
	profile.Spec.Plugin.Image = image
	for i, step := range []struct {
		nodes []corev1.Node
		want  string
	}{
		{fleet("rdma/a", "rdma/a", "rdma/a", ""), ""}, // too few to begin with
		{fleet("rdma/a", "rdma/a", "rdma/a", "rdma/a"), "rdma/a"},
		{fleet("rdma/a", "rdma/a", "rdma/a", ""), "rdma/a"},
		{fleet("NotReady:rdma/a", "cordoned:"), "rdma/a"}, // nothing to judge by
		{fleet("rdma/a", "rdma/a", "", ""), ""},
		{fleet("rdma/a", "rdma/a", "rdma/a", ""), ""},
		{fleet("rdma/a", "rdma/a"), "rdma/a"},
	} {
		profile.Status = Observe(profile, step.nodes, nil, "")
		if profile.Status.RDMAResourceName != step.want {
			t.Errorf("step %d: %q, want %q: %+v", i, profile.Status.RDMAResourceName, step.want, profile.Status.Conditions)
		}
	}
	profile.Generation++
	profile.Spec.Transport.RDMA.ResourceName = "rdma/b"
	if status := Observe(profile, fleet("rdma/a", "rdma/a"), nil, ""); status.RDMAResourceName != "" {
		t.Errorf("%q, though the profile names another one", status.RDMAResourceName)
	}
}

func TestObserveRDMADeviceChanges(t *testing.T) {
	for _, test := range []struct {
		before, after string
		want          bool
	}{
		{"", "rdma/a", true}, {"rdma/a", "-rdma/a", true}, {"rdma/a", "rdma/a", false},
		{"rdma/a", "NotReady:rdma/a", true}, {"rdma/a", "cordoned:rdma/a", true},
	} {
		before, after := fleet(test.before), fleet(test.after)
		after[0].Status.Allocatable[corev1.ResourceCPU] = resource.MustParse("7") // of no matter
		if got := nodeChanged.Update(event.UpdateEvent{ObjectOld: &before[0], ObjectNew: &after[0]}); got != test.want {
			t.Errorf("%q to %q: %t", test.before, test.after, got)
		}
	}
}
