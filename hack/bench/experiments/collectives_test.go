package experiments

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/bench/runner"
	"evenkeel.dev/evenkeel/hack/bench/workload"
)

// A recorder stores samples of quick runs, and makes the page of them.
type recorder struct {
	t     *testing.T
	of    experiment.Experiment
	path  string
	store *runner.Store
}

func newRecorder(t *testing.T, of experiment.Experiment) *recorder {
	t.Helper()
	path := filepath.Join(t.TempDir(), of.Name+".jsonl")
	store, err := runner.OpenStore(path)
	if err != nil {
		t.Fatal(err)
	}
	return &recorder{t, of, path, store}
}

// add stores five rounds of a contender. Values grow by 0.1 % in each round.
func (r *recorder) add(of, contender string, values map[experiment.Quantity]float64) {
	r.t.Helper()
	for round := range 5 {
		s := experiment.Sample{
			Experiment: r.of.Name, Case: of, Contender: contender, Round: round, Start: time.Date(2026, 1, 31, 0, 0, 0, 0, time.UTC), Busy: 0.5,
			Setting: experiment.Setting{Commit: "abc", Machine: "M", Quick: true}, Command: "go run ./hack/bench run " + r.of.Name,
		}
		grown := map[experiment.Quantity]float64{}
		for q, value := range values {
			grown[q] = value * (1 + float64(round)/1000)
		}
		s.Set(experiment.Measured{Values: grown, Versions: "Gloo 1.2 and OpenSSL 3.4"})
		if values == nil {
			s.Failure = "left out"
		}
		if err := r.store.Append(s); err != nil {
			r.t.Fatal(err)
		}
	}
}

// page is what the record says.
func (r *recorder) page() (text string, files map[string][]byte) {
	r.t.Helper()
	store, err := runner.OpenStore(r.path)
	if err != nil {
		r.t.Fatal(err)
	}
	files, err = page.NewResults(r.of, store.Samples).Files()
	if err != nil {
		r.t.Fatal(err)
	}
	text = string(files[r.of.Name+".md"])
	for _, wrong := range []string{"%!", "NaN"} {
		if strings.Contains(text, wrong) {
			r.t.Errorf("%q in\n%s", wrong, text)
		}
	}
	return text, files
}

func (r *recorder) expect(text string, parts ...string) {
	r.t.Helper()
	for _, want := range parts {
		if !strings.Contains(text, want) {
			r.t.Errorf("no %q in\n%s", want, text)
		}
	}
}

// times are a minimum and a median twice as long at each size of a quick run.
func times(minimum func(n float64) float64) map[experiment.Quantity]float64 {
	w := workload.Collective{}
	all := map[experiment.Quantity]float64{}
	for _, n := range processes(2, true, nil).Sweep.Points {
		all[w.Minimum().At(n)], all[w.Median().At(n)] = minimum(n), 2*minimum(n)
	}
	return all
}

func constant(value float64) func(float64) float64 { return func(float64) float64 { return value } }

func TestPageOfCollectives(t *testing.T) {
	r := newRecorder(t, collectives())
	gloos := func(of string) {
		for i, algorithm := range workload.GlooAlgorithms {
			if algorithm != "new_bcube" { // as in a record of another library
				r.add(of, "Gloo, "+algorithm, times(constant(100+float64(i))))
			}
		}
	}
	gloos("2-processes")
	r.add("2-processes", overTCP, times(func(n float64) float64 {
		if n > 10_000 {
			return 90
		}
		return 60
	}))
	r.add("2-processes", sharedMemory, times(constant(25)))
	gloos("4-processes")
	r.add("4-processes", overTCP, times(constant(125)))
	r.add("4-processes", sharedMemory, times(constant(40)))
	text, files := r.page()
	r.expect(text,
		"at commit abc, on 2026-01-31", "default blocking mode", "Goals are this project's own",
		"| 2 processes | minimum time |  | the best at each | at 7 of 7 | 1 of the reference, at every point | yes |\n",
		"|  | minimum time |  | the best at each | at 4 of 7; not at 100000 (90.2 us, goal 70.1 us, 0.7 of Gloo, ring), ",
		", 0.7 of Gloo, ring) | 0.7 of the reference, at 50 % of the points | yes |\n",
		"| 2 processes, Evenkeel, shared memory | minimum time, up to 1000 elements |  | the best at each | at 3 of 3 | 0.3 of the reference, at every point | yes |\n",
		"|  | minimum time, from 1001 elements |  | the best at each | at 4 of 4 | 0.5 of the reference, at every point | yes |\n",
		"| 2 processes | median time |  | the best at each | at 7 of 7 | 1 of the reference, at every point | yes |\n",
		"| 4 processes | minimum time |  | the best at each | at 0 of 7; not at 1 (125.2 us, goal 100.2 us, 1 of Gloo, ring), ",
		"| 4 processes, Evenkeel, shared memory | minimum time, up to 1000 elements |  | the best at each | at 0 of 3; not at 1 (40.1 us, goal 30.1 us, 0.3 of Gloo, ring), ",
		"Evenkeel, TCP loses to the best of the others in 7 of 14 cases, each point of a sweep counted as one: 4 processes, 1 elements (",
		"| 1000 | 100.2 us, Gloo, ring | 25.1 us | 0.25 (0.25 to 0.25) | better | 60.1 us | 0.60 (0.60 to 0.60) | better |\n",
		"Minimum time, median of the rounds:", "Median time, median of the rounds:", "![2 processes](collectives-2-processes.svg)",
	)
	if strings.Contains(text, "| 4 processes | median time |") {
		t.Error("there is a goal of medians of more processes than two")
	}
	for _, wrong := range []string{"| Gloo, new_bcube |", "between 4 hosts", "as threads"} {
		if strings.Contains(text, wrong) {
			t.Errorf("%q, which was not measured, is in\n%s", wrong, text)
		}
	}
	for _, want := range []string{"Evenkeel, TCP, minimum time", "Evenkeel, shared memory, median time"} {
		if !strings.Contains(string(files["collectives-2-processes.svg"]), want) {
			t.Errorf("no %q in the drawing", want)
		}
	}
	if len(files) != 3 {
		t.Errorf("%d files, want the page and two drawings", len(files))
	}
}

