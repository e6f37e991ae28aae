package v1alpha1

import "k8s.io/apimachinery/pkg/api/resource"

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
	fillPointer(&out.Runner.Resources.CPU, resource.MustParse("100m"))
	fillPointer(&out.Runner.Resources.Memory, *resource.NewQuantity(4*(*out.Sweep.MaxBytes)+(256<<20), resource.BinarySI))
	return out
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
