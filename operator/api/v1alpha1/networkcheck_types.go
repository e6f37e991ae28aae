package v1alpha1

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Verdict on a node, a fabric or a check. Inconclusive neither fails nor clears a node.
//
// +kubebuilder:validation:Enum=Pass;Fail;Inconclusive
type Verdict string

// The verdicts.
const (
	VerdictPass         Verdict = "Pass"
	VerdictFail         Verdict = "Fail"
	VerdictInconclusive Verdict = "Inconclusive"
)

// severity orders verdicts from the best to the worst. Of anything else it is lower than that of a verdict.
func (v Verdict) severity() int {
	return slices.Index([]Verdict{VerdictPass, VerdictInconclusive, VerdictFail}, v)
}

// Worse reports whether v is worse than the other verdict: Fail is worse than Inconclusive, and that is worse than Pass.
func (v Verdict) Worse(other Verdict) bool { return v.severity() > other.severity() }

// WorstFirst compares verdicts for sorting, the worst first.
func WorstFirst(a, b Verdict) int { return cmp.Compare(b.severity(), a.severity()) }

// Worst is the worse one of two verdicts.
func Worst(a, b Verdict) Verdict {
	if b.Worse(a) {
		return b
	}
	return a
}

// Stage is one part of a check.
//
// +kubebuilder:validation:Enum=Capacity;Local;RDMA;Pairs;Rails;Gang
type Stage string

// The stages, in the order in which they run. Nodes that do not pass a stage are left out of later stages.
const (
	// StageCapacity reads the API alone: whether the node is ready, and whether all of its GPUs can be used.
	StageCapacity Stage = "Capacity"
	// StageLocal runs the benchmark inside each node, over the plugin.
	StageLocal Stage = "Local"
	// StageRDMA runs the benchmark inside each node over RDMA alone, with the device that jobs get, and checks the limit on locked
	// memory.
	StageRDMA Stage = "RDMA"
	// StagePairs runs the benchmark between pairs of nodes, and tests suspects again with proven partners.
	StagePairs Stage = "Pairs"
	// StageRails runs the benchmark over each device of the nodes that failed, to find the faulty device.
	StageRails Stage = "Rails"
	// StageGang runs the benchmark among all nodes of a pool that passed.
	StageGang Stage = "Gang"
)

// RunnerType is the benchmark.
//
// +kubebuilder:validation:Enum=Bench;NCCLTests;RCCLTests
type RunnerType string

const (
	// RunnerBench is evenkeel-bench over host memory. It needs no GPU.
	RunnerBench RunnerType = "Bench"
	// RunnerNCCLTests is NVIDIA's nccl-tests.
	RunnerNCCLTests RunnerType = "NCCLTests"
	// RunnerRCCLTests is AMD's rccl-tests, which have the programs and options of nccl-tests.
	RunnerRCCLTests RunnerType = "RCCLTests"
)

// UsesGPUs reports whether the benchmark is over the memory of GPUs.
func (r RunnerType) UsesGPUs() bool { return r == RunnerNCCLTests || r == RunnerRCCLTests }

// Launcher starts the benchmark's processes.
//
// +kubebuilder:validation:Enum=Auto;IndexedJob;MPIJob
type Launcher string

const (
	// LauncherAuto is MPIJob if the cluster serves it, else IndexedJob.
	LauncherAuto Launcher = "Auto"
	// LauncherIndexedJob is an Indexed Job with one index for each node.
	LauncherIndexedJob Launcher = "IndexedJob"
	// LauncherMPIJob is an MPIJob (kubeflow.org/v2beta1) of the mpi-operator.
	LauncherMPIJob Launcher = "MPIJob"
)

// Collective is an operation of nccl-tests.
//
// +kubebuilder:validation:Enum=AllReduce;AllGather;ReduceScatter;AllToAll;Broadcast;Reduce;SendRecv
type Collective string