func TestPageOfCollectivesBetweenHostsAndThreads(t *testing.T) {
	r := newRecorder(t, collectives())
	c, w := hostsCase(true)
	for name, median := range map[string]float64{overTCP: c.Limit / 0.96, "Evenkeel, TCP, one flow": 300, "Gloo, ring": 500, "Gloo, new_ring": c.Limit} {
		r.add("hosts", name, map[experiment.Quantity]float64{w.Minimum(): median / 2, w.Median(): median, workload.BoundShare: c.Limit / median})
	}
	threads := workload.Collective{}
	r.add("threads", overTCP, map[experiment.Quantity]float64{
		workload.ThreadsPerCore: 1.5, workload.NetworkThreads: 3, threads.Minimum(): 9, threads.Median(): 20,
	})
	text, files := r.page()
	r.expect(text,
		"A ring cannot take less than 251 ms on these links, the wire limit: each host sends 1.5 times the elements, in packets of 1500 bytes, whose headers count.",
		"| 5000000 elements between 4 hosts with links of 1gbit | the bound's share of the median |  | 1.002 | 0.962 | 0.950 | yes |\n",
		"| 64 ranks as threads of one process, 1 element | worst threads that wait for the network, for each core |  |  | 1.51 | 1.00 | no |\n",
		"| Gloo, new_ring | 251", "`EVENKEEL_FLOWS=1`", "3 (3) | 9.0 us (9.0 us) | 20.0 us (20.1 us)",
	)
	if drawing := string(files["collectives-hosts.svg"]); !strings.Contains(drawing, "wire limit") || !strings.Contains(drawing, "median time, ms") {
		t.Errorf("the drawing between hosts:\n%s", drawing)
	}
	if bound := ringBound(hostsElements); math.Abs(bound-251) > 1 {
		t.Errorf("a ring's bound is %f ms", bound)
	}
}

func TestPageOfCollectivesWithTLSComparesWithGloosBestWithTLS(t *testing.T) {
	r := newRecorder(t, collectivesTLS())
	w := workload.Collective{}
	add := func(of, contender string, median float64) {
		r.add(of, contender, map[experiment.Quantity]float64{w.Minimum(): median / 2, w.Median(): median})
	}
	for _, of := range []string{"1-element", "1000-elements"} {
		add(of, withCertificates, 60)
		add(of, withJobKey, 150)
		add(of, overTCP, 40)
		for i, algorithm := range workload.GlooAlgorithms {
			// With TLS the last algorithm is the fastest, in clear the first.
			if tls := "Gloo with TLS, " + algorithm; of == "1000-elements" && algorithm == "new_bcube" {
				r.add(of, tls, nil)
			} else {
				add(of, tls, float64(100+len(workload.GlooAlgorithms)-1-i))
			}
			add(of, "Gloo, "+algorithm, float64(50+i))
		}
	}
	text, _ := r.page()
	r.expect(text,
		"each run; with Gloo 1.2 and OpenSSL 3.4.",
		"| 4 processes, 1 element | median time |  | 100.2 us | 60.1 us | 100.2 us, 1 of Gloo with TLS, new_bcube | yes |\n",
		"| 4 processes, 1 element, Evenkeel, TLS with the job key | median time |  | 100.2 us | 150.3 us | 100.2 us, 1 of Gloo with TLS, new_bcube | no |\n",
		"| 4 processes, 1000 elements | median time |  | 101.2 us | 60.1 us | 101.2 us, 1 of Gloo with TLS, new_ring | yes |\n",
		"| 1.50 (1.50 to 1.50), Evenkeel, TCP |", "| 3.75 (3.75 to 3.75), Evenkeel, TCP |", "| 2.10 (2.10 to 2.10), Gloo, ring |",
		"| Gloo with TLS, new_bcube | all runs failed |\n", "Gloo with TLS, new_bcube, run 1 failed: left out",
	)
	if strings.Contains(text, "hosts with links") {
		t.Errorf("a case that was not measured is in\n%s", text)
	}
}

func TestPageOfCollectivesWithTLSWithoutAnyRunOfGloo(t *testing.T) {
	r := newRecorder(t, collectivesTLS())
	r.add("1-element", withCertificates, map[experiment.Quantity]float64{workload.Collective{}.Median(): 1})
	for _, algorithm := range workload.GlooAlgorithms {
		r.add("1-element", "Gloo with TLS, "+algorithm, nil)
	}
	text, _ := r.page()
	r.expect(text, "| 4 processes, 1 element | median time |  |  | 1.0 us | 1 of a reference that was not measured | - |\n")
}

// What encrypts has to, and each algorithm of Gloo in clear shows that the capture sees elements.
func TestEachContenderWithTLSIsCaptured(t *testing.T) {
	var goals []string
	cases := collectivesTLS().Cases(false)
	for _, g := range cases[0].Goals {
		goals = append(goals, g.Contender)
	}
	asked := strings.Join(goals, "\n")
	for _, c := range cases[1:] {
		for _, of := range c.Contenders {
			if of.Name != overTCP && !strings.Contains(asked, fmt.Sprintf("capture of %s", of.Name)) {
				t.Errorf("%s is not captured", of.Name)
			}
		}
	}
}
