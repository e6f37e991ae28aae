package experiments

import (
	"fmt"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// Contenders of both experiments with collectives.
const (
	overTCP      = "Evenkeel, TCP"
	sharedMemory = "Evenkeel, shared memory"
)

// Prose of both.
const (
	glooWaits = "Gloo runs in its default blocking mode: the driver sets neither `setSync` nor `busyPoll`, which are its modes for low latency. Evenkeel's caller\n" +
		"polls for 2 ms before it sleeps. So the ratios at small sizes compare a polling waiter with a sleeping one."
	glooFails = "Gloo's ranks sometimes fail when one of them exits before the others; a run has up to three tries."
)

// The measurement between hosts: their number, the rate of each host's link, and the size.
const (
	collectiveHosts = 4
	collectiveRate  = netns.Gbit
	hostsElements   = 5_000_000
)

// collectives measures all-reduces on CPUs against Gloo's, in clear.
func collectives() experiment.Experiment {
	build, open := opened(workload.DebianGloo)
	return experiment.Experiment{
		Name: "collectives", Title: "Collectives against Gloo", Summary: "all-reduces on CPUs, over TCP and shared memory, against Gloo's", Subject: overTCP, DriverOnly: true,
		About: "An all-reduce (sum of float32) by Evenkeel, which chooses the algorithm, and by Debian's libgloo over TCP with each of its algorithms\n" +
			"(" + strings.Join(workload.GlooAlgorithms, ", ") + "). The best algorithm at each size, by its median, is what Evenkeel is\n" +
			"compared with. A run measures each size for a while, and has the minimum and the median time on rank 0.\n\n" +
			glooWaits + " Evenkeel's shared memory is compared with Gloo\n" +
			"over TCP, as Gloo has no transport over shared memory. " + glooFails,
		Notes: "All processes share one machine. Where there are more of them than cores, the medians are mostly those of the scheduler, and the minimum time\n" +
			"is that of the run with the fewest context switches.",
		Rounds: 5, QuickRounds: 2,
		Open: open,
		Cases: func(quick bool) []experiment.Case {
			return []experiment.Case{processes(2, quick, build), processes(4, quick, build), betweenHosts(quick, build), threads(quick)}
		},
	}
}

// collectiveLength is that of the measurement of a size.
func collectiveLength(quick bool) time.Duration {
	if quick {
		return 30 * time.Millisecond
	}
	return 100 * time.Millisecond
}

// processes is a sweep of sizes between processes of this machine.
func processes(ranks int, quick bool, build func() *workload.Gloo) experiment.Case {
	w := workload.Collective{
		Ranks: ranks, Length: collectiveLength(quick),
		Elements: []int{
			1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000,
		},
	}
	if quick {
		w.Elements = []int{1, 100, 1000, 10_000, 100_000, 1_000_000, 5_000_000}
	}
	minimum, median := w.Minimum(), w.Median()
	c := experiment.Case{
		Name: fmt.Sprintf("%d-processes", ranks), Title: fmt.Sprintf("%d processes", ranks), Load: fmt.Sprintf("%s for each size", w.Length),
		Contenders: append([]experiment.Contender{w.Evenkeel(sharedMemory, "shm"), w.Evenkeel(overTCP, "tcp")}, glooContenders(w, build)...),
		Others:     w.GlooBenchmark, Timeout: workload.CollectiveTimeout,
		Headline: minimum, Sweep: &experiment.Sweep{Of: "elements", Points: points(w.Elements), More: []experiment.Quantity{median}}, More: []experiment.Quantity{workload.FailedTries},
	}
	goals := []experiment.Quantity{minimum}
	if ranks == 2 {
		goals = append(goals, median) // with more, those are mostly the scheduler's
	}
	for _, of := range goals {
		c.Goals = append(c.Goals,
			share(of, 1, ""), experiment.Goal{Of: of, Share: 0.7, Points: 0.5},
			experiment.Goal{Of: of, Share: 0.3, To: 1000, Contender: sharedMemory}, experiment.Goal{Of: of, Share: 0.5, From: 1001, Contender: sharedMemory})
	}
	return c
}

// points are those of a sweep over numbers.
func points(numbers []int) []float64 {
	var all []float64
	for _, n := range numbers {
		all = append(all, float64(n))
	}
	return all
}

func glooContenders(w workload.Collective, build func() *workload.Gloo) []experiment.Contender {
	var all []experiment.Contender
	for _, algorithm := range workload.GlooAlgorithms {
		all = append(all, w.Gloo(algorithm, build))
	}
	return all
}

// betweenHosts has one process on each of several hosts.
func betweenHosts(quick bool, build func() *workload.Gloo) experiment.Case {
	c, w := hostsCase(quick)
	c.Contenders = append([]experiment.Contender{w.Evenkeel("Evenkeel, TCP, one flow", "tcp", "EVENKEEL_FLOWS=1"), w.Evenkeel(overTCP, "tcp")}, glooContenders(w, build)...)
	c.Others = w.GlooBenchmark
	c.Notes = append(c.Notes, "Each connection of Evenkeel has four flows, which are for networks with several paths. Here they share one link, and `EVENKEEL_FLOWS=1` is shown for\ncomparison.")
	c.Goals = []experiment.Goal{median(workload.BoundShare, 0.95, "")}
	return c
}

// hostsCase is one process on each of several hosts, still without contenders and goals.
func hostsCase(quick bool) (experiment.Case, workload.Collective) {
	w := workload.Collective{Ranks: collectiveHosts, Elements: []int{hostsElements}, Length: time.Second, Bound: ringBound(hostsElements)}
	if quick {
		w.Length = 300 * time.Millisecond
	}
	return experiment.Case{
		Name: "hosts", Title: fmt.Sprintf("%d elements between %d hosts with links of %s", hostsElements, collectiveHosts, collectiveRate),
		Load: fmt.Sprintf("one process on each host, %s for each run", w.Length), Network: starOf(collectiveHosts, collectiveRate), Timeout: workload.CollectiveTimeout,
		Notes: []string{fmt.Sprintf("A ring cannot take less than %.0f ms on these links, the wire limit: each host sends %.1f times the elements, in packets of %d bytes, whose headers count.",
			w.Bound, 2*float64(collectiveHosts-1)/float64(collectiveHosts), netns.DefaultMTU)},
		Headline: w.Median(), More: []experiment.Quantity{w.Minimum(), workload.BoundShare, workload.FailedTries}, Limit: w.Bound,
	}, w
}

// ringBound is the minimum time of a ring between the hosts, in ms: each host sends all but one of its parts twice.
func ringBound(elements int) float64 {
	payload := 2 * float64(4*elements) * float64(collectiveHosts-1) / float64(collectiveHosts)
	return payload / netns.PayloadLimit(collectiveRate) / 1e6
}

// threads has many ranks as threads of one process.
func threads(quick bool) experiment.Case {
	w := workload.Collective{Ranks: 64, Elements: []int{1}, Length: collectiveLength(quick)}
	return experiment.Case{
		Name: "threads", Title: fmt.Sprintf("%d ranks as threads of one process, 1 element", w.Ranks), Contenders: []experiment.Contender{w.Threads(overTCP)},
		Headline: workload.ThreadsPerCore, More: []experiment.Quantity{workload.NetworkThreads, w.Minimum(), w.Median()}, Timeout: workload.CollectiveTimeout,
		// That all ranks complete is part of it: a run that fails misses the goal.
		Goals: []experiment.Goal{every(workload.ThreadsPerCore, 1, "")},
	}
}
