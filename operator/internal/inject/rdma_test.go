package inject

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const hca = corev1.ResourceName("rdma/hca")

func withRDMA(change func(*RDMA)) Resolved {
	return resolved(func(r *Resolved) {
		r.RDMA = &RDMA{Resource: string(hca), Count: 1}
		if change != nil {
			change(r.RDMA)
		}
	})
}

// withoutDevice checks what came to the container for RDMA, and takes it away again.
func withoutDevice(t *testing.T, before corev1.Container, after *corev1.Container, r Resolved) {
	t.Helper()
	for _, lists := range [][2]corev1.ResourceList{{before.Resources.Limits, after.Resources.Limits}, {before.Resources.Requests, after.Resources.Requests}} {
		for name, quantity := range lists[0] {
			if got, ok := lists[1][name]; !ok || !got.Equal(quantity) {
				t.Fatalf("the user's %s changed to %v", name, got)
			}
		}
		for name := range lists[1] {
			if _, ok := lists[0][name]; !ok && (r.RDMA == nil || string(name) != r.RDMA.Resource) {
				t.Fatalf("%s was added", name)
			}
		}
	}
	after.Resources = before.Resources
	if r.RDMA == nil || !r.RDMA.LockMemory || after.SecurityContext == nil || after.SecurityContext.Capabilities == nil {
		return
	}
	capabilities := after.SecurityContext.Capabilities
	if slices.Contains(capabilities.Drop, ipcLock) && slices.Contains(capabilities.Add, ipcLock) {
		t.Fatal("a capability that the user drops was added")
	}
	capabilities.Add = slices.DeleteFunc(capabilities.Add, func(c corev1.Capability) bool { return c == ipcLock })
	if len(capabilities.Add) == 0 {
		capabilities.Add = nil
	}
	if before.SecurityContext == nil {
		after.SecurityContext = nil
	}
}

func TestInjectRDMADevice(t *testing.T) {
	one := resource.MustParse("1")
	for name, test := range map[string]struct {
		container corev1.Container
		r         Resolved
		limit     map[corev1.ResourceName]string
		added     []corev1.Capability
		skipped   string
	}{
		"one":         {corev1.Container{}, withRDMA(nil), map[corev1.ResourceName]string{hca: "1"}, nil, ""},
		"more of it":  {corev1.Container{}, withRDMA(func(r *RDMA) { r.Count = 4 }), map[corev1.ResourceName]string{hca: "4"}, nil, ""},
		"none":        {corev1.Container{}, resolved(nil), nil, nil, ""},
		"beside GPUs": {corev1.Container{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": one}}}, withRDMA(nil), map[corev1.ResourceName]string{hca: "1", "nvidia.com/gpu": "1"}, nil, ""},
		"its own": {corev1.Container{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"rdma/other": one}}}, withRDMA(nil),
			map[corev1.ResourceName]string{"rdma/other": "1"}, nil, "container main: requests rdma/other itself"},
		"its own number": {corev1.Container{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{hca: resource.MustParse("2")}}}, withRDMA(nil),
			map[corev1.ResourceName]string{hca: "2"}, nil, "container main: requests rdma/hca itself"},
		"the same":       {corev1.Container{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{hca: one}}}, withRDMA(nil), map[corev1.ResourceName]string{hca: "1"}, nil, ""},
		"the capability": {corev1.Container{}, withRDMA(func(r *RDMA) { r.LockMemory = true }), map[corev1.ResourceName]string{hca: "1"}, []corev1.Capability{"IPC_LOCK"}, ""},
		"the capability that it drops": {corev1.Container{SecurityContext: &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"IPC_LOCK"}}}},
			withRDMA(func(r *RDMA) { r.LockMemory = true }), map[corev1.ResourceName]string{hca: "1"}, nil, "container main: drops the capability IPC_LOCK itself"},
	} {
		t.Run(name, func(t *testing.T) {
			test.container.Name = "main"
			p := apply(t, pod(test.container), test.r)
			c := p.Spec.Containers[0]
			limits := map[corev1.ResourceName]string{}
			for name, quantity := range c.Resources.Limits {
				limits[name] = quantity.String()
			}
			if !maps.Equal(limits, test.limit) {
				t.Errorf("limits %v, want %v", limits, test.limit)
			}
			if requested, ok := c.Resources.Requests[hca]; ok && requested.Cmp(c.Resources.Limits[hca]) != 0 {
				t.Errorf("requests %v and limits %v differ, which the API server refuses", c.Resources.Requests, c.Resources.Limits)
			}
			var added []corev1.Capability
			if c.SecurityContext != nil && c.SecurityContext.Capabilities != nil {
				added = c.SecurityContext.Capabilities.Add
			}
			if !slices.Equal(added, test.added) {
				t.Errorf("capabilities %v, want %v", added, test.added)
			}
			if got := p.Annotations[evenkeel.SkippedKey]; got != test.skipped {
				t.Errorf("skipped %q, want %q", got, test.skipped)
			}
		})
	}
}

