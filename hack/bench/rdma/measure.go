package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// The lab's two ports, as perftest and the plugin name them.
const (
	client, server = "rxe0", "rxe1"
	serverAddress  = "10.77.0.2"
	gidIndex       = "1"
)

// Each end runs on a processor of its own, of either contestant: where both are put on one, or moved between two, decides
// more than what they do.
const receiversCPU, sendersCPU = "0", "1"

// latencyRepeats is how often a round measures latency: single runs differ by a factor of two, with the processors that
// soft-RoCE's own threads run on.
const latencyRepeats = 3

// caseTimeout is for one measurement of one contestant.
const caseTimeout = 2 * time.Minute

// contestants are what is measured beside perftest: the plugin and what drives it; and its test binaries, by the names of
// their targets.
type contestants struct {
	Library, Driver string
	Tests           map[string]string
}

// A benchCase is measured with both.
type benchCase struct {
	Name       string
	Bytes      int
	QueuePairs int
	Messages   int     // of all queue pairs
	Latency    bool    // half of a round trip, microseconds; else MB/s
	Least      float64 // bandwidth over perftest's
	Most       float64 // latency over perftest's
	Limits     string  // what is known to keep it from better
}

// What is known of what limits cases.
const (
	limitsBandwidth = "the processors: two emulated ones do soft-RoCE's work and what both ends do. The receiver of `ib_write_bw` sleeps; NCCL's interface makes a receiver ask again and again, as that of `ib_send_bw` does, which is beside it"
	limitsLatency   = "not the verbs, which are perftest's: one write and one completion for each message, with one system call; `ib_send_lat` shows that completions at the receiver cost little. " +
		"A rank that waits yields after each poll, as NCCL's does, which is a system call that is emulated here, on processors that soft-RoCE's threads need; a profile shows more of the ranks' time there than in the plugin. Runs differ by a factor of two"
)

var cases = []benchCase{
	{Name: "1 MiB messages, 1 queue pair", Bytes: 1 << 20, QueuePairs: 1, Messages: 200, Least: 0.9, Limits: limitsBandwidth},
	{Name: "1 MiB messages, 4 queue pairs", Bytes: 1 << 20, QueuePairs: 4, Messages: 200, Least: 0.9, Limits: limitsBandwidth},
	{Name: "8 bytes there and back, half of it, p50", Bytes: 8, QueuePairs: 1, Messages: 2000, Latency: true, Most: 1.5, Limits: limitsLatency},
}

// A check is of what has no figure: tests of the plugin's that pass or fail.
type check struct {
	Name, Goal string
	Build      []string // what to build, in cargo's words
	Target     string   // the name of what is built
	Tests      []string
	Topology   vm.Topology // of the machine that they run in; default that of the figures
}

func (c check) topology() vm.Topology { return cmp.Or(c.Topology, vm.Pair) }

var checks = []check{
	{
		Name: "registration of a cached buffer", Goal: "no verbs call",
		Build: []string{"-p", "evenkeel-transport", "--lib"}, Target: "evenkeel_transport",
		Tests: []string{"rdma::tests::memory_that_is_registered_needs_no_call_of_the_device"},
	},
	{
		Name: "one queue pair forced into error in the middle of a transfer, at either side, of two and of one", Goal: "the transfer finishes, every byte right",
		Build: []string{"-p", "evenkeel-transport", "--lib"}, Target: "evenkeel_transport",
		Tests: []string{"rdma::tests::a_queue_pair_that_fails_at_the_sender_costs_no_byte", "rdma::tests::a_queue_pair_that_fails_at_the_receiver_costs_no_byte"},
	},
	{
		Name: "all packets of a pair of ports lost in the middle of a transfer, and the port down", Goal: "the transfer finishes by another pair, every byte right",
		Build: []string{"-p", "evenkeel-transport", "--lib"}, Target: "evenkeel_transport", Topology: vm.Rails,
		Tests: []string{"rdma::failover::tests::what_is_on_its_way_when_a_path_dies_comes_by_the_other_one", "rdma::failover::tests::a_port_that_goes_down_is_left"},
	},
	{
		Name: "all-reduces of three ranks through two reduction servers", Goal: "every element right",
		Build: []string{"-p", "evenkeel-bench", "--test", "commands"}, Target: "commands",
		Tests: []string{"rdma::rdma_reduction_servers_verify_each_element"},
	},
	{
		Name: "a reduction server killed", Goal: "an error at all ranks that names it",
		Build: []string{"-p", "evenkeel-bench", "--test", "commands"}, Target: "commands",
		Tests: []string{"rdma::rdma_killed_reduction_server_is_named"},
	},
	{
		Name: "receiver killed, or sender", Goal: "an error of all requests that names it, within the time set for verbs (here within 1 s)",
		Build: []string{"-p", "evenkeel-nccl-plugin", "--test", "abi"}, Target: "abi",
		Tests: []string{"peers::a_killed_receiver_fails_every_request_of_the_sender", "peers::a_killed_sender_fails_every_request_of_the_receiver"},
	},
}

