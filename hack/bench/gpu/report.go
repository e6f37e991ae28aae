package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// A report is all that was seen.
type report struct {
	Options         options
	Probe           probe
	Driver, Library string
	Plugin, Socket  []row
	Lost            loss
}

// compared are the type and operation whose times the page shows.
const comparedType, comparedOp = "float32", "sum"

// write writes the page.
func (r report) write(out io.Writer) error {
	page := filepath.Join(r.Options.output, "gpu.md")
	if err := os.MkdirAll(r.Options.output, 0o755); err != nil {
		return fmt.Errorf("results: %w", err)
	}
	if err := os.WriteFile(page, r.markdown(), 0o644); err != nil {
		return fmt.Errorf("results: %w", err)
	}
	_, err := fmt.Fprintf(out, "all results are right; the other ranks had their error %.1f s after one was killed\n%s has all of it\n", r.Lost.After.Seconds(), page)
	return err
}

func (r report) markdown() []byte {
	var b bytes.Buffer
	o := r.Options
	fmt.Fprintf(&b, "# GPU results\n\nWritten by `go run ./hack/bench/gpu`; do not edit.\n\n")
	fmt.Fprintf(&b, "NCCL %s, %s, driver %s (CUDA %d.%d), plugin %s", r.Probe.version(), r.Probe.GPU, r.Driver, r.Probe.CUDA/1000, r.Probe.CUDA/10%100, r.Library)
	if o.quick {
		b.WriteString("; a quick run")
	}
	fmt.Fprintf(&b, ".\n%d processes on this one GPU, each to NCCL a host of its own, over the loopback interface. "+
		"NCCL's log names Evenkeel as the network of every rank.\n", o.ranks)
	b.WriteString("\n## Right results\n\nEvery element of every all-reduce was looked at, over Evenkeel and over NCCL's sockets.\n\n" +
		"| type | operation | sizes | times each | wrong elements |\n| --- | --- | --- | --- | --- |\n")
	for i, first := range r.Plugin {
		if first.Skipped != "" {
			fmt.Fprintf(&b, "| %s | %s | | | not run: %s |\n", first.Type, first.Op, first.Skipped)
			continue
		}
		if i > 0 && r.Plugin[i-1].Type == first.Type && r.Plugin[i-1].Op == first.Op {
			continue
		}
		var sizes []int
		for _, other := range r.Plugin {
			if other.Type == first.Type && other.Op == first.Op {
				sizes = append(sizes, other.Bytes)
			}
		}
		fmt.Fprintf(&b, "| %s | %s | %d, %s to %s | %d | 0 |\n", first.Type, first.Op, len(sizes),
			size(slices.Min(sizes)), size(slices.Max(sizes)), o.plan.iterations)
	}
	fmt.Fprintf(&b, "\n## A killed rank\n\nOne rank was killed (SIGKILL) in the middle of a run. NCCL gave the last of the others its error %.1f s later, and it ended:\n\n"+
		"    %s\n", r.Lost.After.Seconds(), r.Lost.Why)
	fmt.Fprintf(&b, "\n## Times\n\nAll-reduce of %s, %s, medians of %d. All ranks share one GPU by time slicing: "+
		"whoever waits for a peer holds the GPU until its slice ends, and only then the peer can go on.\n"+
		"So these figures compare the two networks, and say nothing of what either can carry.\n\n"+
		"| size | Evenkeel | NCCL's sockets | Evenkeel's speed to theirs |\n| --- | --- | --- | --- |\n", comparedType, comparedOp, o.plan.iterations)
	for _, ours := range r.Plugin {
		for _, theirs := range r.Socket {
			if ours.Type == comparedType && ours.Op == comparedOp && theirs.Type == ours.Type && theirs.Op == ours.Op && theirs.Bytes == ours.Bytes {
				fmt.Fprintf(&b, "| %s | %s | %s | %.2f |\n", size(ours.Bytes), milliseconds(ours), milliseconds(theirs), theirs.Seconds/ours.Seconds)
			}
		}
	}
	return b.Bytes()
}

func milliseconds(r row) string {
	return fmt.Sprintf("%.3f ms", r.Seconds*float64(time.Second/time.Millisecond))
}

// size is a number of bytes in the largest unit that divides it.
func size(bytes int) string {
	units := []string{"B", "KiB", "MiB", "GiB"}
	unit := 0
	for bytes%1024 == 0 && bytes > 0 && unit < len(units)-1 {
		bytes, unit = bytes/1024, unit+1
	}
	return fmt.Sprintf("%d %s", bytes, units[unit])
}
