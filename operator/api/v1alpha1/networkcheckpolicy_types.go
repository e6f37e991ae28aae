package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Switch turns something on or off.
//
// +kubebuilder:validation:Enum=Enabled;Disabled
type Switch string

const (
	// SwitchEnabled turns it on.
	SwitchEnabled Switch = "Enabled"
	// SwitchDisabled turns it off.
	SwitchDisabled Switch = "Disabled"
)

// NetworkCheckPolicySpec says which nodes are checked, when, and what happens to those that fail.
type NetworkCheckPolicySpec struct {
	// nodeSelector selects the policy's nodes; absent or empty: all. A node that several policies select is the one's with the
	// highest priority, and the condition Overlapping of the others says so.
	// +optional
	NodeSelector *metav1.LabelSelector `json:"nodeSelector,omitempty"`

	// priority among policies that select the same node, and among those of the nodes that a job may run on: the highest counts, and of
	// equal ones the first by name.
	// +optional
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=-1000000
	// +kubebuilder:validation:Maximum=1000000
	Priority *int32 `json:"priority,omitempty"`

	// triggers say when nodes are checked.
	// +optional
	// +kubebuilder:default={newNodes:Enabled}
	Triggers TriggerSpec `json:"triggers,omitzero"`

	// freshnessSeconds is how long a node that passed counts as healthy without another check. Default: 86400.
	// +optional
	// +kubebuilder:default=86400
	// +kubebuilder:validation:Minimum=60
	// +kubebuilder:validation:Maximum=31536000
	FreshnessSeconds *int32 `json:"freshnessSeconds,omitempty"`

	// check has the options of the checks.
	// +required
	Check CheckOptions `json:"check,omitzero"`

	// onFail says what happens to nodes that fail.
	// +optional
	// +kubebuilder:default={taint:Disabled}
	OnFail OnFailSpec `json:"onFail,omitzero"`

	// onSuspicion says what happens to nodes whose network a running job suspects.
	// +optional
	// +kubebuilder:default={avoid:Disabled}
	OnSuspicion OnSuspicionSpec `json:"onSuspicion,omitzero"`

	// gate says how long jobs wait for their nodes to be proven. It goes with triggers.jobStart.
	// +optional
	// +kubebuilder:default={onTimeout:Start}
	Gate GateSpec `json:"gate,omitzero"`

	// history is the number of finished checks of this policy that are kept for each trigger. Default: 5.
	// +optional
	// +kubebuilder:default=5
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	History *int32 `json:"history,omitempty"`
}

// TriggerSpec says when nodes are checked.
//
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.timeZone) || has(self.schedule)",message="timeZone goes with schedule"
type TriggerSpec struct {
	// schedule is when all nodes are checked. Those in use then are checked once they are not. It is a cron expression of five fields, or @daily, @hourly, @weekly.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:XValidation:rule="!self.contains('TZ=')",message="the time zone has a field of its own, timeZone"
	// +kubebuilder:validation:XValidation:rule="self.contains('TZ=') || self.matches('^(@(yearly|annually|monthly|weekly|daily|midnight|hourly)|[0-9A-Za-z*/,?-]+( +[0-9A-Za-z*/,?-]+){4})$')",message="a cron expression of five fields, such as '0 3 * * *', or @daily, @hourly, @weekly"
	Schedule string `json:"schedule,omitempty"`

	// timeZone of the schedule, such as Europe/Berlin. Default: Etc/UTC.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	TimeZone string `json:"timeZone,omitempty"`

	// newNodes is Enabled (the default) to check nodes without a verdict, as soon as they are ready and their startup taints are
	// gone. Inconclusive checks are repeated, less and less often.
	// +optional
	// +kubebuilder:default=Enabled
	NewNodes Switch `json:"newNodes,omitempty"`

	// jobEnd is Enabled (the default) to check nodes whose accelerators a job has just left, if their verdict is older than half of
	// freshnessSeconds.
	// +optional
	// +kubebuilder:default=Enabled
	JobEnd Switch `json:"jobEnd,omitempty"`

	// suspicions is Enabled (the default) to check nodes whose network a job suspected while it ran, when the job has ended.
	// +optional
	// +kubebuilder:default=Enabled
	Suspicions Switch `json:"suspicions,omitempty"`

	// repairs is Enabled (the default) to check nodes again that failed: when they become ready, as after a reboot, when they are
	// uncordoned, and else when their verdict is older than freshnessSeconds.
	// +optional
	// +kubebuilder:default=Enabled
	Repairs Switch `json:"repairs,omitempty"`

	// jobStart is Enabled to gate jobs of the profile that check.profileName names. They start when proven nodes have room for their
	// pods, or none is left that could be checked; as many nodes as they lack are checked. Default: Disabled.
	// +optional
	// +kubebuilder:default=Disabled
	JobStart Switch `json:"jobStart,omitempty"`
}

// GateTimeout says what happens to a job whose nodes could not be proven in time.
//
// +kubebuilder:validation:Enum=Start;Wait
type GateTimeout string

const (
	// GateStart lets the job start, so that a fault of the checks does not stop training.
	GateStart GateTimeout = "Start"
	// GateWait keeps the job waiting until its nodes are proven.
	GateWait GateTimeout = "Wait"
)

