package integration

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/doctor"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/workload"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// An injectionCase is a pod that asks for a profile, and what both ways of injection have to make of it.
type injectionCase struct {
	name    string
	profile string
	change  func(*corev1.Pod)
	// refusal is a part of the message with which the pod is refused; empty: it is not.
	refusal string
}

func setEnv(values ...corev1.EnvVar) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Containers[0].Env = values }
}

// containers replaces the pod's container by several.
func containers(names ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers = nil
		for _, name := range names {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: name, Image: "x"})
		}
	}
}

// envFrom takes variables from ConfigMaps and Secrets too, with and without prefixes that the profile's variables have.
func envFrom(env ...corev1.EnvVar) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		c := &p.Spec.Containers[0]
		name, optional := func(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }, true
		c.Env = env
		c.EnvFrom = []corev1.EnvFromSource{
			{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: name("nccl")}},
			{Prefix: "EVENKEEL_", SecretRef: &corev1.SecretEnvSource{LocalObjectReference: name("flows"), Optional: &optional}},
			{Prefix: "NCCL_NET_PLUGIN", ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: name("more")}},
		}
	}
}

// hasKey names a Secret with the job's key, beside another change.
func hasKey(secret string, change func(*corev1.Pod)) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Annotations[evenkeel.JobKeyKey] = secret
		if change != nil {
			change(p)
		}
	}
}

func requests(names ...string) corev1.ResourceRequirements {
	r := corev1.ResourceRequirements{Limits: corev1.ResourceList{}}
	for _, name := range names {
		r.Limits[corev1.ResourceName(name)] = resource.MustParse("1")
	}
	return r
}

// The profiles of the cases, by name.
func injectionProfiles() map[string]evenkeel.NetworkProfileSpec {
	yes, flows, two := true, int32(7), int32(2)
	cpu, memory := resource.MustParse("250m"), resource.MustParse("1Gi")
	plugin := func(d evenkeel.Delivery) evenkeel.PluginSpec { return evenkeel.PluginSpec{Delivery: d} }
	return map[string]evenkeel.NetworkProfileSpec{
		"both-auto":    {},
		"both-image":   {Plugin: plugin(evenkeel.DeliveryImageVolume), ImagePullSecrets: []string{"mine", "registry"}},
		"both-copy":    {Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryInitContainer, Path: "/lib/x"}, ImagePullSecrets: []string{"registry"}},
		"both-sized":   {Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryInitContainer, InstallResources: evenkeel.InstallResources{CPU: &cpu}}},
		"both-large":   {Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryInitContainer, InstallResources: evenkeel.InstallResources{CPU: &cpu, Memory: &memory}}},
		"both-present": {Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryPreinstalled, Path: "/usr/lib/nccl"}},
		"both-settings": {
			Plugin:    evenkeel.PluginSpec{Delivery: evenkeel.DeliveryImageVolume, Strict: &yes},
			Transport: evenkeel.TransportSpec{Mode: evenkeel.TransportTCP, TCP: evenkeel.TCPSpec{FlowsPerPeer: &flows}},
			Environment: []evenkeel.EnvironmentVariable{
				{Name: "Z", Value: `a "quoted" \ <value> $(A)`}, {Name: "EVENKEEL_FLOWS", Value: "9"}, {Name: "A", Value: ""}, {Name: "MINE", Value: "the profile's"},
			},
		},
		"both-node":        {Environment: []evenkeel.EnvironmentVariable{{Name: "EVENKEEL_NODE", Value: "rack-4"}}},
		"both-python":      {Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryImageVolume, Python: evenkeel.PythonEnabled}},
		"both-python-here": {Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryPreinstalled, Path: "/usr/lib/nccl", Python: evenkeel.PythonEnabled}},
		"both-python-recorder": {
			Plugin:      evenkeel.PluginSpec{Delivery: evenkeel.DeliveryImageVolume, Python: evenkeel.PythonEnabled},
			Environment: []evenkeel.EnvironmentVariable{{Name: "EVENKEEL_FLIGHT_RECORDER", Value: "/shared/rank_"}},
		},
		"both-python-more": {
			Plugin:      evenkeel.PluginSpec{Delivery: evenkeel.DeliveryInitContainer, Python: evenkeel.PythonEnabled},
			Environment: []evenkeel.EnvironmentVariable{{Name: "PYTHONPATH", Value: "/shared"}},
		},
		"both-replace": {Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryImageVolume, ConflictPolicy: evenkeel.ConflictReplace, Strict: &yes}},
		"both-strict":  {Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryImageVolume, Strict: &yes}},
		"both-rdma": {Plugin: plugin(evenkeel.DeliveryImageVolume), Transport: evenkeel.TransportSpec{Mode: evenkeel.TransportRDMA, RDMA: evenkeel.RDMASpec{
			ResourceName: "rdma/hca", Count: &two, MemoryLock: evenkeel.MemoryLockCapability, Networks: "rail0,rail1"}}},
		"both-encrypted":         {Plugin: plugin(evenkeel.DeliveryImageVolume), Transport: evenkeel.TransportSpec{Encryption: evenkeel.EncryptionRequired}},
		"both-encrypted-present": {Plugin: evenkeel.PluginSpec{Delivery: evenkeel.DeliveryPreinstalled}, Transport: evenkeel.TransportSpec{Encryption: evenkeel.EncryptionRequired}},
		"both-encrypted-rdma": {Plugin: plugin(evenkeel.DeliveryImageVolume), Transport: evenkeel.TransportSpec{Mode: evenkeel.TransportRDMA, Encryption: evenkeel.EncryptionRequired,
			RDMA: evenkeel.RDMASpec{ResourceName: "rdma/hca", Network: evenkeel.RDMANetworkTrusted}}},
		"both-rdma-none": {Plugin: plugin(evenkeel.DeliveryImageVolume), Transport: evenkeel.TransportSpec{Mode: evenkeel.TransportRDMA}},
		"both-elsewhere": {NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "another"}}},
		"both-here": {NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "mine"}, MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: "team", Operator: metav1.LabelSelectorOpIn, Values: []string{"mine", "another"}}, {Key: "team", Operator: metav1.LabelSelectorOpNotIn, Values: []string{"x"}},
			{Key: "absent", Operator: metav1.LabelSelectorOpNotIn, Values: []string{"x"}}, {Key: "team", Operator: metav1.LabelSelectorOpExists}, {Key: "absent", Operator: metav1.LabelSelectorOpDoesNotExist},
		}}},
		"both-not-here": {NamespaceSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "team", Operator: metav1.LabelSelectorOpNotIn, Values: []string{"mine"}}}}},
	}
}

