package preflight

import (
	"cmp"
	"slices"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// maxGPUsPerNode is the API's limit.
const maxGPUsPerNode = 64

// ChooseRunner returns the benchmark of a check, and how many GPUs it uses of each node. What the check names is taken.
// Otherwise it is the first runner that uses GPUs as jobs do and whose image the installation knows, where every node
// to test offers whole GPUs to it. All runs of a check have one runner, as their bandwidths are compared.
func ChooseRunner(o evenkeel.CheckOptions, installed []evenkeel.RunnerType, nodes []Node) (runner evenkeel.RunnerType, gpusPerNode *int32) {
	if o.Runner.Type != "" {
		return o.Runner.Type, o.Runner.GPUsPerNode
	}
	has := func(stage evenkeel.Stage) bool { return slices.Contains(o.Stages, stage) }
	tested := slices.DeleteFunc(slices.Clone(nodes), func(n Node) bool { return n.Verdict != "" })
	switch {
	case len(tested) == 0,
		o.Runner.Image != "",                              // for all that is known, of evenkeel-bench
		o.BusyNodes == evenkeel.BusyNodesTest,             // their users have the GPUs
		has(evenkeel.StageRDMA), has(evenkeel.StageRails): // which evenkeel-bench alone has
		return evenkeel.RunnerBench, nil
	}
	enough := int32(1)
	if has(evenkeel.StageLocal) {
		enough = 2 // a single GPU has nobody in its node to send to, so that the stage would not see the plugin
	}
	for _, runner := range installed {
		least := int32(maxGPUsPerNode)
		for _, n := range tested {
			least = min(least, n.GPUs[runner])
		}
		if least >= enough {
			return runner, &least
		}
	}
	return evenkeel.RunnerBench, nil
}

// SetRunner sets the runner of a check's options to the recorded one, where the check names none. Earlier versions
// recorded none, and all of their checks name one.
func (r *Record) SetRunner(runner *evenkeel.RunnerSpec) {
	if runner.Type == "" {
		runner.Type, runner.GPUsPerNode = cmp.Or(r.Runner, evenkeel.RunnerBench), r.GPUsPerNode
	}
}
