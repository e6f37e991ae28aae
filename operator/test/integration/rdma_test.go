package integration

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// offer makes a node offer pods so many of an extended resource.
func offer(t *testing.T, node, name string, count int) {
	t.Helper()
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}
	patch := fmt.Sprintf(`{"status": {"capacity": {%[1]q: "%[2]d"}, "allocatable": {%[1]q: "%[2]d"}}}`, name, count)
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

func TestRDMADeviceOfEveryNode(t *testing.T) {
	const hca = "rdma/hca_shared_devices_a"
	pool := map[string]string{"pool": "rdma"}
	newReadyNode(t, "hca-0", pool)
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
	newReadyNode(t, "hca-2", pool)
	waitProfile(t, profile.Name, rdmaIs("SomeNodes", ""))
	user, warned := newUser(t)
	job, _ := newJob("Job", ns, profile.Name)
	job.SetName("by-tcp")
	if err := user.Create(t.Context(), job); err != nil {
		t.Fatal(err)
	}
	if text := strings.Join(warned.take(), "\n"); !strings.Contains(text, "1 of 2 nodes offer "+hca+"; jobs use TCP") {
		t.Errorf("the user is told %q", text)
	}
	createPod(t, podOf(t, job, []string{"spec", "template"}))
	eventually(t, "an Event says so too", func(ctx context.Context) (bool, error) {
		var events corev1.EventList
		err := admin.List(ctx, &events, client.InNamespace(ns))
		return slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
			return e.Reason == "EvenkeelRDMAUnused" && e.InvolvedObject.Name == job.GetName() && strings.Contains(e.Message, "jobs use TCP")
		}), err
	})
	offer(t, "hca-0", hca, 0)
	waitProfile(t, profile.Name, rdmaIs("NoDevice", ""))
}

func TestRDMARequiredNeedsDevice(t *testing.T) {
	nowhere := &metav1.LabelSelector{MatchLabels: map[string]string{"pool": "nowhere"}}
	without := newProfile(t, "strict", evenkeel.NetworkProfileSpec{NodeSelector: nowhere, Transport: evenkeel.TransportSpec{Mode: evenkeel.TransportRDMA}})
	named := newProfile(t, "strict-and-named", evenkeel.NetworkProfileSpec{NodeSelector: nowhere, Transport: evenkeel.TransportSpec{
		Mode: evenkeel.TransportRDMA, RDMA: evenkeel.RDMASpec{ResourceName: "rdma/later", MemoryLock: evenkeel.MemoryLockCapability},
	}})
	ns := newNamespace(t, nil)
	job, _ := newJob("Job", ns, without.Name)
	refused(t, dryRun(t.Context(), job), "requires RDMA and has no device", "none of 0 nodes")
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

	// The namespace decides which pods may have the capability.
	restricted := newNamespace(t, map[string]string{"pod-security.kubernetes.io/enforce": "baseline"})
	job, templates = newJob("Job", restricted, named.Name)
	createJob(t, job)
	if err := admin.Create(t.Context(), podOf(t, job, templates[0])); err == nil || !strings.Contains(err.Error(), "IPC_LOCK") {
		t.Errorf("in a namespace of the standard baseline: %v", err)
	}
}

