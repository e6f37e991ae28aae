package experiments

import (
	"fmt"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
)

// scale measures what thousands of connections cost while they carry nothing.
func scale() experiment.Experiment {
	const (
		limitsOpening = "system calls: a pair has 4 flows, each with its options and its place in `epoll`, where NCCL's sockets have 2\n" +
			"  ([system calls](polling.md#opening))"
		limitsPorts = "the kernel's search for a free port, which plain sockets need too"
	)
	ours := func(pairs, processes int) experiment.Contender {
		return workload.Connections{Pairs: pairs, Processes: processes}.Plugin(experiment.Ours)
	}
	plain := func(pairs, processes, sockets int) experiment.Contender {
		return workload.Connections{Pairs: pairs, Processes: processes}.PlainSockets(sockets)
	}
	one := func(pairs int) experiment.Contender {
		return workload.Connections{Pairs: pairs, Processes: 1}.Plugin("Evenkeel, 1 flow", "EVENKEEL_FLOWS=1")
	}
	light := median(workload.PairMemory, 64, "")
	oneIsLight := light
	oneIsLight.Contender = one(1024).Name
	linear := share(workload.TimeOfAPair, 1.5, limitsPorts)
	linear.Reference.Case = "256-pairs"
	cases := []experiment.Case{
		{
			Name: "1024-pairs", Title: "1,024 pairs",
			Contenders: []experiment.Contender{plain(1024, 1, 2), plain(1024, 1, 4), plain(1024, 1, 1), ours(1024, 1), one(1024)},
			Goals: []experiment.Goal{
				shareOf("2 plain sockets", workload.OpenAndClose, 1.2, limitsOpening), median(workload.PairDescriptors, 8.01, ""), light, oneIsLight,
			},
		},
		{Name: "256-pairs", Title: "256 pairs", Contenders: []experiment.Contender{ours(256, 1)}, Goals: []experiment.Goal{light}},
		{
			Name: "4000-pairs", Title: "4,000 pairs", Contenders: []experiment.Contender{plain(4000, 1, 4), ours(4000, 1)},
			Goals: []experiment.Goal{light, median(workload.IdleShare, 0.5, "")},
		},
		{
			Name: "10002-pairs", Title: "10,002 pairs of 3 pairs of processes", Contenders: []experiment.Contender{plain(3334, 3, 4), ours(3334, 3)},
			Goals: []experiment.Goal{light, linear},
		},
	}
	for i := range cases {
		cases[i].Headline = workload.OpenAndClose
		cases[i].More = []experiment.Quantity{
			workload.Opening, workload.Closing, workload.PairDescriptors, workload.PairMemory, workload.IdleShare, workload.Wakeups,
		}
	}
	return experiment.Experiment{
		Name: "scale", Title: "Connections at scale", Summary: "what thousands of idle connections cost, against plain sockets (20,000 descriptors: ulimit -Hn)",
		About: fmt.Sprintf(`What many connections of two processes cost while they carry nothing, over the loopback interface. Each has carried one message
of 1 KiB, and is idle for %d s. A pair is both ends of a connection, so descriptors, memory, time of a processor and wake-ups
are those of both processes together. Two plain sockets for each connection are as many as NCCL's own have. A run is a command such as:

`+"```"+`
evenkeel-bench scale --plugin ./libnccl-net-evenkeel.so --connections 1024
evenkeel-bench scale --plain-sockets 2 --connections 1024
`+"```", workload.IdleSeconds),
		Notes: `Where several pairs of processes share the connections, times, descriptors and memory are those of the worst of them, and idle figures
are sums. The listening socket is one more descriptor for each process, and not counted. Beyond some 14,000 flows between two addresses, the
kernel takes longer and longer to find a free port, for plain sockets as well. What a connection takes in system calls, and why opening costs
more than plain sockets, is on the page about [system calls](polling.md#opening).`,
		Rounds: 5, QuickRounds: 2,
		Cases: func(bool) []experiment.Case { return cases },
	}
}