// injectionCases are the table that both ways have to agree on.
func injectionCases() []injectionCase {
	root, user := int64(0), int64(1000680000)
	healthy := func(op corev1.NodeSelectorOperator) corev1.NodeSelectorRequirement {
		r := corev1.NodeSelectorRequirement{Key: "evenkeel.dev/network", Operator: op}
		if op == corev1.NodeSelectorOpIn {
			r.Values = []string{"healthy"}
		}
		return r
	}
	zone := corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{"a"}}
	required := func(terms ...corev1.NodeSelectorTerm) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: terms}}}
		}
	}
	cases := []injectionCase{
		{name: "delivery Auto", profile: "both-auto"},
		{name: "image volume", profile: "both-image"},
		{name: "init container", profile: "both-copy"},
		{name: "preinstalled", profile: "both-present"},
		{name: "settings", profile: "both-settings"},
		{name: "an init container of the user's", profile: "both-copy", change: func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "theirs", Image: "x"}}
		}},
		{name: "pull secrets of the user's", profile: "both-image", change: func(p *corev1.Pod) {
			p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "theirs"}, {Name: "mine"}}
		}},
		{name: "a pod of root's", profile: "both-copy", change: func(p *corev1.Pod) { p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: &root} }},
		{name: "a pod of a user's", profile: "both-copy", change: func(p *corev1.Pod) { p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: &user} }},
		{name: "a guaranteed pod", profile: "both-copy", change: func(p *corev1.Pod) { p.Spec.Containers[0].Resources = requests("cpu", "memory") }},
		{name: "a burstable pod", profile: "both-copy", change: func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("250m")}
		}},
		{name: "a pod with resources as a whole", profile: "both-copy", change: func(p *corev1.Pod) {
			whole := requests("cpu", "memory")
			p.Spec.Resources = &whole
		}},
		{name: "resources of the init container", profile: "both-sized", change: func(p *corev1.Pod) { p.Spec.Containers[0].Resources = requests("cpu", "memory") }},
		{name: "larger resources of the init container", profile: "both-large", change: func(p *corev1.Pod) { p.Spec.Containers[0].Resources = requests("cpu") }},
		{name: "resources of the init container of a pod without", profile: "both-sized"},
		{name: "the first container without GPUs", profile: "both-image", change: containers("main", "log", "istio-proxy")},
		{name: "the container of a PyTorchJob", profile: "both-rdma", change: containers("log", "pytorch")},
		{name: "the container of a TrainJob", profile: "both-image", change: containers("log", "node")},
		{name: "the default container", profile: "both-image", change: func(p *corev1.Pod) {
			containers("log", "pytorch", "main")(p)
			p.Annotations["kubectl.kubernetes.io/default-container"] = "main"
		}},
		{name: "a default container that is not there", profile: "both-image", change: func(p *corev1.Pod) {
			containers("main", "log")(p)
			p.Annotations["kubectl.kubernetes.io/default-container"] = "absent"
		}},
		{name: "nothing but a companion", profile: "both-image", change: containers("istio-proxy")},
		{name: "envFrom", profile: "both-settings", change: envFrom(corev1.EnvVar{Name: "A", Value: "mine"})},
		{name: "envFrom and a plugin that is replaced", profile: "both-replace", change: envFrom()},
		{name: "envFrom and another plugin", profile: "both-strict", change: envFrom(corev1.EnvVar{Name: "NCCL_NET_PLUGIN", Value: "none"})},
		{name: "envFrom and the Python package", profile: "both-python", change: envFrom()},
		{name: "envFrom and the Python package beside the profile's", profile: "both-python-more", change: envFrom()},
		{name: "envFrom and the Python package beside the user's", profile: "both-python", change: envFrom(corev1.EnvVar{Name: "PYTHONPATH", Value: "/src"})},
		{name: "envFrom and encryption", profile: "both-encrypted", change: hasKey("theirs", envFrom())},
		{name: "another network", profile: "both-image", change: setEnv(corev1.EnvVar{Name: "NCCL_NET", Value: "gIB"})},
		{name: "another network and another plugin", profile: "both-image", change: setEnv(corev1.EnvVar{Name: "NCCL_NET", Value: "gIB"}, corev1.EnvVar{Name: "NCCL_NET_PLUGIN", Value: "gIB"})},
		{name: "another network where a profile is strict", profile: "both-strict", change: setEnv(corev1.EnvVar{Name: "NCCL_NET", Value: "Socket"})},
		{name: "the network in lower case", profile: "both-strict", change: setEnv(corev1.EnvVar{Name: "NCCL_NET", Value: "evenkeel"})},
		{name: "a network from elsewhere", profile: "both-image", change: setEnv(
			corev1.EnvVar{Name: "NCCL_NET", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}})},
		{name: "chosen containers", profile: "both-image", change: func(p *corev1.Pod) {
			p.Annotations[evenkeel.ContainersKey] = " log ,"
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "log", Image: "x"})
		}},
		{name: "an unknown container", profile: "both-image", refusal: "the pod has pytorch", change: func(p *corev1.Pod) { p.Annotations[evenkeel.ContainersKey] = "trainer" }},
		{name: "a claim", profile: "both-image", change: func(p *corev1.Pod) {
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new(string)}}
			*p.Spec.ResourceClaims[0].ResourceClaimTemplateName = "gpu"
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "claims", Image: "x", Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}})
		}},
		{name: "the user's variables", profile: "both-settings", change: setEnv(
			corev1.EnvVar{Name: "A", Value: "mine"}, corev1.EnvVar{Name: "MINE", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
			corev1.EnvVar{Name: "NCCL_NET", Value: "IB"}, corev1.EnvVar{Name: "NCCL_NET_PLUGIN_REF_COUNT", Value: "0"}, corev1.EnvVar{Name: "EVENKEEL_FLOWS", Value: "9"})},
		{name: "another name of the node", profile: "both-settings", change: setEnv(corev1.EnvVar{Name: "EVENKEEL_NODE", Value: "rack-3"})},
		{name: "the node's name from the profile", profile: "both-node"},
		{name: "the Python package", profile: "both-python"},
		{name: "the Python package that is preinstalled", profile: "both-python-here"},
		{name: "the Python package beside the user's", profile: "both-python", change: setEnv(corev1.EnvVar{Name: "X", Value: "1"}, corev1.EnvVar{Name: "PYTHONPATH", Value: "/src"})},
		{name: "the Python package for an empty path", profile: "both-python", change: setEnv(corev1.EnvVar{Name: "PYTHONPATH", Value: ""})},
		{name: "the Python package that is there", profile: "both-python", change: setEnv(corev1.EnvVar{Name: "PYTHONPATH", Value: "/opt/evenkeel/plugin/python:/src"})},
		{name: "the Python package and a path from elsewhere", profile: "both-python", change: setEnv(
			corev1.EnvVar{Name: "PYTHONPATH", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}})},
		{name: "the Python package beside the profile's", profile: "both-python-more"},
		{name: "the Python package beside the user's and the profile's", profile: "both-python-more", change: setEnv(corev1.EnvVar{Name: "PYTHONPATH", Value: "/src"})},
		{name: "the Python package where the user mounts something", profile: "both-python", change: func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "d", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "d", MountPath: "/opt/evenkeel"}}
		}},
		{name: "a flight recorder of the user's", profile: "both-python", change: setEnv(corev1.EnvVar{Name: "EVENKEEL_FLIGHT_RECORDER", Value: "/tmp/rank_"})},
		{name: "a flight recorder of the profile's", profile: "both-python-recorder"},
		{name: "a flight recorder, preinstalled, and a key", profile: "both-python-here", change: hasKey("theirs", nil)},
		{name: "a mount in place of the flight recorder", profile: "both-python", change: func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "d", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "d", MountPath: "/var/run/evenkeel/"}}
		}},
		{name: "the flight recorder's volume is taken", profile: "both-python", refusal: `volume named "evenkeel-flight-recorder"`, change: func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "evenkeel-flight-recorder", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		}},
		{name: "a variable twice", profile: "both-settings", change: setEnv(corev1.EnvVar{Name: "X", Value: "1"}, corev1.EnvVar{Name: "X", Value: "2"})},
		{name: "another plugin", profile: "both-strict", change: setEnv(corev1.EnvVar{Name: "NCCL_NET_PLUGIN", Value: "none"})},
		{name: "another plugin is replaced", profile: "both-replace", change: setEnv(corev1.EnvVar{Name: "X", Value: "1"}, corev1.EnvVar{Name: "NCCL_NET_PLUGIN", Value: "none"})},
		{name: "the same plugin", profile: "both-strict", change: setEnv(corev1.EnvVar{Name: "NCCL_NET_PLUGIN", Value: "/opt/evenkeel/plugin/libnccl-net-evenkeel.so"})},
		{name: "the same plugin by its short name", profile: "both-strict", change: setEnv(corev1.EnvVar{Name: "NCCL_NET_PLUGIN", Value: "evenkeel"})},
		{name: "a mount of the user's", profile: "both-settings", change: func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "d", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "d", MountPath: "/opt/evenkeel/"}}
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "other", Image: "x", VolumeMounts: []corev1.VolumeMount{{Name: "d", MountPath: "/opt"}}})
		}},
		{name: "the volume is taken", profile: "both-image", refusal: `volume named "evenkeel"`, change: func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "evenkeel", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		}},
		{name: "the init container is taken", profile: "both-copy", refusal: `init container named "evenkeel-install"`, change: func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "evenkeel-install", Image: "x"}}
		}},
		{name: "the volume's name without a volume", profile: "both-present", change: func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "evenkeel", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		}},
		{name: "a forged mark", profile: "both-image", change: func(p *corev1.Pod) { p.Annotations[evenkeel.InjectedKey] = "both-image/1" }},
		{name: "a copied pod", profile: "both-image", change: func(p *corev1.Pod) {
			p.Annotations[evenkeel.SkippedKey], p.Annotations[evenkeel.PluginStatusKey], p.Annotations[evenkeel.RDMAResourceKey] = "old", "Loaded", "rdma/x=1"
			p.Annotations[evenkeel.SuspectsKey] = "of another pod"
		}},
		{name: "the host's network", profile: "both-settings", change: func(p *corev1.Pod) { p.Spec.HostNetwork = true }},
		{name: "the host's network with a device", profile: "both-rdma", change: func(p *corev1.Pod) { p.Spec.HostNetwork = true }},
		{name: "users of its own", profile: "both-rdma", change: func(p *corev1.Pod) { p.Spec.HostUsers = new(bool) }},
		{name: "Windows with a device", profile: "both-rdma", change: func(p *corev1.Pod) { p.Spec.OS = &corev1.PodOS{Name: corev1.Windows} }},
		{name: "Windows", profile: "both-image", change: func(p *corev1.Pod) { p.Spec.OS = &corev1.PodOS{Name: corev1.Windows} }},
		{name: "placed already", profile: "both-image", change: func(p *corev1.Pod) { p.Spec.NodeName = "gpu-1" }},
		{name: "alternatives of nodes", profile: "both-image", change: required(corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{zone}},
			corev1.NodeSelectorTerm{}, corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{"n"}}}})},
		{name: "the user's own rule about nodes", profile: "both-image", change: required(corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{healthy(corev1.NodeSelectorOpExists)}})},
		{name: "the user's preferences of nodes", profile: "both-image", change: func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{}, NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{
				{Weight: 1, Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{zone}}}}}}
		}},
		{name: "proven nodes are preferred already", profile: "both-image", change: func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{
				{Weight: 1, Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{healthy(corev1.NodeSelectorOpIn)}}}}}}
		}},
		{name: "affinity to pods", profile: "both-image", change: func(p *corev1.Pod) { p.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{}} }},
		{name: "a device", profile: "both-rdma"},
		{name: "a device of the user's", profile: "both-rdma", change: func(p *corev1.Pod) { p.Spec.Containers[0].Resources = requests("rdma/other", "cpu") }},
		{name: "the same device", profile: "both-rdma", change: func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"rdma/hca": resource.MustParse("2"), "cpu": resource.MustParse("1")}
		}},
		{name: "another number of devices", profile: "both-rdma", change: func(p *corev1.Pod) { p.Spec.Containers[0].Resources = requests("rdma/hca") }},
		{name: "a device beside GPUs", profile: "both-rdma", change: func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources = requests("nvidia.com/gpu", "cpu")
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"SYS_PTRACE"}}}
		}},
		{name: "the capability is dropped", profile: "both-rdma", change: func(p *corev1.Pod) {
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"IPC_LOCK"}}}
		}},
		{name: "the capability is there", profile: "both-rdma", change: func(p *corev1.Pod) {
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"IPC_LOCK"}}}
		}},
		{name: "networks of the user's", profile: "both-rdma", change: func(p *corev1.Pod) { p.Annotations[evenkeel.NetworksKey] = "mine" }},
		{name: "the same networks", profile: "both-rdma", change: func(p *corev1.Pod) { p.Annotations[evenkeel.NetworksKey] = "rail0,rail1" }},
		{name: "RDMA without a device", profile: "both-rdma-none", refusal: "requires RDMA and has no device to assign"},
		{name: "encryption", profile: "both-encrypted", change: hasKey("theirs", nil)},
		{name: "encryption beside a sidecar", profile: "both-encrypted", change: hasKey("theirs", func(p *corev1.Pod) {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "istio-proxy", Image: "x"})
		})},
		{name: "encryption, preinstalled", profile: "both-encrypted-present", change: hasKey("theirs", nil)},
		{name: "encryption and a trusted network", profile: "both-encrypted-rdma", change: hasKey("theirs", nil)},
		{name: "a key without encryption", profile: "both-settings", change: hasKey("their.secret", nil)},
		{name: "a key beside the user's", profile: "both-encrypted", change: hasKey("theirs", setEnv(corev1.EnvVar{Name: "EVENKEEL_JOB_KEY", Value: "0"}, corev1.EnvVar{Name: "EVENKEEL_JOB_KEY_FILE", Value: "/k"}))},
		{name: "a key beside the user's mount", profile: "both-present", change: hasKey("theirs", func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "d", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "d", MountPath: "/var/run/secrets/evenkeel.dev/"}}
		})},
		{name: "a key and a mount in place of the plugin", profile: "both-settings", change: hasKey("theirs", func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "d", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "d", MountPath: "/opt/evenkeel"}}
		})},
		{name: "a key on Windows", profile: "both-encrypted", change: hasKey("theirs", func(p *corev1.Pod) { p.Spec.OS = &corev1.PodOS{Name: corev1.Windows} })},
		{name: "a copied label of a key", profile: "both-settings", change: func(p *corev1.Pod) { p.Labels = map[string]string{evenkeel.JobKeyKey: "train-key-01234567"} }},
		{name: "encryption without a key", profile: "both-encrypted", refusal: "names a Secret of its namespace with the entry job-key"},
		{name: "encryption with a copied label of a key", profile: "both-encrypted", refusal: "names a Secret of its namespace", change: func(p *corev1.Pod) { p.Labels = map[string]string{evenkeel.JobKeyKey: "train-key-01234567"} }},
		{name: "a key of no name", profile: "both-encrypted", change: hasKey("../theirs", nil), refusal: `evenkeel.dev/job-key is "../theirs"`},
		{name: "a key of too long a name", profile: "both-encrypted", change: hasKey(strings.Repeat("a", 254), nil), refusal: "the name of a Secret"},
		{name: "the key's volume is taken", profile: "both-encrypted", refusal: `volume named "evenkeel-job-key"`, change: hasKey("theirs", func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "evenkeel-job-key", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		})},
		{name: "encryption turned off", profile: "both-encrypted", refusal: "sets EVENKEEL_ENCRYPTION itself", change: hasKey("theirs", setEnv(corev1.EnvVar{Name: "EVENKEEL_ENCRYPTION", Value: "off"}))},
		{name: "encryption and a network said to be trusted", profile: "both-encrypted", refusal: "sets EVENKEEL_RDMA_NETWORK itself", change: hasKey("theirs", setEnv(corev1.EnvVar{Name: "EVENKEEL_RDMA_NETWORK", Value: "trusted"}))},
		{name: "encryption and NCCL's sockets", profile: "both-encrypted", refusal: "sets NCCL_NET itself", change: hasKey("theirs", setEnv(corev1.EnvVar{Name: "NCCL_NET", Value: "Socket"}))},
		{name: "encryption and another plugin", profile: "both-encrypted", refusal: "sets NCCL_NET_PLUGIN itself", change: hasKey("theirs", setEnv(corev1.EnvVar{Name: "NCCL_NET_PLUGIN", Value: "none"}))},
		{name: "encryption and a mount in place of the plugin", profile: "both-encrypted", refusal: "mounts /opt/evenkeel itself", change: hasKey("theirs", func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "d", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "d", MountPath: "/opt/evenkeel"}}
		})},
		{name: "the same variables", profile: "both-encrypted", change: hasKey("theirs", setEnv(corev1.EnvVar{Name: "EVENKEEL_ENCRYPTION", Value: "required"}, corev1.EnvVar{Name: "NCCL_NET", Value: "Evenkeel"}))},
		{name: "a profile for others", profile: "both-elsewhere", refusal: "is not for namespace"},
		{name: "a profile for others by an expression", profile: "both-not-here", refusal: "is not for namespace"},
		{name: "a profile for the namespace", profile: "both-here"},
		{name: "no such profile", profile: "absent", refusal: `no NetworkProfile is named "absent"`},
		{name: "declined", profile: ""},
		{name: "of an owner", profile: "both-image", change: func(p *corev1.Pod) {
			yes := true
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "other", UID: "1"}, {APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "r", UID: "2", Controller: &yes}}
		}},
		{name: "of a JobSet", profile: "both-image", change: func(p *corev1.Pod) {
			yes := true
			p.Labels = map[string]string{"jobset.sigs.k8s.io/jobset-name": "s", "jobset.sigs.k8s.io/jobset-uid": "3"}
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "batch/v1", Kind: "Job", Name: "r", UID: "2", Controller: &yes}}
		}},
		{name: "many containers and variables", profile: "both-settings", change: func(p *corev1.Pod) {
			envFrom()(p)
			p.Annotations[evenkeel.ContainersKey] = "pytorch"
			for len(p.Spec.Containers) < 20 {
				c := p.Spec.Containers[0].DeepCopy()
				c.Name = fmt.Sprintf("c%d", len(p.Spec.Containers))
				for len(c.Env) < 200 {
					c.Env = append(c.Env, corev1.EnvVar{Name: "V" + strings.Repeat("x", len(c.Env)), Value: "1"})
				}
				p.Spec.Containers = append(p.Spec.Containers, *c)
				p.Annotations[evenkeel.ContainersKey] += "," + c.Name
			}
		}},
	}
	for _, name := range inject.Companions() {
		cases = append(cases, injectionCase{name: "companion " + name, profile: "both-image", change: containers(name, "main")})
	}
	for _, name := range append(accelerator.Resources(), "nvidia.com/mig-1g.10gb", "nvidia.com/rail0", "amd.com/cpx_nps4", "amd.com/x") {
		cases = append(cases, injectionCase{name: "accelerator " + name, profile: "both-image", change: func(p *corev1.Pod) {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "accelerated", Image: "x", Resources: requests(name)})
		}})
	}
	return cases
}

