package experiments

import "evenkeel.dev/evenkeel/hack/bench/experiment"

// median is a goal of the runs' median. The limit says why it may be missed.
func median(of experiment.Quantity, figure float64, limit string) experiment.Goal {
	return experiment.Goal{Of: of, Figure: figure, Limit: limit}
}

// every is a goal of every run.
func every(of experiment.Quantity, figure float64, limit string) experiment.Goal {
	return experiment.Goal{Of: of, Worst: true, Figure: figure, Limit: limit}
}

// share is a goal of the runs' median, as a share of that of the best reference.
func share(of experiment.Quantity, share float64, limit string) experiment.Goal {
	return experiment.Goal{Of: of, Share: share, Limit: limit}
}

// shareOf is a share of the median of another contender of the case.
func shareOf(contender string, of experiment.Quantity, share float64, limit string) experiment.Goal {
	return experiment.Goal{Of: of, Share: share, Reference: experiment.Reference{Contender: contender}, Limit: limit}
}
