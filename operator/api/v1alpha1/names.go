package v1alpha1

// Keys that users write.
const (
	// ProfileKey is the annotation on a job that asks for a profile, and the label on its pods that calls the pod webhook.
	ProfileKey = "evenkeel.dev/profile"
	// DefaultProfileKey is the label on a namespace that names the profile of its GPU jobs without the annotation.
	DefaultProfileKey = "evenkeel.dev/default-profile"
	// ContainersKey is the annotation that names the containers to inject, comma-separated.
	ContainersKey = "evenkeel.dev/containers"
	// ReductionKey is the annotation that asks for reduction servers: a number, Auto or Off.
	ReductionKey = "evenkeel.dev/reduction"
	// JobKeyKey is the annotation on a job that names a Secret of its namespace with the job's key. Where Evenkeel makes the key
	// itself, it is a label on the job and its pods instead, with the name of the Secret that it makes.
	JobKeyKey = "evenkeel.dev/job-key"
	// GateKey is the annotation that says whether the job may be gated until its nodes are proven: GateEnabled (the default)
	// or GateDisabled.
	GateKey      = "evenkeel.dev/gate"
	GateEnabled  = "Enabled"
	GateDisabled = "Disabled"
)

// The gate that keeps jobs from starting until their nodes are proven.
const (
	// GatedKey is the label on what is gated: jobs that Evenkeel suspended, and pods with the scheduling gate. Its value is
	// GatedValue, or GatedSuspendedValue on jobs that stay suspended when the gate opens, as their user wanted. It is removed when the gate opens. On the pod templates of jobs that cannot be suspended it asks the pod
	// webhook for the scheduling gate.
	GatedKey   = "evenkeel.dev/gated"
	GatedValue = "true"

	GatedSuspendedValue = "suspended"
	// SchedulingGate is the name of the scheduling gate on pods.
	SchedulingGate = "evenkeel.dev/preflight"
	// TemplateKey is the annotation on such a pod template, and so on its pods, with the template's path in the job.
	TemplateKey = "evenkeel.dev/template"
	// OpenedTemplatesKey is the annotation on such a job that lists the templates whose gate has been opened, comma-separated.
	// Pods that are made from them later do not wait.
	OpenedTemplatesKey = "evenkeel.dev/opened-templates"
)

// Annotations that the workload webhook puts on pod templates: the profile as it was when the job was created.
const (
	PluginImageKey    = "evenkeel.dev/plugin-image"
	DeliveryKey       = "evenkeel.dev/delivery"
	PluginPathKey     = "evenkeel.dev/plugin-path"
	ConflictPolicyKey = "evenkeel.dev/conflict-policy"
	PythonKey         = "evenkeel.dev/python"
	// InstallResourcesKey has the CPU and memory of the init container, where they are not the default: cpu=250m,memory=128Mi.
	InstallResourcesKey = "evenkeel.dev/install-resources"
	EnvironmentKey      = "evenkeel.dev/environment"
	// ImagePullSecretsKey holds the comma-separated names of the Secrets with which pods pull the plugin image.
	ImagePullSecretsKey = "evenkeel.dev/image-pull-secrets"
	// ReductionServersKey holds the addresses of the job's reduction servers.
	ReductionServersKey = "evenkeel.dev/reduction-servers"
	// RDMAResourceKey holds the RDMA resource and quantity that containers request: rdma/hca_shared_devices_a=1.
	RDMAResourceKey = "evenkeel.dev/rdma-resource"
	// MemoryLockKey is Capability where containers get IPC_LOCK.
	MemoryLockKey = "evenkeel.dev/memory-lock"
	// RDMANetworksKey holds the additional networks of pods with an RDMA device.
	RDMANetworksKey = "evenkeel.dev/rdma-networks"
	// RDMAUnusedKey says why the job got no RDMA device although nodes offer one.
	RDMAUnusedKey = "evenkeel.dev/rdma-unused"
	// TunerUnsetKey says why the job got no measurements for the plugin's tuner although its profile has them from checks.
	TunerUnsetKey = "evenkeel.dev/tuner-unset"
	// NetworksKey is the annotation of Multus for additional networks of a pod.
	NetworksKey = "k8s.v1.cni.cncf.io/networks"
)

// Labels that tie a job to its reduction servers. The value of both is the ReductionService's name.
const (
	// ReductionClientKey is on the job and its pods.
	ReductionClientKey = "evenkeel.dev/reduction-client"
	// ReductionServerKey is on everything that the ReductionService owns.
	ReductionServerKey = "evenkeel.dev/reduction-server"
)

// OwnerKey is the label on pods that asked for a profile themselves, with the UID of their owner. Its later pods get the same.
const OwnerKey = "evenkeel.dev/owner"

// Annotations that the pod webhook, or the policy in its place, puts on pods.
const (
	// InjectedKey has a hash of what was injected, or the profile and its generation where a policy did it.
	InjectedKey = "evenkeel.dev/injected"
	// SkippedKey says what was left alone, and why.
	SkippedKey = "evenkeel.dev/skipped"
	// RefusedKey says why a policy refuses the pod.
	RefusedKey = "evenkeel.dev/refused"
	// PluginStatusKey says whether NCCL uses the plugin in the pod: PluginNotReported at first, and what the plugin reports later.
	PluginStatusKey   = "evenkeel.dev/plugin-status"
	PluginNotReported = "NotReported"
	// SuspectsKey says whom the job waits for, on the pod whose rank has found that: JSON. It is there while the job waits.
	SuspectsKey = "evenkeel.dev/suspects"
)

// Labels on what belongs to a check.
const (
	// CheckKey has the NetworkCheck's name. It is on everything that the check owns.
	CheckKey = "evenkeel.dev/check"
	// RunKey has the run's name. It is on the run's pods.
	RunKey = "evenkeel.dev/run"
	// RoleKey is RoleRank on pods that run a rank; an MPIJob's launcher runs none.
	RoleKey  = "evenkeel.dev/role"
	RoleRank = "rank"
	// RoleLauncher is on an MPIJob's launcher.
	RoleLauncher = "launcher"
	// PolicyKey has the NetworkCheckPolicy's name. It is on the policy's checks.
	PolicyKey = "evenkeel.dev/policy"
	// TriggerKey has the trigger that made a policy's check: schedule, new, idle, suspicion, repair or job.
	TriggerKey = "evenkeel.dev/trigger"
)
