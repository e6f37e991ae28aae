package experiments

import (
	"fmt"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
)

// cores measures whether more processes, threads and connections carry more where there are processors for them.
func cores() experiment.Experiment {
	const pinned = ", pinned"
	return experiment.Experiment{
		Name: "cores", Title: "Processors", Summary: "1 to 8 pairs of processes with 1 to 8 worker threads, against plain sockets, for machines with 16 cores",
		About: "Pairs of processes send to each other over the loopback interface at the same time. A process has a thread that polls as NCCL's proxy does, and\n" +
			"worker threads (`EVENKEEL_WORKERS`; `auto` is one for 4 processors, 1 to 4). The rate is the sum of all pairs, and processor time includes\n" +
			"that of the polling. `Pinned` pairs are bound to processors of their own, both processes to the same ones.\n" +
			"Plain sockets are moved by the polling thread: one for each connection, or 4 that share each message equally, as NCCL's own do. Those with\n" +
			"a thread each block, and none waits for another.",
		Notes: "Threads that block carry more than all that a polling thread moves. On the machine with 16 cores, 4 plain sockets with a thread each had 10.3 to\n" +
			"12.3 GB/s in 5 runs, Evenkeel 4.3 to 5.6, and one polled socket for each connection 3.6 to 5.0\n" +
			"(`make bench EXPERIMENT=tcp ONLY=four-connections BENCH=--quick`, at commit 68b50d5a). Workers help the polling thread too little there.",
		Rounds: 2, QuickRounds: 1,
		Cases: func(quick bool) []experiment.Case {
			var all []experiment.Case
			for _, connections := range []int{2, 4} {
				for _, count := range []int{1, 2, 4, 8} {
					w := workload.Pairs{Count: count, Connections: connections, Size: 512 << 10, Depth: 8, Bytes: 2e9}
					if quick {
						w.Bytes = 5e8
					}
					bound := w
					bound.Pinned = true
					c := experiment.Case{
						Name: fmt.Sprintf("%d-pairs-%d-connections", count, connections), Title: fmt.Sprintf("pairs: %d, connections of each: %d", count, connections),
						Load:     "messages of 512 KiB, 8 in flight on each connection",
						Headline: workload.Rate, More: []experiment.Quantity{workload.Slowest, workload.Processor, workload.Sending, workload.Receiving},
						Contenders: []experiment.Contender{
							w.PlainSockets("plain socket, polled", 1), bound.PlainSockets("plain socket, polled"+pinned, 1),
							w.PlainSockets("4 plain sockets, polled, equal shares", 4), w.Threads("plain sockets with a thread each"),
							w.Plugin(experiment.Ours), bound.Plugin(experiment.Ours + pinned),
						},
						Goals: []experiment.Goal{share(workload.Rate, 1, limitsPolled)},
					}
					for _, workers := range []int{1, 2, 4, 8} {
						c.Contenders = append(c.Contenders, w.Plugin(fmt.Sprintf("Evenkeel, %d workers", workers), fmt.Sprintf("EVENKEEL_WORKERS=%d", workers)))
					}
					all = append(all, c)
				}
			}
			return all
		},
	}
}