// A result holds what both gave, a number for each round.
type result struct {
	Case     benchCase
	Perftest []float64
	// Sends are what perftest gave by the other program, of which the receiver looks for a completion of each message,
	// as of the plugin.
	Sends    []float64
	Evenkeel []float64
}

// What was measured, and whether each of the checks passed, by name.
type measured struct {
	Results []result `json:",omitempty"`
	Passed  map[string]bool
}

// measure does what is to be done in a machine of a topology: the figures are those of the default one.
func (c contestants) measure(ctx context.Context, progress io.Writer, rounds int, topology vm.Topology) (measured, error) {
	m := measured{Passed: map[string]bool{}}
	if topology == vm.Pair {
		var err error
		if m.Results, err = c.compare(ctx, progress, rounds); err != nil {
			return measured{}, err
		}
	}
	for _, of := range checks {
		if of.topology() != topology {
			continue
		}
		passed := true
		for _, test := range of.Tests {
			said, err := c.test(ctx, of.Target, test)
			if err != nil {
				passed = false
				fmt.Fprintf(progress, "%s: %v\n%s", test, err, said)
			}
		}
		m.Passed[of.Name] = passed
	}
	return m, nil
}

// test runs one test, and gives what it printed.
func (c contestants) test(ctx context.Context, target, name string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, caseTimeout)
	defer cancel()
	said, err := exec.CommandContext(ctx, c.Tests[target], "--exact", "--include-ignored", name).CombinedOutput()
	if err == nil && !bytes.Contains(said, []byte("1 passed")) {
		err = errors.New("no such test")
	}
	return said, err
}

// compare measures each case with both, in turn.
func (c contestants) compare(ctx context.Context, progress io.Writer, rounds int) ([]result, error) {
	results := make([]result, len(cases))
	for round := range rounds {
		for i, of := range cases {
			results[i].Case = of
			times := 1
			if of.Latency {
				times = latencyRepeats
			}
			for range times {
				if err := c.once(ctx, &results[i]); err != nil {
					return nil, fmt.Errorf("%s: %w", of.Name, err)
				}
			}
			theirs, ours := results[i].Perftest, results[i].Evenkeel
			fmt.Fprintf(progress, "round %d of %d, %s: perftest %.1f, Evenkeel %.1f\n", round+1, rounds, of.Name, theirs[len(theirs)-times:], ours[len(ours)-times:])
		}
	}
	return results, nil
}

// once measures a case with all, one after the other.
func (c contestants) once(ctx context.Context, r *result) error {
	writes, sends := r.Case.programs()
	for _, by := range []struct {
		program string
		values  *[]float64
	}{{sends, &r.Sends}, {writes, &r.Perftest}} {
		value, err := perftest(ctx, r.Case, by.program)
		if err != nil {
			return fmt.Errorf("%s: %w", by.program, err)
		}
		*by.values = append(*by.values, value)
	}
	ours, err := c.run(ctx, r.Case)
	if err != nil {
		return fmt.Errorf("evenkeel-bench: %w", err)
	}
	r.Evenkeel = append(r.Evenkeel, ours)
	return nil
}

// programs are perftest's for a case: of writes, which its receiver knows nothing of, and of sends.
func (c benchCase) programs() (writes, sends string) {
	if c.Latency {
		return "ib_write_lat", "ib_send_lat"
	}
	return "ib_write_bw", "ib_send_bw"
}

// pinned is a command that runs on one processor.
func pinned(ctx context.Context, cpu, program string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "taskset", append([]string{"-c", cpu, program}, args...)...)
}

// pair runs a program that waits and one that comes to it, and gives what the
// one whose result counts printed. Both end with ctx.
func pair(ctx context.Context, waits, comes *exec.Cmd, ready func(context.Context) error, counts *exec.Cmd) ([]byte, error) {
	var out bytes.Buffer
	var complaints [2]bytes.Buffer
	counts.Stdout = &out
	waits.Stderr, comes.Stderr = &complaints[0], &complaints[1]
	if err := waits.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- waits.Wait() }()
	err := ready(ctx)
	if err == nil {
		err = comes.Run()
	}
	if err != nil {
		_ = waits.Process.Kill() // it may have ended by itself
		<-ended
		return nil, fmt.Errorf("%w: %s%s", err, complaints[0].Bytes(), complaints[1].Bytes())
	}
	if err := <-ended; err != nil {
		return nil, fmt.Errorf("%w: %s", err, complaints[0].Bytes())
	}
	return out.Bytes(), nil
}

