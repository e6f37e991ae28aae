package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Delivery is how the plugin's files reach a container.
//
// +kubebuilder:validation:Enum=Auto;ImageVolume;InitContainer;Preinstalled
type Delivery string

const (
	// DeliveryAuto is ImageVolume where every matching node can mount images, else InitContainer.
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
	// ConflictReplace puts Evenkeel in its place.
	ConflictReplace ConflictPolicy = "Replace"
)

// TransportMode is what carries the data.
//
// +kubebuilder:validation:Enum=Auto;TCP;RDMA
type TransportMode string

const (
	// TransportAuto lets the plugin choose for each pair of peers, and gives jobs an RDMA device where every matching node has one.
	TransportAuto TransportMode = "Auto"
	// TransportTCP uses TCP flows only.
	TransportTCP TransportMode = "TCP"
	// TransportRDMA gives jobs an RDMA device, and uses nothing else.
	TransportRDMA TransportMode = "RDMA"
)

// MemoryLock is how containers may lock the memory that RDMA devices read and write.
//
// +kubebuilder:validation:Enum=RuntimeDefault;Capability
type MemoryLock string

const (
	// MemoryLockRuntimeDefault leaves it at the limit that the container runtime gives.
	MemoryLockRuntimeDefault MemoryLock = "RuntimeDefault"
	// MemoryLockCapability adds the capability IPC_LOCK, which takes away the limit from containers that run as root. Namespaces
	// that enforce the pod standard baseline or restricted refuse it.
	MemoryLockCapability MemoryLock = "Capability"
)

const (
	// DefaultPath is where the libraries lie inside the plugin image.
	DefaultPath = "/plugin"
	// ConditionReady says that jobs may use the profile.
	ConditionReady = "Ready"
	// ConditionRDMA says whether jobs get an RDMA device; absent with mode TCP.
	ConditionRDMA = "RDMA"
)

// NetworkProfileSpec says which plugin jobs get, how, with which settings, and who may ask for it.
type NetworkProfileSpec struct {
	// namespaceSelector selects the namespaces whose jobs may use the profile. Absent: all.
	// +optional
	NamespaceSelector *metav1.LabelSelector `json:"namespaceSelector,omitempty"`

	// nodeSelector selects the nodes that jobs of this profile run on; it decides what delivery Auto means. Absent: all.
	// +optional
	NodeSelector *metav1.LabelSelector `json:"nodeSelector,omitempty"`

	// plugin says which plugin, and how it reaches a container.
	// +required
	Plugin PluginSpec `json:"plugin,omitzero"`

	// transport holds the plugin's settings.
	// +optional
	Transport TransportSpec `json:"transport,omitzero"`

	// environment is added to the containers that get the plugin. What a container sets itself stays.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:XValidation:rule="self.all(e, e.name != 'NCCL_NET_PLUGIN')",message="NCCL_NET_PLUGIN is set by Evenkeel itself"
	// +kubebuilder:validation:XValidation:rule="self.all(e, e.name != 'LD_LIBRARY_PATH')",message="LD_LIBRARY_PATH would hide libraries of the training image"
	Environment []EnvironmentVariable `json:"environment,omitempty"`

	// reduction says who gets reduction servers, how many and which.
	// +optional
	Reduction ReductionSpec `json:"reduction,omitzero"`
}

// ReductionMode is who gets reduction servers.
//
// +kubebuilder:validation:Enum=Off;OnRequest;Always
type ReductionMode string

const (
	// ReductionOff refuses jobs that ask for them.
	ReductionOff ReductionMode = "Off"
	// ReductionOnRequest gives them to jobs that ask.
	ReductionOnRequest ReductionMode = "OnRequest"
	// ReductionAlways gives them to every job that does not decline.
	ReductionAlways ReductionMode = "Always"
)

// DefaultMaxReductionServers is the most that a job gets where the profile does not say.
const DefaultMaxReductionServers = 16

// ReductionSpec says who gets reduction servers, how many and which.
//
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.servers) || self.servers <= (has(self.maxServers) ? self.maxServers : 16)",message="servers is larger than maxServers (default: 16)"
type ReductionSpec struct {
	// mode is Off (jobs that ask are refused), OnRequest (the default) or Always (jobs may decline).
	// +optional
	Mode ReductionMode `json:"mode,omitempty"`

	// servers is their number for jobs that do not say, with mode Always. Absent: as sizing says.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	Servers *int32 `json:"servers,omitempty"`

	// maxServers is the most that one job gets. Default: 16.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	MaxServers *int32 `json:"maxServers,omitempty"`

	// sizing is how many servers Auto means: workers x workerBandwidth / serverBandwidth. Absent: one for each worker.
	// +optional
	Sizing SizingSpec `json:"sizing,omitzero"`

	// server says what each server gets and where it runs.
	// +optional
	Server ReductionServerSpec `json:"server,omitzero"`
}