// pod is the case's pod, as its controller creates it.
func (c injectionCase) pod(namespace string) *corev1.Pod {
	p := plainPod(namespace)
	p.GenerateName, p.Name = "", "p"
	p.Annotations = map[string]string{evenkeel.ProfileKey: c.profile}
	if c.change != nil {
		c.change(p)
	}
	return p
}

// notPinned are the annotations of pods that only the webhook writes: it pins the profile to all pods of an owner, and marks those
// whose plugin reports.
var notPinned = []string{
	evenkeel.InjectedKey, evenkeel.ContainersKey, evenkeel.DeliveryKey, evenkeel.PluginPathKey, evenkeel.ConflictPolicyKey, evenkeel.PluginImageKey, evenkeel.ImagePullSecretsKey,
	evenkeel.EnvironmentKey, evenkeel.InstallResourcesKey, evenkeel.PythonKey, evenkeel.RDMAResourceKey, evenkeel.MemoryLockKey, evenkeel.RDMANetworksKey, evenkeel.PluginStatusKey,
}

// comparable returns what both ways have to agree on.
func comparable(pod *corev1.Pod) *corev1.Pod {
	same := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels, Annotations: maps.Clone(pod.Annotations)}, Spec: *pod.Spec.DeepCopy()}
	for _, key := range notPinned {
		delete(same.Annotations, key)
	}
	for i := range same.Spec.Containers { // how the plugin reports, which the webhook alone adds
		c := &same.Spec.Containers[i]
		var env []corev1.EnvVar
		for _, e := range c.Env {
			if e.Name != "EVENKEEL_REPORT" && e.Name != "EVENKEEL_POD_UID" {
				env = append(env, e)
			}
		}
		c.Env = env
	}
	return same
}

