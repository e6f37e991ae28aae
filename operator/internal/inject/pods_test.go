package inject

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// TestInjectKindsOfPods has pods whose own settings limit what can be added to them.
func TestInjectKindsOfPods(t *testing.T) {
	yes, no := true, false
	device := withRDMA(func(r *RDMA) { r.LockMemory, r.Networks = true, "rail0" })
	ownUsers := func(p *corev1.Pod) { p.Spec.HostUsers = &no }
	hostNetwork := func(p *corev1.Pod) { p.Spec.HostNetwork = true }
	readOnly := func(p *corev1.Pod) {
		p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{ReadOnlyRootFilesystem: &yes}
	}
	windows := func(p *corev1.Pod) { p.Spec.OS = &corev1.PodOS{Name: corev1.Windows} }
	for name, test := range map[string]struct {
		change             func(*corev1.Pod)
		r                  Resolved
		plugin, lock, rail bool
		skipped            string
	}{
		"an ordinary one":                   {func(*corev1.Pod) {}, device, true, true, true, ""},
		"users of its own":                  {ownUsers, resolved(nil), true, false, false, ""},
		"users of its own and locked pages": {ownUsers, device, true, false, true, "container main: the capability IPC_LOCK locks no memory in a user namespace"},
		"the node's network":                {hostNetwork, resolved(nil), true, false, false, ""},
		"the node's network and another":    {hostNetwork, device, true, true, false, "the pod: uses the node's network, and so gets no other"},
		"a root file system to read":        {readOnly, device, true, true, true, ""},
		"Windows":                           {windows, device, false, false, false, "the pod: NCCL does not run on Windows"},
	} {
		for _, delivery := range []evenkeel.Delivery{evenkeel.DeliveryImageVolume, evenkeel.DeliveryInitContainer} {
			t.Run(name+" by "+string(delivery), func(t *testing.T) {
				p := pod(corev1.Container{Name: "main"})
				test.change(p)
				before := p.DeepCopy()
				r := test.r
				r.Delivery = delivery
				apply(t, p, r)
				c := &p.Spec.Containers[0]
				if got := env(*c)["NCCL_NET_PLUGIN"] != "" && len(c.VolumeMounts) == 1 && c.VolumeMounts[0].ReadOnly; got != test.plugin {
					t.Errorf("the plugin: %t; mounts %v", got, c.VolumeMounts)
				}
				if got := p.Annotations[evenkeel.SkippedKey]; got != test.skipped {
					t.Errorf("skipped: %q, want %q", got, test.skipped)
				}
				if got := c.SecurityContext != nil && c.SecurityContext.Capabilities != nil && len(c.SecurityContext.Capabilities.Add) > 0; got != test.lock {
					t.Errorf("IPC_LOCK: %t", got)
				}
				if got := p.Annotations[evenkeel.NetworksKey] != ""; got != test.rail {
					t.Errorf("networks: %q", p.Annotations[evenkeel.NetworksKey])
				}
				if diff := cmp.Diff([]any{before.Spec.HostUsers, before.Spec.HostNetwork, before.Spec.OS}, []any{p.Spec.HostUsers, p.Spec.HostNetwork, p.Spec.OS}); diff != "" {
					t.Error(diff)
				}
				if c.SecurityContext != nil && before.Spec.Containers[0].SecurityContext != nil && !*c.SecurityContext.ReadOnlyRootFilesystem {
					t.Error("its root file system can be written")
				}
				again := p.DeepCopy()
				apply(t, again, r)
				if diff := cmp.Diff(p, again); diff != "" {
					t.Errorf("a second application changes it: %s", diff)
				}
			})
		}
	}
}

func TestInjectLeavesWindowsPodsAlone(t *testing.T) {
	p := pod(corev1.Container{Name: "main"})
	p.Spec.OS = &corev1.PodOS{Name: corev1.Windows}
	p.Labels = map[string]string{evenkeel.GatedKey: evenkeel.GatedValue}
	r := withRDMA(nil)
	if err := AddDevices(&p.Spec, p.Annotations, r); err != nil {
		t.Fatal(err)
	}
	before := p.DeepCopy()
	if err := Apply(p, r, controller); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before.Spec, p.Spec); diff != "" || len(p.Spec.Containers[0].Resources.Limits) > 0 {
		t.Errorf("it has %v more: %s", p.Spec.Containers[0].Resources.Limits, diff)
	}
	if !strings.Contains(p.Annotations[evenkeel.SkippedKey], "Windows") {
		t.Errorf("annotations %v", p.Annotations)
	}
}
