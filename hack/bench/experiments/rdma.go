package experiments

import (
	"fmt"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// What limits the cases of RDMA that may miss a goal.
const (
	limitsRDMABandwidth = "the processors: two emulated ones run soft-RoCE and both ends. The receiver of `ib_write_bw` sleeps; NCCL's interface makes a receiver poll, as that of `ib_send_bw` does, which is shown for comparison"
	limitsRDMALatency   = "not the verbs, which are perftest's: one write and one completion for each message, with one system call; `ib_send_lat` shows that completions at the receiver cost little. " +
		"A rank that waits yields after each poll, as NCCL's does, which is a system call that is emulated here, on processors that soft-RoCE's threads need; a profile shows more of the ranks' time there than in the plugin. Runs differ by a factor of two"
)

// rdma measures the plugin over RDMA against perftest, in virtual machines, and runs there what of its tests is about
// more than speed.
func rdma() experiment.Experiment {
	lab, open := opened(vm.New)
	// Perftest's first program writes, which the receiver does not notice. The second sends: its receiver polls for a
	// completion of each message, as the plugin's does.
	against := func(name, title string, w workload.RDMA, writes, sends string, goal float64, limit string) experiment.Case {
		reference := w.Perftest(lab, writes)
		reference.Reference = true
		return experiment.Case{
			Name: name, Title: title, Headline: w.Headline(), Timeout: workload.RDMATimeout,
			Contenders: []experiment.Contender{w.Perftest(lab, sends), reference, w.Plugin(lab, experiment.Ours)},
			Goals:      []experiment.Goal{share(w.Headline(), goal, limit)},
		}
	}
	return experiment.Experiment{
		Name: "rdma", Title: "RDMA: the plugin against perftest", Summary: "the plugin over RDMA against perftest, in virtual machines",
		About: "Soft-RoCE in a virtual machine with an emulated processor; two ports joined by a virtual Ethernet link (MTU 9000, RDMA MTU 4096).\n" +
			"Each run has a new machine, and each end a processor of its own. Only the ratios mean something: neither the processor nor the network card is real.\n" +
			"perftest: `ib_write_bw` and `ib_write_lat`, the average and the typical value that they print. The receiver of `ib_write_bw` sleeps until the end,\n" +
			"that of `ib_write_lat` polls memory. Those of `ib_send_bw` and `ib_send_lat` poll for a completion of each message, as the plugin's does. Evenkeel:\n" +
			"`evenkeel-bench net --transport rdma`, through NCCL's interface: the receiver posts each buffer, and every message has its number, which is checked.",
		Notes: "The case without figures has tests of the plugin, in the same kind of virtual machine; those of other ports run in one with two pairs.\n" +
			"Idle pairs are 200, as the virtual machine opens and uses each over its emulated processor. Over TCP, [4,000](scale.md) are measured.",
		Rounds: 5, QuickRounds: 2,
		Open: open,
		Cases: func(bool) []experiment.Case {
			one, four := workload.RDMA{Bytes: 1 << 20, QueuePairs: 1, Messages: 200}, workload.RDMA{Bytes: 1 << 20, QueuePairs: 4, Messages: 200}
			latency := workload.RDMA{Bytes: 8, QueuePairs: 1, Messages: 2000, Latency: true}
			return []experiment.Case{
				against("one-queue-pair", "1 MiB messages, 1 queue pair", one, "ib_write_bw", "ib_send_bw", 0.9, limitsRDMABandwidth),
				against("four-queue-pairs", "1 MiB messages, 4 queue pairs", four, "ib_write_bw", "ib_send_bw", 0.9, limitsRDMABandwidth),
				against("latency", "8 bytes there and back", latency, "ib_write_lat", "ib_send_lat", 1.5, limitsRDMALatency),
				checks(workload.NewRDMATests(lab)),
			}
		},
	}
}

// checks is the case of what passes or fails.
func checks(tests *workload.RDMATests) experiment.Case {
	c := experiment.Case{
		Name: "tests", Title: "tests of the plugin", Headline: workload.Passed, Once: true, Timeout: checksTimeout,
		Notes: []string{"Each is of one test or more:\n"},
	}
	for _, of := range rdmaChecks {
		c.Contenders = append(c.Contenders, tests.Pass(of.name, of.target, of.topology, of.tests...))
		g := median(workload.Passed, 1, "")
		g.Contender = of.name
		c.Goals = append(c.Goals, g)
		for _, test := range of.tests {
			c.Notes[0] += fmt.Sprintf("\n* %s: %s (`%s`)", of.name, of.goal, test)
		}
	}
	return c
}

// checksTimeout is for compiling the tests, and for those of a check.
const checksTimeout = 45 * time.Minute

// An rdmaCheck has no figure: tests of the plugin that pass or fail.
type rdmaCheck struct {
	name, goal string
	target     string // of the test program
	tests      []string
	topology   vm.Topology // of the virtual machine; default that of the figures
}

var rdmaChecks = []rdmaCheck{
	{
		name: "registration of a cached buffer", goal: "no verbs call",
		target: "evenkeel_transport",
		tests:  []string{"rdma::tests::mr_cache_registers_memory_once"},
	},
	{
		name: "one queue pair forced into error in the middle of a transfer, at either side, of two and of one", goal: "the transfer finishes, every byte right",
		target: "evenkeel_transport",
		tests:  []string{"rdma::tests::queue_pair_failure_at_the_sender_loses_no_byte", "rdma::tests::queue_pair_failure_at_the_receiver_loses_no_byte"},
	},
	{
		name: "all packets of a pair of ports lost in the middle of a transfer, and the port down", goal: "the transfer finishes by another pair, every byte right",
		target: "evenkeel_transport", topology: vm.Rails,
		tests: []string{"rdma::failover::tests::path_failure_under_load_loses_no_byte", "rdma::failover::tests::port_down_fails_over"},
	},
	{
		name: "all-reduces of three ranks through two reduction servers", goal: "every element right",
		target: "commands",
		tests:  []string{"rdma::rdma_reduction_servers_verify_each_element"},
	},
	{
		name: "a reduction server killed", goal: "an error at all ranks that names it",
		target: "commands",
		tests:  []string{"rdma::rdma_killed_reduction_server_is_named"},
	},
	{
		name: "an outage of the only path, three times as long as the peer timeout", goal: "the transfer finishes, every byte right",
		target: "evenkeel_transport", topology: vm.Rails,
		tests: []string{"rdma::failover::tests::outage_of_the_only_path_is_outlived"},
	},
	{
		name: "memory that an idle pair pins, one connection in each direction", goal: "at most 128 KiB with mlx5: 44 KiB measured here, and at most 80 KiB computed for its queues",
		target: "evenkeel_transport",
		tests:  []string{"rdma::tests::idle_pairs_pin_little_memory", "rdma::queue_pairs::tests::idle_pair_pins_little_memory_with_mlx5"},
	},
	{
		name: "200 idle pairs", goal: "at most 0.5 % of a processor, and less than two wake-ups a second",
		target: "evenkeel_transport",
		tests:  []string{"rdma::tests::idle_pairs_take_no_processor_time"},
	},
	{
		name: "receiver killed, or sender", goal: "an error of all requests that names it, within the time set for verbs (here within 1 s)",
		target: "abi",
		tests:  []string{"peer_death::killed_receiver_fails_all_requests_of_the_sender", "peer_death::killed_sender_fails_all_requests_of_the_receiver"},
	},
}
