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
	"strings"
	"text/tabwriter"

	"evenkeel.dev/evenkeel/hack/bench/internal/plot"
)

// A reductionPage is all that was measured of reduction servers.
type reductionPage struct {
	Machine machine
	Quick   bool
	Results []reductionResult
}

const (
	// ofAdd and ofFloat32 are what sums of float32, and of half types, are to
	// reach: shares of an add's rate and of float32's.
	ofAdd, ofFloat32 = 0.9, 0.8
	// ofTwoMessages is what a small all-reduce may take at most.
	ofTwoMessages = 2.0
)

// A reductionRow is a line of the table of goals; without a goal it is there beside others.
type reductionRow struct {
	what, reference, seen, goal string
	reached                     bool
	// limit is what keeps it from more, where that is known.
	limit string
}

func (r reductionRow) cells() []string {
	verdict, limit := string(no), r.limit
	switch {
	case r.goal == "":
		verdict = ""
	case r.reached:
		verdict, limit = string(yes), ""
	}
	return []string{r.what, r.reference, r.seen, r.goal, verdict, limit}
}

var reductionHeading = []string{"case", "reference", "seen", "goal", "reached", "what limits it"}

// of is the median of a quantity over a contender's runs.
func (r starResult) of(who reducer, quantity func(reduced) float64) float64 {
	var all []float64
	for _, run := range r.Runs[who.Name] {
		all = append(all, quantity(run))
	}
	return medianOf(all)
}

// plainName is what plain sockets are called where contenders are.
const plainName = "plain sockets, no sums"

// plain is the median of what plain sockets got; 0 where that was not measured.
func (r starResult) plain() float64 {
	if len(r.Plain) == 0 {
		return 0
	}
	var all []float64
	for _, run := range r.Plain {
		all = append(all, run.Rate)
	}
	return medianOf(all)
}

func algbw(r reduced) float64 { return r.Algbw }
func busy(r reduced) float64  { return r.Busy }

// rows are the lines of the table of goals.
func (p reductionPage) rows() []reductionRow {
	var rows []reductionRow
	for _, r := range p.Results {
		switch {
		case r.Star != nil:
			rows = append(rows, r.Star.rows()...)
		case len(r.Small) > 0:
			rows = append(rows, r.small())
		case r.Memory != nil:
			const mib = 1 << 20
			rows = append(rows, reductionRow{
				what: fmt.Sprintf("buffers of a server with %d jobs at a time", r.Memory.Jobs), reference: fmt.Sprintf("bound, %d MiB", memoryBound/mib),
				seen: fmt.Sprintf("%.1f MiB (the process: %.1f MiB)", r.Memory.Most/mib, r.Memory.Peak/mib), goal: "never above",
				reached: r.Memory.Jobs == memoryJobs && r.Memory.Most <= memoryBound,
			})
		case len(r.Kernels) > 0:
			rows = append(rows, r.kernels()...)
		}
	}
	return rows
}

func (r starResult) rows() []reductionRow {
	c := r.Case
	got, limit, ring := r.of(byServers, algbw), c.limit(), r.of(byRing, algbw)
	use := fmt.Sprintf("%.0f %% of the processors in use", 100*r.of(byServers, busy))
	if r.of(byServers, busy) >= boundBy {
		use = "the processors: " + use
	}
	if plain := r.plain(); plain > 0 {
		use += fmt.Sprintf("; plain sockets that add nothing get %.2f of the link", plain/limit)
	}
	rows := []reductionRow{{
		what: c.title() + ": algbw", reference: fmt.Sprintf("link, %.4f GB/s", limit),
		seen: fmt.Sprintf("%.4f GB/s, %.2f", got, got/limit), goal: fmt.Sprint(c.OfLink), reached: got >= c.OfLink*limit, limit: use,
	}}
	if len(r.Runs[inPieces.Name]) > 0 {
		pieces := r.of(inPieces, algbw)
		rows = append(rows, reductionRow{
			what: "beside it, the vector cut as NCCL cuts it: by " + inPieces.Name, reference: fmt.Sprintf("link, %.4f GB/s", limit),
			seen: fmt.Sprintf("%.4f GB/s, %.2f", pieces, pieces/limit),
		})
	}
	if c.OfRing > 0 {
		rows = append(rows, reductionRow{
			what: c.title() + ": algbw", reference: fmt.Sprintf("ring, %.4f GB/s", ring),
			seen: fmt.Sprintf("%.4f GB/s, %.2f", got, got/ring), goal: fmt.Sprint(c.OfRing), reached: got >= c.OfRing*ring, limit: use,
		})
	}
	return rows
}

