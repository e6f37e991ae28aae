package inject

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// TestInjectLeavesCompanionsAlone has pods without GPUs, or with, whose containers do not all run the job.
func TestInjectLeavesCompanionsAlone(t *testing.T) {
	gpu := corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}}
	for name, test := range map[string]struct {
		containers       []string
		defaultContainer string
		named            []string
		gpus             []string
		want             []string
	}{
		"alone":                               {containers: []string{"anything"}, want: []string{"anything"}},
		"beside a log shipper":                {containers: []string{"trainer", "fluent-bit", "daprd"}, want: []string{"trainer"}},
		"after a log shipper":                 {containers: []string{"fluent-bit", "daprd", "trainer"}, want: []string{"trainer"}},
		"beside a mesh":                       {containers: []string{"istio-proxy", "trainer"}, want: []string{"trainer"}},
		"Katib's trial":                       {containers: []string{"training-container", "metrics-logger-and-collector"}, want: []string{"training-container"}},
		"beside what nobody knows":            {containers: []string{"trainer", "their-own-agent"}, want: []string{"trainer"}},
		"a PyTorchJob's":                      {containers: []string{"their-own-agent", "pytorch"}, want: []string{"pytorch"}},
		"a TrainJob's":                        {containers: []string{"their-own-agent", "node"}, want: []string{"node"}},
		"the default container":               {containers: []string{"their-own-agent", "pytorch", "main"}, defaultContainer: "main", want: []string{"main"}},
		"a default container that is not":     {containers: []string{"main", "log"}, defaultContainer: "absent", want: []string{"main"}},
		"a default container of another":      {containers: []string{"main", "istio-proxy"}, defaultContainer: "istio-proxy", want: []string{"main"}},
		"those that ask for GPUs":             {containers: []string{"agent", "a", "b"}, gpus: []string{"a", "b"}, defaultContainer: "agent", want: []string{"a", "b"}},
		"a companion with a GPU":              {containers: []string{"main", "vault-agent"}, gpus: []string{"vault-agent"}, want: []string{"main"}},
		"those that the user names":           {containers: []string{"main", "fluent-bit"}, named: []string{"fluent-bit"}, want: []string{"fluent-bit"}},
		"two that the user names":             {containers: []string{"a", "b", "c"}, named: []string{"a", "c"}, want: []string{"a", "c"}},
		"no container but those of injectors": {containers: []string{"istio-proxy"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := pod()
			p.Annotations = map[string]string{"kubectl.kubernetes.io/default-container": test.defaultContainer}
			for _, c := range test.containers {
				p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: c})
				if slices.Contains(test.gpus, c) {
					p.Spec.Containers[len(p.Spec.Containers)-1].Resources = *gpu.DeepCopy()
				}
			}
			r := withRDMA(func(r *RDMA) { r.LockMemory = true })
			r.Containers = test.named
			template := p.DeepCopy()
			if err := AddDevices(&template.Spec, template.Annotations, r); err != nil {
				t.Fatal(err)
			}
			apply(t, p, r)
			var got, devices []string
			for i, c := range p.Spec.Containers {
				if len(c.Env) > 0 {
					got = append(got, c.Name)
				} else if len(c.VolumeMounts) > 0 || c.SecurityContext != nil {
					t.Errorf("%s has mounts %v and security context %v without variables", c.Name, c.VolumeMounts, c.SecurityContext)
				}
				if _, has := template.Spec.Containers[i].Resources.Limits[hca]; has {
					devices = append(devices, c.Name)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(got, devices); diff != "" {
				t.Errorf("queues and quotas count the devices of others: %s", diff)
			}
			if p.Annotations[evenkeel.InjectedKey] == "" {
				t.Errorf("annotations %v", p.Annotations)
			}
		})
	}
}
