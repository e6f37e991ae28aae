// Package experiments has the experiments, one in a file.
package experiments

import (
	"fmt"
	"slices"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

// All are the experiments, in the order in which they are listed.
func All() []experiment.Experiment {
	return []experiment.Experiment{
		scale(), cores(), rcclExperiment(), tcp(), encryption(), reduction(), kernels(), simulation(), rdma(), collectives(), collectivesTLS(), unevenLinks(), torch(), injections(), noFaults(), onGPU(),
	}
}

// Names are theirs.
func Names() []string {
	var names []string
	for _, e := range All() {
		names = append(names, e.Name)
	}
	return names
}

// Named is the experiment of a name.
func Named(name string) (experiment.Experiment, error) {
	names := Names()
	at := slices.Index(names, name)
	if at < 0 {
		return experiment.Experiment{}, fmt.Errorf("no experiment %q: there are %s", name, strings.Join(names, ", "))
	}
	return All()[at], nil
}
