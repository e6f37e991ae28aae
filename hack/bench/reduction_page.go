package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
)

// A reductionPage is all that was measured of reduction servers.
type reductionPage struct {
	Machine machine
	Commit  string
	Runs    int
	Quick   bool
	Stars   []starResult
	// Seconds, of each round.
	Small, PingPong []float64
	Memory          *memoryResult
	Kernels         string
}

const timelineFile = "reduction-timeline.svg"

// of is the median of a quantity over a contender's runs.
func (r starResult) of(who reducer, quantity func(reduced) float64) float64 {
	var all []float64
	for _, run := range r.Runs[who.Name] {
		all = append(all, quantity(run))
	}
	return medianOf(all)
}

func algbw(r reduced) float64 { return r.Algbw }

// rows are the lines of the table of goals.
func (p reductionPage) rows() [][]string {
	var rows [][]string
	judge := func(what, reference, seen, goal string, reached bool) {
		verdict := no
		if reached {
			verdict = yes
		}
		rows = append(rows, []string{what, reference, seen, goal, string(verdict)})
	}
	for _, r := range p.Stars {
		c := r.Case
		got, limit, ring := r.of(byServers, algbw), c.limit(), r.of(byRing, algbw)
		judge(c.title()+": algbw", fmt.Sprintf("link, %.4f GB/s", limit), fmt.Sprintf("%.4f GB/s, %.2f", got, got/limit), fmt.Sprint(c.OfLink), got >= c.OfLink*limit)
		if c.OfRing > 0 {
			judge(c.title()+": algbw", fmt.Sprintf("ring, %.4f GB/s", ring), fmt.Sprintf("%.4f GB/s, %.2f", got, got/ring), fmt.Sprint(c.OfRing), got >= c.OfRing*ring)
		}
	}
	if len(p.Small) > 0 {
		got, two := medianOf(p.Small), medianOf(p.PingPong)
		judge("all-reduce of 1 KiB, 2 clients, 2 servers, links without a limit: p50", fmt.Sprintf("two messages, %.1f us", two*1e6),
			fmt.Sprintf("%.1f us, %.2f", got*1e6, got/two), "2.0", got <= 2*two)
	}
	if m := p.Memory; m != nil {
		const mib = 1 << 20
		judge(fmt.Sprintf("buffers of a server with %d jobs at a time", m.Jobs), fmt.Sprintf("bound, %d MiB", memoryBound/mib),
			fmt.Sprintf("%.1f MiB (the process: %.1f MiB)", m.Most/mib, m.Peak/mib), "never above", m.Jobs == memoryJobs && m.Most <= memoryBound)
	}
	return rows
}

func (p reductionPage) markdown() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# Reduction servers' results\n\nWritten by `make bench-reduction`; do not edit.\n\n")
	fmt.Fprintf(&b, "One machine plays all hosts: %d cores (%s), %s. Commit %s, %d rounds", p.Machine.Cores, p.Machine.Processor, p.Machine.Kernel, p.Commit, p.Runs)
	if p.Quick {
		b.WriteString("; quick runs")
	}
	b.WriteString(".\nEach client and server is a network namespace with a link of its own to a switch (`go run ./hack/netlab --help`). In each round all contenders\n" +
		"run one after the other: ranks all-reduce 64 MiB of float32 through the plugin, and check every element once. algbw is bytes of the vector per time,\n" +
		"10^9 bytes a second; figures are medians. The ring is `evenkeel-bench`'s own, over the same plugin and links.\n")
	if p.Machine.Load > busyLoad {
		fmt.Fprintf(&b, "\n**The machine was not quiet: its load was %.1f when the run began.** Other programs are part of these figures.\n", p.Machine.Load)
	}
	b.WriteString("\n| case | reference | seen | goal | reached |\n| --- | --- | --- | --- | --- |\n")
	for _, row := range p.rows() {
		for _, cell := range row {
			fmt.Fprintf(&b, "| %s ", cell)
		}
		b.WriteString("|\n")
	}
	for _, r := range p.Stars {
		fmt.Fprintf(&b, "\n## %s\n\n| contender | algbw | worst | best | of the link | of the ring | clients' CPU s/GB | processors in use |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n", capital(r.Case.title()))
		ring := r.of(byRing, algbw)
		bound := false
		for _, who := range reducers {
			var all []float64
			for _, run := range r.Runs[who.Name] {
				all = append(all, run.Algbw)
			}
			got, busy := medianOf(all), r.of(who, func(r reduced) float64 { return r.Busy })
			bound = bound || busy >= boundBy
			fmt.Fprintf(&b, "| %s | %.4f GB/s | %.4f | %.4f | %.2f | %.2f | %.2f | %.0f %% |\n", who.Name, got, slices.Min(all), slices.Max(all),
				got/r.Case.limit(), got/ring, r.of(who, func(r reduced) float64 { return r.CPU }), 100*busy)
		}
		if bound {
			b.WriteString("\n**The processors were all in use: these figures say more of them than of the links.**\n")
		}
	}
	if len(p.Stars) > 0 {
		c := p.Stars[0].Case
		fmt.Fprintf(&b, "\n## A reduction, piece by piece\n\n%s: where each piece of one all-reduce was.\n\n![pieces at servers and ranks](%s)\n", capital(c.title()), timelineFile)
	}
	if p.Kernels != "" {
		fmt.Fprintf(&b, "\n## Sums\n\nOf 2 to 16 sources beside adding two arrays to a third, on one core, in caches and in memory. Goals: float32 0.9 of the add; float16 and\n"+
			"bfloat16 0.8 of float32's bytes.\n\n```\n%s```\n", p.Kernels)
	}
	return b.Bytes()
}

// write writes the page and its drawing.
func (p reductionPage) write(out io.Writer, folder, drawing string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("results: %w", err)
	}
	if len(p.Stars) > 0 {
		svg, err := os.ReadFile(drawing)
		if err != nil {
			return fmt.Errorf("results: %w", err)
		}
		if err := os.WriteFile(filepath.Join(folder, timelineFile), svg, 0o644); err != nil {
			return fmt.Errorf("results: %w", err)
		}
	}
	page := filepath.Join(folder, "reduction.md")
	if err := os.WriteFile(page, p.markdown(), 0o644); err != nil {
		return fmt.Errorf("results: %w", err)
	}
	_, err := fmt.Fprintf(out, "\n%s has all of it\n", page)
	return err
}

// get is what a page of this machine says.
func get(ctx context.Context, address string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	return io.ReadAll(io.LimitReader(response.Body, 1<<20))
}
