package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// evenkeel runs Evenkeel over a transport, which may have more arguments, with environment variables.
func evenkeel(bench, folder string, transport []string, settings ...string) func(context.Context, task) (map[int]figure, error) {
	return func(ctx context.Context, t task) (map[int]figure, error) {
		list := strings.ReplaceAll(strings.Trim(fmt.Sprint(t.elements), "[]"), " ", ",")
		out, err := ranks(ctx, folder, t, func(rank int, store string) []string {
			return slices.Concat([]string{"env"}, settings, []string{bench, "collective", "--size", strconv.Itoa(t.ranks), "--rank", strconv.Itoa(rank),
				"--shared-path", store, "--tcp-device", t.network.device, "--elements", list,
				"--iteration-time", fmt.Sprintf("%dms", t.length.Milliseconds()), "--json", "--transport"}, transport)
		})
		if err != nil {
			return nil, err
		}
		report, err := readReport(out)
		if err != nil {
			return nil, err
		}
		figures := report.figures()
		return figures, complete(figures, t.elements)
	}
}

// inProcess runs ranks as threads of one process, which all-reduce one element.
func inProcess(ctx context.Context, bench string, ranks int, length time.Duration) (threadsReport, error) {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	cmd, err := loopback.command(ctx, 0, bench, "collective", "--spawn", strconv.Itoa(ranks), "--in-process", "--elements", "1",
		"--iteration-time", fmt.Sprintf("%dms", length.Milliseconds()), "--json")
	if err != nil {
		return threadsReport{}, err
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return threadsReport{}, fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	report, err := readReport(out)
	if err != nil {
		return threadsReport{}, err
	}
	figures := report.figures()
	return threadsReport{figures[1], report.IOThreads}, complete(figures, []int{1})
}

// A report is what evenkeel-bench prints.
type report struct {
	IOThreads int `json:"io_threads"`
	Rows      []struct {
		Elements int
		Min      float64 `json:"min_us"`
		Median   float64 `json:"p50_us"`
	}
}

func readReport(text []byte) (report, error) {
	var r report
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("evenkeel-bench's report: %w", err)
	}
	return r, nil
}

func (r report) figures() map[int]figure {
	figures := map[int]figure{}
	for _, row := range r.Rows {
		figures[row.Elements] = figure{row.Min, row.Median}
	}
	return figures
}
