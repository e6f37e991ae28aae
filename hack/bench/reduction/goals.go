package main

import (
	"fmt"
	"slices"

	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
)

const (
	// busyShare is the share of all processors' time from which on the processors count as the limit.
	busyShare = 0.9
	// ofAdd and ofFloat32 are the goals of sums of float32 and of half types: shares of an add's rate and of float32's.
	ofAdd, ofFloat32 = 0.9, 0.8
	// ofTwoMessages is the goal of a small all-reduce: its maximum time, relative to two messages.
	ofTwoMessages = 2.0
)

// A goalRow is a row of the table of goals. Some rows have no goal and are there for comparison.
type goalRow struct {
	what, reference, measured, goal string
	reached                         bool
	// limit is the known limit, shown where the goal is missed.
	limit string
}

func (r goalRow) cells() []string {
	reached, limit := page.YesNo(r.reached), r.limit
	switch {
	case r.goal == "":
		reached = ""
	case r.reached:
		limit = ""
	}
	return []string{r.what, r.reference, r.measured, r.goal, reached, limit}
}

var heading = []string{"case", "reference", "measured", "goal", "reached", "what limits it"}

// of is the median of a quantity over a contender's runs.
func (r starResult) of(c contender, quantity func(outcome) float64) float64 {
	var all []float64
	for _, run := range r.Runs[c.Name] {
		all = append(all, quantity(run))
	}
	return stats.Median(all)
}

// plainName is the name of plain sockets among the contenders.
const plainName = "plain sockets, no sums"

// plain is the median rate of plain sockets; zero where that was not measured.
func (r starResult) plain() float64 {
	var all []float64
	for _, run := range r.Plain {
		all = append(all, run.Rate)
	}
	return stats.Median(all)
}

func algbw(r outcome) float64 { return r.Algbw }
func busy(r outcome) float64  { return r.Busy }
func cpu(r outcome) float64   { return r.CPU }

// rows are the table of goals.
func (r report) rows() []goalRow {
	var rows []goalRow
	for _, result := range r.results {
		switch {
		case result.Star != nil:
			rows = append(rows, result.Star.rows()...)
		case len(result.Small) > 0:
			rows = append(rows, result.small())
		case result.Memory != nil:
			const mib = 1 << 20
			rows = append(rows, goalRow{
				what: fmt.Sprintf("buffers of a server with %d jobs at a time", result.Memory.Jobs), reference: fmt.Sprintf("limit, %d MiB", memoryBound/mib),
				measured: fmt.Sprintf("%.1f MiB (the process: %.1f MiB)", result.Memory.Max/mib, result.Memory.Peak/mib), goal: "never above",
				reached: result.Memory.Jobs == memoryJobs && result.Memory.Max <= memoryBound,
			})
		case len(result.Kernels) > 0:
			rows = append(rows, result.kernels()...)
		}
	}
	return rows
}

func (r starResult) rows() []goalRow {
	c := r.Case
	got, limit, byRing := r.of(servers, algbw), c.limit(), r.of(ring, algbw)
	use := fmt.Sprintf("%.0f %% of the processors in use", 100*r.of(servers, busy))
	if r.of(servers, busy) >= busyShare {
		use = "the processors: " + use
	}
	if plain := r.plain(); plain > 0 {
		use += fmt.Sprintf("; plain sockets that sum nothing get %.2f of the link", plain/limit)
	}
	rows := []goalRow{{
		what: c.title() + ": algbw", reference: fmt.Sprintf("link, %.4f GB/s", limit),
		measured: fmt.Sprintf("%.4f GB/s, %.2f", got, got/limit), goal: fmt.Sprint(c.OfLink), reached: got >= c.OfLink*limit, limit: use,
	}}
	if len(r.Runs[serversChunked.Name]) > 0 {
		pieces := r.of(serversChunked, algbw)
		rows = append(rows, goalRow{
			what: "for comparison, cut as NCCL cuts vectors: " + serversChunked.Name, reference: fmt.Sprintf("link, %.4f GB/s", limit),
			measured: fmt.Sprintf("%.4f GB/s, %.2f", pieces, pieces/limit),
		})
	}
	if c.MaxCPU > 0 {
		rows = append(rows, r.processorTime()...)
	}
	if c.OfRing > 0 {
		rows = append(rows, goalRow{
			what: c.title() + ": algbw", reference: fmt.Sprintf("ring, %.4f GB/s", byRing),
			measured: fmt.Sprintf("%.4f GB/s, %.2f", got, got/byRing), goal: fmt.Sprint(c.OfRing), reached: got >= c.OfRing*byRing, limit: use,
		})
	}
	return rows
}