func TestInjectRDMANetworks(t *testing.T) {
	rails := withRDMA(func(r *RDMA) { r.Networks = "rail0,rail1" })
	p := apply(t, pod(corev1.Container{Name: "main"}), rails)
	if got := p.Annotations[evenkeel.NetworksKey]; got != "rail0,rail1" {
		t.Errorf("networks %q", got)
	}
	own := pod(corev1.Container{Name: "main"})
	own.Annotations = map[string]string{evenkeel.NetworksKey: "storage"}
	apply(t, own, rails)
	if got := own.Annotations[evenkeel.NetworksKey]; got != "storage" || !strings.Contains(own.Annotations[evenkeel.SkippedKey], evenkeel.NetworksKey) {
		t.Errorf("networks %q, skipped %q", got, own.Annotations[evenkeel.SkippedKey])
	}
}

func TestResolvedRDMARoundTrip(t *testing.T) {
	for _, r := range []Resolved{withRDMA(nil), withRDMA(func(r *RDMA) { r.Count, r.LockMemory, r.Networks = 8, true, "a/b@eth1" })} {
		back, err := FromPod(map[string]string{evenkeel.ProfileKey: "default"}, r.Annotations())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(r, back); diff != "" {
			t.Error(diff)
		}
	}
	good := withRDMA(func(r *RDMA) { r.LockMemory = true }).Annotations()
	for _, bad := range []map[string]string{
		{evenkeel.RDMAResourceKey: "rdma/hca"}, {evenkeel.RDMAResourceKey: "rdma/hca=0"}, {evenkeel.RDMAResourceKey: "rdma/hca=65"}, {evenkeel.RDMAResourceKey: "cpu=1"},
		{evenkeel.RDMAResourceKey: "kubernetes.io/batch-cpu=1"}, {evenkeel.RDMAResourceKey: "rdma/h c a=1"}, {evenkeel.RDMAResourceKey: ""},
		{evenkeel.MemoryLockKey: "Please"}, {evenkeel.RDMANetworksKey: strings.Repeat("n", 1025)},
	} {
		annotations := maps.Clone(good)
		maps.Copy(annotations, bad)
		if _, err := FromPod(map[string]string{evenkeel.ProfileKey: "p"}, annotations); err == nil || !strings.Contains(err.Error(), evenkeel.RDMAResourceKey) && !strings.Contains(err.Error(), slices.Collect(maps.Keys(bad))[0]) {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

func TestResolveRDMADevice(t *testing.T) {
	two := int32(2)
	for name, test := range map[string]struct {
		spec        evenkeel.TransportSpec
		found       string // by the controller
		stale       bool
		want        *RDMA
		environment string
	}{
		"auto, nothing found":    {spec: evenkeel.TransportSpec{}, environment: ""},
		"auto, found":            {spec: evenkeel.TransportSpec{Mode: evenkeel.TransportAuto}, found: "rdma/hca", want: &RDMA{Resource: "rdma/hca", Count: 1}, environment: "auto"},
		"auto, found long ago":   {spec: evenkeel.TransportSpec{Mode: evenkeel.TransportAuto}, found: "rdma/hca", stale: true, environment: "auto"},
		"auto, named, not found": {spec: evenkeel.TransportSpec{Mode: evenkeel.TransportAuto, RDMA: evenkeel.RDMASpec{ResourceName: "x/y"}}, environment: "auto"},
		"TCP":                    {spec: evenkeel.TransportSpec{Mode: evenkeel.TransportTCP}, found: "rdma/hca", environment: "tcp"},
		"RDMA, named": {spec: evenkeel.TransportSpec{Mode: evenkeel.TransportRDMA, RDMA: evenkeel.RDMASpec{ResourceName: "x/y", Count: &two, MemoryLock: evenkeel.MemoryLockCapability, Networks: "n"}},
			want: &RDMA{Resource: "x/y", Count: 2, LockMemory: true, Networks: "n"}, environment: "rdma"},
		"RDMA, nothing found": {spec: evenkeel.TransportSpec{Mode: evenkeel.TransportRDMA}, environment: "rdma"},
	} {
		t.Run(name, func(t *testing.T) {
			profile := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "p", Generation: 2}}
			profile.Spec.Plugin.Image, profile.Spec.Transport = image, test.spec
			profile.Status.RDMAResourceName, profile.Status.ObservedGeneration = test.found, 2
			if test.stale {
				profile.Status.ObservedGeneration = 1
			}
			r := Resolve(profile, "")
			if diff := cmp.Diff(test.want, r.RDMA); diff != "" {
				t.Error(diff)
			}
			if got := r.Environment[TransportEnv]; got != test.environment {
				t.Errorf("%s=%q, want %q", TransportEnv, got, test.environment)
			}
		})
	}
}
