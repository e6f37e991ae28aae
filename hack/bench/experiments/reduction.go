package experiments

import (
	"fmt"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const reductionServers = "reduction servers"

// What limits the cases of reduction servers that may miss a goal.
const (
	limitsAlgbw   = "the processors, which all hosts share: plain sockets that sum nothing have a row of their own"
	limitsClients = "the number of clients, each of which sends a GB and receives one. A part is the driver's, which asks 100 times before it sleeps"
	limitsPolling = "the polling: a thread that never sleeps uses what the processors have left, whatever the plugin does"
	limitsSmall   = "the processors, too few for 2 clients and a server at a time: the same messages over plain sockets have a row of their own"
)

// reduction measures reduction servers against a ring, over the same plugin and links.
func reduction() experiment.Experiment {
	return experiment.Experiment{
		Name: "reduction", Title: "Reduction servers' results", Summary: "reduction servers against a ring over the same links, and what a server's memory is", Subject: reductionServers,
		About: "One machine plays all hosts. Each client and server is a network namespace with a link of its own to a switch (`go run ./hack/lab/net --help`).\n" +
			"Ranks all-reduce a vector of float32 through the plugin, and check every element once. They ask for completions, and sleep after 100 rounds in which\n" +
			"nothing moves, as many ranks share this machine's processors. A contender that is polled as NCCL polls only yields (`evenkeel-bench reduction --driver nccl`).\n" +
			"algbw is bytes of the vector per time, 10^9 bytes a second. The ring is `evenkeel-bench`'s own, over the same plugin and links; no ring of NCCL's is\n" +
			"measured here. Plain sockets are a blocking connection from each client to each server. All send and receive as much as they can in both directions,\n" +
			"and nothing is summed: the maximum of what the machine can do.",
		Notes: "On a machine with AVX2 only, 8 bytes there and back take 30 us over plain sockets instead of 16. There an older version of this code reached 0.74 of the\n" +
			"link and 1.29 of the ring with 4 clients and 4 servers at 1 Gbit/s, and 0.82 of the link at 250 Mbit/s. Its clients took 11 s/GB of processor time,\n" +
			"and 29 at 250 Mbit/s. It was not measured again on such a machine. The sums themselves are another experiment, `kernels`.",
		Rounds: 5, QuickRounds: 2,
		Cases: func(quick bool) []experiment.Case {
			var all []experiment.Case
			// Slower links show the network where the processors, which all hosts share, are too few for the faster ones.
			for _, rate := range []netns.Rate{netns.Gbit, 250 * netns.Mbit} {
				for _, hosts := range []int{4, 2} {
					all = append(all, star(hosts, rate, quick))
				}
			}
			memory := workload.ServerMemory{Jobs: 64, Bound: 256 << 20}
			return append(all, smallReduction(quick), experiment.Case{
				Name: "memory", Title: fmt.Sprintf("a server with %d jobs of 2 ranks at a time, bounded to %d MiB", memory.Jobs, memory.Bound>>20),
				Timeout:    workload.ServerMemoryTimeout,
				Contenders: []experiment.Contender{memory.Server(reductionServers)}, Headline: workload.ServerBuffers, More: []experiment.Quantity{workload.ServerPeak},
				Goals: []experiment.Goal{every(workload.ServerBuffers, float64(memory.Bound>>20), "")},
			})
		},
	}
}

// starOf is a network of clients and servers around a switch.
func starOf(hosts int, rate netns.Rate) *netns.Config {
	config := &netns.Config{}
	for range hosts {
		config.Star = append(config.Star, rate)
	}
	return config
}

// star is as many clients as servers, with links of one rate.
func star(hosts int, rate netns.Rate, quick bool) experiment.Case {
	const polled = "servers, polled as NCCL polls"
	w := workload.Reduction{Clients: hosts, Servers: hosts, Bytes: 64 << 20, Operations: 5, Warmup: 1}
	if rate < netns.Gbit {
		w.Bytes, w.Operations = 32<<20, 2
	}
	if quick {
		w.Bytes, w.Operations = w.Bytes/4, 3
	}
	ring := w.AllReduce("ring", false, "--run-type", "ring")
	ring.Reference = true
	// Each byte crosses a client's link once in each direction.
	limit := netns.PayloadLimit(rate)
	c := experiment.Case{
		Name:  fmt.Sprintf("%dand%d-%s", hosts, hosts, rate),
		Title: fmt.Sprintf("%d clients, %d servers, links of %s", hosts, hosts, rate), Load: fmt.Sprintf("vectors of %d MiB", w.Bytes>>20),
		Network: starOf(2*hosts, rate), Headline: workload.Algbw, More: []experiment.Quantity{workload.ClientsCPU}, Limit: limit,
		Contenders: []experiment.Contender{
			w.AllReduce(reductionServers, hosts == 4, "--run-type", "servers"),
			w.AllReduce(polled, false, "--run-type", "servers", "--driver", "nccl"),
			w.AllReduce("servers, operations of 512 KiB", false, "--run-type", "servers", "--chunksize", "512K"),
			ring, w.Plain("plain sockets, no sums"),
		},
		Goals: []experiment.Goal{median(workload.Algbw, 0.9*limit, limitsAlgbw)},
	}
	if hosts == 4 {
		c.Goals = append(c.Goals, share(workload.Algbw, 1.3, limitsAlgbw))
	}
	if rate == netns.Gbit {
		ofPolled := median(workload.ClientsCPU, 3, limitsPolling)
		ofPolled.Contender = polled
		c.Goals = append(c.Goals, median(workload.ClientsCPU, 3, limitsClients), ofPolled)
	}
	return c
}

// smallReduction compares a small all-reduce with messages of its size between the same hosts.
func smallReduction(quick bool) experiment.Case {
	const two = "two messages, there and back"
	w := workload.Reduction{Clients: 2, Servers: 2, Bytes: 1 << 10, Operations: 5000, Warmup: 100}
	if quick {
		w.Operations = 500
	}
	return experiment.Case{
		Name: "small", Title: "all-reduce of 1 KiB, 2 clients, 2 servers, links without a limit",
		Network: starOf(4, 0), Headline: workload.OperationTime,
		Notes: []string{"Medians of a run's operations, one after the other; of messages of that size there and back; and, over plain sockets, of the messages of an\n" +
			"all-reduce: one from each client to a server, which answers when it has both."},
		Contenders: []experiment.Contender{
			w.AllReduce(reductionServers, false, "--depth", "1"), w.Messages(two), w.PlainMessages("the same messages over plain sockets"),
		},
		Goals: []experiment.Goal{shareOf(two, workload.OperationTime, 2, limitsSmall)},
	}
}