// processorTime has a row for each of the two drivers.
func (r starResult) processorTime() []goalRow {
	c := r.Case
	own := r.of(servers, cpu)
	row := func(driver string, of contender, reference, limit string) goalRow {
		got := r.of(of, cpu)
		return goalRow{
			what: fmt.Sprintf("%s: processor time of all clients for each GB, %s", c.title(), driver), reference: reference,
			measured: fmt.Sprintf("%.2f s", got), goal: fmt.Sprintf("at most %g s", c.MaxCPU), reached: got <= c.MaxCPU, limit: limit,
		}
	}
	rows := []goalRow{row("driver that sleeps", servers, fmt.Sprintf("ring, %.2f s", r.of(ring, cpu)),
		fmt.Sprintf("the number of clients: %.2f s for each, which sends a GB and receives one. A part is the driver's, which asks 100 times before it sleeps", own/float64(c.Clients)))}
	if len(r.Runs[serversPolled.Name]) == 0 {
		return rows
	}
	return append(rows, row("driver that yields as NCCL's proxy does", serversPolled, fmt.Sprintf("driver that sleeps, %.2f s", own),
		fmt.Sprintf("the polling: a thread that never sleeps uses what the processors have left, and at the link's rate a GB takes %.1f s, whatever the plugin does", 1/c.limit())))
}

func (r caseResult) small() goalRow {
	var all, two, plain, ratio []float64
	for _, round := range r.Small {
		all, two, plain = append(all, round.AllReduce), append(two, round.TwoMessages), append(plain, round.Plain)
		ratio = append(ratio, round.AllReduce/round.TwoMessages)
	}
	return goalRow{
		what:      "all-reduce of 1 KiB, 2 clients, 2 servers, links without a limit: p50",
		reference: fmt.Sprintf("two messages, %.1f us", stats.Median(two)*1e6),
		measured:  fmt.Sprintf("%.1f us, %.2f", stats.Median(all)*1e6, stats.Median(ratio)),
		goal:      fmt.Sprintf("%.1f", ofTwoMessages), reached: stats.Median(ratio) <= ofTwoMessages,
		limit: fmt.Sprintf("%d cores for 2 clients and a server at a time: the same messages over plain sockets take %.1f us", r.Machine.Cores, stats.Median(plain)*1e6),
	}
}

// kernels has two rows for each size of the buffers: the worst over all numbers of sources.
func (r caseResult) kernels() []goalRow {
	var totals []string
	for _, row := range r.Kernels {
		if !slices.Contains(totals, row.Total) {
			totals = append(totals, row.Total)
		}
	}
	var rows []goalRow
	for _, total := range totals {
		var add, single []float64
		ofAdds, ofSingles := worst{lowest: 1e9}, worst{lowest: 1e9}
		for _, row := range r.Kernels {
			if row.Total != total {
				continue
			}
			add, single = append(add, row.Add), append(single, row.Float32)
			ofAdds.add(row.Float32/row.Add, row.LoadFloat32/row.Add, fmt.Sprintf("%d sources", row.Sources))
			ofSingles.add(row.Float16/row.Float32, row.LoadFloat16/row.Float32, fmt.Sprintf("float16, %d sources", row.Sources))
			ofSingles.add(row.Bfloat16/row.Float32, row.LoadBfloat16/row.Float32, fmt.Sprintf("bfloat16, %d sources", row.Sources))
		}
		line := func(what, reference string, w worst, goal float64) {
			limit := fmt.Sprintf("%s on one core: loading the sources alone, as if they were one buffer, with nothing summed or stored, gets %.2f there", r.Kernels[0].Instructions, w.loads)
			if w.loads >= goal {
				limit += ", so the loads are not the limit; most likely it is the number of concurrent buffers, or the conversion"
			}
			rows = append(rows, goalRow{
				what: fmt.Sprintf("sums of 2 to 16 buffers of %s, %s in all", what, total), reference: reference,
				measured: fmt.Sprintf("%.2f at least (%s)", w.lowest, w.which), goal: fmt.Sprint(goal), reached: w.lowest >= goal,
				limit: limit,
			})
		}
		line("float32", fmt.Sprintf("add of two arrays, %.1f GB/s", stats.Median(add)), ofAdds, ofAdd)
		line("float16 and bfloat16", fmt.Sprintf("float32, %.1f GB/s", stats.Median(single)), ofSingles, ofFloat32)
	}
	return rows
}

// worst is the lowest of several figures, what it is of, and the figure of loads alone there.
type worst struct {
	lowest, loads float64
	which         string
}

func (w *worst) add(figure, loads float64, which string) {
	if figure < w.lowest {
		*w = worst{figure, loads, which}
	}
}
