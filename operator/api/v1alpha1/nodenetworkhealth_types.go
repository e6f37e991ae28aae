package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Health is the current health of a node's network.
//
// +kubebuilder:validation:Enum=Healthy;Unhealthy;Unknown
type Health string

// The health of a node. Pass makes it Healthy, Fail Unhealthy; an inconclusive result does not change it.
const (
	HealthHealthy   Health = "Healthy"
	HealthUnhealthy Health = "Unhealthy"
	HealthUnknown   Health = "Unknown"
)

const (
	// ConditionNodeHealthy is the condition on nodes that a policy selects.
	ConditionNodeHealthy = "EvenkeelNetworkHealthy"
	// HealthKey is the label on those nodes, its values the two below, and the key of the taint.
	HealthKey = "evenkeel.dev/network"
	// HealthyValue is the label's value on a node that passed, UnhealthyValue on one that failed.
	HealthyValue   = "healthy"
	UnhealthyValue = "unhealthy"
	// UnprovenValue is the taint's value on a node that registered with it, until it has passed.
	UnprovenValue = "unproven"
	// ReadinessTaintKey is the key of the taint that the Node Readiness Controller manages by the shipped NodeReadinessRule.
	ReadinessTaintKey = "readiness.k8s.io/evenkeel-network"
)

// SuspectClass is what the ranks of a running job wait for.
//
// +kubebuilder:validation:Enum=late;link;path
type SuspectClass string

const (
	// SuspectLate is a process that does not call, or that does not get the CPU. The network is not at fault.
	SuspectLate SuspectClass = "late"
	// SuspectLink is a card of a node.
	SuspectLink SuspectClass = "link"
	// SuspectPath is what is between two nodes, or an end of it that cannot be told from the other.
	SuspectPath SuspectClass = "path"
)

// HistoryLength is the number of results that a NodeNetworkHealth keeps.
const HistoryLength = 20

// NodeNetworkHealthStatus has the results of checks of the node.
type NodeNetworkHealthStatus struct {
	// health is Healthy, Unhealthy or Unknown.
	// +optional
	Health Health `json:"health,omitempty"`

	// reason and message are those of the result that health follows.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=400
	Message string `json:"message,omitempty"`

	// observedTime is when that result was found.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`

	// busBandwidth is the latest measurement, bytes per second.
	// +optional
	BusBandwidth *resource.Quantity `json:"busBandwidth,omitempty"`

	// measured is what that measurement says of the network besides, and what it depends on.
	// +optional
	Measured MeasuredNetwork `json:"measured,omitzero"`

	// baseline is the usual bandwidth of the node, over the passed results in history.
	// +optional
	Baseline Baseline `json:"baseline,omitzero"`

	// history has the latest results, newest first.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	History []HealthResult `json:"history,omitempty"`

	// suspicions are what jobs said about the node's network while they ran, newest first. They are no verdicts: a check confirms or
	// clears them when the job has ended.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=8
	Suspicions []Suspicion `json:"suspicions,omitempty"`
}

// MeasuredNetwork is what a check measured of the node's network besides its bandwidth, and what both depend on.
//
// +kubebuilder:validation:MinProperties=1
type MeasuredNetwork struct {
	// profileName is the NetworkProfile that was checked.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	ProfileName string `json:"profileName,omitempty"`

	// latencyMicroseconds is the time of a small message from one node to another, the least of the node's runs. Absent: unknown.
	// +optional
	// +kubebuilder:validation:Minimum=1
	LatencyMicroseconds *int32 `json:"latencyMicroseconds,omitempty"`

	// devices is the number of network devices that NCCL sees on the node, where busBandwidth is that of one of them. Absent: it is that
	// of all of them, or the number is unknown.
	// +optional
	// +kubebuilder:validation:Minimum=1
	Devices *int32 `json:"devices,omitempty"`
}

// Suspicion is what a job said about the network of a node on which it had a pod.
type Suspicion struct {
	// job is the one whose ranks waited.
	// +required
	Job SuspiciousJob `json:"job,omitzero"`

	// class is link, a card of the node, or path, what is between it and another node.
	// +required
	Class SuspectClass `json:"class,omitempty"`

	// since is when the job began to wait.
	// +required
	Since metav1.Time `json:"since,omitzero"`

	// confidencePercent is how sure the job's ranks were.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	ConfidencePercent *int32 `json:"confidencePercent,omitempty"`

	// message is the sentence of the job's ranks.
	// +optional
	// +kubebuilder:validation:MaxLength=300
	Message string `json:"message,omitempty"`

	// withdrawnTime is when the job no longer said so, while it ran.
	// +optional
	WithdrawnTime *metav1.Time `json:"withdrawnTime,omitempty"`

	// jobEndTime is when all pods of the job had terminated. From then on a check may test the node.
	// +optional
	JobEndTime *metav1.Time `json:"jobEndTime,omitempty"`
}

// SuspiciousJob names the job of a suspicion.
type SuspiciousJob struct {
	// namespace, kind and name of the job.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Kind string `json:"kind,omitempty"`
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
	// uid of what controls the job's pods.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	UID string `json:"uid,omitempty"`
}

// MaxSuspicions is the number of suspicions that a NodeNetworkHealth keeps.
const MaxSuspicions = 8

// Baseline is the usual bandwidth of a node.
//
// +kubebuilder:validation:MinProperties=1
type Baseline struct {
	// samples is the number of results.
	// +optional
	Samples *int32 `json:"samples,omitempty"`

	// medianBusBandwidth and madBusBandwidth (median absolute deviation) are in bytes per second.
	// +optional
	MedianBusBandwidth *resource.Quantity `json:"medianBusBandwidth,omitempty"`
	// +optional
	MADBusBandwidth *resource.Quantity `json:"madBusBandwidth,omitempty"`
}

// HealthResult is the result of one check of the node.
type HealthResult struct {
	// check is the NetworkCheck's name, uid its own.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Check string `json:"check,omitempty"`
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=36
	UID string `json:"uid,omitempty"`

	// time is when the check ended.
	// +required
	Time metav1.Time `json:"time,omitzero"`

	// verdict on the node.
	// +required
	Verdict Verdict `json:"verdict,omitempty"`

	// reason is a CamelCase word.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`

	// busBandwidth is the best of the node's runs, bytes per second.
	// +optional
	BusBandwidth *resource.Quantity `json:"busBandwidth,omitempty"`

	// benchmark identifies the runner, sweep and plugin that were used. Bandwidths of the same benchmark can be compared.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	Benchmark string `json:"benchmark,omitempty"`
}

// NodeNetworkHealth is the health of a node's network. It has the node's name and is deleted with the node.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,path=nodenetworkhealths,shortName=nodehealth
// +kubebuilder:printcolumn:name="Health",type=string,JSONPath=`.status.health`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.reason`
// +kubebuilder:printcolumn:name="B/s",type=string,JSONPath=`.status.busBandwidth`
// +kubebuilder:printcolumn:name="Usual B/s",type=string,JSONPath=`.status.baseline.medianBusBandwidth`
// +kubebuilder:printcolumn:name="Checked",type=date,JSONPath=`.status.observedTime`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.message`
type NodeNetworkHealth struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// status has the results of checks.
	// +optional
	Status NodeNetworkHealthStatus `json:"status,omitzero"`
}

// NodeNetworkHealthList is a list of them.
//
// +kubebuilder:object:root=true
type NodeNetworkHealthList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []NodeNetworkHealth `json:"items"`
}
