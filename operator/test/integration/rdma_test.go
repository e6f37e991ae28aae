package integration

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// offer makes a node offer pods so many of an extended resource.
func offer(t *testing.T, node, resource string, count int) {
	t.Helper()
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}
	patch := fmt.Sprintf(`{"status": {"capacity": {%[1]q: "%[2]d"}, "allocatable": {%[1]q: "%[2]d"}}}`, resource, count)
	if err := admin.Status().Patch(t.Context(), object, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		t.Fatal(err)
	}
}

func rdmaIs(reason, device string) func(*evenkeel.NetworkProfile) bool {
	return func(p *evenkeel.NetworkProfile) bool {
		c := meta.FindStatusCondition(p.Status.Conditions, evenkeel.ConditionRDMA)
		return c != nil && c.Reason == reason && p.Status.RDMAResourceName == device
	}
}

func TestJobsGetTheRDMADeviceThatEveryNodeOffers(t *testing.T) {
	const hca = "rdma/hca_shared_devices_a"
	pool := map[string]string{"pool": "rdma"}
	newNode(t, "hca-0", "v1.36.3", "containerd://2.1.4", pool)
	profile := newProfile(t, "offered", evenkeel.NetworkProfileSpec{
		NodeSelector: &metav1.LabelSelector{MatchLabels: pool},
		Transport:    evenkeel.TransportSpec{Mode: evenkeel.TransportAuto, RDMA: evenkeel.RDMASpec{Networks: "rail0"}},
	})
	waitProfile(t, profile.Name, rdmaIs("NoDevice", ""))
	offer(t, "hca-0", hca, 63)
	waitProfile(t, profile.Name, rdmaIs("EveryNode", hca))

	ns := newNamespace(t, nil)
	for _, kind := range []string{"PyTorchJob", "Job"} {
		job, templates := newJob(kind, ns, profile.Name)
		createJob(t, job)
		for _, path := range templates {
			pod := podOf(t, job, path)
			if got := pod.Spec.Containers[0].Resources.Requests[hca]; got.Value() != 1 {
				t.Errorf("%v: the template asks for %v, and queues go by that", path, pod.Spec.Containers[0].Resources)
			}
			pod = createPod(t, pod)
			c := &pod.Spec.Containers[0]
			if got := c.Resources.Limits[hca]; got.Value() != 1 || variable(c, "EVENKEEL_TRANSPORT") != "auto" || pod.Annotations[evenkeel.NetworksKey] != "rail0" {
				t.Errorf("%v: limits %v, EVENKEEL_TRANSPORT=%q, annotations %v", path, c.Resources.Limits, variable(c, "EVENKEEL_TRANSPORT"), pod.Annotations)
			}
		}
	}

	newNode(t, "hca-1", "v1.36.3", "containerd://2.1.4", pool)
	waitProfile(t, profile.Name, rdmaIs("SomeNodes", ""))
	offer(t, "hca-0", hca, 0)
	waitProfile(t, profile.Name, rdmaIs("NoDevice", ""))
}

func TestRDMAAloneNeedsADevice(t *testing.T) {
	nowhere := &metav1.LabelSelector{MatchLabels: map[string]string{"pool": "nowhere"}}
	without := newProfile(t, "strict", evenkeel.NetworkProfileSpec{NodeSelector: nowhere, Transport: evenkeel.TransportSpec{Mode: evenkeel.TransportRDMA}})
	named := newProfile(t, "strict-and-named", evenkeel.NetworkProfileSpec{NodeSelector: nowhere, Transport: evenkeel.TransportSpec{
		Mode: evenkeel.TransportRDMA, RDMA: evenkeel.RDMASpec{ResourceName: "rdma/later", MemoryLock: evenkeel.MemoryLockCapability},
	}})
	ns := newNamespace(t, nil)
	job, _ := newJob("Job", ns, without.Name)
	refused(t, dryRun(t.Context(), job), "asks for RDMA and nothing else", "none of 0 nodes")
	job, templates := newJob("Job", ns, named.Name)
	createJob(t, job)
	pod := createPod(t, podOf(t, job, templates[0]))
	c := &pod.Spec.Containers[0]
	if got := c.Resources.Limits["rdma/later"]; got.Value() != 1 || variable(c, "EVENKEEL_TRANSPORT") != "rdma" {
		t.Errorf("limits %v, EVENKEEL_TRANSPORT=%q", c.Resources.Limits, variable(c, "EVENKEEL_TRANSPORT"))
	}
	if c.SecurityContext == nil || c.SecurityContext.Capabilities == nil || fmt.Sprint(c.SecurityContext.Capabilities.Add) != "[IPC_LOCK]" {
		t.Errorf("security context %+v", c.SecurityContext)
	}

	// It is the namespace that decides who may have the capability.
	restricted := newNamespace(t, map[string]string{"pod-security.kubernetes.io/enforce": "baseline"})
	job, templates = newJob("Job", restricted, named.Name)
	createJob(t, job)
	if err := admin.Create(t.Context(), podOf(t, job, templates[0])); err == nil || !strings.Contains(err.Error(), "IPC_LOCK") {
		t.Errorf("in a namespace of the standard baseline: %v", err)
	}
}