// perftestTries bounds how often perftest runs for a figure: on emulated
// processors it once printed 0 after a run that was as any other.
const perftestTries = 3

// errNoFigure says that perftest ran and printed no figure.
var errNoFigure = errors.New("no result")

// perftest measures a case by one of perftest's programs.
func perftest(ctx context.Context, c benchCase, program string) (value float64, err error) {
	for range perftestTries {
		if value, err = perftestOnce(ctx, c, program); !errors.Is(err, errNoFigure) {
			break
		}
	}
	return value, err
}

func perftestOnce(ctx context.Context, c benchCase, program string) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, caseTimeout)
	defer cancel()
	port, err := freePort()
	if err != nil {
		return 0, err
	}
	args := []string{"-x", gidIndex, "-F", "-s", strconv.Itoa(c.Bytes), "-n", strconv.Itoa(c.Messages / c.QueuePairs), "-p", strconv.Itoa(port)}
	if !c.Latency {
		args = append(args, "-q", strconv.Itoa(c.QueuePairs))
	}
	waits := pinned(ctx, receiversCPU, program, append([]string{"-d", server}, args...)...)
	comes := pinned(ctx, sendersCPU, program, append(append([]string{"-d", client}, args...), serverAddress)...)
	text, err := pair(ctx, waits, comes, func(ctx context.Context) error { return listening(ctx, port) }, comes)
	if err != nil {
		return 0, err
	}
	if c.Latency {
		return perftestColumn(string(text), c.Bytes, 4)
	}
	mib, err := perftestColumn(string(text), c.Bytes, 3)
	return mib * (1 << 20) / 1e6, err
}

// perftestColumn finds a column of the line of results that perftest printed
// for a size: of bandwidth the fourth is the average, MiB/s; of latency the
// fifth is the median, microseconds.
func perftestColumn(text string, size, column int) (float64, error) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) > column && fields[0] == strconv.Itoa(size) {
			if value, err := strconv.ParseFloat(fields[column], 64); err == nil && value > 0 {
				return value, nil
			}
		}
	}
	return 0, fmt.Errorf("%w for %d bytes in what it printed: %s", errNoFigure, size, text)
}

// run measures the plugin: rank 1 sends to rank 0.
func (c contestants) run(ctx context.Context, of benchCase) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, caseTimeout)
	defer cancel()
	port, err := freePort()
	if err != nil {
		return 0, err
	}
	size := strconv.Itoa(of.Bytes)
	args := []string{
		"net", "--plugin", c.Library, "--transport", "rdma", "--json", "-b", size, "-e", size, "-n", strconv.Itoa(of.Messages),
		"--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", strconv.Itoa(port),
	}
	if of.Latency {
		args = append(args, "--ping-pong")
	}
	rank := func(number, device, cpu string) *exec.Cmd {
		cmd := pinned(ctx, cpu, c.Driver, append(args, "--rank", number)...)
		cmd.Env = append(os.Environ(), "NCCL_IB_HCA=="+device, "EVENKEEL_QUEUE_PAIRS="+strconv.Itoa(of.QueuePairs))
		return cmd
	}
	receives, sends := rank("0", server, receiversCPU), rank("1", client, sendersCPU)
	// Ranks wait for each other.
	text, err := pair(ctx, receives, sends, func(context.Context) error { return nil }, receives)
	if err != nil {
		return 0, err
	}
	return driverResult(text, of.Latency)
}

// driverResult reads what evenkeel-bench printed: MB/s, or half a round trip in microseconds.
func driverResult(text []byte, latency bool) (float64, error) {
	var report struct {
		Rows []struct {
			Bandwidth float64 `json:"bandwidth"`
			P50       float64 `json:"p50_us"`
			Wrong     int     `json:"wrong"`
		} `json:"rows"`
	}
	if err := json.Unmarshal(text, &report); err != nil {
		return 0, fmt.Errorf("%w in what it printed: %s", err, text)
	}
	if len(report.Rows) != 1 || report.Rows[0].Wrong > 0 {
		return 0, fmt.Errorf("one row without wrong messages was expected: %s", text)
	}
	if latency {
		return report.Rows[0].P50 / 2, nil
	}
	return report.Rows[0].Bandwidth * 1e3, nil
}

func freePort() (int, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil
}

// listening waits until somebody listens at a port, without connecting there:
// perftest takes one connection.
func listening(ctx context.Context, port int) error {
	wanted := fmt.Sprintf(":%04X", port)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
			text, err := os.ReadFile(table)
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(text)) {
				// Local address, peer's address, state: 0A is listening.
				fields := strings.Fields(line)
				if len(fields) > 3 && strings.HasSuffix(fields[1], wanted) && fields[3] == "0A" {
					return nil
				}
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("nobody listens at port %d: %w", port, context.Cause(ctx))
		case <-tick.C:
		}
	}
}
