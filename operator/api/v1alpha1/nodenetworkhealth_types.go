package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Health is the present verdict on a node.
//
// +kubebuilder:validation:Enum=Healthy;Unhealthy;Unknown
type Health string

// The states of a node. Only a Pass makes it Healthy, only a Fail Unhealthy; a run that says nothing changes nothing.
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
)

// HistoryLength is how many results a NodeNetworkHealth keeps.
const HistoryLength = 20

// NodeNetworkHealthStatus is what checks said about the node.
type NodeNetworkHealthStatus struct {
	// health is Healthy, Unhealthy or Unknown.
	// +optional
	Health Health `json:"health,omitempty"`

	// reason and message are those of the result that decided.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=400
	Message string `json:"message,omitempty"`

	// observedTime is when that result was found.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`

	// busBandwidth is the latest that was measured, bytes per second.
	// +optional
	BusBandwidth *resource.Quantity `json:"busBandwidth,omitempty"`

	// baseline is what the node reaches when all is well: over the results kept that passed.
	// +optional
	Baseline Baseline `json:"baseline,omitzero"`

	// history has the latest results, newest first.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=20
	History []HealthResult `json:"history,omitempty"`
}

// Baseline is what a node reaches when all is well.
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

// HealthResult is what one check said about the node.
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

	// reason is a word.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`

	// busBandwidth is the best that a run with the node reached, bytes per second.
	// +optional
	BusBandwidth *resource.Quantity `json:"busBandwidth,omitempty"`
}

// NodeNetworkHealth is what is known about a node's network. It has the node's name and goes with it.
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

	// status is what checks said.
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
