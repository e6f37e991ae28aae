package main

import (
	"cmp"

	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// A benchCase is measured with perftest and with the plugin.
type benchCase struct {
	Name       string
	Bytes      int
	QueuePairs int
	Messages   int     // of all queue pairs
	Latency    bool    // half of a round trip, microseconds; else MB/s
	Min        float64 // bandwidth over perftest's
	Max        float64 // latency over perftest's
	Limits     string  // the known limit
}

// Known limits of the cases.
const (
	limitsBandwidth = "the processors: two emulated ones run soft-RoCE and both ends. The receiver of `ib_write_bw` sleeps; NCCL's interface makes a receiver poll, as that of `ib_send_bw` does, which is shown for comparison"
	limitsLatency   = "not the verbs, which are perftest's: one write and one completion for each message, with one system call; `ib_send_lat` shows that completions at the receiver cost little. " +
		"A rank that waits yields after each poll, as NCCL's does, which is a system call that is emulated here, on processors that soft-RoCE's threads need; a profile shows more of the ranks' time there than in the plugin. Runs differ by a factor of two"
)

var cases = []benchCase{
	{Name: "1 MiB messages, 1 queue pair", Bytes: 1 << 20, QueuePairs: 1, Messages: 200, Min: 0.9, Limits: limitsBandwidth},
	{Name: "1 MiB messages, 4 queue pairs", Bytes: 1 << 20, QueuePairs: 4, Messages: 200, Min: 0.9, Limits: limitsBandwidth},
	{Name: "8 bytes there and back, half of it, p50", Bytes: 8, QueuePairs: 1, Messages: 2000, Latency: true, Max: 1.5, Limits: limitsLatency},
}

// perftest names perftest's programs for a case: of writes, which the receiver does not notice, and of sends.
func (c benchCase) perftest() (writes, sends string) {
	if c.Latency {
		return "ib_write_lat", "ib_send_lat"
	}
	return "ib_write_bw", "ib_send_bw"
}

// A check has no figure: tests of the plugin that pass or fail.
type check struct {
	Name, Goal string
	Target     string // target of the test program
	Tests      []string
	Topology   vm.Topology // of the virtual machine; default that of the figures
}

func (c check) topology() vm.Topology { return cmp.Or(c.Topology, vm.Pair) }

var checks = []check{
	{
		Name: "registration of a cached buffer", Goal: "no verbs call",
		Target: "evenkeel_transport",
		Tests:  []string{"rdma::tests::mr_cache_registers_memory_once"},
	},
	{
		Name: "one queue pair forced into error in the middle of a transfer, at either side, of two and of one", Goal: "the transfer finishes, every byte right",
		Target: "evenkeel_transport",
		Tests:  []string{"rdma::tests::queue_pair_failure_at_the_sender_loses_no_byte", "rdma::tests::queue_pair_failure_at_the_receiver_loses_no_byte"},
	},
	{
		Name: "all packets of a pair of ports lost in the middle of a transfer, and the port down", Goal: "the transfer finishes by another pair, every byte right",
		Target: "evenkeel_transport", Topology: vm.Rails,
		Tests: []string{"rdma::failover::tests::path_failure_under_load_loses_no_byte", "rdma::failover::tests::port_down_fails_over"},
	},
	{
		Name: "all-reduces of three ranks through two reduction servers", Goal: "every element right",
		Target: "commands",
		Tests:  []string{"rdma::rdma_reduction_servers_verify_each_element"},
	},
	{
		Name: "a reduction server killed", Goal: "an error at all ranks that names it",
		Target: "commands",
		Tests:  []string{"rdma::rdma_killed_reduction_server_is_named"},
	},
	{
		Name: "an outage of the only path, three times as long as the peer timeout", Goal: "the transfer finishes, every byte right",
		Target: "evenkeel_transport", Topology: vm.Rails,
		Tests: []string{"rdma::failover::tests::outage_of_the_only_path_is_outlived"},
	},
	{
		Name: "memory that an idle pair pins, one connection in each direction", Goal: "at most 128 KiB with mlx5: 44 KiB measured here, and at most 80 KiB computed for its queues",
		Target: "evenkeel_transport",
		Tests:  []string{"rdma::tests::idle_pairs_pin_little_memory", "rdma::queue_pairs::tests::idle_pair_pins_little_memory_with_mlx5"},
	},
	{
		Name: "200 idle pairs", Goal: "at most 0.5 % of a processor, and less than two wake-ups a second",
		Target: "evenkeel_transport",
		Tests:  []string{"rdma::tests::idle_pairs_take_no_processor_time"},
	},
	{
		Name: "receiver killed, or sender", Goal: "an error of all requests that names it, within the time set for verbs (here within 1 s)",
		Target: "abi",
		Tests:  []string{"peer_death::killed_receiver_fails_all_requests_of_the_sender", "peer_death::killed_sender_fails_all_requests_of_the_receiver"},
	},
}
