package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Delivery is how the plugin's files get into a container.
//
// +kubebuilder:validation:Enum=Auto;ImageVolume;InitContainer;Preinstalled
type Delivery string

const (
	// DeliveryAuto is ImageVolume if every matching node can mount images, else InitContainer.
	DeliveryAuto Delivery = "Auto"
	// DeliveryImageVolume mounts the plugin image as a read-only volume (Kubernetes 1.35, containerd 2.1, CRI-O 1.31).
	DeliveryImageVolume Delivery = "ImageVolume"
	// DeliveryInitContainer copies the files into an emptyDir before the containers start.
	DeliveryInitContainer Delivery = "InitContainer"
	// DeliveryPreinstalled adds nothing: the training image has the files.
	DeliveryPreinstalled Delivery = "Preinstalled"
)

// ConflictPolicy says what happens to a container that names a network plugin itself.
//
// +kubebuilder:validation:Enum=Keep;Replace
type ConflictPolicy string

const (
	// ConflictKeep leaves the container's own plugin and reports it.
	ConflictKeep ConflictPolicy = "Keep"
	// ConflictReplace replaces it by Evenkeel.
	ConflictReplace ConflictPolicy = "Replace"
)

// UnavailablePolicy says what NCCL does where it cannot use the plugin.
//
// +kubebuilder:validation:Enum=Fallback;Fail
type UnavailablePolicy string

const (
	// UnavailableFallback uses NCCL's own sockets.
	UnavailableFallback UnavailablePolicy = "Fallback"
	// UnavailableFail ends the job.
	UnavailableFail UnavailablePolicy = "Fail"
)

// TransportMode selects the transport.
//
// +kubebuilder:validation:Enum=Auto;TCP;RDMA
type TransportMode string

const (
	// TransportAuto lets the plugin choose for each pair of peers. Jobs get an RDMA device if 90 percent of the
	// matching nodes that they can run on now offer it, and keep getting it while 75 percent do.
	TransportAuto TransportMode = "Auto"
	// TransportTCP uses TCP flows only.
	TransportTCP TransportMode = "TCP"
	// TransportRDMA gives jobs an RDMA device, and requires RDMA.
	TransportRDMA TransportMode = "RDMA"
)

// Encryption says whether the plugin and the reduction servers encrypt what they send.
//
// +kubebuilder:validation:Enum=Disabled;Required
type Encryption string

const (
	// EncryptionDisabled sends in clear.
	EncryptionDisabled Encryption = "Disabled"
	// EncryptionRequired encrypts all TCP traffic of the plugin and the reduction servers, and refuses peers and pods that
	// would not.
	EncryptionRequired Encryption = "Required"
)

// NetworkTrust says what the network of RDMA devices is.
//
// +kubebuilder:validation:Enum=Untrusted;Trusted
type NetworkTrust string

const (
	// NetworkUntrusted keeps encrypted jobs off RDMA, which is not encrypted.
	NetworkUntrusted NetworkTrust = "Untrusted"
	// NetworkTrusted lets encrypted jobs send in clear over RDMA, as the network is protected otherwise.
	NetworkTrusted NetworkTrust = "Trusted"
)

// MemoryLock is how containers may lock the memory that RDMA devices read and write.
//
// +kubebuilder:validation:Enum=RuntimeDefault;Capability
type MemoryLock string

const (
	// MemoryLockRuntimeDefault keeps the limit of the container runtime.
	MemoryLockRuntimeDefault MemoryLock = "RuntimeDefault"
	// MemoryLockCapability adds the capability IPC_LOCK, which lifts the limit for containers that run as root. Namespaces
	// that enforce the pod standard baseline or restricted refuse it.
	MemoryLockCapability MemoryLock = "Capability"
)

// TunerSource says where the network of the plugin's tuner is measured.
//
// +kubebuilder:validation:Enum=None;Preflight
type TunerSource string

const (
	// TunerNone sets nothing: NCCL chooses alone, unless env says what was measured.
	TunerNone TunerSource = "None"
	// TunerPreflight gives new jobs what checks measured on the profile's nodes.
	TunerPreflight TunerSource = "Preflight"
)