// The collectives. The runner Bench has AllReduce only.
const (
	CollectiveAllReduce     Collective = "AllReduce"
	CollectiveAllGather     Collective = "AllGather"
	CollectiveReduceScatter Collective = "ReduceScatter"
	CollectiveAllToAll      Collective = "AllToAll"
	CollectiveBroadcast     Collective = "Broadcast"
	CollectiveReduce        Collective = "Reduce"
	CollectiveSendRecv      Collective = "SendRecv"
)

const (
	// ConditionComplete says that a check has ended.
	ConditionComplete = "Complete"
	// ConditionPassed is True, False or Unknown as the verdict is Pass, Fail or Inconclusive.
	ConditionPassed = "Passed"
)

// BusyNodes says what happens to nodes whose accelerators somebody uses.
//
// +kubebuilder:validation:Enum=Skip;Test
type BusyNodes string

const (
	// BusyNodesSkip leaves them alone. A run during which somebody begins to use them is inconclusive.
	BusyNodesSkip BusyNodes = "Skip"
	// BusyNodesTest tests them beside their users, who are disturbed, and whose traffic is measured too.
	BusyNodesTest BusyNodes = "Test"
)

// NetworkCheckSpec says which nodes to check, and how. It is immutable.
type NetworkCheckSpec struct {
	// nodes says which nodes are checked.
	// +required
	Nodes NodeSet `json:"nodes,omitzero"`

	CheckOptions `json:",inline"`

	// ttlSecondsAfterFinished is how long the check and its report are kept. Absent: until they are deleted.
	// +optional
	// +kubebuilder:validation:Minimum=0
	TTLSecondsAfterFinished *int32 `json:"ttlSecondsAfterFinished,omitempty"`
}

// NodeSet selects nodes.
//
// +kubebuilder:validation:ExactlyOneOf=selector;names
type NodeSet struct {
	// selector selects nodes by label; an empty one selects all.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`

	// names of the nodes.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=5000
	// +kubebuilder:validation:items:MaxLength=253
	Names []string `json:"names,omitempty"`
}