// mutatingPolicies is the first version of Kubernetes that serves MutatingAdmissionPolicy v1.
const mutatingPolicies = "1.36"

// useMutatingPolicy replaces the webhooks by the chart's policies until the test ends.
func useMutatingPolicy(t *testing.T) {
	t.Helper()
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	objects, err := apiserver.Chart(root, systemNamespace, "--no-hooks", "--set", "defaultProfile.spec.plugin.image="+image, "--set", "injection.mode=MutatingAdmissionPolicy")
	if err != nil {
		t.Fatal(err)
	}
	ns := newNamespace(t, nil)
	t.Cleanup(func() { // the last one: what other tests need is in force again
		err := wait.PollUntilContextTimeout(context.Background(), 50*time.Millisecond, waitTimeout, true, func(ctx context.Context) (bool, error) {
			pod := injectionCase{profile: "default"}.pod(ns)
			job, _ := newJob("Job", ns, "default")
			if dryRun(ctx, pod) != nil || dryRun(ctx, job) != nil {
				return false, nil
			}
			templates, err := workload.Templates(job)
			return err == nil && templates[0].Label(evenkeel.ProfileKey) != "" && templates[0].Annotations()[evenkeel.ProfileKey] == "" && pod.Annotations[evenkeel.DeliveryKey] != "", err
		})
		if err != nil {
			t.Errorf("the webhooks are not in force again: %v", err)
		}
	})
	if err := admin.Delete(t.Context(), install.objects["MutatingWebhookConfiguration/evenkeel"].DeepCopy()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { restoreWebhooks(t) })
	for _, object := range objects {
		if install.objects[object.GetKind()+"/"+object.GetName()] != nil {
			continue
		}
		if err := admin.Create(t.Context(), object); err != nil {
			t.Fatalf("create the chart's %s %s: %v", object.GetKind(), object.GetName(), err)
		}
		remove(t, object)
	}
}