// NetworkProfileSpec says which plugin jobs get, how, with which settings, and which jobs may use it.
//
// +kubebuilder:validation:XValidation:rule="!has(self.transport) || !has(self.transport.encryption) || self.transport.encryption != 'Required' || !has(self.env) || self.env.all(e, !(e.name in ['NCCL_NET', 'EVENKEEL_JOB_KEY', 'EVENKEEL_JOB_KEY_FILE']))",message="with transport.encryption Required, Evenkeel sets NCCL_NET and the job's key: remove NCCL_NET, EVENKEEL_JOB_KEY and EVENKEEL_JOB_KEY_FILE from env"
// +kubebuilder:validation:XValidation:rule="!has(self.plugin.unavailablePolicy) || self.plugin.unavailablePolicy != 'Fail' || !has(self.env) || self.env.all(e, e.name != 'NCCL_NET')",message="plugin.unavailablePolicy Fail sets NCCL_NET to Evenkeel: remove NCCL_NET from env"
type NetworkProfileSpec struct {
	// namespaceSelector selects the namespaces whose jobs may use the profile. Absent: all.
	// +optional
	NamespaceSelector *metav1.LabelSelector `json:"namespaceSelector,omitempty"`

	// nodeSelector selects the nodes on which jobs of this profile are expected: delivery Auto, RDMA and the tuner look at
	// these. It places no pod: jobs have to select the nodes themselves. Absent: all.
	// +optional
	NodeSelector *metav1.LabelSelector `json:"nodeSelector,omitempty"`

	// plugin says which plugin is used, and how it is delivered.
	// +required
	Plugin PluginSpec `json:"plugin,omitzero"`

	// imagePullSecrets name Secrets in the job's namespace with credentials for the plugin image and that of the reduction
	// servers.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	ImagePullSecrets []SecretReference `json:"imagePullSecrets,omitempty"`

	// transport has the plugin's settings.
	// +optional
	// +kubebuilder:default={}
	Transport TransportSpec `json:"transport,omitzero"`

	// env is added to the containers that get the plugin. Variables that a container sets itself stay.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:XValidation:rule="self.all(e, e.name != 'NCCL_NET_PLUGIN')",message="NCCL_NET_PLUGIN is set by Evenkeel itself"
	// +kubebuilder:validation:XValidation:rule="self.all(e, !(e.name in ['EVENKEEL_ENCRYPTION', 'EVENKEEL_RDMA_NETWORK']))",message="EVENKEEL_ENCRYPTION and EVENKEEL_RDMA_NETWORK are set by transport.encryption and transport.rdma.networkTrust"
	// +kubebuilder:validation:XValidation:rule="self.all(e, e.name != 'LD_LIBRARY_PATH')",message="LD_LIBRARY_PATH would hide libraries of the training image"
	Env []EnvVar `json:"env,omitempty"`

	// reduction says which jobs get reduction servers, and how many.
	// +optional
	// +kubebuilder:default={mode:OnRequest}
	Reduction ReductionSpec `json:"reduction,omitzero"`

	// check says how the nodes of the profile's jobs are checked.
	// +optional
	Check ProfileCheckSpec `json:"check,omitzero"`

	// tuner says whether new jobs get what checks measured, for the plugin's choice of NCCL's algorithms.
	// +optional
	Tuner TunerSpec `json:"tuner,omitzero"`
}

// TunerSpec says whether new jobs get what checks measured: EVENKEEL_TUNER_BANDWIDTH and EVENKEEL_TUNER_LATENCY.
// docs/operate.md, NCCL's algorithms, has the rules.
//
// +kubebuilder:validation:MinProperties=1
type TunerSpec struct {
	// source is None (the default) or Preflight: new jobs get the bandwidth and latency that checks measured on the
	// profile's nodes. It needs a NetworkCheckPolicy, and recent measurements of half of the nodes. Other jobs get
	// nothing; an Event says why.
	// +optional
	// +kubebuilder:default=None
	Source TunerSource `json:"source,omitempty"`
}