// CheckOptions say how nodes are checked.
//
// +kubebuilder:validation:XValidation:rule="!has(self.stages) || !self.stages.exists(s, s == 'Rails') || (has(self.rails) && (!has(self.runner) || !has(self.runner.type) || self.runner.type == 'Bench'))",message="stage Rails needs rails, the number of devices of a node, and the runner Bench"
// +kubebuilder:validation:XValidation:rule="!has(self.stages) || !self.stages.exists(s, s == 'RDMA') || !has(self.runner) || !has(self.runner.type) || self.runner.type == 'Bench'",message="stage RDMA needs the runner Bench"
// +kubebuilder:validation:XValidation:rule="!has(self.stages) || !(self.stages.exists(s, s == 'Rails' || s == 'Gang')) || self.stages.exists(s, s == 'Pairs')",message="stages Rails and Gang work with what stage Pairs found: name Pairs too"
// +kubebuilder:validation:XValidation:rule="!has(self.sweep) || !has(self.sweep.collective) || self.sweep.collective == 'AllReduce' || (has(self.runner) && has(self.runner.type) && self.runner.type in ['NCCLTests', 'RCCLTests'])",message="the runner Bench has the collective AllReduce only: for another one, name the runner NCCLTests or RCCLTests"
type CheckOptions struct {
	// stages to run. The order of the list does not matter. Default: Capacity, Local, Pairs.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=6
	// +kubebuilder:default={Capacity,Local,Pairs}
	Stages []Stage `json:"stages,omitempty"`

	// profileName is the NetworkProfile whose plugin is tested. Default: default.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:default=default
	ProfileName string `json:"profileName,omitempty"`

	// busyNodes says what happens to nodes whose accelerators somebody uses: Skip (the default) leaves them alone, and the check's
	// pods request all accelerators of their nodes, at a priority that gives way to any other pod. Test tests them all the same.
	// +optional
	// +kubebuilder:default=Skip
	BusyNodes BusyNodes `json:"busyNodes,omitempty"`

	// runner is the benchmark.
	// +optional
	// +kubebuilder:default={launcher:Auto}
	Runner RunnerSpec `json:"runner,omitzero"`

	// sweep says what the benchmark measures.
	// +optional
	// +kubebuilder:default={iterations:20}
	Sweep SweepSpec `json:"sweep,omitzero"`

	// rails is the number of network devices of a node, for stage Rails.
	// +optional
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=16
	Rails *int32 `json:"rails,omitempty"`

	// poolLabel is the node label whose value names the pool. Nodes of a pool should be equally fast, and are tested among
	// themselves. Default: nvidia.com/gpu.product. Nodes without the label are one pool.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	// +kubebuilder:default="nvidia.com/gpu.product"
	PoolLabel string `json:"poolLabel,omitempty"`

	// thresholds say which bandwidth is too low.
	// +optional
	// +kubebuilder:default={minPercentOfMedian:85}
	Thresholds ThresholdSpec `json:"thresholds,omitzero"`

	// maxConcurrentNodes is the maximum number of nodes tested at once. Default: a tenth of them, and 32 at least.
	// +optional
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=5000
	MaxConcurrentNodes *int32 `json:"maxConcurrentNodes,omitempty"`

	// runTimeoutSeconds is the timeout of one run, including the pull of its image. A run that takes longer is inconclusive.
	// Default: 300.
	// +optional
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=86400
	// +kubebuilder:default=300
	RunTimeoutSeconds *int32 `json:"runTimeoutSeconds,omitempty"`

	// timeoutSeconds is the timeout of the whole check. Then it ends with the results that it has. Default: 3600, and 120 more for
	// each time that maxConcurrentNodes goes into the nodes.
	// +optional
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=604800
	TimeoutSeconds *int32 `json:"timeoutSeconds,omitempty"`
}

