package v1alpha1

// Keys that users write.
const (
	// ProfileKey is the annotation on a job that asks for a profile, and the label on its pods that calls the pod webhook.
	ProfileKey = "evenkeel.dev/profile"
	// ContainersKey is the annotation that names the containers to inject, comma-separated.
	ContainersKey = "evenkeel.dev/containers"
	// ReductionKey is the annotation that asks for reduction servers: a number, Auto or Off.
	ReductionKey = "evenkeel.dev/reduction"
	// PreflightKey is the annotation that says whether the job may be held until its nodes are proven: PreflightGate (the
	// default) or PreflightOff.
	PreflightKey  = "evenkeel.dev/preflight"
	PreflightGate = "Gate"
	PreflightOff  = "Off"
)

// What holds jobs until their nodes are proven.
const (
	// GateKey is the label on what is held: jobs that Evenkeel suspended, and pods with the scheduling gate. Its value is
	// GateClosed; it goes when the gate opens. On the pod templates of jobs that cannot be suspended it asks the pod webhook
	// for the scheduling gate.
	GateKey    = "evenkeel.dev/gate"
	GateClosed = "closed"
	// SchedulingGate is the name of the scheduling gate on pods.
	SchedulingGate = "evenkeel.dev/preflight"
)

// Annotations that the workload webhook puts on pod templates: the profile as it was when the job was created.
const (
	PluginImageKey    = "evenkeel.dev/plugin-image"
	DeliveryKey       = "evenkeel.dev/delivery"
	PluginPathKey     = "evenkeel.dev/plugin-path"
	ConflictPolicyKey = "evenkeel.dev/conflict-policy"
	EnvironmentKey    = "evenkeel.dev/environment"
	// ReductionServersKey holds the addresses of the job's reduction servers.
	ReductionServersKey = "evenkeel.dev/reduction-servers"
	// RDMAResourceKey holds the RDMA device that containers get, and how many of it: rdma/hca_shared_devices_a=1.
	RDMAResourceKey = "evenkeel.dev/rdma-resource"
	// MemoryLockKey is Capability where containers get IPC_LOCK.
	MemoryLockKey = "evenkeel.dev/memory-lock"
	// RDMANetworksKey holds the further networks of pods with an RDMA device.
	RDMANetworksKey = "evenkeel.dev/rdma-networks"
	// NetworksKey is Multus's: the further networks of a pod.
	NetworksKey = "k8s.v1.cni.cncf.io/networks"
)

// Labels that tie a job to its reduction servers; both hold the ReductionService's name.
const (
	// ReductionClientKey is on the job and its pods.
	ReductionClientKey = "evenkeel.dev/reduction-client"
	// ReductionServerKey is on everything that the ReductionService owns.
	ReductionServerKey = "evenkeel.dev/reduction-server"
)

// Annotations that the pod webhook puts on pods.
const (
	// InjectedKey holds a hash of what was injected.
	InjectedKey = "evenkeel.dev/injected"
	// SkippedKey says what was left alone, and why.
	SkippedKey = "evenkeel.dev/skipped"
)

// Labels on what belongs to a check.
const (
	// CheckKey holds the NetworkCheck's name, on everything it owns.
	CheckKey = "evenkeel.dev/check"
	// RunKey holds the run's name, on its pods.
	RunKey = "evenkeel.dev/run"
	// RoleKey is RoleRank on pods that run a rank; an MPIJob's launcher runs none.
	RoleKey  = "evenkeel.dev/role"
	RoleRank = "rank"
	// RoleLauncher is on an MPIJob's launcher.
	RoleLauncher = "launcher"
	// PolicyKey holds the NetworkCheckPolicy's name, on its checks.
	PolicyKey = "evenkeel.dev/policy"
)
