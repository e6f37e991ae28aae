package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
)

func TestPageComparesWithTheLinkAndTheRing(t *testing.T) {
	c := starCases()[0]
	limit := c.limit()
	runs := func(shares ...float64) []outcome {
		var all []outcome
		for _, share := range shares {
			all = append(all, outcome{Algbw: share * limit, Busy: 0.5, CPU: 2})
		}
		return all
	}
	star := starResult{Case: c, Timeline: "<svg/>", Runs: map[string][]outcome{
		servers.Name: runs(0.5, 0.92, 0.95), serversPolled.Name: {{Algbw: 0.5 * limit, Busy: 1, CPU: 12}}, serversChunked.Name: runs(0.8), ring.Name: runs(0.6, 0.75, 0.8),
	}}
	page := report{results: []caseResult{
		{Name: c.Name, Star: &star},
		{Name: "small", Small: []smallRound{{AllReduce: 50e-6, TwoMessages: 30e-6}}},
		{Name: "memory", Memory: &memoryResult{Jobs: memoryJobs, Max: memoryBound + 1, Peak: 2 * memoryBound}},
		{Name: "kernels", Kernels: []kernelRow{
			{Total: "24 KiB", Sources: 2, Add: 100, Float32: 95, Float16: 90, Bfloat16: 90},
			{Total: "24 KiB", Sources: 16, Add: 100, Float32: 89, LoadFloat32: 93, Float16: 88, Bfloat16: 80},
			{Total: "256 MiB", Sources: 2, Add: 10, Float32: 10, Float16: 9, Bfloat16: 7},
		}},
	}}
	var reached []string
	for _, row := range page.rows() {
		reached = append(reached, row.cells()[4])
	}
	// 0.92 of the link and for comparison 0.8, 2 s and 12 s of processor time, 1.23 of the ring, 1.7 of two messages, a byte too much; 0.89 of an add, 0.9 of float32; 1 and 0.7.
	if want := []string{"yes", "", "yes", "no", "no", "yes", "no", "no", "yes", "yes", "no"}; !slices.Equal(reached, want) {
		t.Errorf("reached: %v, want %v of\n%s", reached, want, page.markdown())
	}
	text := string(page.markdown())
	for _, part := range []string{"Goals are this project's own", "0.92", "1.23", "vectors: servers, operations of 512 KiB | link, 0.1196 GB/s | 0.0956 GB/s, 0.80 |  |  |", "processor time of all clients for each GB, driver that yields as NCCL's proxy does | driver that sleeps, 2.00 s | 12.00 s | at most 3 s | no | the polling: ", "at the link's rate a GB takes 8.4 s", "0.89 at least (16 sources)", "gets 0.93 there, so the loads are not the limit", "0.70 at least (bfloat16, 2 sources)", star.plotFile(), star.timelineFile()} {
		if !strings.Contains(text, part) {
			t.Errorf("no %q in\n%s", part, text)
		}
	}
	if strings.Contains(text, "processors were all in use") {
		t.Error("half of the processors counts as all")
	}
}

func TestPageShowsEveryDrawing(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	here, folder := machine.Machine{Cores: 2}, t.TempDir()
	for _, c := range starCases() {
		all := map[string][]outcome{}
		for _, contender := range contenders {
			all[contender.Name] = []outcome{{Algbw: c.limit(), Busy: 0.95}}
		}
		results, err := openCache(here, false)
		if err != nil {
			t.Fatal(err)
		}
		star := starResult{Case: c, Runs: all}
		if c.Timeline {
			star.Timeline = "<svg/>"
		}
		if err := results.Add(caseResult{Name: c.Name, Machine: here, Source: page.Source{Commit: "abc"}, Star: &star}); err != nil {
			t.Fatal(err)
		}
	}
	results, err := openCache(here, false)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := (report{results: results.Results}).write(&out, folder); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(filepath.Join(folder, "reduction.md"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(folder, "*.svg"))
	if err != nil || len(files) != 6 {
		t.Errorf("%d drawings, %v: one of each case, and two timelines", len(files), err)
	}
	for _, file := range files {
		if !bytes.Contains(content, []byte("("+filepath.Base(file)+")")) {
			t.Errorf("the page does not show %s", file)
		}
	}
	if !strings.Contains(out.String(), "4 clients, 4 servers") || !bytes.Contains(content, []byte("processors were all in use")) {
		t.Errorf("%s\n%s", out.String(), content)
	}
}
