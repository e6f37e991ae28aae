package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// DefaultPoolLabel is the label by which the GPU operator's feature discovery tells products apart.
const DefaultPoolLabel = "nvidia.com/gpu.product"

// Defaults that follow from the number of nodes.
const (
	defaultConcurrentNodes   = 32
	defaultConcurrentPercent = 10
	defaultTimeoutSeconds    = 3600
	// secondsOfWave are added for each time that maxConcurrentNodes goes into the nodes.
	secondsOfWave = 120
)

// WithDefaults returns the options with every default filled in, but for the runner's image. Those that follow from the number of
// nodes are as for a few.
func (o CheckOptions) WithDefaults() CheckOptions { return o.WithDefaultsFor(0) }

// WithDefaultsFor returns the options of a check of that many nodes, with every default filled in, but for the runner's image.
func (o CheckOptions) WithDefaultsFor(nodes int) CheckOptions {
	out := *o.DeepCopy()
	if len(out.Stages) == 0 {
		out.Stages = []Stage{StageCapacity, StageLocal, StagePairs}
	}
	fill(&out.ProfileName, "default")
	fill(&out.BusyNodes, BusyNodesSkip)
	fill(&out.PoolLabel, DefaultPoolLabel)
	fill(&out.Runner.Launcher, LauncherAuto)
	fill(&out.Sweep.Collective, CollectiveAllReduce)
	fillPointer(&out.Sweep.MinBytes, 1<<20)
	fillPointer(&out.Sweep.MaxBytes, max(64<<20, *out.Sweep.MinBytes))
	*out.Sweep.MinBytes = min(*out.Sweep.MinBytes, *out.Sweep.MaxBytes)
	fillPointer(&out.Sweep.Iterations, 20)
	fillPointer(&out.MaxConcurrentNodes, int32(max(defaultConcurrentNodes, nodes*defaultConcurrentPercent/100)))
	fillPointer(&out.RunTimeoutSeconds, 300)
	fillPointer(&out.TimeoutSeconds, defaultTimeoutSeconds+secondsOfWave*int32(nodes)/(*out.MaxConcurrentNodes))
	r := &out.Runner.Resources
	if !names(r, corev1.ResourceCPU) {
		set(&r.Requests, corev1.ResourceCPU, resource.MustParse("100m"))
	}
	if !names(r, corev1.ResourceMemory) {
		memory := *resource.NewQuantity(4*(*out.Sweep.MaxBytes)+(256<<20), resource.BinarySI)
		set(&r.Requests, corev1.ResourceMemory, memory)
		set(&r.Limits, corev1.ResourceMemory, memory)
	}
	return out
}

// names reports whether the resource is requested or limited.
func names(r *corev1.ResourceRequirements, name corev1.ResourceName) bool {
	_, requested := r.Requests[name]
	_, limited := r.Limits[name]
	return requested || limited
}

func set(list *corev1.ResourceList, name corev1.ResourceName, value resource.Quantity) {
	if *list == nil {
		*list = corev1.ResourceList{}
	}
	(*list)[name] = value
}

func fill[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func fillPointer[T any](field **T, value T) {
	if *field == nil {
		*field = &value
	}
}