func (r reductionResult) small() reductionRow {
	var all, two, plain, ratio []float64
	for _, round := range r.Small {
		all, two, plain = append(all, round.AllReduce), append(two, round.TwoMessages), append(plain, round.Plain)
		ratio = append(ratio, round.AllReduce/round.TwoMessages)
	}
	return reductionRow{
		what:      "all-reduce of 1 KiB, 2 clients, 2 servers, links without a limit: p50",
		reference: fmt.Sprintf("two messages, %.1f us", medianOf(two)*1e6),
		seen:      fmt.Sprintf("%.1f us, %.2f", medianOf(all)*1e6, medianOf(ratio)),
		goal:      fmt.Sprintf("%.1f", ofTwoMessages), reached: medianOf(ratio) <= ofTwoMessages,
		limit: fmt.Sprintf("%d cores for 2 clients and a server at a time: the same messages over plain sockets take %.1f us", r.Machine.Cores, medianOf(plain)*1e6),
	}
}

// kernels has two lines for each place of the buffers: the worst of all numbers
// of sources.
func (r reductionResult) kernels() []reductionRow {
	var totals []string
	for _, row := range r.Kernels {
		if !slices.Contains(totals, row.Total) {
			totals = append(totals, row.Total)
		}
	}
	var rows []reductionRow
	for _, total := range totals {
		var add, single []float64
		ofAdds, ofSingles := worst{least: 1e9}, worst{least: 1e9}
		for _, row := range r.Kernels {
			if row.Total != total {
				continue
			}
			add, single = append(add, row.Add), append(single, row.Float32)
			ofAdds.see(row.Float32/row.Add, row.LoadFloat32/row.Add, fmt.Sprintf("%d sources", row.Sources))
			ofSingles.see(row.Float16/row.Float32, row.LoadFloat16/row.Float32, fmt.Sprintf("float16, %d sources", row.Sources))
			ofSingles.see(row.Bfloat16/row.Float32, row.LoadBfloat16/row.Float32, fmt.Sprintf("bfloat16, %d sources", row.Sources))
		}
		line := func(what, reference string, w worst, goal float64) {
			limit := fmt.Sprintf("%s on one core: loading the sources alone, as if they were one buffer, with nothing added or stored, gets %.2f there", r.Kernels[0].Instructions, w.loads)
			if w.loads >= goal {
				limit += ", so that it is not the loads; most likely following so many buffers at a time, or converting"
			}
			rows = append(rows, reductionRow{
				what: fmt.Sprintf("sums of 2 to 16 buffers of %s, %s in all", what, total), reference: reference,
				seen: fmt.Sprintf("%.2f at least (%s)", w.least, w.which), goal: fmt.Sprint(goal), reached: w.least >= goal,
				limit: limit,
			})
		}
		line("float32", fmt.Sprintf("add of two arrays, %.1f GB/s", medianOf(add)), ofAdds, ofAdd)
		line("float16 and bfloat16", fmt.Sprintf("float32, %.1f GB/s", medianOf(single)), ofSingles, ofFloat32)
	}
	return rows
}

// worst is the least of several figures, whose it is, and what loading alone gets there.
type worst struct {
	least, loads float64
	which        string
}

func (w *worst) see(figure, loads float64, which string) {
	if figure < w.least {
		*w = worst{figure, loads, which}
	}
}

func (p reductionPage) markdown() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# Reduction servers' results\n\nWritten by `make bench-reduction`; do not edit.\n\n")
	fmt.Fprintf(&b, "One machine plays all hosts: %d cores (%s), %s", p.Machine.Cores, p.Machine.Processor, p.Machine.Kernel)
	if p.Quick {
		b.WriteString("; quick runs")
	}
	b.WriteString(".\nEach client and server is a network namespace with a link of its own to a switch (`go run ./hack/lab/net --help`). In each round all contenders\n" +
		"run one after the other: ranks all-reduce a vector of float32 through the plugin, and check every element once. algbw is bytes of the vector per time,\n" +
		"10^9 bytes a second; figures are medians. The ring is `evenkeel-bench`'s own, over the same plugin and links. Processors in use are those of the\n" +
		"whole run, its start and its checks included. Plain sockets are a blocking connection from each client to each server, which all send and take as much\n" +
		"as they can in both directions, and nothing is added up: what the machine could do at best.\n\n")
	line := func(cells []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	line(reductionHeading)
	line(slices.Repeat([]string{"---"}, len(reductionHeading)))
	for _, row := range p.rows() {
		line(row.cells())
	}
	for _, r := range p.Results {
		r.details(&b)
	}
	return b.Bytes()
}