// Servers get what their job has, from the nodes that they may run on.
func TestRDMADeviceOfReductionServers(t *testing.T) {
	const device = "rdma/for_servers"
	pool := map[string]string{"pool": "servers"}
	cpu := resource.MustParse("100m")
	spec := func(mode evenkeel.TransportMode, rdma evenkeel.RDMASpec) evenkeel.NetworkProfileSpec {
		return evenkeel.NetworkProfileSpec{
			NodeSelector: &metav1.LabelSelector{MatchLabels: pool}, Transport: evenkeel.TransportSpec{Mode: mode, RDMA: rdma},
			Reduction: evenkeel.ReductionSpec{Server: evenkeel.ReductionServerSpec{CPU: &cpu, NodeSelector: pool}},
		}
	}
	condition := func(reason string) func(*evenkeel.ReductionService) bool {
		return func(s *evenkeel.ReductionService) bool {
			c := meta.FindStatusCondition(s.Status.Conditions, evenkeel.ConditionRDMA)
			return c != nil && c.Reason == reason
		}
	}
	newReadyNode(t, "servers-0", pool)
	offer(t, "servers-0", device, 63)
	offer(t, "servers-0", "cpu", 8)
	offer(t, "servers-0", "memory", 16<<30)
	auto := newProfile(t, "servers-auto", spec(evenkeel.TransportAuto, evenkeel.RDMASpec{Networks: "rail0"}))
	waitProfile(t, auto.Name, rdmaIs("EveryNode", device))

	job, _ := reducing(t, "PyTorchJob", newNamespace(t, nil), auto.Name, "1")
	service := waitService(t, job, "has the device", condition(evenkeel.ReasonServersHaveDevice))
	pod := startServers(t, service)[0]
	c := &pod.Spec.Containers[0]
	if got := c.Resources.Limits[device]; got.Value() != 1 || variable(c, "EVENKEEL_TRANSPORT") != "auto" || pod.Annotations[evenkeel.NetworksKey] != "rail0" {
		t.Errorf("limits %v, environment %v, annotations %v", c.Resources.Limits, c.Env, pod.Annotations)
	}

	// Pods would run nowhere else, so that with mode Auto another node decides otherwise.
	newReadyNode(t, "servers-1", map[string]string{"pool": "servers", "hca": "none"})
	offer(t, "servers-1", "cpu", 8)
	offer(t, "servers-1", "memory", 16<<30)
	workersOnly := spec(evenkeel.TransportAuto, evenkeel.RDMASpec{})
	workersOnly.NodeSelector = &metav1.LabelSelector{MatchLabels: pool, MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "hca", Operator: metav1.LabelSelectorOpDoesNotExist}}}
	mixed := newProfile(t, "servers-mixed", workersOnly)
	waitProfile(t, mixed.Name, rdmaIs("EveryNode", device))
	job, _ = reducing(t, "PyTorchJob", newNamespace(t, nil), mixed.Name, "1")
	service = waitService(t, job, "uses TCP", condition(evenkeel.ReasonServersUseTCP))
	c = &part[appsv1.StatefulSet](t, service).Spec.Template.Spec.Containers[0]
	if _, found := c.Resources.Limits[device]; found {
		t.Errorf("limits %v", c.Resources.Limits)
	}
	eventually(t, "the Event is recorded", hasEvent(job.GetNamespace(), job, "EvenkeelReductionWithoutRDMA", "not every node that they may run on offered "+device))

	// A job that requires RDMA waits, and an Event says why.
	strict := newProfile(t, "servers-strict", spec(evenkeel.TransportRDMA, evenkeel.RDMASpec{ResourceName: "rdma/to_come", MemoryLock: evenkeel.MemoryLockCapability}))
	job, _ = reducing(t, "PyTorchJob", newNamespace(t, nil), strict.Name, "1")
	service = waitService(t, job, "waits", condition(evenkeel.ReasonNoNodeHasDevice))
	eventually(t, "the Event is recorded", hasEvent(job.GetNamespace(), job, "EvenkeelReductionWithoutRDMA", "none of the 2 that they may run on offers rdma/to_come"))
	set := part[appsv1.StatefulSet](t, service).Spec.Template.Spec
	c = &set.Containers[0]
	if got := c.Resources.Limits["rdma/to_come"]; got.Value() != 1 || variable(c, "EVENKEEL_TRANSPORT") != "rdma" ||
		*set.SecurityContext.RunAsUser != 0 || fmt.Sprint(c.SecurityContext.Capabilities.Add) != "[IPC_LOCK]" {
		t.Errorf("limits %v, environment %v, %+v, %+v", c.Resources.Limits, c.Env, set.SecurityContext, c.SecurityContext)
	}
}
