package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/ci/check/results"
	"evenkeel.dev/evenkeel/hack/internal/child"
	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// rdmaTests are the Rust tests that run in the lab: the targets of the test programs, the lab's topology, and the
// programs' arguments. There is one virtual machine for each topology, and its programs run one after the other.
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
	{targets: []string{"abi"}, topology: vm.Pair, run: []string{"messages::", "polled_lines::polled_lines_are_right_when_their_flags_are", "tables::", "close::both", "lifecycle::library", "lifecycle::finalize", "lifecycle::communicators", "lifecycle::one_flow", "lifecycle::closed", "fork::fork_amid", "peer_death::killed", "peer_death::messages", "handshake::closed", "handshake::many", "collnet::all_reduce", "collnet::requests", "collnet::lost"}},
	{targets: []string{"abi"}, topology: vm.Pair, run: []string{"gpu_memory::offered", "traffic_class::marks", "registrations::messages", "devices::rdma_ports", "--include-ignored"}},
	// Its kernel has TLS, which most machines' lacks.
	{
		targets: []string{"evenkeel_transport", "encryption"}, topology: vm.Pair,
		run:         []string{"kernel_tls", "encryption_hides", "encryption_with_checksums", "encryption_on_one_side", "encryption_needs", "encryption_cannot", "--include-ignored"},
		environment: []string{"EVENKEEL_TEST_KTLS=on"},
	},
	{targets: []string{"commands"}, topology: vm.Pair, run: []string{"rdma::", "--include-ignored"}},
}

// rdmaLab runs the lab's own tests. If the machine cannot have the lab, that counts as a skipped test.
func rdmaLab(ctx context.Context, t *task) error {
	if t.skippedLab("rdma kernel", 1) {
		return nil
	}
	return t.runGo(ctx, "rdma lab tests", 10*time.Minute, nil)
}

// An rdmaProgram is a test program with its arguments.
type rdmaProgram struct {
	name, dir   string
	environment []string
	command     []string
}

// rdmaTimeout is that of one program. The virtual machine may take longer to start and to end.
const rdmaTimeout = 10 * time.Minute

// rdma runs the tests that need the lab with a topology. If the machine cannot have it, each row of the table counts as
// a skipped test.
func rdma(topology vm.Topology) func(context.Context, *task) error {
	return func(ctx context.Context, t *task) error {
		var programs []rdmaProgram
		rows := 0
		for _, tests := range rdmaTests {
			if tests.topology != topology {
				continue
			}
			rows++
			for _, target := range tests.targets {
				test, err := t.rust.Test(target)
				if err != nil {
					return err
				}
				programs = append(programs, rdmaProgram{
					name: test.Package + " " + target, dir: filepath.Join(t.root, "plugin", test.Package),
					environment: append([]string{results.RustEnvironment}, tests.environment...),
					command:     slices.Concat([]string{test.Path}, tests.run, results.RustArguments),
				})
			}
		}
		if t.skippedLab("rdma kernel", rows) {
			return nil
		}
		timeout := time.Duration(len(programs)) * rdmaTimeout
		cmd := child.Command(ctx, t.work, t.rdmaLab, "--topology", string(topology), "--timeout", timeout.String(), "--", "bash", "-c", rdmaScript(programs))
		t.parse(ctx, cmd, &rdmaParser{task: t, programs: programs})
		return context.Cause(ctx)
	}
}

// rdmaMark begins a line between the outputs of two programs: "start", or "end" and the exit status.
const rdmaMark = "@@ evenkeel check: "

// rdmaScript runs programs one after the other.
func rdmaScript(programs []rdmaProgram) string {
	var b strings.Builder
	for _, p := range programs {
		fmt.Fprintf(&b, "printf '\\n%sstart\\n'\n(cd %s && exec timeout --kill-after 10s %d env", rdmaMark, quote(p.dir), int(rdmaTimeout.Seconds()))
		for _, word := range slices.Concat(p.environment, p.command) {
			b.WriteString(" " + quote(word))
		}
		fmt.Fprintf(&b, ")\nprintf '\\n%send %%d\\n' $?\n", rdmaMark)
	}
	return b.String()
}

// quote makes one word of the shell of any text.
func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

// rdmaParser gives each of the programs of a script a parser of its own.
type rdmaParser struct {
	task     *task
	programs []rdmaProgram // that have not ended
	parser   results.Parser
	began    time.Time
}

// Line takes a line of the script's output.
func (p *rdmaParser) Line(line string) {
	mark, marked := strings.CutPrefix(strings.TrimSpace(line), rdmaMark)
	status, end := strings.CutPrefix(mark, "end ")
	switch {
	case marked && mark == "start" && p.parser == nil && len(p.programs) > 0:
		p.parser, p.began = results.NewRust(p.programs[0].name, p.task.receiver()), p.task.console.now()
	case marked && end && p.parser != nil:
		var err error
		if status != "0" {
			err = errors.New("exit status " + status)
		}
		p.end(err)
	case p.parser != nil:
		p.parser.Line(line)
	default:
		p.task.note(line)
	}
}

func (p *rdmaParser) end(err error) {
	p.parser.End(err)
	p.task.programEnded(p.programs[0].name, p.task.console.now().Sub(p.began))
	p.parser, p.programs = nil, p.programs[1:]
}

// End takes the end of the virtual machine. Programs that did not run have failed.
func (p *rdmaParser) End(err error) {
	if err == nil && len(p.programs) > 0 {
		err = errors.New("the virtual machine ended too early")
	}
	if p.parser != nil {
		p.end(err)
	}
	for _, program := range p.programs {
		p.task.report(results.Result{Program: program.name, Name: "(not run)", Outcome: results.Failed, Output: err.Error() + "\n"})
	}
	if len(p.programs) == 0 && err != nil && p.task.failedTests() == 0 {
		p.task.report(results.Result{Program: "virtual machine", Name: "(program)", Outcome: results.Failed, Output: err.Error() + "\n"})
	}
}
