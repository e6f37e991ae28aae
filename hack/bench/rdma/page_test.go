package main

import (
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func TestPerftestOutput(t *testing.T) {
	bandwidth := `---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]
 1048576    200              70.51              68.25		   0.000068
---------------------------------------------------------------------------------------
`
	if got, err := perftestColumn(bandwidth, 1<<20, 3); err != nil || got != 68.25 {
		t.Errorf("bandwidth %v, %v", got, err)
	}
	latency := ` #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 8       1000          40.11          9812.00      45.20     	       61.11        	300.10		120.00    		9812.00
`
	if got, err := perftestColumn(latency, 8, 4); err != nil || got != 45.2 {
		t.Errorf("latency %v, %v", got, err)
	}
	for _, text := range []string{"Couldn't connect", " 1048576    200    0.00    0.00    0.000000\n"} {
		if _, err := perftestColumn(text, 1<<20, 3); !errors.Is(err, errNoFigure) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestReportOfEvenkeelBench(t *testing.T) {
	row := `{"rows":[{"size":8,"time_us":100,"bandwidth":0.081,"p50_us":90,"p99_us":100,"wrong":0}]}`
	if got, err := driverResult([]byte(row), true); err != nil || got != 45 {
		t.Errorf("latency %v, %v", got, err)
	}
	if got, err := driverResult([]byte(row), false); err != nil || got != 81 {
		t.Errorf("bandwidth %v, %v", got, err)
	}
	for _, wrong := range []string{"", `{"rows":[]}`, strings.Replace(row, `"wrong":0`, `"wrong":1`, 1)} {
		if _, err := driverResult([]byte(wrong), false); err == nil {
			t.Errorf("%q has a result", wrong)
		}
	}
}

func TestPage(t *testing.T) {
	slow := cases[2]
	slow.Limits = "the moon"
	m := measured{
		Results: []result{
			{Case: cases[0], Perftest: []float64{60, 50, 70}, Sends: []float64{45, 30, 51}, Evenkeel: []float64{57, 66, 48}},
			{Case: slow, Perftest: []float64{40, 50}, Sends: []float64{54}, Evenkeel: []float64{60, 78}},
		},
		Passed: map[string]bool{checks[0].Name: true}, // the others did not run
	}
	text := string(markdown(m, 3, page.Source{Commit: "abc", Day: "2026-01-31"}, machine.Machine{Load: 1.5}))
	for _, want := range []string{
		"| 60.0 (50.0 to 70.0) MB/s | 57.0 (48.0 to 66.0) MB/s | 0.95 | at least 0.9 | yes |",
		"| 45.0 (40.0 to 50.0) us | 69.0 (60.0 to 78.0) us | 1.53 | at most 1.5 | no |",
		"| for comparison: `ib_send_bw` | 45.0 (30.0 to 51.0) MB/s |  | 0.75 of `ib_write_bw` |  |  |",
		"| for comparison: `ib_send_lat` | 54.0 (54.0 to 54.0) us |  | 1.20 of `ib_write_lat` |  |  |",
		"* " + slow.Name + ": the moon",
		"3 rounds at commit abc, on 2026-01-31", "not quiet: its load was 1.5", "Goals are this project's own",
		"| no verbs call | yes |", "every byte right | no |",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %s", want, text)
		}
	}
	if strings.Contains(text, "* "+cases[0].Name) {
		t.Errorf("a reached goal has a limit: %s", text)
	}
}

// The checks name Rust tests, which must exist.
func TestChecksNameRustTests(t *testing.T) {
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range checks {
		for _, name := range c.Tests {
			function := "fn " + name[strings.LastIndex(name, ":")+1:] + "("
			if err := exec.Command("grep", "-rqF", "--include=*.rs", function, filepath.Join(root, "plugin", "crates")).Run(); err != nil {
				t.Errorf("no Rust test %s: %v", name, err)
			}
		}
	}
}