// ProfileCheckSpec says how the nodes of the profile's jobs are checked.
//
// +kubebuilder:validation:MinProperties=1
type ProfileCheckSpec struct {
	// image has evenkeel-bench, for checks with this profile and the runner Bench that name no image. It loads the
	// profile's plugin. Default: the installation's.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Image string `json:"image,omitempty"`
}

// ReductionMode says which jobs get reduction servers.
//
// +kubebuilder:validation:Enum=Disabled;OnRequest;Always
type ReductionMode string

const (
	// ReductionDisabled refuses jobs that ask for them.
	ReductionDisabled ReductionMode = "Disabled"
	// ReductionOnRequest gives them to jobs that ask for them.
	ReductionOnRequest ReductionMode = "OnRequest"
	// ReductionAlways gives them to every job with the annotation not set to Off.
	ReductionAlways ReductionMode = "Always"
)

// ReductionSpec says which jobs get reduction servers, and how many.
//
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.servers) || !has(self.maxServers) || self.servers <= self.maxServers",message="servers is larger than maxServers"
type ReductionSpec struct {
	// image of the servers, of the repository that the installation's has. Plugin and servers of different protocols
	// refuse each other, so set it with plugin.image: jobs get no servers while the tags of the two do not go together.
	// Default: the installation's.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Image string `json:"image,omitempty"`

	// mode is Disabled (jobs that ask are refused), OnRequest (the default) or Always (jobs may decline).
	// +optional
	// +kubebuilder:default=OnRequest
	Mode ReductionMode `json:"mode,omitempty"`

	// servers is the number for jobs without the annotation, with mode Always. Absent: computed from sizing.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	Servers *int32 `json:"servers,omitempty"`

	// maxServers is the maximum for one job. Default: 16.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	// +kubebuilder:default=16
	MaxServers *int32 `json:"maxServers,omitempty"`

	// sizing determines the number of servers for Auto: workers x workerBandwidth / serverBandwidth. Absent: one for each
	// worker.
	// +optional
	Sizing SizingSpec `json:"sizing,omitzero"`

	// server has the resources and the placement of each server.
	// +optional
	// +kubebuilder:default={}
	Server ReductionServerSpec `json:"server,omitzero"`
}

// PlacementMode is where reduction servers go.
//
// +kubebuilder:validation:Enum=Spread;NearWorkers
type PlacementMode string

const (
	// PlacementSpread puts each server into another domain, if there are enough.
	PlacementSpread PlacementMode = "Spread"
	// PlacementNearWorkers puts servers into the domain of the job's workers, if there is room.
	PlacementNearWorkers PlacementMode = "NearWorkers"
)