// details writes all of a case.
func (r reductionResult) details(b *bytes.Buffer) {
	from := fmt.Sprintf("%d rounds at commit %s.", r.Runs, r.Commit)
	if r.Machine.Load > busyLoad {
		from += fmt.Sprintf("\n\n**The machine was not quiet: its load was %.1f when the run began.** Other programs are part of these figures.", r.Machine.Load)
	}
	switch {
	case r.Star != nil:
		r.Star.details(b, from)
	case len(r.Small) > 0:
		fmt.Fprintf(b, "\n## All-reduce of 1 KiB\n\n%s In each round, the medians of operations one after the other, of %d bytes, and of messages of as many bytes there and back;\n"+
			"and over plain sockets, of what an all-reduce sends: a message from each client to a server, which answers when it has both.\n\n"+
			"| all-reduce | two messages | ratio | over plain sockets | processors in use |\n| --- | --- | --- | --- | --- |\n", from, smallBytes)
		for _, round := range r.Small {
			fmt.Fprintf(b, "| %.1f us | %.1f us | %.2f | %.1f us | %.0f %% |\n",
				round.AllReduce*1e6, round.TwoMessages*1e6, round.AllReduce/round.TwoMessages, round.Plain*1e6, 100*round.Busy)
		}
	case len(r.Kernels) > 0:
		fmt.Fprintf(b, "\n## Sums\n\nAt commit %s, with %s on one core. GB/s that are read and written; the add is of two arrays of float32 to a third, over as much memory. Both lie in the same memory. Loads are the sources made float32, as if they were one buffer, and neither added to each other nor stored: about what there is to reach.\n\n"+
			"| all buffers | sources | add | float32 | of the add | float16 | of float32 | bfloat16 | of float32 | fp8 e4m3 | int32 | loads: float32 | float16 | bfloat16 |\n%s|\n", r.Commit, r.Kernels[0].Instructions, strings.Repeat("| --- ", 14))
		for _, k := range r.Kernels {
			fmt.Fprintf(b, "| %s | %d | %.1f | %.1f | %.2f | %.1f | %.2f | %.1f | %.2f | %.1f | %.1f | %.1f | %.1f | %.1f |\n", k.Total, k.Sources, k.Add, k.Float32, k.Float32/k.Add,
				k.Float16, k.Float16/k.Float32, k.Bfloat16, k.Bfloat16/k.Float32, k.Float8, k.Int32, k.LoadFloat32, k.LoadFloat16, k.LoadBfloat16)
		}
	}
}

func (r starResult) details(b *bytes.Buffer, from string) {
	c := r.Case
	fmt.Fprintf(b, "\n## %s\n\nVectors of %d MiB. %s\n\n| contender | algbw | worst | best | of the link | of the ring | clients' CPU s/GB | processors in use |\n%s|\n",
		capital(c.title()), r.Size>>20, from, strings.Repeat("| --- ", 8))
	ring, bound := r.of(byRing, algbw), false
	for _, who := range reducers {
		var all []float64
		for _, run := range r.Runs[who.Name] {
			all = append(all, run.Algbw)
		}
		got, use := medianOf(all), r.of(who, busy)
		bound = bound || use >= boundBy
		fmt.Fprintf(b, "| %s | %.4f GB/s | %.4f | %.4f | %.2f | %.2f | %.2f | %.0f %% |\n", who.Name, got, slices.Min(all), slices.Max(all),
			got/c.limit(), got/ring, r.of(who, func(r reduced) float64 { return r.CPU }), 100*use)
	}
	if plain := r.plain(); plain > 0 {
		var all, use []float64
		for _, run := range r.Plain {
			all, use = append(all, run.Rate), append(use, run.Busy)
		}
		fmt.Fprintf(b, "| %s | %.4f GB/s | %.4f | %.4f | %.2f | %.2f | | %.0f %% |\n", plainName, plain, slices.Min(all), slices.Max(all),
			plain/c.limit(), plain/ring, 100*medianOf(use))
	}
	if bound {
		b.WriteString("\n**The processors were all in use: these figures say more of them than of the links.**\n")
	}
	fmt.Fprintf(b, "\n![%s](%s)\n", c.title(), r.plotFile())
	if r.Timeline != "" {
		fmt.Fprintf(b, "\nWhere each piece of one all-reduce was, at the servers and at the clients:\n\n![pieces at servers and ranks](%s)\n", r.timelineFile())
	}
}

func (r starResult) plotFile() string     { return "reduction-" + r.Case.Name + ".svg" }
func (r starResult) timelineFile() string { return "reduction-" + r.Case.Name + "-timeline.svg" }

// plot draws all runs.
func (r starResult) plot() []byte {
	chart := plot.Dots{Title: capital(r.Case.title()), X: "algbw, GB/s", Marks: []plot.Mark{{At: r.Case.limit(), Label: "link"}}}
	for _, who := range reducers {
		var values []float64
		for _, run := range r.Runs[who.Name] {
			values = append(values, run.Algbw)
		}
		chart.Add(who.Name, slices.Sorted(slices.Values(values)))
	}
	return chart.SVG()
}

// write writes the page and its drawings, and prints the table of goals.
func (p reductionPage) write(out io.Writer, folder string) error {
	files := map[string][]byte{"reduction.md": p.markdown()}
	for _, r := range p.Results {
		if r.Star == nil {
			continue
		}
		files[r.Star.plotFile()] = r.Star.plot()
		if r.Star.Timeline != "" {
			files[r.Star.timelineFile()] = []byte(r.Star.Timeline)
		}
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("results: %w", err)
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(folder, name), content, 0o644); err != nil {
			return fmt.Errorf("results: %w", err)
		}
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(table, "\n%s\n", strings.Join(reductionHeading, "\t"))
	for _, row := range p.rows() {
		fmt.Fprintln(table, strings.Join(row.cells(), "\t"))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\n%s has all of it\n", filepath.Join(folder, "reduction.md"))
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
