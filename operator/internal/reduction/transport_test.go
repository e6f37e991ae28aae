package reduction

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const hca = "rdma/hca"

// nodes that are ready and large; those of them whose name begins with r offer the device.
func nodes(names ...string) []corev1.Node {
	var list []corev1.Node
	for _, name := range names {
		has := corev1.ResourceList{"cpu": resource.MustParse("8"), "memory": resource.MustParse("8Gi")}
		if name[0] == 'r' {
			has[hca] = resource.MustParse("63")
		}
		list = append(list, corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"name": name}},
			Status:     corev1.NodeStatus{Allocatable: has, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
		})
	}
	return list
}

func profiled(mode evenkeel.TransportMode, change func(*evenkeel.NetworkProfile)) *evenkeel.NetworkProfile {
	p := &evenkeel.NetworkProfile{
		Spec:   evenkeel.NetworkProfileSpec{Transport: evenkeel.TransportSpec{Mode: mode}},
		Status: evenkeel.NetworkProfileStatus{RDMAResourceName: hca},
	}
	if change != nil {
		change(p)
	}
	return p
}

func TestServersGetRDMADevice(t *testing.T) {
	tainted := nodes("r1", "other")
	tainted[1].Spec.Taints = []corev1.Taint{{Key: "control-plane", Effect: corev1.TaintEffectNoSchedule}}
	for name, test := range map[string]struct {
		profile *evenkeel.NetworkProfile
		nodes   []corev1.Node
		want    string
	}{
		"every node offers it":            {profiled("", nil), nodes("r1", "r2"), hca},
		"every node that servers may use": {profiled(evenkeel.TransportAuto, nil), tainted, hca},
		"some nodes":                      {profiled(evenkeel.TransportAuto, nil), nodes("r1", "other"), ""},
		"some nodes, and nothing else":    {profiled(evenkeel.TransportRDMA, nil), nodes("r1", "other"), hca},
		"no node":                         {profiled(evenkeel.TransportAuto, nil), nodes("other"), ""},
		"no node at all":                  {profiled(evenkeel.TransportAuto, nil), nil, ""},
		"no node, and nothing else":       {profiled(evenkeel.TransportRDMA, nil), nodes("other"), hca},
		"the nodes that are chosen": {profiled(evenkeel.TransportAuto, func(p *evenkeel.NetworkProfile) {
			p.Spec.Reduction.Server.NodeSelector = map[string]string{"name": "r1"}
		}), nodes("r1", "other"), hca},
		"jobs have none": {profiled(evenkeel.TransportAuto, func(p *evenkeel.NetworkProfile) { p.Status.RDMAResourceName = "" }), nodes("r1"), ""},
		"TCP":            {profiled(evenkeel.TransportTCP, func(p *evenkeel.NetworkProfile) { p.Spec.Transport.RDMA.ResourceName = hca }), nodes("r1"), ""},
	} {
		service := newService(func(s *evenkeel.ReductionServiceSpec) { s.Server = test.profile.Spec.Reduction.Server })
		SetTransport(service, test.profile, test.nodes)
		if got := service.Spec.Transport.RDMA.ResourceName; got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
		pod := object[*appsv1.StatefulSet](t, service, 4).Spec.Template.Spec
		if got := pod.Containers[0].Resources.Limits[hca]; got.Value() == 1 != (test.want != "") {
			t.Errorf("%s: limits %v", name, pod.Containers[0].Resources.Limits)
		}
	}
}

func TestCountOffering(t *testing.T) {
	service := newService(func(s *evenkeel.ReductionServiceSpec) { s.Transport.RDMA.ResourceName = hca })
	list := nodes("r1", "r2", "other", "r-small")
	list[3].Status.Allocatable[corev1.ResourceMemory] = resource.MustParse("1Gi")
	if offering, all := CountOffering(service, list); offering != 2 || all != 3 {
		t.Errorf("%d of %d nodes", offering, all)
	}
}

// A server listens by what the profile says, at the ports that it says.
func TestServersGetTransportSettings(t *testing.T) {
	profile := profiled(evenkeel.TransportRDMA, func(p *evenkeel.NetworkProfile) {
		p.Spec.Environment = []evenkeel.EnvironmentVariable{{Name: "NCCL_SOCKET_IFNAME", Value: "eth0"}, {Name: "NCCL_IB_HCA", Value: "=mlx5_1"}, {Name: "NCCL_DEBUG", Value: "INFO"}}
	})
	service := newService(nil)
	SetTransport(service, profile, nodes("r1"))
	want := []corev1.EnvVar{
		{Name: "EVENKEEL_JOB_KEY_FILE", Value: "/var/run/secrets/evenkeel.dev/job-key"}, {Name: "EVENKEEL_WORKERS", Value: "1"},
		{Name: "EVENKEEL_TRANSPORT", Value: "rdma"}, {Name: "NCCL_IB_HCA", Value: "=mlx5_1"},
	}
	if diff := cmp.Diff(want, object[*appsv1.StatefulSet](t, service, 4).Spec.Template.Spec.Containers[0].Env); diff != "" {
		t.Error(diff)
	}
}

func TestServersGetDeviceLikeWorkers(t *testing.T) {
	two := int32(2)
	rail := evenkeel.RDMASpec{ResourceName: hca, Count: &two, Networks: "rail0@net1"}
	set := object[*appsv1.StatefulSet](t, newService(func(s *evenkeel.ReductionServiceSpec) { s.Transport.RDMA = rail }), 4).Spec.Template
	c := set.Spec.Containers[0]
	if got := c.Resources.Requests[hca]; got.Value() != 2 || set.Annotations[evenkeel.NetworksKey] != "rail0@net1" {
		t.Errorf("requests %v, annotations %v", c.Resources.Requests, set.Annotations)
	}
	if !*set.Spec.SecurityContext.RunAsNonRoot || len(c.SecurityContext.Capabilities.Add) > 0 {
		t.Errorf("nobody asked for %+v, %+v", set.Spec.SecurityContext, c.SecurityContext)
	}

	rail.MemoryLock = evenkeel.MemoryLockCapability
	set = object[*appsv1.StatefulSet](t, newService(func(s *evenkeel.ReductionServiceSpec) { s.Transport.RDMA = rail }), 4).Spec.Template
	c = set.Spec.Containers[0]
	if *set.Spec.SecurityContext.RunAsNonRoot || *set.Spec.SecurityContext.RunAsUser != 0 || fmt.Sprint(c.SecurityContext.Capabilities.Add) != "[IPC_LOCK]" {
		t.Errorf("%+v, %+v: the capability counts only for root", set.Spec.SecurityContext, c.SecurityContext)
	}
	if !slices.Contains(c.SecurityContext.Capabilities.Drop, "ALL") || *c.SecurityContext.AllowPrivilegeEscalation {
		t.Errorf("%+v: more than was asked for", c.SecurityContext)
	}
}
