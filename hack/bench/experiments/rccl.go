package experiments

import (
	"fmt"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
	"evenkeel.dev/evenkeel/hack/lab/rccl"
)

// rcclExperiment measures all-reduces of a real collective library over the plugin, and over that library's own
// sockets.
func rcclExperiment() experiment.Experiment {
	const mib = 32
	lab, open := opened(rccl.New)
	// A network has links of these rates. allReduces counts the all-reduces of a round; one more comes first and connects.
	network := func(name, title string, allReduces int, rates ...netns.Rate) experiment.Case {
		w := workload.AllReduce{Lab: lab, Bytes: mib << 20, Count: allReduces}
		return experiment.Case{
			Name: name, Title: title, Network: &netns.Config{Links: netns.Links(rates...)}, Anew: true,
			Contenders: []experiment.Contender{
				w.Sockets("RCCL's sockets"),
				w.Sockets("RCCL's sockets, 16 for each connection", "NCCL_SOCKET_NTHREADS=4", "NCCL_NSOCKS_PERTHREAD=4"),
				w.Plugin(experiment.Ours),
			},
			Headline: workload.Rate, Limit: netns.PayloadLimit(rates...),
		}
	}
	return experiment.Experiment{
		Name: "rccl", Title: "RCCL over Evenkeel and over its own sockets", Summary: "a real collective library, over the plugin and over its own sockets",
		About: fmt.Sprintf(`RCCL is real: Debian's 2.13.4. The GPUs are not: memory is the host's, and the kernels run on the same processors as the network
([how](../../hack/lab/rccl/README.md)). So the page shows how the two networks share links under a real library's traffic. It cannot show
GPU memory, GPUDirect, or the time of a GPU's kernels.

All-reduces of %d MiB between two hosts of one rank each, every element checked. In GB/s: the size divided by the time of the slower rank,
the median of a run. A run has new processes and so new ports, which the links are chosen by.`, mib),
		Notes: "An all-reduce of two ranks sends as many bytes each way as it has, at most at the links' limit. RCCL's sockets send a message over one\n" +
			"connection, or divide it over several in equal parts, and wait for the slowest. \"16 for each connection\" is the most that RCCL takes:\n" +
			"`NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4`.\n" + `
An all-reduce of 40 MB over Evenkeel once took 4.6 s on a busy machine, instead of 0.2 to 0.6 s. No cause was found. To see it again, four
ranks on two cores at a load of 8 to 10 ran 100 all-reduces of 40 MB over each network, with the same RCCL. The longest took 0.65 s over
Evenkeel and 0.47 s over RCCL's sockets. These runs were made once, by hand; the commands here do not repeat them.`,
		Rounds: 5, QuickRounds: 2,
		Open: open,
		Cases: func(bool) []experiment.Case {
			return []experiment.Case{
				network("four-links", "4 links of 500 Mbit/s, chosen by a hash of addresses and ports", 5, 500*netns.Mbit, 500*netns.Mbit, 500*netns.Mbit, 500*netns.Mbit),
				network("slow-link", "the same, one link at 100 Mbit/s", 5, 500*netns.Mbit, 500*netns.Mbit, 500*netns.Mbit, 100*netns.Mbit),
				network("one-link", "1 link of 500 Mbit/s", 5, 500*netns.Mbit),
				network("direct", "hosts joined directly, unshaped", 40),
			}
		},
	}
}
