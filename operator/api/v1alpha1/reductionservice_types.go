package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// MaxReductionServers is the maximum number of servers of a job.
const MaxReductionServers = 64

// Condition of a ReductionService, and its reasons.
const (
	// ConditionAvailable says that every server is ready.
	ConditionAvailable = "Available"

	ReasonAllReady     = "AllReady"
	ReasonStarting     = "Starting"
	ReasonServerLost   = "ServerLost"
	ReasonJobFinished  = "JobFinished"
	ReasonJobSuspended = "JobSuspended"
)

const (
	// ConditionDraining says that servers run on nodes that are cordoned or drained, and since when; absent: none do.
	ConditionDraining = "Draining"

	ReasonNodesCordoned = "NodesCordoned"
)

// Reasons of the condition RDMA of a ReductionService.
const (
	ReasonServersHaveDevice = "ServersHaveDevice"
	ReasonNoNodeHasDevice   = "NoNodeHasDevice"
	ReasonServersUseTCP     = "ServersUseTCP"
)

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

	// memory is the limit of all buffers of a server. Its container gets 256Mi more, as request and limit. Default: 1Gi.
	// +optional
	// +kubebuilder:default="1Gi"
	Memory *resource.Quantity `json:"memory,omitempty"`

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

	// evictAfterSeconds is how long a server stays on a node after somebody cordoned it or began to drain it. Then it may be evicted, so that the node can be
	// drained, and the job fails. Absent: servers are not evicted while the job runs.
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

// ReductionServiceSpec is what the job got when it was created.
type ReductionServiceSpec struct {
	// workloadRef is the job.
	// +required
	WorkloadRef WorkloadReference `json:"workloadRef,omitzero"`

	// replicas is the number of servers. The job's pods have their addresses from the start.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	Replicas *int32 `json:"replicas,omitempty"`

	// image of the servers.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Image string `json:"image,omitempty"`

	// imagePullSecrets are those of the profile.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=253
	ImagePullSecrets []string `json:"imagePullSecrets,omitempty"`

	// priorityClassName is the job's.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	PriorityClassName string `json:"priorityClassName,omitempty"`

	// server has the resources and the placement of each server.
	// +optional
	Server ReductionServerSpec `json:"server,omitzero"`

	// transport is that of the profile. rdma.resourceName is set if servers get the device, and only then.
	// +optional
	Transport TransportSpec `json:"transport,omitzero"`

	// keySecretName names the Secret with the job's key, if its user brought one. Absent: one of the service's name is made.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	KeySecretName string `json:"keySecretName,omitempty"`

	// environment of the servers: the profile's settings of the transport and its RDMA ports.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	Environment []EnvironmentVariable `json:"environment,omitempty"`
}

// WorkloadReference names a job of the same namespace.
type WorkloadReference struct {
	// apiGroup of the job's kind, such as kubeflow.org.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	APIGroup string `json:"apiGroup,omitempty"`

	// kind of the job.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Kind string `json:"kind,omitempty"`

	// name of the job.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// uid of the job, which another job of the same name does not have.
	// +required
	UID types.UID `json:"uid,omitempty"`
}

// ReductionServiceStatus is the state of the servers.
type ReductionServiceStatus struct {
	// conditions: Available, ImagesMatch, RDMA for jobs that have a device, and Draining while servers are on nodes that are cordoned or drained.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// observedGeneration is the generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// readyReplicas is the number of servers that are ready.
	// +optional
	ReadyReplicas *int32 `json:"readyReplicas,omitempty"`

	// endpoints are the servers' addresses, host:port, as the job's pods have them.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=256
	Endpoints []string `json:"endpoints,omitempty"`

	// lostServers are servers that were ready and are not any more, while the job runs.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=63
	LostServers []string `json:"lostServers,omitempty"`
}

// ReductionService is the set of reduction servers of one job. Evenkeel creates it for jobs with the annotation
// evenkeel.dev/reduction. It is deleted with the job.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=rsvc
// +kubebuilder:printcolumn:name="Kind",type=string,JSONPath=`.spec.workloadRef.kind`
// +kubebuilder:printcolumn:name="Job",type=string,JSONPath=`.spec.workloadRef.name`
// +kubebuilder:printcolumn:name="Servers",type=integer,JSONPath=`.spec.replicas`
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.readyReplicas`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.conditions[?(@.type=="Available")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && self.metadata.name.size() <= 52",message="the name is part of the servers' host names: at most 52 of a-z, 0-9 and -, a letter first"
type ReductionService struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is what the job got when it was created.
	// +required
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the servers of a job are fixed when it is created: create a new job"
	Spec ReductionServiceSpec `json:"spec,omitzero"`

	// status is the state of the servers.
	// +optional
	Status ReductionServiceStatus `json:"status,omitzero"`
}

// ReductionServiceList is a list of reduction services.
//
// +kubebuilder:object:root=true
type ReductionServiceList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []ReductionService `json:"items"`
}

// WithDefaults returns the spec with every default filled in.
func (s ReductionServerSpec) WithDefaults() ReductionServerSpec {
	out := *s.DeepCopy()
	fillPointer(&out.CPU, resource.MustParse("2"))
	fillPointer(&out.Memory, resource.MustParse("1Gi"))
	fill(&out.Placement.Mode, PlacementSpread)
	if out.Placement.Mode == PlacementSpread {
		fill(&out.Placement.TopologyKey, "kubernetes.io/hostname")
	}
	fill(&out.Placement.TopologyKey, "topology.kubernetes.io/zone")
	return out
}
