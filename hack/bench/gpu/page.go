package main

import (
	"bytes"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
)

// A report has all results.
type report struct {
	Options         options
	Probe           probe
	Machine         machine.Machine
	Source          page.Source
	Driver, Library string
	Plugin, Socket  []row
	Lost            loss
}

// The page shows the times of this type and operation.
const comparedType, comparedOp = "float32", "sum"

// write writes the page.
func (r report) write(out io.Writer) error {
	if err := page.Write(r.Options.output, map[string][]byte{"gpu.md": r.markdown()}); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "all results are right; the other ranks got an error %.1f s after one was killed\n%s has all of it\n", r.Lost.After.Seconds(), filepath.Join(r.Options.output, "gpu.md"))
	return err
}

func (r report) markdown() []byte {
	var b bytes.Buffer
	o := r.Options
	fmt.Fprintf(&b, "# GPU results\n\nWritten by `make gpu`; do not edit.\n\n")
	fmt.Fprintf(&b, "NCCL %s, %s, driver %s (CUDA %d.%d), plugin %s", r.Probe.version(), r.Probe.GPU, r.Driver, r.Probe.CUDA/1000, r.Probe.CUDA/10%100, r.Library)
	if o.quick {
		b.WriteString("; a quick run")
	}
	fmt.Fprintf(&b, ".\nTaken at %s. Machine: %s. %s\n", r.Source, r.Machine, r.Machine.Quiet())
	fmt.Fprintf(&b, "%d processes on this one GPU, each to NCCL a host of its own, over the loopback interface. "+
		"NCCL's log names Evenkeel as the network of every rank.\n", o.ranks)
	b.WriteString("\n## Right results\n\nEvery element of every all-reduce was checked, over Evenkeel and over NCCL's sockets.\n\n" +
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
	fmt.Fprintf(&b, "\n## A killed rank\n\nOne rank was killed (SIGKILL) in the middle of a run. The last of the others got its error from NCCL %.1f s later, and exited:\n\n"+
		"    %s\n", r.Lost.After.Seconds(), r.Lost.Failure)
	fmt.Fprintf(&b, "\n## Times\n\nAll-reduce of %s, %s, medians of %d. All ranks share one GPU by time slicing: "+
		"a rank that waits for a peer holds the GPU until its slice ends, and only then the peer continues.\n"+
		"So these figures compare the two networks, and are no measure of what either can carry.\n\n"+
		"| size | Evenkeel | NCCL's sockets | Evenkeel's speed relative to NCCL's sockets |\n| --- | --- | --- | --- |\n", comparedType, comparedOp, o.plan.iterations)
	for _, ours := range r.Plugin {
		for _, socket := range r.Socket {
			if ours.Type == comparedType && ours.Op == comparedOp && socket.Type == ours.Type && socket.Op == ours.Op && socket.Bytes == ours.Bytes {
				fmt.Fprintf(&b, "| %s | %s | %s | %.2f |\n", size(ours.Bytes), milliseconds(ours), milliseconds(socket), socket.Seconds/ours.Seconds)
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
