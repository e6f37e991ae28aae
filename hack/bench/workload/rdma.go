package workload

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
	"evenkeel.dev/evenkeel/hack/lab/rdma/vm"
)

// Quantities of [RDMA] and [RDMATests].
var (
	Bandwidth = experiment.Quantity{Name: "bandwidth", Title: "bandwidth", Unit: "MB/s", Digits: 1}
	// HalfRoundTrip is the median of a run's.
	HalfRoundTrip = experiment.Quantity{Name: "half_round_trip", Title: "half of a round trip", Unit: "us", Digits: 1, LowerIsBetter: true}
	// Passed is 1: a test that does not pass is a run that failed.
	Passed = experiment.Quantity{Name: "passed", Title: "passed"}
)

const (
	// RDMACommand is the subcommand that measures in a virtual machine: a JSON object of [RDMARun].
	RDMACommand = "rdma-run"

	// The lab's two ports, as perftest and the plugin name them.
	client, server = "rxe0", "rxe1"
	serverAddress  = "10.77.0.2"
	gidIndex       = "1"

	// Each end runs on a processor of its own, with perftest and with the plugin: the placement of the two ends matters
	// more than what they do.
	receiverCPU, senderCPU = "0", "1"

	// latencyRepeats is the number of latency measurements in a run: single ones differ by a factor of two, depending on
	// the processors of soft-RoCE's own threads.
	latencyRepeats = 3
	// maxSaid is how much of the output of a command that failed is part of the error: its end.
	maxSaid = 2000
	// rdmaTimeout is for one measurement, or one test.
	rdmaTimeout = 2 * time.Minute
	// RDMATimeout is for one run, with the start of its virtual machine.
	RDMATimeout = 10 * time.Minute
)

// RDMA is messages between two ports of soft-RoCE in a virtual machine, which is a new one for each run.
type RDMA struct {
	Bytes      int
	QueuePairs int
	Messages   int  // of all queue pairs
	Latency    bool // of messages there and back; else the bandwidth
}

// An RDMARun is what runs in a virtual machine.
type RDMARun struct {
	RDMA
	Perftest        string // the program; empty for the plugin
	Library, Driver string
}

// Headline is the quantity that it is about.
func (w RDMA) Headline() experiment.Quantity {
	if w.Latency {
		return HalfRoundTrip
	}
	return Bandwidth
}

// Perftest sends by one of perftest's programs.
func (w RDMA) Perftest(lab func() *vm.Lab, program string) experiment.Contender {
	return w.contender(lab, program, func(experiment.Run) RDMARun { return RDMARun{RDMA: w, Perftest: program} })
}

// Plugin sends by the plugin.
func (w RDMA) Plugin(lab func() *vm.Lab, name string) experiment.Contender {
	return w.contender(lab, name, func(r experiment.Run) RDMARun { return RDMARun{RDMA: w, Library: r.Library, Driver: r.Driver} })
}

// contender has this program measure in a virtual machine.
func (w RDMA) contender(lab func() *vm.Lab, name string, of func(experiment.Run) RDMARun) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		self, err := os.Executable()
		if err != nil {
			return m, err
		}
		text, err := inMachine(ctx, lab(), vm.Pair, self, RDMACommand, proc.JSON(of(r)))
		if err != nil {
			return m, err
		}
		value, err := strconv.ParseFloat(string(bytes.TrimSpace(text)), 64)
		if err != nil {
			return m, fmt.Errorf("unexpected output in the virtual machine: %q", text)
		}
		m.Values = outcome{w.Headline(): value}
		return m, nil
	}}
}

// inMachine runs a command in a new virtual machine, and returns its output.
func inMachine(ctx context.Context, lab *vm.Lab, topology vm.Topology, command ...string) ([]byte, error) {
	var out, said bytes.Buffer
	code, err := lab.Run(ctx, vm.Config{Topology: topology, Command: command, Env: os.Environ(), Timeout: RDMATimeout, Stdout: &out, Stderr: &said})
	if err != nil {
		return nil, fmt.Errorf("the RDMA lab: %w", err)
	}
	if code != 0 {
		text := append(out.Bytes(), said.Bytes()...)
		return nil, fmt.Errorf("exit status %d in the RDMA lab: %s", code, text[max(0, len(text)-maxSaid):])
	}
	return out.Bytes(), nil
}

// Measure measures, in the virtual machine: MB/s, or half a round trip in microseconds.
func (r RDMARun) Measure(ctx context.Context) (float64, error) {
	times := 1
	if r.Latency {
		times = latencyRepeats
	}
	var values []float64
	for range times {
		value, err := r.once(ctx)
		if err != nil {
			return 0, err
		}
		values = append(values, value)
	}
	return stats.Median(values), nil
}

func (r RDMARun) once(ctx context.Context) (float64, error) {
	if r.Perftest != "" {
		return runPerftest(ctx, r.RDMA, r.Perftest)
	}
	ctx, cancel := context.WithTimeout(ctx, rdmaTimeout)
	defer cancel()
	port, err := freePort()
	if err != nil {
		return 0, err
	}
	driver := netDriver{
		program: r.Driver, master: "127.0.0.1", port: port, size: r.Bytes, messages: r.Messages, warmup: 8, flags: []string{"--plugin", r.Library, "--transport", "rdma"},
	}
	if r.Latency {
		driver.flags = append(driver.flags, "--ping-pong")
	}
	row, _, _, err := runPair(func(rank int, role string) (*proc.Process, error) {
		environment := []string{"NCCL_IB_HCA==" + []string{server, client}[rank], "EVENKEEL_QUEUE_PAIRS=" + strconv.Itoa(r.QueuePairs)}
		return pinned(ctx, []string{receiverCPU, senderCPU}[rank], role, environment, driver.command(rank)...)
	})
	if r.Latency {
		return row.P50 / 2, err
	}
	return row.Bandwidth * 1e3, err
}

// pinned starts a program on one processor.
func pinned(ctx context.Context, cpu, role string, environment []string, argv ...string) (*proc.Process, error) {
	return proc.Start(ctx, nil, "", role, environment, append([]string{"taskset", "-c", cpu}, argv...)...)
}

// RDMATests are tests of the plugin that run in the same virtual machines. They are built when the first of them runs.
type RDMATests struct {
	lab   func() *vm.Lab
	built *cargo.Built
}

// NewRDMATests has built nothing yet.
func NewRDMATests(lab func() *vm.Lab) *RDMATests { return &RDMATests{lab: lab} }

// Pass runs tests of a test program, on ports joined by a topology; [vm.Pair] if empty.
func (t *RDMATests) Pass(name, target string, topology vm.Topology, tests ...string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, _ experiment.Run) (m experiment.Measured, err error) {
		if t.built == nil {
			root, err := toolbox.Root()
			if err != nil {
				return m, err
			}
			// Tests load the library and start the servers of the debug build.
			built, err := cargo.Everything(ctx, root)
			if err != nil {
				return m, err
			}
			t.built = &built
		}
		test, err := t.built.Test(target)
		if err != nil {
			return m, err
		}
		for _, name := range tests {
			output, err := inMachine(ctx, t.lab(), cmp.Or(topology, vm.Pair), test.Path, "--exact", "--include-ignored", name)
			if err == nil && !bytes.Contains(output, []byte("1 passed")) {
				err = errors.New("no such test")
			}
			if err != nil {
				return m, fmt.Errorf("%s: %w", name, err)
			}
		}
		m.Values = outcome{Passed: 1}
		return m, nil
	}}
}
