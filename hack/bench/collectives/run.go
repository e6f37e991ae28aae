package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A figure is what a run gave for one number of elements, in microseconds.
type figure struct{ least, median float64 }

// A task is what a contender is to do.
type task struct {
	ranks    int
	length   time.Duration // of each measurement
	elements []int
	network  network
}

// A network is where a task's ranks are.
type network struct {
	device string
	// command prepares a rank's command; it is killed with this process.
	command func(ctx context.Context, rank int, argv ...string) (*exec.Cmd, error)
}

// loopback has all ranks on this machine.
var loopback = network{"lo", func(ctx context.Context, _ int, argv ...string) (*exec.Cmd, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd, nil
}}

// A contender runs all ranks once and gives its figures by number of elements.
type contender struct {
	name  string
	run   func(context.Context, task) (map[int]figure, error)
	tries int // that a run may take; what fails before is told on the page
}

// glooTries is more than one because Gloo's ranks now and then fail when one of them leaves before the others.
const glooTries = 3

// mostTime is longer than any run takes.
const mostTime = 5 * time.Minute

// ours is Evenkeel over a transport, with variables of the environment.
func ours(bench, folder, transport string, settings ...string) func(context.Context, task) (map[int]figure, error) {
	return func(ctx context.Context, t task) (map[int]figure, error) {
		list := strings.ReplaceAll(strings.Trim(fmt.Sprint(t.elements), "[]"), " ", ",")
		out, err := ranks(ctx, folder, t, func(rank int, store string) []string {
			argv := append([]string{"env"}, settings...)
			return append(argv, bench, "collective", "--size", strconv.Itoa(t.ranks), "--rank", strconv.Itoa(rank), "--shared-path", store,
				"--transport", transport, "--tcp-device", t.network.device, "--elements", list,
				"--iteration-time", fmt.Sprintf("%dms", t.length.Milliseconds()), "--json")
		})
		if err != nil {
			return nil, err
		}
		report, err := readReport(out)
		if err != nil {
			return nil, err
		}
		figures := report.figures()
		return figures, complete(figures, t.elements)
	}
}

// ranks runs a process for each rank, which meet in a folder of their own,
// and returns what rank 0 wrote.
func ranks(ctx context.Context, folder string, t task, argv func(rank int, store string) []string) ([]byte, error) {
	store, err := os.MkdirTemp(folder, "store-")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, mostTime)
	defer cancel()
	var others []*exec.Cmd
	defer func() {
		cancel()
		for _, cmd := range others {
			_ = cmd.Wait() // rank 0 has said what there is to say
		}
	}()
	for rank := t.ranks - 1; rank > 0; rank-- {
		cmd, err := t.network.command(ctx, rank, argv(rank, store)...)
		if err != nil {
			return nil, err
		}
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		others = append(others, cmd)
	}
	first, err := t.network.command(ctx, 0, argv(0, store)...)
	if err != nil {
		return nil, err
	}
	var stderr bytes.Buffer
	first.Stderr = &stderr
	out, err := first.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}

// inProcess runs ranks as threads of one process, which all-reduce one element.
func inProcess(ctx context.Context, bench string, ranks int, length time.Duration) (threadsReport, error) {
	ctx, cancel := context.WithTimeout(ctx, mostTime)
	defer cancel()
	cmd, err := loopback.command(ctx, 0, bench, "collective", "--spawn", strconv.Itoa(ranks), "--in-process", "--elements", "1",
		"--iteration-time", fmt.Sprintf("%dms", length.Milliseconds()), "--json")
	if err != nil {
		return threadsReport{}, err
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return threadsReport{}, fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	report, err := readReport(out)
	if err != nil {
		return threadsReport{}, err
	}
	figures := report.figures()
	return threadsReport{figures[1], report.IOThreads}, complete(figures, []int{1})
}

// A report is what evenkeel-bench prints.
type report struct {
	IOThreads int `json:"io_threads"`
	Rows      []struct {
		Elements int
		Min      float64 `json:"min_us"`
		Median   float64 `json:"p50_us"`
	}
}

func readReport(text []byte) (report, error) {
	var r report
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("evenkeel-bench's report: %w", err)
	}
	return r, nil
}

func (r report) figures() map[int]figure {
	figures := map[int]figure{}
	for _, row := range r.Rows {
		figures[row.Elements] = figure{row.Min, row.Median}
	}
	return figures
}

func complete(figures map[int]figure, elements []int) error {
	for _, n := range elements {
		if _, ok := figures[n]; !ok {
			return fmt.Errorf("no figure for %d elements", n)
		}
	}
	return nil
}

// benchmark builds evenkeel-bench.
func benchmark(ctx context.Context) (string, error) {
	target, err := filepath.Abs("plugin/target")
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "cargo", "build", "--locked", "--release", "-p", "evenkeel-bench")
	// Wherever else the user has Cargo build.
	cmd.Env = append(os.Environ(), "CARGO_TARGET_DIR="+target)
	cmd.Dir, cmd.Stderr = "plugin", os.Stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("cargo build: %w", err)
	}
	return filepath.Join(target, "release", "evenkeel-bench"), nil
}