// An outcome is what the API server made of a pod.
type outcome struct {
	pod *corev1.Pod
	err error
}

// outcomes are those of all cases.
func outcomes(t *testing.T, namespace string) map[string]outcome {
	t.Helper()
	all := map[string]outcome{}
	for _, c := range injectionCases() {
		pod := c.pod(namespace)
		err := dryRun(t.Context(), pod)
		all[c.name] = outcome{pod, err}
	}
	return all
}

// TestPolicyInjection compares what the policies do with what the webhooks did before, and sees to what else they have to do.
func TestPolicyInjection(t *testing.T) {
	apiserver.Needs(t, mutatingPolicies, "MutatingAdmissionPolicy v1")
	gate, pool, _ := newGate(t, "policy-gate", waitRegardless)
	ns := newNamespace(t, map[string]string{"team": "mine"})
	for name, spec := range injectionProfiles() {
		newProfile(t, name, spec)
	}
	webhook := outcomes(t, ns)
	useMutatingPolicy(t)
	eventually(t, "the policies are in force", func(ctx context.Context) (bool, error) {
		last := injectionCase{profile: "default"}.pod(ns)
		err := dryRun(ctx, last)
		return dryRun(ctx, injectionCase{profile: "absent"}.pod(ns)) != nil && err == nil && len(last.Spec.SchedulingGates) == 1, nil
	})
	t.Run("cases", func(t *testing.T) { samePods(t, webhook, outcomes(t, ns)) })
	t.Run("init container", func(t *testing.T) { keepsInitContainer(t, asking("both-copy")) })
	t.Run("gates", func(t *testing.T) { policyGates(t, gate, pool) })
	t.Run("jobs", policyJobs)
	t.Run("warnings", policyWarnings)
	t.Run("doctor", func(t *testing.T) {
		_, findings := doctorOf(t)
		if !finds(findings, doctor.OK, "admission", "there is no webhook") || !finds(findings, doctor.OK, "policies", "serves MutatingAdmissionPolicy v1") {
			t.Errorf("%+v", findings)
		}
	})
	t.Run("that cannot be evaluated", func(t *testing.T) { brokenPolicy(t, ns) })
}

