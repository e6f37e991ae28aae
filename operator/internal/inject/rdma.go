package inject

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// TransportEnv is the variable that selects the plugin's transport: auto, tcp or rdma.
	TransportEnv = "EVENKEEL_TRANSPORT"
	// RDMADomain is the domain of the resources of the RDMA shared device plugin.
	RDMADomain = "rdma/"

	ipcLock          = corev1.Capability("IPC_LOCK")
	allCapabilities  = corev1.Capability("ALL")
	maxNetworksBytes = 1024 // limit of the annotation
)

// RDMA is the device that a job's containers get.
type RDMA struct {
	// Resource is the extended resource, such as rdma/hca_shared_devices_a. Count is the number for each container.
	Resource string
	Count    int
	// LockMemory adds the capability IPC_LOCK.
	LockMemory bool `json:",omitempty"`
	// Networks are additional networks of the pod, in the format of Multus; empty: none.
	Networks string `json:",omitempty"`
}

// NewRDMA returns the device that the spec names; nil: none.
func NewRDMA(spec evenkeel.RDMASpec) *RDMA {
	if spec.ResourceName == "" {
		return nil
	}
	r := &RDMA{Resource: spec.ResourceName, Count: 1, LockMemory: spec.MemoryLock == evenkeel.MemoryLockCapability, Networks: spec.Networks}
	if spec.Count != nil {
		r.Count = int(*spec.Count)
	}
	return r
}

// resolveRDMA returns the device that jobs of the profile get; nil: none. With mode Auto it is the device that the controller found
// on most nodes.
func resolveRDMA(profile *evenkeel.NetworkProfile) *RDMA {
	mode, spec := profile.Spec.Transport.Mode, profile.Spec.Transport.RDMA
	if WithoutRDMA(profile.Spec.Transport) {
		return nil
	}
	if mode != evenkeel.TransportRDMA || spec.ResourceName == "" {
		spec.ResourceName = ""
		if profile.Status.ObservedGeneration == profile.Generation {
			spec.ResourceName = profile.Status.RDMAResourceName
		}
	}
	return NewRDMA(spec)
}

// annotations encode the device.
func (r *RDMA) annotations() map[string]string {
	a := map[string]string{evenkeel.RDMAResourceKey: r.Resource + "=" + strconv.Itoa(r.Count)}
	if r.LockMemory {
		a[evenkeel.MemoryLockKey] = string(evenkeel.MemoryLockCapability)
	}
	if r.Networks != "" {
		a[evenkeel.RDMANetworksKey] = r.Networks
	}
	return a
}

// rdmaKeys are the annotations that encode a device.
var rdmaKeys = []string{evenkeel.RDMAResourceKey, evenkeel.MemoryLockKey, evenkeel.RDMANetworksKey}

// rdmaFromPod decodes and checks the annotations; nil: no device.
func rdmaFromPod(annotations map[string]string) (*RDMA, error) {
	text := annotations[evenkeel.RDMAResourceKey]
	if text == "" {
		for _, key := range rdmaKeys {
			if annotations[key] != "" {
				return nil, fmt.Errorf("annotation %s requires the annotation %s", key, evenkeel.RDMAResourceKey)
			}
		}
		return nil, nil
	}
	name, number, _ := strings.Cut(text, "=")
	count, err := strconv.Atoi(number)
	domain, _, qualified := strings.Cut(name, "/")
	if err != nil || count < 1 || count > 64 || !qualified || domain == "kubernetes.io" || len(validation.IsQualifiedName(name)) > 0 {
		return nil, fmt.Errorf("annotation %s is %q: an extended resource and a number from 1 to 64, such as rdma/hca_shared_devices_a=1", evenkeel.RDMAResourceKey, text)
	}
	r := &RDMA{Resource: name, Count: count, Networks: annotations[evenkeel.RDMANetworksKey]}
	if len(r.Networks) > maxNetworksBytes {
		return nil, fmt.Errorf("annotation %s has %d bytes: at most %d", evenkeel.RDMANetworksKey, len(r.Networks), maxNetworksBytes)
	}
	switch lock := annotations[evenkeel.MemoryLockKey]; lock {
	case "":
	case string(evenkeel.MemoryLockCapability):
		r.LockMemory = true
	default:
		return nil, fmt.Errorf("annotation %s is %q: %s, or absent", evenkeel.MemoryLockKey, lock, evenkeel.MemoryLockCapability)
	}
	return r, nil
}

