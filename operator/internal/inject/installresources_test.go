package inject

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func sizes(cpu, memory string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
}

// installed are the resources of the init container of a pod that is limited itself.
func installed(t *testing.T, r Resolved) corev1.ResourceRequirements {
	t.Helper()
	p := apply(t, pod(corev1.Container{Name: "main", Resources: corev1.ResourceRequirements{Requests: sizes("4", "1Gi"), Limits: sizes("4", "1Gi")}}), r)
	return p.Spec.InitContainers[0].Resources
}

func TestInstallResourcesAreThoseOfTheProfile(t *testing.T) {
	cpu, memory := resource.MustParse("250m"), resource.MustParse("128Mi")
	for name, test := range map[string]struct {
		spec      evenkeel.InstallResources
		want      corev1.ResourceList
		annotated string
	}{
		"by default":             {evenkeel.InstallResources{}, sizes("100m", "64Mi"), ""},
		"CPU":                    {evenkeel.InstallResources{CPU: &cpu}, sizes("250m", "64Mi"), "cpu=250m,memory=64Mi"},
		"memory":                 {evenkeel.InstallResources{Memory: &memory}, sizes("100m", "128Mi"), "cpu=100m,memory=128Mi"},
		"the default in figures": {evenkeel.InstallResources{CPU: resource.NewMilliQuantity(100, resource.DecimalSI)}, sizes("100m", "64Mi"), ""},
	} {
		profile := &evenkeel.NetworkProfile{}
		profile.Name = "p"
		profile.Spec.Plugin = evenkeel.PluginSpec{Image: image, Delivery: evenkeel.DeliveryInitContainer, InstallResources: test.spec}
		r := Resolve(profile, "")
		if got := r.Annotations()[evenkeel.InstallResourcesKey]; got != test.annotated {
			t.Errorf("%s: the annotation is %q, want %q", name, got, test.annotated)
		}
		pinned, err := FromPod(r.Labels(), r.Annotations())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(corev1.ResourceRequirements{Requests: test.want, Limits: test.want}, installed(t, pinned)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestInstallResourcesFitLimitRanges(t *testing.T) {
	container := func(least, most corev1.ResourceList) corev1.LimitRange {
		return corev1.LimitRange{Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{{Type: corev1.LimitTypeContainer, Min: least, Max: most}}}}
	}
	ofPods := container(sizes("1", "1Gi"), nil)
	ofPods.Spec.Limits[0].Type = corev1.LimitTypePod
	for name, test := range map[string]struct {
		ranges []corev1.LimitRange
		want   corev1.ResourceList
	}{
		"none":            {nil, sizes("100m", "64Mi")},
		"a minimum":       {[]corev1.LimitRange{container(sizes("250m", "128Mi"), nil)}, sizes("250m", "128Mi")},
		"a lower minimum": {[]corev1.LimitRange{container(sizes("50m", "1Mi"), nil)}, sizes("100m", "64Mi")},
		"a maximum":       {[]corev1.LimitRange{container(nil, sizes("50m", "32Mi"))}, sizes("50m", "32Mi")},
		"of memory alone": {[]corev1.LimitRange{container(corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Gi")}, nil)}, sizes("100m", "1Gi")},
		"several":         {[]corev1.LimitRange{container(sizes("200m", "128Mi"), nil), container(sizes("300m", "100Mi"), nil)}, sizes("300m", "128Mi")},
		"of whole pods":   {[]corev1.LimitRange{ofPods}, sizes("100m", "64Mi")},
	} {
		r := resolved(func(r *Resolved) { r.Delivery = evenkeel.DeliveryInitContainer })
		r.FitLimitRanges(test.ranges)
		if diff := cmp.Diff(corev1.ResourceRequirements{Requests: test.want, Limits: test.want}, installed(t, r)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	mounted := resolved(nil)
	if mounted.FitLimitRanges([]corev1.LimitRange{container(sizes("250m", "128Mi"), nil)}); mounted.Install != nil {
		t.Errorf("without an init container: %v", mounted.Install)
	}
}

func TestInstallResourcesForged(t *testing.T) {
	for _, text := range []string{"cpu=1", "cpu=1,memory=", "cpu=0,memory=1Mi", "cpu=-1,memory=1Mi", "cpu=1,memory=1Mi,nvidia.com/gpu=8", "cpu", "cpu=1,cpu=2", "cpu=x,memory=1Mi"} {
		r := resolved(func(r *Resolved) { r.Delivery = evenkeel.DeliveryInitContainer })
		annotations := r.Annotations()
		annotations[evenkeel.InstallResourcesKey] = text
		if _, err := FromPod(r.Labels(), annotations); err == nil || !strings.Contains(err.Error(), "such as cpu=250m,memory=128Mi") {
			t.Errorf("%s: %v", text, err)
		}
	}
}
