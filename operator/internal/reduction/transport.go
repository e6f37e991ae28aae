package reduction

import (
	"strings"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
)

// portSettings is the prefix of NCCL's settings for RDMA ports.
const portSettings = "NCCL_IB_"

// SetTransport gives a service the transport of the profile's jobs, including their RDMA device. With mode Auto servers
// get the device only if every node that they may run on offers it, since they would run on no other node. With mode
// RDMA they always get it.
func SetTransport(service *evenkeel.ReductionService, profile *evenkeel.NetworkProfile, nodes []corev1.Node) {
	of, spec := inject.Resolve(profile, ""), &service.Spec
	spec.Transport, spec.Environment = *profile.Spec.Transport.DeepCopy(), nil
	for _, name := range of.Variables() {
		if name == inject.TransportEnv || name == inject.EncryptionEnv || name == inject.RDMANetworkEnv || strings.HasPrefix(name, portSettings) {
			spec.Environment = append(spec.Environment, evenkeel.EnvironmentVariable{Name: name, Value: of.Environment[name]})
		}
	}
	spec.Transport.RDMA.ResourceName = ""
	if of.RDMA == nil {
		return
	}
	spec.Transport.RDMA.ResourceName = of.RDMA.Resource
	if offering, all := CountOffering(service, nodes); spec.Transport.Mode != evenkeel.TransportRDMA && (offering == 0 || offering < all) {
		spec.Transport.RDMA.ResourceName = ""
	}
}

// CountOffering counts the nodes that the servers may run on: the ones that offer the device, and all.
func CountOffering(service *evenkeel.ReductionService, nodes []corev1.Node) (offering, all int) {
	anywhere := service.DeepCopy()
	anywhere.Spec.Transport.RDMA.ResourceName = ""
	fits, fitsOtherwise := gate.NodeFilter([]*corev1.PodSpec{&serverPod(service).Spec}), gate.NodeFilter([]*corev1.PodSpec{&serverPod(anywhere).Spec})
	for i := range nodes {
		if fits(&nodes[i]) {
			offering++
		}
		if fitsOtherwise(&nodes[i]) {
			all++
		}
	}
	return offering, all
}

// addDevice adds the service's device to a server. The capability to lock memory is effective for root only, so the
// server runs as root with it.
func addDevice(pod *corev1.Pod, service *evenkeel.ReductionService) {
	device := inject.NewRDMA(service.Spec.Transport.RDMA)
	if device == nil {
		return
	}
	device.AddTo(pod)
	if device.LockMemory {
		root, no := int64(0), false
		security := pod.Spec.SecurityContext
		security.RunAsNonRoot, security.RunAsUser, security.RunAsGroup = &no, &root, &root
	}
}
