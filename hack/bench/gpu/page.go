package main

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

// A report has all results.
type report struct {
	Options         options
	Probe           probe
	Machine         machine.Machine
	Source          page.Source
	Driver, Library string
	// MPS is set where the ranks' kernels run at the same time.
	MPS                     bool
	Plugin, Servers, Socket []row
	Lost, LostServer        loss
	Shaped                  []shaped
	// NoLab is why there are no shaped networks.
	NoLab string
}

// The page shows the times of this type and operation.
const comparedType, comparedOp = "float32", "sum"

// write writes the page.
func (r report) write(out io.Writer) error {
	if err := page.Write(r.Options.output, map[string][]byte{"gpu.md": r.markdown()}); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "all results are right; the other ranks got an error %.1f s after one was killed, and %.1f s after a reduction server was\n%s has all of it\n", r.Lost.After.Seconds(), r.LostServer.After.Seconds(), filepath.Join(r.Options.output, "gpu.md"))
	return err
}

func (r report) markdown() []byte {
	var b bytes.Buffer
	o := r.Options
	fmt.Fprintf(&b, "# GPU results\n\nWritten by `make gpu`; do not edit.\n\n")
	fmt.Fprintf(&b, "NCCL %s, %s, driver %s (CUDA %d.%d), plugin and servers %s", r.Probe.version(), r.Probe.GPU, r.Driver, r.Probe.CUDA/1000, r.Probe.CUDA/10%100, r.Library)
	if o.quick {
		b.WriteString("; a quick run")
	}
	fmt.Fprintf(&b, ".\nTaken at %s. Machine: %s. %s\n", r.Source, r.Machine, r.Machine.Quiet())
	fmt.Fprintf(&b, "%d processes on this one GPU, each to NCCL a host of its own, over the loopback interface. "+
		"NCCL's log names Evenkeel as the network of every rank.\n", o.ranks)
	b.WriteString("\n## Right results\n\nEvery element of every all-reduce was checked, over Evenkeel, over reduction servers and over NCCL's sockets.\n\n" +
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
	fmt.Fprintf(&b, "\n## A killed rank, and a killed server\n\nOne rank was killed (SIGKILL) in the middle of a run. The last of the others got its error from NCCL %.1f s later, and exited:\n\n"+
		"    %s\n", r.Lost.After.Seconds(), r.Lost.Failure)
	fmt.Fprintf(&b, "\nOne of %d reduction servers was killed likewise. The last of the ranks got its error %.1f s later:\n\n    %s\n",
		serverCount, r.LostServer.After.Seconds(), r.LostServer.Failure)
	r.writeTimes(&b)
	r.writeShaped(&b)
	return b.Bytes()
}

// writeTimes writes the times on the loopback interface.
func (r report) writeTimes(b *bytes.Buffer) {
	fmt.Fprintf(b, "\n## Times\n\nAll-reduce of %s, %s, medians of %d. ", comparedType, comparedOp, r.Options.plan.iterations)
	if r.MPS {
		b.WriteString("All ranks share one GPU by NVIDIA's MPS, so their kernels run at the same time.\nThe loopback interface is as fast as the processors, so these figures tell what each way costs of them.\n\n")
	} else {
		b.WriteString("All ranks share one GPU by time slicing: a rank that waits for a peer holds the GPU until its slice ends, and only then the peer continues.\n" +
			"So these figures compare the ways, and are no measure of what any can carry.\n\n")
	}
	table := page.Table{Heading: []string{"Size", "Evenkeel", fmt.Sprintf("%d reduction servers", serverCount), "NCCL's sockets", "Evenkeel's speed relative to NCCL's sockets"}}
	of := func(rows []row, bytes int) *row {
		at := slices.IndexFunc(rows, func(r row) bool { return r.Type == comparedType && r.Op == comparedOp && r.Bytes == bytes })
		if at < 0 {
			return nil
		}
		return &rows[at]
	}
	for _, ours := range r.Plugin {
		servers, socket := of(r.Servers, ours.Bytes), of(r.Socket, ours.Bytes)
		if ours.Type == comparedType && ours.Op == comparedOp && servers != nil && socket != nil {
			table.Add(size(ours.Bytes), milliseconds(ours), milliseconds(*servers), milliseconds(*socket), fmt.Sprintf("%.2f", socket.Seconds/ours.Seconds))
		}
	}
	table.Markdown(b)
}

// writeShaped writes the times in shaped networks.
func (r report) writeShaped(b *bytes.Buffer) {
	b.WriteString("\n## Slow links\n\n")
	if len(r.Shaped) == 0 {
		fmt.Fprintf(b, "Not measured: %s.\n", r.NoLab)
		return
	}
	fmt.Fprintf(b, "All-reduce of %s, %s, in networks of namespaces on this machine, with shaped links. The median of %d jobs over unequal links, "+
		"with the least and the most in brackets; one job in the star.\n", comparedType, comparedOp, starts)
	var network string
	var table page.Table
	var sizes []int
	for _, run := range r.Shaped {
		if run.Network != network {
			if network != "" {
				table.Markdown(b)
			}
			network, sizes = run.Network, slices.Sorted(maps.Keys(run.Seconds))
			fmt.Fprintf(b, "\n**%s**\n\n", network)
			table = page.Table{Heading: []string{"Over"}}
			for _, bytes := range sizes {
				table.Heading = append(table.Heading, size(bytes))
			}
		}
		cells := []string{run.Way}
		for _, bytes := range sizes {
			var times []float64
			for _, seconds := range run.Seconds[bytes] {
				times = append(times, 1e3*seconds)
			}
			if len(times) == 1 {
				cells = append(cells, fmt.Sprintf("%.1f ms", times[0]))
				continue
			}
			cells = append(cells, stats.MedianAndRange(times)+" ms")
		}
		table.Add(cells...)
	}
	table.Markdown(b)
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