// SizingSpec holds the bandwidths that the number of servers follows from.
type SizingSpec struct {
	// workerBandwidth is what a worker can send and receive, bytes per second, such as 12500M.
	// +required
	WorkerBandwidth resource.Quantity `json:"workerBandwidth,omitzero"`

	// serverBandwidth is what a server can receive, sum and send, bytes per second.
	// +required
	ServerBandwidth resource.Quantity `json:"serverBandwidth,omitzero"`
}

// PluginSpec names the plugin.
//
// +kubebuilder:validation:XValidation:rule="(has(self.delivery) && self.delivery == 'Preinstalled') || has(self.image)",message="image is required unless delivery is Preinstalled"
type PluginSpec struct {
	// image is the plugin image, pinned by digest so that every pod of a job gets the same.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:XValidation:rule="self.matches('@sha256:[0-9a-f]{64}$')",message="pin the image by digest: name@sha256:<64 hexadecimal digits>"
	Image string `json:"image,omitempty"`

	// delivery is how the files reach a container: Auto (the default), ImageVolume, InitContainer or Preinstalled.
	// +optional
	Delivery Delivery `json:"delivery,omitempty"`

	// path is the folder of the libraries inside the plugin image or, for Preinstalled, inside the container. Default: /plugin.
	// +optional
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:XValidation:rule="self.startsWith('/') && !self.endsWith('/') && !self.contains('..')",message="path is absolute, without a trailing slash or '..', such as /plugin"
	Path string `json:"path,omitempty"`

	// conflictPolicy is for containers that set NCCL_NET_PLUGIN themselves: Keep (the default) leaves them alone, Replace does not.
	// +optional
	ConflictPolicy ConflictPolicy `json:"conflictPolicy,omitempty"`
}

// TransportSpec holds the plugin's settings.
type TransportSpec struct {
	// mode is what carries the data: Auto (the default), TCP or RDMA. RDMA is strict: peers that cannot use it fail.
	// +optional
	Mode TransportMode `json:"mode,omitempty"`

	// tcp holds the settings of the TCP engine.
	// +optional
	TCP TCPSpec `json:"tcp,omitzero"`

	// rdma says which device jobs get, their reduction servers included, and how.
	// +optional
	RDMA RDMASpec `json:"rdma,omitzero"`
}

// RDMASpec says which device jobs get, and how.
//
// +kubebuilder:validation:MinProperties=1
type RDMASpec struct {
	// resourceName is the extended resource that a device plugin offers, such as rdma/hca_shared_devices_a. Default: the one
	// of the domain rdma that nodes offer.
	// +optional
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=317
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="!self.startsWith('kubernetes.io/')",message="resourceName is an extended resource: its domain is not kubernetes.io"
	ResourceName string `json:"resourceName,omitempty"`

	// count is how many of it each container gets. Default: 1.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	Count *int32 `json:"count,omitempty"`

	// memoryLock is how containers may lock memory: RuntimeDefault (the default) or Capability.
	// +optional
	MemoryLock MemoryLock `json:"memoryLock,omitempty"`

	// networks are further networks for pods that get a device, as the annotation k8s.v1.cni.cncf.io/networks names them:
	// for SR-IOV and host-device networks by Multus.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Networks string `json:"networks,omitempty"`
}

// TCPSpec holds the settings of the TCP engine.
//
// +kubebuilder:validation:MinProperties=1
type TCPSpec struct {
	// flowsPerPeer is the number of TCP flows of each connection. Absent: the plugin's own default.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	FlowsPerPeer *int32 `json:"flowsPerPeer,omitempty"`
}

// EnvironmentVariable is one variable with a literal value.
type EnvironmentVariable struct {
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

// NetworkProfileStatus is what the controller found.
type NetworkProfileStatus struct {
	// conditions: Ready.
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

	// imageVolumeNodes is how many of them can mount images as volumes.
	// +optional
	ImageVolumeNodes *int32 `json:"imageVolumeNodes,omitempty"`

	// rdmaResourceName is the RDMA device that jobs created now get; absent: none.
	// +optional
	// +kubebuilder:validation:MaxLength=317
	RDMAResourceName string `json:"rdmaResourceName,omitempty"`

	// rdmaNodes is how many of the matched nodes offer an RDMA device.
	// +optional
	RDMANodes *int32 `json:"rdmaNodes,omitempty"`
}

// PluginStatus is the plugin that jobs created now are pinned to.
//
// +kubebuilder:validation:MinProperties=1
type PluginStatus struct {
	// image is the full reference.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Image string `json:"image,omitempty"`

	// digest is the part after the @.
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

	// status is what the controller found.
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

// LibraryPath is the folder of the libraries, with the default applied.
func (p PluginSpec) LibraryPath() string {
	if p.Path == "" {
		return DefaultPath
	}
	return p.Path
}