// samePods compares what both ways made of the cases.
func samePods(t *testing.T, webhook, policy map[string]outcome) {
	for _, c := range injectionCases() {
		t.Run(c.name, func(t *testing.T) {
			a, b := webhook[c.name], policy[c.name]
			if c.refusal != "" {
				refused(t, a.err, c.refusal)
				refused(t, b.err, c.refusal)
				return
			}
			if a.err != nil || b.err != nil {
				t.Fatalf("webhook: %v, policy: %v", a.err, b.err)
			}
			if (a.pod.Annotations[evenkeel.InjectedKey] == "") != (b.pod.Annotations[evenkeel.InjectedKey] == "") {
				t.Errorf("webhook injects: %q, policy: %q", a.pod.Annotations[evenkeel.InjectedKey], b.pod.Annotations[evenkeel.InjectedKey])
			}
			if diff := gocmp.Diff(comparable(a.pod), comparable(b.pod)); diff != "" {
				t.Errorf("webhook (-) and policy (+) differ:\n%s", diff)
			}
			again := b.pod.DeepCopy()
			again.ResourceVersion, again.UID, again.CreationTimestamp = "", "", metav1.Time{}
			if err := dryRun(t.Context(), again); err != nil {
				t.Fatalf("a second time: %v", err)
			}
			if diff := gocmp.Diff(comparable(b.pod), comparable(again)); diff != "" {
				t.Errorf("a second time changes the pod:\n%s", diff)
			}
		})
	}
}