// GateOptOut says whether a job may do without the gate.
//
// +kubebuilder:validation:Enum=Allowed;Forbidden
type GateOptOut string

const (
	// GateOptOutAllowed lets the user of a job turn its gate off.
	GateOptOutAllowed GateOptOut = "Allowed"
	// GateOptOutForbidden makes the gate mandatory.
	GateOptOutForbidden GateOptOut = "Forbidden"
)

// GateSpec says how long jobs wait for their nodes to be proven, and whether they may do without.
//
// +kubebuilder:validation:MinProperties=1
type GateSpec struct {
	// timeoutSeconds is the maximum time that a job waits, from its creation. Default: 1800.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=604800
	// +kubebuilder:default=1800
	TimeoutSeconds *int32 `json:"timeoutSeconds,omitempty"`

	// onTimeout is what happens after that time, and after two inconclusive checks of the nodes: Start (the default) or Wait.
	// +optional
	// +kubebuilder:default=Start
	OnTimeout GateTimeout `json:"onTimeout,omitempty"`

	// optOut is Forbidden to refuse jobs with the annotation evenkeel.dev/gate: Disabled, and to gate jobs that their user created
	// suspended. Default: Allowed.
	// +optional
	// +kubebuilder:default=Allowed
	OptOut GateOptOut `json:"optOut,omitempty"`
}

// OnFailSpec says what happens to nodes that fail. Jobs of a profile avoid them in any case.
//
// +kubebuilder:validation:MinProperties=1
type OnFailSpec struct {
	// taint is Enabled to taint failed nodes with evenkeel.dev/network=unhealthy:NoSchedule, so that pods without a toleration
	// avoid them too. Default: Disabled.
	// +optional
	// +kubebuilder:default=Disabled
	Taint Switch `json:"taint,omitempty"`

	// maxUnhealthyPercent is the share of the policy's nodes that may be labeled unhealthy, at least one node. Beyond it the
	// cause is more likely something else, and no more nodes are labeled. Default: 20.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	// +kubebuilder:default=20
	MaxUnhealthyPercent *int32 `json:"maxUnhealthyPercent,omitempty"`
}

// OnSuspicionSpec says what happens to nodes whose network a running job suspects. No node fails by a job's word alone.
//
// +kubebuilder:validation:MinProperties=1
type OnSuspicionSpec struct {
	// avoid is Enabled to take a suspected node for unproven until a check clears it: new jobs prefer others, and gated jobs wait for
	// its check. At most onFail.maxUnhealthyPercent of the policy's nodes are avoided, those that were suspected first. Default: Disabled.
	// +optional
	// +kubebuilder:default=Disabled
	Avoid Switch `json:"avoid,omitempty"`
}

// NetworkCheckPolicyStatus is what the controller observes.
type NetworkCheckPolicyStatus struct {
	// conditions: Ready, Overlapping.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// observedGeneration is the generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// nodes of the policy, and how many of them are healthy, unhealthy or neither.
	// +optional
	Nodes *int32 `json:"nodes,omitempty"`
	// +optional
	Healthy *int32 `json:"healthy,omitempty"`
	// +optional
	Unhealthy *int32 `json:"unhealthy,omitempty"`
	// +optional
	Unknown *int32 `json:"unknown,omitempty"`

	// badNodes are the names of the unhealthy nodes, as many as fit, for people.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	BadNodes string `json:"badNodes,omitempty"`

	// unhealthyNodes are their names, sorted, the first 1000.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MaxLength=253
	UnhealthyNodes []string `json:"unhealthyNodes,omitempty"`

	// runningCheck is the policy's check that has not ended, the first by name.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	RunningCheck string `json:"runningCheck,omitempty"`

	// runningChecks is the number of the policy's checks that have not ended.
	// +optional
	RunningChecks *int32 `json:"runningChecks,omitempty"`

	// lastScheduleTime is the time of the schedule that a check was last made for.
	// +optional
	LastScheduleTime *metav1.Time `json:"lastScheduleTime,omitempty"`
}

// NetworkCheckPolicy keeps nodes checked.
//
// +kubebuilder:object:root=true
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,path=networkcheckpolicies,shortName=netcheckpolicy
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Nodes",type=integer,JSONPath=`.status.nodes`
// +kubebuilder:printcolumn:name="Healthy",type=integer,JSONPath=`.status.healthy`
// +kubebuilder:printcolumn:name="Unhealthy",type=integer,JSONPath=`.status.unhealthy`
// +kubebuilder:printcolumn:name="Unknown",type=integer,JSONPath=`.status.unknown`
// +kubebuilder:printcolumn:name="Bad nodes",type=string,JSONPath=`.status.badNodes`
// +kubebuilder:printcolumn:name="Running",type=string,JSONPath=`.status.runningCheck`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 40",message="a policy's name has at most 40 characters, as its checks' names begin with it"
type NetworkCheckPolicy struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is what the administrator wants.
	// +required
	Spec NetworkCheckPolicySpec `json:"spec,omitzero"`

	// status is what the controller observes.
	// +optional
	Status NetworkCheckPolicyStatus `json:"status,omitzero"`
}

// NetworkCheckPolicyList is a list of policies.
//
// +kubebuilder:object:root=true
type NetworkCheckPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []NetworkCheckPolicy `json:"items"`
}