// RunnerSpec is the benchmark and its launcher.
//
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.type) || self.type == 'Bench' || has(self.gpusPerNode)",message="a runner that uses GPUs needs gpusPerNode"
// +kubebuilder:validation:XValidation:rule="!has(self.gpusPerNode) || (has(self.type) && self.type != 'Bench')",message="gpusPerNode goes with the runners NCCLTests and RCCLTests, which have to be named: the runner Bench uses no GPU"
type RunnerSpec struct {
	// type is the benchmark: Bench, NCCLTests or RCCLTests. Default: NCCLTests, with all GPUs of the node that has the fewest, where
	// Evenkeel was installed with an image of it and every node that is tested offers whole GPUs of NVIDIA's; RCCLTests where that is so
	// of AMD's; else Bench. It is chosen when the check starts, and is then in status.runner. Bench it is too with an image of one's own,
	// busyNodes Test, the stages RDMA and Rails, and with fewer than two GPUs for the stage Local.
	// +optional
	Type RunnerType `json:"type,omitempty"`

	// image has the benchmark and, for MPIJobs, mpirun and sshd; its user is numeric and not root. Default: the
	// image for this type that Evenkeel was installed with.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Image string `json:"image,omitempty"`

	// launcher starts the benchmark's processes: Auto (the default), IndexedJob or MPIJob.
	// +optional
	// +kubebuilder:default=Auto
	Launcher Launcher `json:"launcher,omitempty"`

	// gpusPerNode is how many GPUs of each node nccl-tests or rccl-tests use.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	GPUsPerNode *int32 `json:"gpusPerNode,omitempty"`

	// resources of each pod, besides its GPUs. Default: a request of 100m cpu; of memory, request and limit of four buffers of the
	// largest size and 256Mi.
	// +optional
	// +kubebuilder:validation:XValidation:rule="!has(self.claims)",message="claims are not supported"
	Resources corev1.ResourceRequirements `json:"resources,omitzero"`

	// tolerations of the pods, besides those for nvidia.com/gpu and amd.com/gpu.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:XValidation:rule="self.all(t, !has(t.operator) || t.operator in ['Exists', 'Equal'])",message="operator is Exists or Equal"
	// +kubebuilder:validation:XValidation:rule="self.all(t, has(t.operator) && t.operator == 'Exists' ? !has(t.value) || t.value == '' : has(t.key) && t.key != '')",message="a toleration without a key has the operator Exists, which goes without a value"
	// +kubebuilder:validation:XValidation:rule="self.all(t, !has(t.effect) || t.effect in ['', 'NoSchedule', 'PreferNoSchedule', 'NoExecute'])",message="effect is NoSchedule, PreferNoSchedule or NoExecute"
	Tolerations []corev1.Toleration `json:"tolerations,omitempty"`

	// environment is added to the benchmark's processes. It takes precedence over the profile's.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	Environment []EnvironmentVariable `json:"environment,omitempty"`

	// imagePullSecrets are Secrets of Evenkeel's namespace to pull the image with, besides those of the installation.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	ImagePullSecrets []corev1.LocalObjectReference `json:"imagePullSecrets,omitempty"`

	// supplementalGroups are further groups of the benchmark's processes: for AMD's GPUs, the group that owns /dev/kfd and
	// /dev/dri/renderD* on the nodes, where these are not open to every user.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=2147483647
	SupplementalGroups []int64 `json:"supplementalGroups,omitempty"`

	// runtimeClassName of the pods, such as nvidia where that is not the nodes' default.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	RuntimeClassName *string `json:"runtimeClassName,omitempty"`

	// podLabels of the pods, besides Evenkeel's own, such as sidecar.istio.io/inject: "false". Those that select the installation's own
	// pods, app.kubernetes.io/..., are refused.
	// +optional
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(k, !k.startsWith('app.kubernetes.io/') && !k.startsWith('evenkeel.dev/'))",message="labels of app.kubernetes.io/ and evenkeel.dev/ are Evenkeel's own"
	PodLabels map[string]LabelValue `json:"podLabels,omitempty"`

	// podAnnotations of the pods.
	// +optional
	// +kubebuilder:validation:MaxProperties=16
	PodAnnotations map[string]string `json:"podAnnotations,omitempty"`
}

// LabelValue is the value of a label.
// +kubebuilder:validation:MaxLength=63
// +kubebuilder:validation:Pattern=`^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$`
type LabelValue string

// SweepSpec says what the benchmark measures.
//
// +kubebuilder:validation:MinProperties=1
// +kubebuilder:validation:XValidation:rule="!has(self.minBytes) || !has(self.maxBytes) || self.minBytes <= self.maxBytes",message="minBytes is larger than maxBytes"
type SweepSpec struct {
	// collective is the operation. Default: AllReduce.
	// +optional
	// +kubebuilder:default=AllReduce
	Collective Collective `json:"collective,omitempty"`

	// minBytes is the smallest buffer. Default: 1048576.
	// +optional
	// +kubebuilder:validation:Minimum=4
	// +kubebuilder:validation:Maximum=68719476736
	MinBytes *int64 `json:"minBytes,omitempty"`

	// maxBytes is the largest buffer. Default: 67108864.
	// +optional
	// +kubebuilder:validation:Minimum=4
	// +kubebuilder:validation:Maximum=68719476736
	MaxBytes *int64 `json:"maxBytes,omitempty"`

	// iterations is the number of timed operations of each size. Default: 20.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	// +kubebuilder:default=20
	Iterations *int32 `json:"iterations,omitempty"`
}

