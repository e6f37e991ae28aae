package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// rdmaTests are the Rust tests that run in the lab: arguments for Cargo, the lab's topology, and arguments for the test binaries.
// Each test binary has a virtual machine of its own.
var rdmaTests = []struct {
	build       []string
	topology    vm.Topology
	run         []string
	environment []string
}{
	{build: []string{"-p", "evenkeel-transport", "--lib"}, topology: vm.Pair, run: []string{"device::", "rdma::", "--include-ignored", "--skip", "port_down_error", "--skip", "idle_pairs", "--skip", "unexpected_messages_wait", "--skip", "failover"}},
	// Tests of a whole port or process.
	{build: []string{"-p", "evenkeel-transport", "--lib"}, topology: vm.Pair, run: []string{"rdma::tests::port_down_error", "rdma::tests::idle_pairs", "rdma::tests::unexpected_messages_wait", "--include-ignored", "--test-threads", "1"}},
	// One test at a time, as each changes the links.
	{build: []string{"-p", "evenkeel-transport", "--lib"}, topology: vm.Rails, run: []string{"rdma::failover", "--include-ignored", "--test-threads", "1", "--skip", "fused_tests"}},
	{build: []string{"-p", "evenkeel-transport", "--lib"}, topology: vm.Rails, run: []string{"rdma::failover::fused_tests", "--include-ignored", "--test-threads", "1"}},
	// Tests that are ignored here are part of other tests.
	{build: []string{"-p", "evenkeel-nccl-plugin", "--test", "abi"}, topology: vm.Pair, run: []string{"messages::", "polled_lines::polled_lines_are_right_when_their_flags_are", "tables::", "close::both", "lifecycle::library", "lifecycle::finalize", "lifecycle::communicators", "lifecycle::one_flow", "lifecycle::thousand", "fork::fork_amid", "peer_death::killed", "peer_death::messages", "handshake::closed", "handshake::many", "collnet::all_reduce", "collnet::requests", "collnet::lost"}},
	{build: []string{"-p", "evenkeel-nccl-plugin", "--test", "abi"}, topology: vm.Pair, run: []string{"gpu_memory::offered", "traffic_class::marks", "registrations::messages", "devices::rdma_ports", "--include-ignored"}},
	// Its kernel has TLS, which most machines' lacks.
	{
		build: []string{"-p", "evenkeel-transport", "--lib", "--test", "encryption"}, topology: vm.Pair,
		run:         []string{"kernel_tls", "encryption_hides", "encryption_with_checksums", "encryption_on_one_side", "encryption_needs", "encryption_cannot", "--include-ignored"},
		environment: []string{"EVENKEEL_TEST_KTLS=on"},
	},
	{build: []string{"-p", "evenkeel-bench", "--test", "commands"}, topology: vm.Pair, run: []string{"rdma::", "--include-ignored"}},
}

// rdma runs the lab's own tests, and then those that need it. If the machine cannot have the lab, each counts as skipped.
func rdma(ctx context.Context, root string) (counts, error) {
	_, err := vm.New(ctx, os.Stderr)
	if missing := (vm.Missing{}); errors.As(err, &missing) {
		fmt.Printf("skipped: no RDMA lab on this machine: %s\n", missing.What)
		return counts{skipped: 1 + len(rdmaTests)}, nil
	}
	if err != nil {
		return counts{}, err
	}
	n, err := goTest(ctx, root, nil, "-tags", "e2e", "-timeout", "10m", "./hack/lab/rdma/...")
	if err != nil {
		return n, err
	}
	work, err := os.MkdirTemp("", "evenkeel-check-")
	if err != nil {
		return n, err
	}
	defer os.RemoveAll(work)
	program := filepath.Join(work, "rdma-lab")
	if err := stream(command(ctx, root, "go", "build", "-o", program, "./hack/lab/rdma"), nil); err != nil {
		return n, err
	}
	// Tests load the library and start the programs, so these are built first.
	if err := stream(command(ctx, pluginDir(root), "cargo", "build", "--locked", "-p", "evenkeel-nccl-plugin", "-p", "evenkeel-reduction-server"), nil); err != nil {
		return n, err
	}
	for _, t := range rdmaTests {
		runner := fmt.Sprintf("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=%s --topology %s --timeout 10m --", program, t.topology)
		rust, err := cargoTest(ctx, root, append(slices.Clone(t.environment), runner), slices.Concat(t.build, []string{"--"}, t.run)...)
		n.add(rust)
		if err != nil {
			return n, err
		}
	}
	return n, nil
}
