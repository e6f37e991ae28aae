package experiments

import (
	"fmt"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload/gpu"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	// gpuTimeout is for one run. All that is measured is a record of its own, so that an interruption loses no more than
	// this.
	gpuTimeout = 2 * time.Minute
	// killTimeout is for a run in which something is killed: NCCL's timeout, and the ranks' end after it.
	killTimeout = 5 * time.Minute
)

// onGPU measures real NCCL on this machine's first GPU.
func onGPU() experiment.Experiment {
	const loopbackServers, cards = 2, 4
	lab, open := opened(gpu.New)
	return experiment.Experiment{
		Name: "gpu", Title: "GPU results", Summary: "real NCCL over the plugin on one GPU, against its own sockets (NVIDIA's driver, NCCL 2.21, cc)",
		About: "All ranks are processes on one GPU, each to NCCL a host of its own, so that they reach each other only through the network. They all-reduce, and check\n" +
			"every element. NCCL's log names the network of every rank, and a run over another one fails. NCCL_ and EVENKEEL_ settings of the environment are ignored.\n\n" +
			"Ranks share the GPU by time slicing: a rank that waits for a peer holds the GPU until its slice ends, and only then the peer continues. So figures compare\n" +
			"the ways, and are no measure of what any can carry. With NVIDIA's MPS kernels run at the same time. It is started before:\n" +
			"`export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps; nvidia-cuda-mps-control -d; make bench EXPERIMENT=gpu`. Times are medians of a run's all-reduces of float32, sum.",
		Notes:  "In the middle of a run a rank is killed (SIGKILL), and in another one a reduction server. All ranks that are left must get an error from NCCL, and exit.",
		Rounds: 5, QuickRounds: 1, Checks: true,
		Open: open,
		Cases: func(quick bool) []experiment.Case {
			w := gpu.Load{Lab: lab, Ranks: 2, Min: 8, Max: 64 << 20, Iterations: 5, Timeout: time.Minute, OutputTimeout: 90 * time.Second}
			if quick {
				w.Max, w.Iterations = 4<<20, 2
			}
			timed := func(name, title string, w gpu.Load, network *netns.Config, ways ...gpu.Way) experiment.Case {
				w.Name = name + "-"
				c := experiment.Case{
					Name: name, Title: title, Network: network, Headline: gpu.Time, More: []experiment.Quantity{gpu.Right}, Timeout: gpuTimeout,
					Sweep: &experiment.Sweep{Of: "bytes", Points: points(w.Sizes())},
				}
				for _, way := range ways {
					c.Contenders = append(c.Contenders, w.AllReduce(way))
				}
				return c
			}
			killed := func(name, title string, of experiment.Contender) experiment.Case {
				return experiment.Case{Name: name, Title: title, Headline: gpu.ErrorAfter, Once: true, Timeout: killTimeout, Contenders: []experiment.Contender{of}}
			}
			all, kill, shaped := w, w, w
			all.AllTypes, kill.AllTypes = true, true
			kill.Max, shaped.Min = 4<<20, 1<<20
			star := shaped
			star.Ranks = cards
			return []experiment.Case{
				timed("loopback", "2 ranks over the loopback interface, all types and operations", all, nil, gpu.Plugin, gpu.Servers(loopbackServers), gpu.Sockets),
				killed("killed-rank", "a killed rank", kill.KillRank(gpu.Plugin)),
				killed("killed-server", "a killed reduction server", kill.KillServer(gpu.Servers(loopbackServers))),
				timed("unequal-links", "2 ranks, joined by links of 1gbit, 1gbit, 1gbit, 200mbit", shaped,
					&netns.Config{Links: netns.Links(netns.Gbit, netns.Gbit, netns.Gbit, 200*netns.Mbit)}, gpu.Plugin, gpu.Sockets, gpu.ManySockets),
				timed("cards", fmt.Sprintf("%d ranks, each on a card of %s", cards, netns.Gbit), star, starOf(2*cards, netns.Gbit),
					gpu.Servers(cards), gpu.Plugin, gpu.Sockets, gpu.ManySockets),
			}
		},
	}
}