// ReductionServerSpec has the resources and the placement of each server.
type ReductionServerSpec struct {
	// cpu that each server requests; it runs as many threads. Default: 2.
	// +optional
	// +kubebuilder:default="2"
	CPU *resource.Quantity `json:"cpu,omitempty"`

	// bufferMemory is the limit of all buffers of a server. Its container gets 256Mi more, as request and limit. Default:
	// 1Gi.
	// +optional
	// +kubebuilder:default="1Gi"
	BufferMemory *resource.Quantity `json:"bufferMemory,omitempty"`

	// nodeSelector selects the nodes that servers run on. Absent: any.
	// +optional
	// +kubebuilder:validation:MaxProperties=16
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`

	// tolerations of the servers.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:XValidation:rule="self.all(t, !has(t.operator) || t.operator in ['Exists', 'Equal'])",message="operator is Exists or Equal"
	// +kubebuilder:validation:XValidation:rule="self.all(t, has(t.operator) && t.operator == 'Exists' ? !has(t.value) || t.value == '' : has(t.key) && t.key != '')",message="a toleration without a key has the operator Exists, which goes without a value"
	// +kubebuilder:validation:XValidation:rule="self.all(t, !has(t.effect) || t.effect in ['', 'NoSchedule', 'PreferNoSchedule', 'NoExecute'])",message="effect is NoSchedule, PreferNoSchedule or NoExecute"
	Tolerations []corev1.Toleration `json:"tolerations,omitempty"`

	// evictAfterSeconds is how long a server stays on a node after somebody cordoned it or began to drain it. Then it may
	// be evicted, so that the node can be drained, and the job fails. Absent: servers are not evicted while the job runs.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=604800
	EvictAfterSeconds *int32 `json:"evictAfterSeconds,omitempty"`

	// placement is a preference: a server that cannot have it runs elsewhere.
	// +optional
	// +kubebuilder:default={mode:Spread}
	Placement PlacementSpec `json:"placement,omitzero"`
}

// PlacementSpec says how servers are placed.
//
// +kubebuilder:validation:MinProperties=1
type PlacementSpec struct {
	// mode is Spread (the default) or NearWorkers. In both, servers avoid hosts with workers or other servers if possible.
	// +optional
	// +kubebuilder:default=Spread
	Mode PlacementMode `json:"mode,omitempty"`

	// topologyKey is the label of nodes that names the domain. Default: kubernetes.io/hostname for Spread,
	// topology.kubernetes.io/zone for NearWorkers.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=316
	TopologyKey string `json:"topologyKey,omitempty"`
}

// SizingSpec has the bandwidths that determine the number of servers.
type SizingSpec struct {
	// workerBandwidth is the bandwidth of a worker, bytes per second in each direction, such as 12500M.
	// +required
	WorkerBandwidth resource.Quantity `json:"workerBandwidth,omitzero"`

	// serverBandwidth is the rate at which a server receives, sums and sends, bytes per second.
	// +required
	ServerBandwidth resource.Quantity `json:"serverBandwidth,omitzero"`
}

// PluginSpec names the plugin.
//
// +kubebuilder:validation:XValidation:rule="(has(self.delivery) && self.delivery == 'Preinstalled') || has(self.image)",message="image is required unless delivery is Preinstalled"
type PluginSpec struct {
	// image is the plugin image, pinned by digest so that every pod of a job gets the same. A tag before the digest, such
	// as name:0.1.0-p8.2@sha256:..., says which reduction servers it goes with: version and protocols.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="self.matches('@sha256:[0-9a-f]{64}$')",message="pin the image by digest: name@sha256:<64 hexadecimal digits>"
	Image string `json:"image,omitempty"`

	// delivery is how the files get into a container: Auto (the default), ImageVolume, InitContainer or Preinstalled.
	// +optional
	// +kubebuilder:default=Auto
	Delivery Delivery `json:"delivery,omitempty"`

	// path is the folder of the libraries inside the plugin image or, for Preinstalled, inside the container. Default:
	// /plugin.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.startsWith('/') && !self.endsWith('/') && !self.contains('..')",message="path is absolute, without a trailing slash or '..', such as /plugin"
	// +kubebuilder:default=/plugin
	Path string `json:"path,omitempty"`

	// installResources are the CPU and memory of the init container that copies the files, with delivery InitContainer. A
	// LimitRange of the job's namespace changes them to what it allows. Default: 100m and 64Mi.
	// +optional
	InstallResources InstallResources `json:"installResources,omitzero"`

	// conflictPolicy is for containers that set NCCL_NET_PLUGIN themselves: Keep (the default) keeps their plugin, Replace
	// replaces it.
	// +optional
	// +kubebuilder:default=Keep
	ConflictPolicy ConflictPolicy `json:"conflictPolicy,omitempty"`

	// unavailablePolicy is what NCCL does where it cannot use the plugin: Fallback uses its own sockets, Fail ends the job
	// (NCCL_NET=Evenkeel). Containers that keep a plugin of their own are exempt. Absent: Fallback.
	// +optional
	UnavailablePolicy UnavailablePolicy `json:"unavailablePolicy,omitempty"`

	// python is Enabled or Disabled (the default). Enabled appends the folder of the Python package evenkeel, which is
	// beside the plugin, to the PYTHONPATH of the containers that get the plugin: torch.distributed then has the backend
	// evenkeel. What the container sets itself stays in front. A PYTHONPATH that is set in the training image, and not in
	// the pod, is hidden: repeat it in the pod. These containers also get a volume for what `kubectl evenkeel why` reads
	// of calls that hang, and EVENKEEL_FLIGHT_RECORDER, which names its folder, unless they set that themselves.
	// +optional
	Python Switch `json:"python,omitempty"`
}

// InstallResources are what the init container gets that copies the files. It requests as much as it is limited to, so
// that a pod stays in the QoS class Guaranteed. It gets none in a pod without any CPU or memory, or with resources of
// the pod as a whole.
//
// +kubebuilder:validation:MinProperties=1
type InstallResources struct {
	// cpu is the request and the limit. Default: 100m.
	// +optional
	// +kubebuilder:default="100m"
	// +kubebuilder:validation:XValidation:rule="quantity(string(self)).isGreaterThan(quantity('0'))",message="cpu is more than 0, such as 100m"
	CPU *resource.Quantity `json:"cpu,omitempty"`

	// memory is the request and the limit. Default: 64Mi.
	// +optional
	// +kubebuilder:default="64Mi"
	// +kubebuilder:validation:XValidation:rule="quantity(string(self)).isGreaterThan(quantity('0'))",message="memory is more than 0, such as 64Mi"
	Memory *resource.Quantity `json:"memory,omitempty"`
}

// TransportSpec has the plugin's settings.
//
// +kubebuilder:validation:XValidation:rule="!has(self.encryption) || self.encryption != 'Required' || !has(self.mode) || self.mode != 'RDMA' || (has(self.rdma) && has(self.rdma.networkTrust) && self.rdma.networkTrust == 'Trusted')",message="RDMA is not encrypted: with encryption Required, mode is Auto or TCP, or rdma.networkTrust is Trusted"
type TransportSpec struct {
	// mode is Auto (the default), TCP or RDMA. RDMA is strict: peers that cannot use it fail.
	// +optional
	// +kubebuilder:default=Auto
	Mode TransportMode `json:"mode,omitempty"`

	// encryption is Disabled (the default) or Required: all TCP traffic of the plugin and of the job's reduction servers
	// is encrypted and authenticated with the job's key. Peers without it are refused, and so are pods that would send in
	// clear. The plugin's image must be of a version that can encrypt.
	// +optional
	// +kubebuilder:default=Disabled
	Encryption Encryption `json:"encryption,omitempty"`

	// tcp has the settings of the TCP transport.
	// +optional
	TCP TCPSpec `json:"tcp,omitzero"`

	// rdma says which device jobs and their reduction servers get.
	// +optional
	// +kubebuilder:default={count:1}
	RDMA RDMASpec `json:"rdma,omitzero"`
}

// RDMASpec says which device jobs get.
//
// +kubebuilder:validation:MinProperties=1
type RDMASpec struct {
	// resourceName is the extended resource that a device plugin offers, such as rdma/hca_shared_devices_a. Default: the
	// one of the domain rdma that nodes offer.
	// +optional
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=317
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="!self.startsWith('kubernetes.io/')",message="resourceName is an extended resource: its domain is not kubernetes.io"
	ResourceName string `json:"resourceName,omitempty"`

	// networkTrust is Untrusted (the default) or Trusted. It has an effect with encryption Required only: over an
	// untrusted network, jobs use TCP. Over a trusted one, such as one with IPsec in the cards, RDMA may carry data in
	// clear.
	// +optional
	// +kubebuilder:default=Untrusted
	NetworkTrust NetworkTrust `json:"networkTrust,omitempty"`

	// count is the number of devices for each container. Default: 1.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	// +kubebuilder:default=1
	Count *int32 `json:"count,omitempty"`

	// memoryLock is how containers may lock memory: RuntimeDefault (the default) or Capability.
	// +optional
	// +kubebuilder:default=RuntimeDefault
	MemoryLock MemoryLock `json:"memoryLock,omitempty"`

	// additionalNetworks are further networks of pods that get a device, in the format of the annotation
	// k8s.v1.cni.cncf.io/networks. Multus attaches them, for SR-IOV and host-device networks.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	AdditionalNetworks string `json:"additionalNetworks,omitempty"`
}

// TCPSpec has the settings of the TCP transport.
//
// +kubebuilder:validation:MinProperties=1
type TCPSpec struct {
	// flowsPerPeer is the number of TCP flows of each connection. Absent: the plugin's own default.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	FlowsPerPeer *int32 `json:"flowsPerPeer,omitempty"`
}

// EnvVar is one variable with a literal value, a corev1.EnvVar without valueFrom. Pods of a job get the value that was
// there when the job was created, and a reference would be read later. Pods of checks run in Evenkeel's own namespace,
// whose Secrets are not for whoever writes a check.
type EnvVar struct {
	// name of the variable.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:Pattern=`^[A-Za-z_][A-Za-z0-9_]*$`
	Name string `json:"name,omitempty"`

	// value of the variable.
	// +required
	// +kubebuilder:validation:MinLength=0
	// +kubebuilder:validation:MaxLength=4096
	Value string `json:"value"`
}

// SecretReference names a Secret, as a pod's imagePullSecrets do.
type SecretReference struct {
	// name of the Secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
}

// NetworkProfileStatus is what the controller observes.
type NetworkProfileStatus struct {
	// conditions: Ready, RDMA, Tuner, ImagesMatch, and on the profile of the chart's values DefaultApplied.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// observedGeneration is the generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// delivery is what jobs created now get.
	// +optional
	Delivery Delivery `json:"delivery,omitempty"`

	// plugin is what jobs created now are pinned to.
	// +optional
	Plugin PluginStatus `json:"plugin,omitzero"`

	// matchedNodes is the number of nodes that nodeSelector selects.
	// +optional
	MatchedNodes *int32 `json:"matchedNodes,omitempty"`

	// imageVolumeNodes is the number of them that can mount images as volumes.
	// +optional
	ImageVolumeNodes *int32 `json:"imageVolumeNodes,omitempty"`

	// rdmaResourceName is the RDMA device that jobs created now get; absent: none.
	// +optional
	// +kubebuilder:validation:MaxLength=317
	RDMAResourceName string `json:"rdmaResourceName,omitempty"`

	// rdmaNodes is the number of matched nodes that offer an RDMA device.
	// +optional
	RDMANodes *int32 `json:"rdmaNodes,omitempty"`

	// tuner is what jobs created now get, if tuner.source is Preflight and enough nodes were measured.
	// +optional
	Tuner TunerStatus `json:"tuner,omitzero"`
}

// TunerStatus is the network that the tuner of jobs created now chooses by.
//
// +kubebuilder:validation:MinProperties=1
type TunerStatus struct {
	// bandwidthMbps is that of a node in each direction, Mb/s.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000000
	BandwidthMbps *int32 `json:"bandwidthMbps,omitempty"`

	// latencyMicroseconds is the time of a small message from one node to another.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	LatencyMicroseconds *int32 `json:"latencyMicroseconds,omitempty"`
}

// PluginStatus is the plugin that jobs created now are pinned to.
//
// +kubebuilder:validation:MinProperties=1
type PluginStatus struct {
	// image is the full reference.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Image string `json:"image,omitempty"`

	// digest is the part of the reference after the @.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	Digest string `json:"digest,omitempty"`
}

// NetworkProfile says which network plugin training jobs get, and how. A job asks for it with the annotation
// evenkeel.dev/profile.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=netprof
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Delivery",type=string,JSONPath=`.status.delivery`
// +kubebuilder:printcolumn:name="Transport",type=string,JSONPath=`.spec.transport.mode`
// +kubebuilder:printcolumn:name="RDMA device",type=string,JSONPath=`.status.rdmaResourceName`
// +kubebuilder:printcolumn:name="Nodes",type=integer,JSONPath=`.status.matchedNodes`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type NetworkProfile struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is what the administrator wants.
	// +required
	Spec NetworkProfileSpec `json:"spec,omitzero"`

	// status is what the controller observes.
	// +optional
	Status NetworkProfileStatus `json:"status,omitzero"`
}

// NetworkProfileList is a list of profiles.
//
// +kubebuilder:object:root=true
type NetworkProfileList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []NetworkProfile `json:"items"`
}
