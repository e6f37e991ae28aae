package integration

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// TestInstallResourcesFitLimitRange has namespaces whose LimitRange the container that copies the files has to fit.
func TestInstallResourcesFitLimitRange(t *testing.T) {
	quantities := func(cpu, memory string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
	}
	profile := newProfile(t, "limited", evenkeel.NetworkProfileSpec{Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryInitContainer}})
	for name, test := range map[string]struct {
		limit       corev1.LimitRangeItem
		cpu, memory string
	}{
		"minima": {corev1.LimitRangeItem{Min: quantities("250m", "128Mi"), MaxLimitRequestRatio: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4")}}, "250m", "128Mi"},
		"maxima": {corev1.LimitRangeItem{Max: quantities("50m", "32Mi")}, "50m", "32Mi"},
		"room":   {corev1.LimitRangeItem{Min: quantities("10m", "16Mi"), Max: quantities("2", "1Gi")}, "100m", "64Mi"},
	} {
		t.Run(name, func(t *testing.T) {
			ns := newNamespace(t, nil)
			test.limit.Type = corev1.LimitTypeContainer
			limits := &corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "team"}, Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{test.limit}}}
			if err := admin.Create(t.Context(), limits); err != nil {
				t.Fatal(err)
			}
			sized := func(pod *corev1.Pod) *corev1.Pod {
				size := quantities(test.cpu, test.memory)
				pod.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: size, Limits: size}
				return pod
			}
			last := ""
			say := func(why string) {
				if why != last {
					t.Log(why)
				}
				last = why
			}
			fits := func(ctx context.Context, pod *corev1.Pod) (bool, error) {
				// The LimitRange is seen a little later than it is made, by the API server and by the webhook.
				if err := dryRun(ctx, pod); err != nil {
					_, why, _ := strings.Cut(err.Error(), "is forbidden")
					say("refused" + why)
					return false, nil
				}
				has := pod.Spec.InitContainers[0].Resources
				for _, list := range []corev1.ResourceList{has.Requests, has.Limits} {
					if cpu, memory := list.Cpu().String(), list.Memory().String(); cpu != test.cpu || memory != test.memory {
						say("the init container has " + cpu + " and " + memory)
						return false, nil
					}
				}
				return true, nil
			}
			eventually(t, "a job's pod fits", func(ctx context.Context) (bool, error) {
				job, paths := newJob("Job", ns, profile.Name)
				if err := dryRun(ctx, job); err != nil {
					return false, err
				}
				return fits(ctx, sized(podOf(t, job, paths[0])))
			})
			eventually(t, "a pod that asks itself fits", func(ctx context.Context) (bool, error) {
				pod := plainPod(ns)
				pod.Annotations = map[string]string{evenkeel.ProfileKey: profile.Name}
				return fits(ctx, sized(pod))
			})
		})
	}
}