// ThresholdSpec says which bus bandwidth is too low, in bytes per second. The first that is set counts: minBusBandwidth, the
// pool's own, the share of the pool's median.
//
// +kubebuilder:validation:MinProperties=1
type ThresholdSpec struct {
	// minBusBandwidth is the minimum for every run, such as 340G.
	// +optional
	MinBusBandwidth *resource.Quantity `json:"minBusBandwidth,omitempty"`

	// pools have minimums of their own.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	Pools []PoolThreshold `json:"pools,omitempty"`

	// minPercentOfMedian is the share of the pool's median that a run has to reach. Default: 85. It cannot find a pool that is
	// slow as a whole; the other two can.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	// +kubebuilder:default=85
	MinPercentOfMedian *int32 `json:"minPercentOfMedian,omitempty"`
}

// PoolThreshold is the minimum of one pool.
type PoolThreshold struct {
	// name is the value of poolLabel.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name,omitempty"`

	// minBusBandwidth is the minimum for the pool's runs.
	// +required
	MinBusBandwidth resource.Quantity `json:"minBusBandwidth,omitzero"`
}

// NetworkCheckStatus is the result. Its size is bounded, however many nodes there are; the report has everything.
type NetworkCheckStatus struct {
	// conditions: Complete, Passed.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// observedGeneration is the generation that this status describes.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// verdict is Fail if a node or a fabric failed, else Inconclusive if one of them is, else Pass. Absent until the end.
	// +optional
	Verdict Verdict `json:"verdict,omitempty"`

	// progress is the current stage and how far it is, for people.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Progress string `json:"progress,omitempty"`

	// stage that runs; absent before the first run and after the last.
	// +optional
	Stage Stage `json:"stage,omitempty"`

	// round of stage Pairs that runs, from 1. Suspects are tested again in later rounds.
	// +optional
	Round *int32 `json:"round,omitempty"`

	// runs that the stage, or the round, has.
	// +optional
	Runs *int32 `json:"runs,omitempty"`

	// runsDone of them have ended. It is written in steps of a tenth.
	// +optional
	RunsDone *int32 `json:"runsDone,omitempty"`

	// message sums up the verdict in a line.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`

	// startTime is when the nodes were selected.
	// +optional
	StartTime *metav1.Time `json:"startTime,omitempty"`

	// completionTime is when the verdict was final.
	// +optional
	CompletionTime *metav1.Time `json:"completionTime,omitempty"`

	// launcher is the one that started the benchmark's processes.
	// +optional
	Launcher Launcher `json:"launcher,omitempty"`

	// runner is the benchmark: the one that spec.runner.type names, or that was chosen when the check started.
	// +optional
	Runner RunnerType `json:"runner,omitempty"`

	// summary counts nodes and runs.
	// +optional
	Summary CheckSummary `json:"summary,omitzero"`

	// badNodes are the names of the failed nodes, as many as fit, for people.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	BadNodes string `json:"badNodes,omitempty"`

	// failedNodes are their names, sorted, the first 1000.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MaxLength=253
	FailedNodes []string `json:"failedNodes,omitempty"`

	// findings are the nodes that did not pass, failed ones first, at most 64.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	Findings []NodeFinding `json:"findings,omitempty"`

	// fabrics are the verdicts on the network between the nodes of each pool, failed ones first, at most 16.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Fabrics []FabricFinding `json:"fabrics,omitempty"`

	// networks are the networks that carried the runs, as their logs say.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=8
	Networks []LoadedNetwork `json:"networks,omitempty"`

	// reportName is the ConfigMap with the report: report.md and pairs.svg. Every node and run is in record.jsonl of the ConfigMaps
	// that are named so, with -1, -2 and so on added.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	ReportName string `json:"reportName,omitempty"`
}

