package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// A kernelRow is the speed of sums of a number of sources, whose buffers have Total bytes together: GB/s that are read and
// written. Add is that of adding two arrays into a third, over as much memory.
type kernelRow struct {
	Instructions string
	Total        string
	Sources      int
	Add          float64
	Float32      float64
	Float16      float64
	Bfloat16     float64
	Float8       float64 `json:"fp8 e4m3"`
	Int32        float64
	// Only converting the sources to float32.
	LoadFloat32  float64 `json:"float32 loads"`
	LoadFloat16  float64 `json:"float16 loads"`
	LoadBfloat16 float64 `json:"bfloat16 loads"`
}

// kernels measures the sums against adding two arrays.
func (b bench) kernels(ctx context.Context, result *caseResult) error {
	fmt.Fprintf(b.out, "\nkernels: sums of 2 to 16 sources\n")
	cmd := exec.CommandContext(ctx, "cargo", "run", "--release", "--locked", "-q", "-p", "evenkeel-reduction-kernels", "--example", "speed", "--", "--json")
	cmd.Dir, cmd.Stderr = filepath.Join(b.root, "plugin"), os.Stderr
	text, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("measure the kernels: %w", err)
	}
	for line := range bytes.Lines(text) {
		var row kernelRow
		if err := json.Unmarshal(line, &row); err != nil || row.Add == 0 {
			return fmt.Errorf("unexpected report of the kernels: %q", line)
		}
		result.Kernels = append(result.Kernels, row)
		fmt.Fprintf(b.out, "  %s, %2d sources: float32 %.2f of an add, float16 %.2f and bfloat16 %.2f of float32\n",
			row.Total, row.Sources, row.Float32/row.Add, row.Float16/row.Float32, row.Bfloat16/row.Float32)
	}
	return nil
}
