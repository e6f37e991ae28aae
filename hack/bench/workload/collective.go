package workload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/internal/child"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// Quantities of [Collective], besides its times.
var (
	// BoundShare is how much of the wire's rate the median is: its bound divided by it.
	BoundShare = experiment.Quantity{Name: "bound_share", Title: "the bound's share of the median", Digits: 3}
	// FailedTries counts how often Gloo failed before the run that was measured.
	FailedTries = experiment.Quantity{Name: "failed_tries", Title: "tries that failed", LowerIsBetter: true}
	// NetworkThreads are those of a process that wait for the network, and ThreadsPerCore how many of them a core has.
	NetworkThreads = experiment.Quantity{Name: "network_threads", Title: "threads that wait for the network", LowerIsBetter: true}
	ThreadsPerCore = experiment.Quantity{Name: "threads_per_core", Title: "threads that wait for the network, for each core", Digits: 2, LowerIsBetter: true}
)

// A Collective is all-reduces (sum of float32). All ranks are on this machine, or one is on each host of a star.
type Collective struct {
	Ranks int
	// Elements are the sizes that a run measures one after the other. With several of them, the times are those of a
	// sweep.
	Elements []int
	Length   time.Duration // of the measurement of a size
	// Bound is the least time on the network, in ms; zero on this machine, where times are in us.
	Bound float64
}

const (
	// tryTimeout is longer than any try takes that ends.
	tryTimeout = 5 * time.Minute
	// CollectiveTimeout is for all tries of a run.
	CollectiveTimeout = glooTries * tryTimeout
)

// Minimum is the least time of a run's all-reduces, on rank 0.
func (w Collective) Minimum() experiment.Quantity { return w.time("minimum", "minimum time") }

// Median is the median time of a run's all-reduces, on rank 0.
func (w Collective) Median() experiment.Quantity { return w.time("median", "median time") }

func (w Collective) time(name, title string) experiment.Quantity {
	q := experiment.Quantity{Name: name, Title: title, Unit: "us", Digits: 1, LowerIsBetter: true}
	if w.Bound > 0 {
		q.Unit = "ms"
	}
	return q
}

// figures are what a run measured, by number of elements.
type figures map[int]figure

// A figure has times in microseconds.
type figure struct{ min, median float64 }

// measured has the figures of all sizes.
func (w Collective) measured(all figures) (m experiment.Measured, err error) {
	m.Values = outcome{}
	for _, n := range w.Elements {
		f, ok := all[n]
		if !ok {
			return m, fmt.Errorf("no figure for %d elements", n)
		}
		minimum, median := w.Minimum(), w.Median()
		if len(w.Elements) > 1 {
			minimum, median = minimum.At(float64(n)), median.At(float64(n))
		}
		if w.Bound > 0 {
			f = figure{f.min / 1e3, f.median / 1e3}
			m.Values[BoundShare] = w.Bound / f.median
		}
		m.Values[minimum], m.Values[median] = f.min, f.median
	}
	return m, nil
}

// Evenkeel all-reduces over one of its transports, with these variables of the environment.
func (w Collective) Evenkeel(name, transport string, environment ...string) experiment.Contender {
	return w.evenkeel(name, environment, func() []string { return []string{transport} })
}

// EvenkeelBy all-reduces over TCP by a benchmark of evenkeel-bench collective, with these options.
func (w Collective) EvenkeelBy(name, benchmark string, options ...string) experiment.Contender {
	return w.evenkeel(name, nil, func() []string { return slices.Concat([]string{"tcp"}, options, []string{benchmark}) })
}

// EvenkeelTLS shows the same certificates as Gloo.
func (w Collective) EvenkeelTLS(name string, build func() *Gloo) experiment.Contender {
	return w.evenkeel(name, nil, func() []string {
		c := build().certificates
		return []string{"tls", "--cert", c.certificate, "--pkey", c.key, "--ca-file", c.authority}
	})
}

// evenkeel takes a transport, with arguments of its own.
func (w Collective) evenkeel(name string, environment []string, transport func() []string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		ctx, cancel := context.WithTimeoutCause(ctx, tryTimeout, fmt.Errorf("not done within %s", tryTimeout))
		defer cancel()
		out, err := w.ranks(ctx, r.Lab, environment, func(rank int, device, store string) []string {
			return slices.Concat([]string{
				r.Driver, "collective", "--size", strconv.Itoa(w.Ranks), "--rank", strconv.Itoa(rank), "--shared-path", store, "--tcp-device", device,
				"--elements", list(w.Elements), "--iteration-time", w.length(), "--json", "--transport",
			}, transport())
		})
		if err != nil {
			return m, err
		}
		report, err := readCollective(out)
		if err != nil {
			return m, err
		}
		return w.measured(report.figures())
	}}
}

// Threads has the ranks as threads of one process, over TCP.
func (w Collective) Threads(name string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		out, err := proc.Output(ctx, child.Command(ctx, "", r.Driver, "collective", "--spawn", strconv.Itoa(w.Ranks), "--in-process",
			"--elements", strconv.Itoa(w.Elements[0]), "--iteration-time", w.length(), "--json"))
		if err != nil {
			return m, err
		}
		report, err := readCollective(out)
		if err != nil {
			return m, err
		}
		if m, err = w.measured(report.figures()); err != nil {
			return m, err
		}
		m.Values[NetworkThreads], m.Values[ThreadsPerCore] = float64(report.IOThreads), float64(report.IOThreads)/float64(runtime.NumCPU())
		return m, nil
	}}
}

func (w Collective) length() string { return fmt.Sprintf("%dms", w.Length.Milliseconds()) }

// list is numbers with commas between them, as programs read them.
func list(numbers []int) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(numbers), "[]"), " ", ",")
}

// ranks runs a process for each rank, with a folder of their own as the store, and returns what rank 0 wrote.
func (w Collective) ranks(ctx context.Context, lab *netns.Lab, environment []string, argv func(rank int, device, store string) []string) (out []byte, err error) {
	store, err := os.MkdirTemp("", "evenkeel-store-")
	if err != nil {
		return nil, fmt.Errorf("the ranks' store: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(store)) }()
	device := loopback
	if lab != nil {
		device = netns.DataInterface
	}
	var all []*proc.Process
	defer func() {
		for _, p := range all {
			_ = p.Kill(nil) // the error of rank 0 is the one that counts
		}
	}()
	for rank := w.Ranks - 1; rank >= 0; rank-- {
		p, err := proc.Start(ctx, lab, netns.StarHost(rank), fmt.Sprintf("rank %d", rank), environment, argv(rank, device, store)...)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	out, err = all[len(all)-1].Wait()
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return out, err
}

// A collectiveReport is what evenkeel-bench collective prints.
type collectiveReport struct {
	IOThreads int `json:"io_threads"`
	Rows      []struct {
		Elements int
		Min      float64 `json:"min_us"`
		Median   float64 `json:"p50_us"`
	}
}

func readCollective(text []byte) (collectiveReport, error) {
	var r collectiveReport
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("unexpected report of evenkeel-bench collective: %w", err)
	}
	return r, nil
}

func (r collectiveReport) figures() figures {
	all := figures{}
	for _, row := range r.Rows {
		all[row.Elements] = figure{row.Min, row.Median}
	}
	return all
}