// CheckSummary counts nodes and runs.
type CheckSummary struct {
	// nodes that were selected.
	// +optional
	Nodes *int32 `json:"nodes,omitempty"`

	// passed nodes.
	// +optional
	Passed *int32 `json:"passed,omitempty"`

	// failed nodes.
	// +optional
	Failed *int32 `json:"failed,omitempty"`

	// inconclusive nodes: neither passed nor failed.
	// +optional
	Inconclusive *int32 `json:"inconclusive,omitempty"`

	// runs of the benchmark.
	// +optional
	Runs *int32 `json:"runs,omitempty"`

	// medianBusBandwidth is over the runs between nodes that passed, bytes per second.
	// +optional
	MedianBusBandwidth *resource.Quantity `json:"medianBusBandwidth,omitempty"`
}

// NodeFinding is a node that did not pass.
type NodeFinding struct {
	// name of the node.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// verdict is Fail or Inconclusive.
	// +required
	Verdict Verdict `json:"verdict,omitempty"`

	// stage that found it.
	// +required
	Stage Stage `json:"stage,omitempty"`

	// reason is a CamelCase word.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`

	// message is one line for people.
	// +optional
	// +kubebuilder:validation:MaxLength=400
	Message string `json:"message,omitempty"`

	// busBandwidth is the best of the node's runs, bytes per second.
	// +optional
	BusBandwidth *resource.Quantity `json:"busBandwidth,omitempty"`
}

// FabricFinding is the verdict on the network between the nodes of a pool.
type FabricFinding struct {
	// pools has one pool, or some of the pools with a single node each; none if the verdict is on all.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:items:MaxLength=63
	Pools []string `json:"pools,omitempty"`

	// verdict on the fabric.
	// +required
	Verdict Verdict `json:"verdict,omitempty"`

	// reason is a CamelCase word.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`

	// message is one line for people.
	// +optional
	// +kubebuilder:validation:MaxLength=400
	Message string `json:"message,omitempty"`

	// minBusBandwidth is the minimum that its runs had to reach, bytes per second.
	// +optional
	MinBusBandwidth *resource.Quantity `json:"minBusBandwidth,omitempty"`
}

// LoadedNetwork is a network that carried runs.
type LoadedNetwork struct {
	// name is the plugin's own, or NCCL's name of a built-in network: Evenkeel, Socket, IB.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Name string `json:"name,omitempty"`

	// api is the version of the ncclNet interface, if known.
	// +optional
	// +kubebuilder:validation:Minimum=1
	API *int32 `json:"api,omitempty"`

	// sha256 is the beginning of the library's hash, if known.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	SHA256 string `json:"sha256,omitempty"`

	// transport of the network: tcp, rdma, or mixed if ranks differ. Absent if unknown.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	Transport string `json:"transport,omitempty"`
}

// NetworkCheck checks the network of nodes once.
//
// +kubebuilder:object:root=true
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=netcheck
// +kubebuilder:printcolumn:name="Verdict",type=string,JSONPath=`.status.verdict`
// +kubebuilder:printcolumn:name="Bad nodes",type=string,JSONPath=`.status.badNodes`
// +kubebuilder:printcolumn:name="Nodes",type=integer,JSONPath=`.status.summary.nodes`
// +kubebuilder:printcolumn:name="Passed",type=integer,JSONPath=`.status.summary.passed`
// +kubebuilder:printcolumn:name="Failed",type=integer,JSONPath=`.status.summary.failed`
// +kubebuilder:printcolumn:name="Unclear",type=integer,JSONPath=`.status.summary.inconclusive`
// +kubebuilder:printcolumn:name="Median B/s",type=string,JSONPath=`.status.summary.medianBusBandwidth`
// +kubebuilder:printcolumn:name="Progress",type=string,JSONPath=`.status.progress`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.message`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 63",message="a check's name has at most 63 characters"
type NetworkCheck struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec says what to check.
	// +required
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a check cannot be changed: create another"
	Spec NetworkCheckSpec `json:"spec,omitzero"`

	// status is the result.
	// +optional
	Status NetworkCheckStatus `json:"status,omitzero"`
}

// NetworkCheckList is a list of checks.
//
// +kubebuilder:object:root=true
type NetworkCheckList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []NetworkCheck `json:"items"`
}
