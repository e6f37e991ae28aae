package inject

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// installNames are the resources of the init container, in the order of the annotation.
var installNames = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory}

// defaultInstall is what the init container gets if the profile says nothing.
func defaultInstall() corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("64Mi")}
}

// installList is what the profile gives the init container; nil: the default.
func installList(spec evenkeel.InstallResources) corev1.ResourceList {
	list := defaultInstall()
	for name, quantity := range map[corev1.ResourceName]*resource.Quantity{corev1.ResourceCPU: spec.CPU, corev1.ResourceMemory: spec.Memory} {
		if quantity != nil {
			list[name] = *quantity
		}
	}
	return unlessDefault(list)
}

func unlessDefault(list corev1.ResourceList) corev1.ResourceList {
	for name, quantity := range defaultInstall() {
		if own := list[name]; own.Cmp(quantity) != 0 {
			return list
		}
	}
	return nil
}

// FitLimitRanges changes the resources of the init container to what the LimitRanges of the job's namespace allow a container. The API
// server would refuse every pod of the job otherwise, for a container that its user does not know.
func (r *Resolved) FitLimitRanges(ranges []corev1.LimitRange) {
	if r.Delivery != evenkeel.DeliveryInitContainer {
		return
	}
	list := r.installList()
	for _, name := range installNames {
		own := list[name]
		var atLeast, atMost []resource.Quantity
		for i := range ranges {
			for _, item := range ranges[i].Spec.Limits {
				if item.Type != corev1.LimitTypeContainer {
					continue
				}
				if q, has := item.Min[name]; has {
					atLeast = append(atLeast, q)
				}
				if q, has := item.Max[name]; has {
					atMost = append(atMost, q)
				}
			}
		}
		for _, q := range atLeast {
			if q.Cmp(own) > 0 {
				own = q
			}
		}
		for _, q := range atMost {
			if q.Cmp(own) < 0 {
				own = q
			}
		}
		list[name] = own
	}
	r.Install = unlessDefault(list)
}

// installList are the CPU and memory of the init container.
func (r Resolved) installList() corev1.ResourceList {
	if r.Install == nil {
		return defaultInstall()
	}
	return r.Install.DeepCopy()
}

// installResources leaves the pod's QoS class as it is, since the kubelet assigns whole cores and NUMA nodes to Guaranteed
// pods only. A quota may require a limit of each container, so that a pod with limits gets them here too.
func (r Resolved) installResources(pod *corev1.Pod) corev1.ResourceRequirements {
	if hasPodResources(pod) || !hasComputeResources(pod) {
		return corev1.ResourceRequirements{}
	}
	return corev1.ResourceRequirements{Requests: r.installList(), Limits: r.installList()}
}

// hasPodResources reports whether the pod as a whole has resources, which then decide its class and satisfy quotas.
func hasPodResources(pod *corev1.Pod) bool {
	return pod.Spec.Resources != nil && len(pod.Spec.Resources.Requests)+len(pod.Spec.Resources.Limits) > 0
}

// hasComputeResources reports whether any container has CPU or memory, so that the pod is not BestEffort.
func hasComputeResources(pod *corev1.Pod) bool {
	return slices.ContainsFunc(slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers), func(c corev1.Container) bool {
		for _, list := range []corev1.ResourceList{c.Resources.Requests, c.Resources.Limits} {
			if list.Cpu().Sign() > 0 || list.Memory().Sign() > 0 {
				return true
			}
		}
		return false
	})
}

// formatInstall and parseInstall are the annotation's form of the resources.
func formatInstall(list corev1.ResourceList) string {
	var parts []string
	for _, name := range installNames {
		quantity := list[name]
		parts = append(parts, string(name)+"="+quantity.String())
	}
	return strings.Join(parts, ",")
}

func parseInstall(text string) (corev1.ResourceList, error) {
	if text == "" {
		return nil, nil
	}
	list := corev1.ResourceList{}
	for _, part := range strings.Split(text, ",") {
		name, value, _ := strings.Cut(part, "=")
		quantity, err := resource.ParseQuantity(value)
		if err != nil || quantity.Sign() <= 0 || !slices.Contains(installNames, corev1.ResourceName(name)) {
			return nil, badInstall(text)
		}
		list[corev1.ResourceName(name)] = quantity
	}
	if len(list) != len(installNames) {
		return nil, badInstall(text)
	}
	return list, nil
}

func badInstall(text string) error {
	return fmt.Errorf("annotation %s is %q: CPU and memory, such as cpu=250m,memory=128Mi", evenkeel.InstallResourcesKey, text)
}
