package workload

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/child"
)

// RendezvousTime is how long ranks take until the last of them has the sum of a first all-reduce.
var RendezvousTime = experiment.Quantity{Name: "rendezvous", Title: "time of the rendezvous", Unit: "s", Digits: 2, LowerIsBetter: true, Reached: true}

// RendezvousTimeout is for one run of [Rendezvous]: the program gives up each number of ranks after 180 s.
const RendezvousTimeout = 15 * time.Minute

// A Torch is a Python with torch and with the package of this checkout.
type Torch struct {
	python string
	folder string // with the package
}

// NewTorch builds the package, and installs torch into the cache where it is missing, 5 GB.
func NewTorch(ctx context.Context, progress io.Writer) (*Torch, error) {
	root, err := toolbox.Root()
	if err != nil {
		return nil, err
	}
	wheel, err := artifacts.Wheel(ctx, root, progress, false)
	if err != nil {
		return nil, err
	}
	python, folder, err := toolbox.TorchEnvironment(ctx, progress, wheel)
	return &Torch{python, folder}, err
}

// Close removes its package.
func (t *Torch) Close() error { return os.RemoveAll(t.folder) }

// A torchReport is what the programs in the folder torch print.
type torchReport struct {
	Torch   string          // its version
	Seconds map[int]float64 // by size, or by number of ranks
	Missed  map[int]string  // why there is no time
}

// run runs one of the programs over a backend.
func (t *Torch) run(ctx context.Context, program, backend string, arguments ...string) (r torchReport, err error) {
	root, err := toolbox.Root()
	if err != nil {
		return r, err
	}
	script := filepath.Join(root, "hack", "bench", "workload", "torch", program)
	// Outside the checkout, so that Python imports the installed package.
	cmd := child.Command(ctx, t.folder, t.python, append([]string{script, "--backend", backend}, arguments...)...)
	// A warning for each connection of Gloo's would hide an error.
	cmd.Env = append(cmd.Environ(), "PYTHONPATH="+t.folder, "TORCH_CPP_LOG_LEVEL=ERROR")
	text, err := proc.Output(ctx, cmd)
	if err != nil {
		return r, fmt.Errorf("%s: %w", program, err)
	}
	return readTorch(text)
}

// readTorch reads the last line; libraries may have written others.
func readTorch(text []byte) (r torchReport, err error) {
	lines := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	if err := json.Unmarshal(lines[len(lines)-1], &r); err != nil || r.Torch == "" {
		return r, fmt.Errorf("unexpected report of torch: %q", text)
	}
	return r, nil
}

// measured has the times that were reached, in a unit of seconds.
func (r torchReport) measured(unit float64, of func(point int) experiment.Quantity) experiment.Measured {
	m := experiment.Measured{Values: outcome{}, Versions: "torch " + r.Torch}
	for point, seconds := range r.Seconds {
		m.Values[of(point)] = seconds / unit
	}
	return m
}

// A TorchOperation is an operation of torch.distributed, again and again, by ranks that are processes of this machine.
type TorchOperation struct {
	Name   string // all-reduce, ddp-step, all-gather or reduce-scatter
	Ranks  int
	Bytes  []int         // with several of them, the times are those of a sweep
	Length time.Duration // of the measurement of a size, about
}

// Time is the median time of an operation on rank 0: in a sweep in us, else in ms.
func (w TorchOperation) Time() experiment.Quantity {
	if len(w.Bytes) > 1 {
		return OperationTime
	}
	return experiment.Quantity{Name: "operation_ms", Title: OperationTime.Title, Unit: "ms", Digits: 2, LowerIsBetter: true}
}

// Backend runs it over a backend of torch.
func (w TorchOperation) Backend(name, backend string, torch func() *Torch) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, _ experiment.Run) (m experiment.Measured, err error) {
		report, err := torch().run(ctx, "operations.py", backend, "--operation", w.Name, "--ranks", strconv.Itoa(w.Ranks), "--bytes", list(w.Bytes),
			"--seconds", fmt.Sprint(w.Length.Seconds()))
		if err != nil {
			return m, err
		}
		return w.measured(report), nil
	}}
}

func (w TorchOperation) measured(report torchReport) experiment.Measured {
	if len(w.Bytes) == 1 {
		return report.measured(1e-3, func(int) experiment.Quantity { return w.Time() })
	}
	return report.measured(1e-6, func(size int) experiment.Quantity { return w.Time().At(float64(size)) })
}

// A Rendezvous is ranks that find each other by a TCPStore of torch. They are threads of processes of this machine, 16
// in each.
type Rendezvous struct{ Ranks []int }

// Backend runs it over a backend of torch. A number of ranks that has not met once is not tried again.
func (w Rendezvous) Backend(name, backend string, torch func() *Torch) experiment.Contender {
	missed := map[int]string{}
	return experiment.Contender{Name: name, Run: func(ctx context.Context, _ experiment.Run) (m experiment.Measured, err error) {
		numbers := slices.DeleteFunc(slices.Clone(w.Ranks), func(n int) bool { return missed[n] != "" })
		report, err := torch().run(ctx, "rendezvous.py", backend, "--ranks", list(numbers))
		if err != nil {
			return m, err
		}
		maps.Copy(missed, report.Missed)
		m = report.measured(1, func(n int) experiment.Quantity { return RendezvousTime.At(float64(n)) })
		var notes []string
		for _, n := range slices.Sorted(maps.Keys(missed)) {
			notes = append(notes, fmt.Sprintf("%d ranks: %s", n, missed[n]))
		}
		m.Note = strings.Join(notes, "; ")
		return m, nil
	}}
}