// policyGates has pods of a profile whose jobs wait.
func policyGates(t *testing.T, policy *evenkeel.NetworkCheckPolicy, pool map[string]string) {
	ns := newNamespace(t, nil)
	job := heldJob(t, "PyTorchJob", ns, pool)
	createJob(t, job)
	isStateOf(t, job, "runs") // its pods wait instead
	pod := podOf(t, job, []string{"spec", "pytorchReplicaSpecs", "Worker", "template"})
	changed := func(change func(*corev1.Pod)) *corev1.Pod {
		p := pod.DeepCopy()
		change(p)
		return p
	}
	gated := func(p *corev1.Pod) bool {
		return len(p.Spec.SchedulingGates) == 1 && p.Spec.SchedulingGates[0].Name == evenkeel.SchedulingGate && p.Labels[evenkeel.GatedKey] == evenkeel.GatedValue
	}
	for name, p := range map[string]*corev1.Pod{
		"declined": changed(func(p *corev1.Pod) { p.Annotations[evenkeel.GateKey] = evenkeel.GateDisabled }),
		"queued":   changed(func(p *corev1.Pod) { p.Labels["kueue.x-k8s.io/podset"] = "main" }),
		"placed":   changed(func(p *corev1.Pod) { p.Spec.NodeName = "gpu-1" }),
		"Windows":  changed(func(p *corev1.Pod) { p.Spec.OS = &corev1.PodOS{Name: corev1.Windows}; p.Spec.NodeSelector = nil }),
		"of another profile with a label that was copied": changed(func(p *corev1.Pod) {
			p.Annotations[evenkeel.ProfileKey], p.Labels[evenkeel.GatedKey] = "both-image", evenkeel.GatedValue
		}),
	} {
		if err := dryRun(t.Context(), p); err != nil || len(p.Spec.SchedulingGates) != 0 || p.Labels[evenkeel.GatedKey] != "" || p.Annotations[evenkeel.InjectedKey] == "" {
			t.Errorf("a pod that is %s: %v, gates %v, labels %v", name, err, p.Spec.SchedulingGates, p.Labels)
		}
	}
	// The webhook has injected its job, which runs.
	before := changed(func(p *corev1.Pod) {
		p.Labels[evenkeel.ProfileKey] = p.Annotations[evenkeel.ProfileKey]
		delete(p.Annotations, evenkeel.ProfileKey)
	})
	if err := dryRun(t.Context(), before); err != nil || len(before.Spec.SchedulingGates) != 0 || before.Annotations[evenkeel.InjectedKey] == "" {
		t.Errorf("a pod of a job from before: %v, gates %v, annotations %v", err, before.Spec.SchedulingGates, before.Annotations)
	}
	beside := changed(func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "another"}} })
	if err := dryRun(t.Context(), beside); err != nil || len(beside.Spec.SchedulingGates) != 2 {
		t.Errorf("beside another gate: %v, %v", err, beside.Spec.SchedulingGates)
	}
	refused(t, dryRun(t.Context(), changed(func(p *corev1.Pod) { p.Annotations[evenkeel.GateKey] = "maybe" })), `annotation evenkeel.dev/gate is "maybe"`)
	first := createPod(t, pod.DeepCopy())
	remove(t, first)
	if !gated(first) {
		t.Fatalf("gates %v, labels %v", first.Spec.SchedulingGates, first.Labels)
	}
	patch := func(text string) {
		if err := admin.Patch(t.Context(), policy, client.RawPatch(types.MergePatchType, []byte(text))); err != nil {
			t.Fatal(err)
		}
	}
	opened := func(p *corev1.Pod) {
		eventually(t, "the pod may be scheduled", func(ctx context.Context) (bool, error) {
			err := admin.Get(ctx, client.ObjectKeyFromObject(p), p)
			return len(p.Spec.SchedulingGates) == 0 && p.Labels[evenkeel.GatedKey] == "", err
		})
	}
	patch(`{"spec": {"gate": {"onTimeout": "Start"}}}`)
	opened(first)
	patch(`{"spec": {"gate": {"onTimeout": "Wait", "optOut": "Forbidden"}}}`)
	later := createPod(t, pod.DeepCopy()) // of a job that runs
	remove(t, later)
	opened(later)
	eventually(t, "nobody may decline", func(ctx context.Context) (bool, error) {
		err := dryRun(ctx, changed(func(p *corev1.Pod) { p.Annotations[evenkeel.GateKey] = evenkeel.GateDisabled }))
		return err != nil && strings.Contains(err.Error(), "NetworkCheckPolicy policy-gate gates every job"), nil
	})
}