// AddDevices adds the RDMA device to the same containers of a job's pod template to which [Apply] adds it in the pod, since quotas
// and queues read templates. Annotations are the template's.
func AddDevices(spec *corev1.PodSpec, annotations map[string]string, r Resolved) error {
	if r.RDMA == nil || forWindows(spec) {
		return nil
	}
	containers, err := selectContainers(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}, Spec: *spec}, r)
	if err != nil {
		return err
	}
	for _, c := range containers {
		r.RDMA.addDevice(c)
	}
	return nil
}

// addRDMA adds the RDMA device to the containers, and its networks to the pod.
func addRDMA(in *injection) error {
	device := in.resolved.RDMA
	if device == nil {
		return nil
	}
	for _, t := range in.targets {
		if !t.excluded {
			t.skipped = append(t.skipped, device.addToContainer(in.pod, t.Container)...)
		}
	}
	if reason := device.addNetworks(in.pod); reason != "" {
		in.skippedOfPod = append(in.skippedOfPod, reason)
	}
	return nil
}

// AddTo adds the device to every container of a pod that Evenkeel creates.
func (r *RDMA) AddTo(pod *corev1.Pod) {
	for i := range pod.Spec.Containers {
		r.addToContainer(pod, &pod.Spec.Containers[i])
	}
	r.addNetworks(pod)
}

// addToContainer adds the device to one container of the pod, and returns what it left unchanged and why.
func (r *RDMA) addToContainer(pod *corev1.Pod, c *corev1.Container) []string {
	var skipped []string
	if reason := r.addDevice(c); reason != "" {
		skipped = append(skipped, reason)
	}
	if reason := r.addCapability(pod, c); reason != "" {
		skipped = append(skipped, reason)
	}
	return skipped
}

// addDevice requests the device, unless the container requests one itself.
func (r *RDMA) addDevice(c *corev1.Container) (reason string) {
	name := corev1.ResourceName(r.Resource)
	for _, list := range []corev1.ResourceList{c.Resources.Limits, c.Resources.Requests} {
		for own, quantity := range list {
			if own == name && quantity.Value() == int64(r.Count) {
				return ""
			}
			if own == name || strings.HasPrefix(string(own), RDMADomain) {
				return fmt.Sprintf("container %s: requests %s itself", c.Name, own)
			}
		}
	}
	quantity := *resource.NewQuantity(int64(r.Count), resource.DecimalSI)
	for _, list := range []*corev1.ResourceList{&c.Resources.Limits, &c.Resources.Requests} {
		if *list == nil {
			*list = corev1.ResourceList{}
		}
		(*list)[name] = quantity
	}
	return ""
}

// addCapability adds IPC_LOCK, unless the container drops it itself. The kernel asks for it in the node's own user namespace.
func (r *RDMA) addCapability(pod *corev1.Pod, c *corev1.Container) (reason string) {
	if !r.LockMemory {
		return ""
	}
	if pod.Spec.HostUsers != nil && !*pod.Spec.HostUsers {
		return fmt.Sprintf("container %s: the capability %s locks no memory in a user namespace", c.Name, ipcLock)
	}
	if c.SecurityContext == nil {
		c.SecurityContext = &corev1.SecurityContext{}
	}
	if c.SecurityContext.Capabilities == nil {
		c.SecurityContext.Capabilities = &corev1.Capabilities{}
	}
	capabilities := c.SecurityContext.Capabilities
	switch {
	case slices.Contains(capabilities.Drop, ipcLock):
		return fmt.Sprintf("container %s: drops the capability %s itself", c.Name, ipcLock)
	case !slices.Contains(capabilities.Add, ipcLock) && !slices.Contains(capabilities.Add, allCapabilities):
		capabilities.Add = append(capabilities.Add, ipcLock)
	}
	return ""
}

// addNetworks adds the device's networks to the pod, unless the pod names networks itself.
func (r *RDMA) addNetworks(pod *corev1.Pod) (reason string) {
	if r.Networks == "" || pod.Annotations[evenkeel.NetworksKey] == r.Networks {
		return ""
	}
	if pod.Spec.HostNetwork {
		return "the pod: uses the node's network, and so gets no other"
	}
	if pod.Annotations[evenkeel.NetworksKey] != "" {
		return fmt.Sprintf("the pod: has the annotation %s itself", evenkeel.NetworksKey)
	}
	if pod.Annotations == nil {
		pod.Annotations = map[string]string{}
	}
	pod.Annotations[evenkeel.NetworksKey] = r.Networks
	return ""
}
