package jobs

import (
	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
)

// GPUTests are what differs between the runners that use GPUs. Programs, options and output are the same.
type GPUTests struct {
	// GPU is the extended resource that a pod requests for a GPU.
	GPU corev1.ResourceName
	// WithoutMPIRun is the folder of the programs that are linked with Evenkeel's functions of MPI, in images for Indexed Jobs.
	WithoutMPIRun string
}

// GPURunners are the runners that use GPUs.
var GPURunners = map[evenkeel.RunnerType]GPUTests{
	evenkeel.RunnerNCCLTests: {GPU: accelerator.NVIDIA, WithoutMPIRun: "/opt/evenkeel/nccl-tests"},
	evenkeel.RunnerRCCLTests: {GPU: accelerator.AMD, WithoutMPIRun: "/opt/evenkeel/rccl-tests"},
}

// gpuPrograms are the programs of nccl-tests and rccl-tests.
var gpuPrograms = map[evenkeel.Collective]string{
	evenkeel.CollectiveAllReduce: "all_reduce_perf", evenkeel.CollectiveAllGather: "all_gather_perf",
	evenkeel.CollectiveReduceScatter: "reduce_scatter_perf", evenkeel.CollectiveAllToAll: "alltoall_perf",
	evenkeel.CollectiveBroadcast: "broadcast_perf", evenkeel.CollectiveReduce: "reduce_perf", evenkeel.CollectiveSendRecv: "sendrecv_perf",
}