// policyJobs has a job of every kind: its templates get what its pods have to have.
func policyJobs(t *testing.T) {
	installKinds(t,
		jobSetSource,
		mpiJobSource,
	)
	ns := newNamespace(t, nil)
	for kind, text := range map[string]string{
		"Job":             `{apiVersion: batch/v1, kind: Job, spec: {template: T}}`,
		"PyTorchJob":      `{apiVersion: kubeflow.org/v1, kind: PyTorchJob, spec: {pytorchReplicaSpecs: {Master: {template: T}, Worker: {template: T}}}}`,
		"MPIJob":          `{apiVersion: kubeflow.org/v2beta1, kind: MPIJob, spec: {mpiReplicaSpecs: {Launcher: {template: T}, Worker: {template: T}}}}`,
		"JobSet":          `{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, spec: {replicatedJobs: [{name: a, template: {spec: {template: T}}}, {name: b, template: {spec: {template: T}}}]}}`,
		"Volcano's Job":   `{apiVersion: batch.volcano.sh/v1alpha1, kind: Job, spec: {minAvailable: 2, tasks: [{name: worker, replicas: 2, template: T}]}}`,
		"LeaderWorkerSet": `{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, spec: {leaderWorkerTemplate: {size: 2, leaderTemplate: T, workerTemplate: T}}}`,
		"without leader":  `{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, spec: {leaderWorkerTemplate: {size: 2, workerTemplate: T}}}`,
	} {
		t.Run(kind, func(t *testing.T) {
			for annotations, own := range map[string]string{``: "", `metadata: {annotations: {"evenkeel.dev/containers": own}}, `: "own"} {
				job := &unstructured.Unstructured{}
				text := strings.ReplaceAll(text, "emplate: T", `emplate: {`+annotations+`spec: {restartPolicy: Never, containers: [{name: c, image: "registry.example.com/train:1"}]}}`)
				if err := yaml.UnmarshalStrict([]byte(text), &job.Object); err != nil {
					t.Fatal(err)
				}
				job.SetNamespace(ns)
				job.SetName("handed")
				job.SetAnnotations(map[string]string{evenkeel.ProfileKey: "both-image", evenkeel.ContainersKey: "c, of-another-template", evenkeel.GateKey: evenkeel.GateDisabled, "other": "x"})
				eventually(t, "the API server knows the kind", func(ctx context.Context) (bool, error) {
					err := dryRun(ctx, job)
					return err == nil, nil
				})
				templates, err := workload.Templates(job)
				if err != nil || len(templates) == 0 {
					t.Fatalf("%v %v", templates, err)
				}
				for _, template := range templates {
					want := map[string]string{evenkeel.ProfileKey: "both-image", evenkeel.ContainersKey: cmp.Or(own, "c"), evenkeel.GateKey: evenkeel.GateDisabled}
					if diff := gocmp.Diff(want, template.Annotations()); diff != "" {
						t.Errorf("%s: %s", template.Path, diff)
					}
				}
			}
		})
	}
	keepsTemplates(t, ns, "both-image", evenkeel.ProfileKey)
	owned, _ := newJob("Job", ns, "both-image")
	yes := true
	owned.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "x", UID: "1", Controller: &yes}})
	if err := dryRun(t.Context(), owned); err != nil {
		t.Fatal(err)
	}
	if pod := podOf(t, owned, []string{"spec", "template"}); pod.Annotations[evenkeel.ProfileKey] != "" {
		t.Errorf("a job that another object made: %v", pod.Annotations)
	}
}

// policyWarnings asks for what only the webhook does.
func policyWarnings(t *testing.T) {
	ns := newNamespace(t, nil)
	user, told := newUser(t)
	try := func(object client.Object, want string) {
		t.Helper()
		told.take()
		if err := user.Create(t.Context(), object, client.DryRunAll); err != nil {
			t.Fatal(err)
		}
		if text := strings.Join(told.take(), "\n"); (want == "") != (text == "") || !strings.Contains(text, want) {
			t.Errorf("warned %q, want %q", text, want)
		}
	}
	asking, _ := newJob("Job", ns, "both-image")
	asking.SetAnnotations(map[string]string{evenkeel.ProfileKey: "both-image", evenkeel.ReductionKey: "2"})
	eventually(t, "the policies that warn are in force", func(ctx context.Context) (bool, error) {
		err := user.Create(ctx, asking.DeepCopy(), client.DryRunAll)
		return len(told.take()) > 0, err
	})
	try(asking, "evenkeel.dev/reduction has no effect")
	plain, _ := newJob("Job", ns, "both-image")
	try(plain, "")
	owned, _ := newJob("Job", ns, "both-image")
	yes := true
	owned.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "x", UID: "1", Controller: &yes}})
	try(owned, "evenkeel.dev/profile has no effect on an object that another one made")
	try(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "defaults", Labels: map[string]string{evenkeel.DefaultProfileKey: "both-image"}}}, "evenkeel.dev/default-profile has no effect")
	try(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "plain"}}, "")
}

// brokenPolicy: if the API server cannot evaluate a policy, pods that asked for a profile are refused, and no others.
func brokenPolicy(t *testing.T, ns string) {
	asking := func(ctx context.Context) error { return dryRun(ctx, injectionCase{profile: "both-image"}.pod(ns)) }
	for what, patch := range map[string]string{
		"a condition":   `{"spec": {"matchConditions": [{"name": "broken", "expression": "object.spec.nothing == params.metadata.name"}]}}`,
		"a mutation":    `{"spec": {"matchConditions": null, "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": "[JSONPatch{op: 'remove', path: '/spec/nothing'}]"}}]}}`,
		"the parameter": `{"spec": {"paramKind": {"apiVersion": "evenkeel.dev/v1alpha1", "kind": "NothingOfTheKind"}}}`,
	} {
		t.Run(what, func(t *testing.T) {
			policy := &admissionregistrationv1.MutatingAdmissionPolicy{}
			if err := admin.Get(t.Context(), client.ObjectKey{Name: "evenkeel-pods"}, policy); err != nil {
				t.Fatal(err)
			}
			before := policy.DeepCopy()
			if err := admin.Patch(t.Context(), policy, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				before.ResourceVersion = policy.ResourceVersion
				if err := admin.Update(context.Background(), before); err != nil {
					t.Error(err)
				}
				if err := wait.PollUntilContextTimeout(context.Background(), 50*time.Millisecond, waitTimeout, true, func(ctx context.Context) (bool, error) { return asking(ctx) == nil, nil }); err != nil {
					t.Error(err)
				}
			})
			eventually(t, "pods that ask are refused", func(ctx context.Context) (bool, error) {
				err := asking(ctx)
				return err != nil && strings.Contains(err.Error(), "the policy evenkeel-pods could not be evaluated"), nil
			})
			if err := dryRun(t.Context(), plainPod(ns)); err != nil {
				t.Errorf("the pod of somebody else: %v", err)
			}
		})
	}
}
