package experiments

import (
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
)

// kernelsTimeout is for compiling and running the program.
const kernelsTimeout = 15 * time.Minute

// kernels measures the sums of reduction servers and collectives on one core.
func kernels() experiment.Experiment {
	const limits = "the instructions of one core. Loading the sources alone has columns of its own; where loads reach the goal, most likely it is the\n" +
		"  number of concurrent buffers, or the conversion"
	return experiment.Experiment{
		Name: "kernels", Title: "Sums", Summary: "sums of 2 to 16 buffers on one core, against adding two arrays",
		About: "GB/s that are read and written. The add is of two arrays of float32 into a third, over as much memory, in the same place. Loads are the sources\n" +
			"converted to float32, as if they were one buffer, and neither summed nor stored: about the maximum. One program measures all in turn, once a round.",
		Rounds: 3, QuickRounds: 1, DriverOnly: true,
		Cases: func(bool) []experiment.Case {
			program := workload.NewKernels()
			var all []experiment.Case
			for _, total := range []string{"24 KiB", "512 KiB", "256 MiB"} {
				c := experiment.Case{
					Name: strings.ToLower(strings.ReplaceAll(total, " ", "-")), Title: "buffers of " + total + " in all", Headline: workload.SumFloat32, Timeout: kernelsTimeout,
					More: []experiment.Quantity{
						workload.OfAdd, workload.SumFloat16, workload.SumBfloat16, workload.HalfShare, workload.SumFloat8, workload.SumInt32, workload.Add,
						workload.LoadFloat32, workload.LoadFloat16, workload.LoadBfloat16,
					},
				}
				for _, sources := range []int{2, 4, 8, 16} {
					of := program.Sum(total, sources)
					c.Contenders = append(c.Contenders, of)
					for _, g := range []experiment.Goal{median(workload.OfAdd, 0.9, limits), median(workload.HalfShare, 0.8, limits)} {
						g.Contender = of.Name
						c.Goals = append(c.Goals, g)
					}
				}
				all = append(all, c)
			}
			return all
		},
	}
}
