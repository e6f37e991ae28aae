package workload

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/child"
)

func kernelRate(name, title string) experiment.Quantity {
	return experiment.Quantity{Name: name, Title: title, Unit: "GB/s", Digits: 1}
}

// Quantities of [Kernels]: GB that are read and written in a second, and shares of them.
var (
	SumFloat32   = kernelRate("float32", "float32")
	SumFloat16   = kernelRate("float16", "float16")
	SumBfloat16  = kernelRate("bfloat16", "bfloat16")
	SumFloat8    = kernelRate("fp8_e4m3", "fp8 e4m3")
	SumInt32     = kernelRate("int32", "int32")
	Add          = kernelRate("add", "add of two arrays")
	LoadFloat32  = kernelRate("load_float32", "loads of float32")
	LoadFloat16  = kernelRate("load_float16", "of float16")
	LoadBfloat16 = kernelRate("load_bfloat16", "of bfloat16")
	// OfAdd is float32's share of the add, and HalfShare that of the slower half type of float32.
	OfAdd     = experiment.Quantity{Name: "of_add", Title: "float32, of an add", Digits: 2}
	HalfShare = experiment.Quantity{Name: "half_share", Title: "the slower half type, of float32", Digits: 2}
)

// Kernels are sums of a number of buffers on one core. One program measures all sizes and numbers in turn, once a
// round.
type Kernels struct{ rounds map[int][]kernelRow }

// NewKernels has not measured yet.
func NewKernels() *Kernels { return &Kernels{rounds: map[int][]kernelRow{}} }

// A kernelRow is a line of the program: of sources whose buffers have Total bytes together.
type kernelRow struct {
	Total    string
	Sources  int
	Add      float64
	Float32  float64
	Float16  float64
	Bfloat16 float64
	Float8   float64 `json:"fp8 e4m3"`
	Int32    float64
	// Only converting the sources to float32.
	LoadFloat32  float64 `json:"float32 loads"`
	LoadFloat16  float64 `json:"float16 loads"`
	LoadBfloat16 float64 `json:"bfloat16 loads"`
}

// Sum is the row of a size, as the program writes it, and a number of sources.
func (k *Kernels) Sum(total string, sources int) experiment.Contender {
	return experiment.Contender{Name: fmt.Sprintf("%d sources", sources), Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		rows := k.rounds[r.Round]
		if rows == nil {
			if rows, err = measureKernels(ctx); err != nil {
				return m, err
			}
			k.rounds[r.Round] = rows
		}
		at := slices.IndexFunc(rows, func(row kernelRow) bool { return row.Total == total && row.Sources == sources })
		if at < 0 {
			return m, fmt.Errorf("the kernels' program has no row of %s and %d sources", total, sources)
		}
		m.Values = rows[at].outcome()
		return m, nil
	}}
}

func (r kernelRow) outcome() outcome {
	return outcome{
		SumFloat32: r.Float32, SumFloat16: r.Float16, SumBfloat16: r.Bfloat16, SumFloat8: r.Float8, SumInt32: r.Int32, Add: r.Add,
		LoadFloat32: r.LoadFloat32, LoadFloat16: r.LoadFloat16, LoadBfloat16: r.LoadBfloat16,
		OfAdd: r.Float32 / r.Add, HalfShare: min(r.Float16, r.Bfloat16) / r.Float32,
	}
}

// measureKernels builds and runs the program.
func measureKernels(ctx context.Context) ([]kernelRow, error) {
	root, err := toolbox.Root()
	if err != nil {
		return nil, err
	}
	cmd := child.Command(ctx, filepath.Join(root, "plugin"), "cargo", "run", "--release", "--locked", "-q", "-p", "evenkeel-reduction-kernels", "--example", "speed", "--", "--json")
	text, err := proc.Output(ctx, cmd)
	if err != nil {
		return nil, fmt.Errorf("measure the kernels: %w", err)
	}
	return readKernels(text)
}

func readKernels(text []byte) ([]kernelRow, error) {
	var rows []kernelRow
	for line := range bytes.Lines(text) {
		var row kernelRow
		if err := json.Unmarshal(line, &row); err != nil || row.Add == 0 || row.Float32 == 0 {
			return nil, fmt.Errorf("unexpected report of the kernels: %q", line)
		}
		rows = append(rows, row)
	}
	return rows, nil
}
