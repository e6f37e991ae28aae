package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"evenkeel.dev/evenkeel/hack/internal/cargo"
	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// rdmaTests are the Rust tests that run in the lab: the targets of the test programs, the lab's topology, and the programs' arguments.
// Each program has a virtual machine of its own.
var rdmaTests = []struct {
	targets     []string
	topology    vm.Topology
	run         []string
	environment []string
}{
	{targets: []string{"evenkeel_transport"}, topology: vm.Pair, run: []string{"device::", "rdma::", "--include-ignored", "--skip", "port_down_error", "--skip", "idle_pairs", "--skip", "unexpected_messages_wait", "--skip", "failover"}},
	// Tests of a whole port or process.
	{targets: []string{"evenkeel_transport"}, topology: vm.Pair, run: []string{"rdma::tests::port_down_error", "rdma::tests::idle_pairs", "rdma::tests::unexpected_messages_wait", "--include-ignored", "--test-threads", "1"}},
	// One test at a time, as each changes the links.
	{targets: []string{"evenkeel_transport"}, topology: vm.Rails, run: []string{"rdma::failover", "--include-ignored", "--test-threads", "1", "--skip", "fused_tests"}},
	{targets: []string{"evenkeel_transport"}, topology: vm.Rails, run: []string{"rdma::failover::fused_tests", "--include-ignored", "--test-threads", "1"}},
	// Tests that are ignored here are part of other tests.
	{targets: []string{"abi"}, topology: vm.Pair, run: []string{"messages::", "polled_lines::polled_lines_are_right_when_their_flags_are", "tables::", "close::both", "lifecycle::library", "lifecycle::finalize", "lifecycle::communicators", "lifecycle::one_flow", "lifecycle::thousand", "fork::fork_amid", "peer_death::killed", "peer_death::messages", "handshake::closed", "handshake::many", "collnet::all_reduce", "collnet::requests", "collnet::lost"}},
	{targets: []string{"abi"}, topology: vm.Pair, run: []string{"gpu_memory::offered", "traffic_class::marks", "registrations::messages", "devices::rdma_ports", "--include-ignored"}},
	// Its kernel has TLS, which most machines' lacks.
	{
		targets: []string{"evenkeel_transport", "encryption"}, topology: vm.Pair,
		run:         []string{"kernel_tls", "encryption_hides", "encryption_with_checksums", "encryption_on_one_side", "encryption_needs", "encryption_cannot", "--include-ignored"},
		environment: []string{"EVENKEEL_TEST_KTLS=on"},
	},
	{targets: []string{"commands"}, topology: vm.Pair, run: []string{"rdma::", "--include-ignored"}},
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
	built, err := cargo.Everything(ctx, root)
	if err != nil {
		return n, err
	}
	for _, t := range rdmaTests {
		for _, target := range t.targets {
			test, err := built.Test(target)
			if err != nil {
				return n, err
			}
			fmt.Printf("\n%s: %s %s\n", test.Package, target, strings.Join(t.run, " "))
			lab := []string{"--topology", string(t.topology), "--timeout", "10m", "--", test.Path}
			cmd := command(ctx, filepath.Join(pluginDir(root), test.Package), program, append(lab, t.run...)...)
			cmd.Env = append(os.Environ(), t.environment...)
			rust, err := countRust(cmd)
			n.add(rust)
			if err != nil {
				return n, fmt.Errorf("%s in the lab: %w", target, err)
			}
		}
	}
	return n, nil
}
