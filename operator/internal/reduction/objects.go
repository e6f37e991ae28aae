package reduction

import (
	"cmp"
	"fmt"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/jobkey"
)

const (
	// Container is the name of the server's container.
	Container = "reduction-server"
	// drainSeconds is how long a stopping server continues operations in progress. graceSeconds is the pod's termination
	// grace period.
	drainSeconds, graceSeconds = 30, 45
	// memoryOverhead is what a server needs besides its buffers.
	memoryOverhead = 256 << 20
)

// A Run is how the servers of a service should run now.
type Run struct {
	// Servers is the number of servers.
	Servers int32
	// Evictable reports whether they may be evicted.
	Evictable bool
	// HostNetwork reports whether pods of the job are in the network of their nodes.
	HostNetwork bool
}

// Objects returns the objects of a service except its key.
func Objects(service *evenkeel.ReductionService, run Run) []client.Object {
	return []client.Object{headless(service), disruptionBudget(service, run.Evictable), networkPolicy(service, run.HostNetwork), statefulSet(service, run.Servers)}
}

// Key returns the Secret with the job's key of 64 hexadecimal digits.
func Key(service *evenkeel.ReductionService, key []byte) *corev1.Secret {
	yes := true
	return &corev1.Secret{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: objectMeta(service), Type: corev1.SecretTypeOpaque, Immutable: &yes,
		Data: jobkey.Data(key),
	}
}

// objectMeta is the metadata of all objects. They are owned by the service, and that by the job.
func objectMeta(service *evenkeel.ReductionService) metav1.ObjectMeta {
	yes, no := true, false
	return metav1.ObjectMeta{
		Namespace: service.Namespace, Name: service.Name, Labels: serverLabels(service),
		OwnerReferences: []metav1.OwnerReference{{
			APIVersion: evenkeel.GroupVersion.String(), Kind: "ReductionService", Name: service.Name, UID: service.UID,
			Controller: &yes, BlockOwnerDeletion: &no,
		}},
	}
}

func serverLabels(service *evenkeel.ReductionService) map[string]string {
	return map[string]string{evenkeel.ReductionServerKey: service.Name}
}

func selectServers(service *evenkeel.ReductionService) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: serverLabels(service)}
}

func selectClients(service *evenkeel.ReductionService) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{evenkeel.ReductionClientKey: service.Name}}
}

// headless gives the servers their host names, once they are ready. Clients wait for a name without an address, but not
// long for a server that has an address and does not answer.
func headless(service *evenkeel.ReductionService) *corev1.Service {
	return &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: objectMeta(service),
		Spec: corev1.ServiceSpec{
			ClusterIP: corev1.ClusterIPNone, Selector: serverLabels(service),
			Ports: []corev1.ServicePort{
				{Name: "reduction", Port: Port, TargetPort: intstr.FromInt32(Port), Protocol: corev1.ProtocolTCP},
				{Name: "metrics", Port: MetricsPort, TargetPort: intstr.FromInt32(MetricsPort), Protocol: corev1.ProtocolTCP},
			},
		},
	}
}

// disruptionBudget protects servers from eviction: without one of them the whole job would end. So if one may be
// evicted, all may.
func disruptionBudget(service *evenkeel.ReductionService, evictable bool) *policyv1.PodDisruptionBudget {
	unavailable := intstr.FromInt32(0)
	if evictable {
		unavailable = intstr.FromString("100%")
	}
	return &policyv1.PodDisruptionBudget{
		TypeMeta:   metav1.TypeMeta{APIVersion: "policy/v1", Kind: "PodDisruptionBudget"},
		ObjectMeta: objectMeta(service),
		Spec:       policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &unavailable, Selector: selectServers(service)},
	}
}

// networkPolicy allows connections from the job's pods, and to the metrics from everywhere. Servers may connect to the
// job's pods only. No selector of pods matches those in the network of their nodes: then connections are allowed from
// and to everywhere, and the job's key decides who is served.
func networkPolicy(service *evenkeel.ReductionService, hostNetwork bool) *networkingv1.NetworkPolicy {
	tcp, port, metrics := corev1.ProtocolTCP, intstr.FromInt32(Port), intstr.FromInt32(MetricsPort)
	clients := []networkingv1.NetworkPolicyPeer{{PodSelector: selectClients(service)}}
	if hostNetwork {
		clients = nil
	}
	return &networkingv1.NetworkPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"},
		ObjectMeta: objectMeta(service),
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: *selectServers(service),
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
			Ingress: []networkingv1.NetworkPolicyIngressRule{
				{From: clients, Ports: []networkingv1.NetworkPolicyPort{{Protocol: &tcp, Port: &port}}},
				{Ports: []networkingv1.NetworkPolicyPort{{Protocol: &tcp, Port: &metrics}}},
			},
			Egress: []networkingv1.NetworkPolicyEgressRule{{To: clients}},
		},
	}
}

func statefulSet(service *evenkeel.ReductionService, running int32) *appsv1.StatefulSet {
	pod := serverPod(service)
	return &appsv1.StatefulSet{
		TypeMeta:   metav1.TypeMeta{APIVersion: "apps/v1", Kind: "StatefulSet"},
		ObjectMeta: objectMeta(service),
		Spec: appsv1.StatefulSetSpec{
			Replicas: &running, ServiceName: service.Name, Selector: selectServers(service),
			PodManagementPolicy: appsv1.ParallelPodManagement,
			// A running server is never replaced by a newer template: its job would end.
			UpdateStrategy: appsv1.StatefulSetUpdateStrategy{Type: appsv1.OnDeleteStatefulSetStrategyType},
			Template:       corev1.PodTemplateSpec{ObjectMeta: pod.ObjectMeta, Spec: pod.Spec},
		},
	}
}

// serverPod returns a pod without permissions in the cluster. It fits the restricted standard, unless the profile asks
// for a capability.
func serverPod(service *evenkeel.ReductionService) *corev1.Pod {
	yes, no, seconds := true, false, int64(graceSeconds)
	spec := service.Spec.Server.WithDefaults()
	memory := *resource.NewQuantity(spec.Memory.Value()+memoryOverhead, resource.BinarySI)
	threads := max(1, spec.CPU.Value())
	probe := func(path string, failures int32) *corev1.Probe {
		return &corev1.Probe{
			ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromInt32(MetricsPort)}},
			PeriodSeconds: 2, FailureThreshold: failures,
		}
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Labels: serverLabels(service)},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: &no, EnableServiceLinks: &no, TerminationGracePeriodSeconds: &seconds,
			PriorityClassName: service.Spec.PriorityClassName,
			SecurityContext: &corev1.PodSecurityContext{
				// The image names a user. One named here might be outside the range that the cluster allows the namespace.
				RunAsNonRoot:   &yes,
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			NodeSelector: spec.NodeSelector, Tolerations: spec.Tolerations,
			Affinity:                  affinity(service, spec.Placement),
			TopologySpreadConstraints: spreadConstraints(service, spec.Placement),
			Volumes:                   []corev1.Volume{inject.KeyVolume(cmp.Or(service.Spec.KeySecretName, service.Name))},
			Containers: []corev1.Container{{
				Name: Container, Image: service.Spec.Image, ImagePullPolicy: corev1.PullIfNotPresent,
				Args: []string{
					"serve", fmt.Sprintf("--listen=[::]:%d", Port), fmt.Sprintf("--metrics=[::]:%d", MetricsPort),
					fmt.Sprintf("--memory=%d", spec.Memory.Value()),
					// By default the server would use all cores of the host.
					fmt.Sprintf("--threads=%d", threads),
					fmt.Sprintf("--drain-timeout=%ds", drainSeconds),
				},
				Env: []corev1.EnvVar{
					{Name: inject.KeyFileEnv, Value: inject.KeyFile},
					// One for 4 cores, 1 to 4: the transport's default on a host with the requested number of cores.
					{Name: "EVENKEEL_WORKERS", Value: strconv.FormatInt(min(max(1, threads/4), 4), 10)},
				},
				Ports: []corev1.ContainerPort{
					{Name: "reduction", ContainerPort: Port, Protocol: corev1.ProtocolTCP},
					{Name: "metrics", ContainerPort: MetricsPort, Protocol: corev1.ProtocolTCP},
				},
				Resources: corev1.ResourceRequirements{
					Requests: corev1.ResourceList{corev1.ResourceCPU: *spec.CPU, corev1.ResourceMemory: memory},
					Limits:   corev1.ResourceList{corev1.ResourceMemory: memory},
				},
				ReadinessProbe: probe("/readyz", 2), LivenessProbe: probe("/healthz", 15),
				VolumeMounts: []corev1.VolumeMount{inject.KeyMount()},
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
			}},
		},
	}
	for _, e := range service.Spec.Environment {
		pod.Spec.Containers[0].Env = append(pod.Spec.Containers[0].Env, corev1.EnvVar{Name: e.Name, Value: e.Value})
	}
	for _, name := range service.Spec.ImagePullSecrets {
		pod.Spec.ImagePullSecrets = append(pod.Spec.ImagePullSecrets, corev1.LocalObjectReference{Name: name})
	}
	addDevice(pod, service)
	inject.AvoidUnhealthyNodes(pod)
	return pod
}

// affinity prefers the workers' domain, if requested, and avoids the workers' hosts, since workers need the links of
// their hosts.
func affinity(service *evenkeel.ReductionService, placement evenkeel.PlacementSpec) *corev1.Affinity {
	term := func(topology string) corev1.WeightedPodAffinityTerm {
		return corev1.WeightedPodAffinityTerm{Weight: 50, PodAffinityTerm: corev1.PodAffinityTerm{TopologyKey: topology, LabelSelector: selectClients(service)}}
	}
	a := &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
		PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{term(corev1.LabelHostname)},
	}}
	if placement.Mode == evenkeel.PlacementNearWorkers {
		a.PodAffinity = &corev1.PodAffinity{
			PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{term(placement.TopologyKey)},
		}
	}
	return a
}

// spreadConstraints spread servers over hosts, and over domains if requested.
func spreadConstraints(service *evenkeel.ReductionService, placement evenkeel.PlacementSpec) []corev1.TopologySpreadConstraint {
	keys := []string{corev1.LabelHostname}
	if placement.Mode == evenkeel.PlacementSpread && placement.TopologyKey != corev1.LabelHostname {
		keys = append(keys, placement.TopologyKey)
	}
	var list []corev1.TopologySpreadConstraint
	for _, key := range keys {
		list = append(list, corev1.TopologySpreadConstraint{
			MaxSkew: 1, TopologyKey: key, WhenUnsatisfiable: corev1.ScheduleAnyway, LabelSelector: selectServers(service),
		})
	}
	return list
}
