package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/page"
)

// tlsRound has 100 us of Gloo's fastest with TLS and 50 us in clear at each size, and shares of the 100 us of Evenkeel.
func tlsRound(elements []int, certificates, jobKey, clear float64) map[string]map[int]figure {
	round := map[string]map[int]figure{}
	add := func(name string, n int, median float64) {
		if round[name] == nil {
			round[name] = map[int]figure{}
		}
		round[name][n] = figure{1, median}
	}
	for _, n := range elements {
		add(withCertificates, n, 100*certificates)
		add(withJobKey, n, 100*jobKey)
		add(tcp, n, 100*clear)
		for i, algorithm := range algorithms {
			// With TLS the last algorithm is the fastest, in clear the first.
			add(glooTLS(algorithm), n, float64(100+len(algorithms)-1-i))
			add(gloo(algorithm), n, float64(50+i))
		}
	}
	return round
}

func TestTLSPageComparesWithGloosBestWithTLS(t *testing.T) {
	elements := []int{1, 1000}
	r := tlsResults{
		setting: setting{Rounds: 3, Length: time.Second, StarLength: time.Second, Elements: elements, Gloo: "Gloo 1.2",
			Source: page.Source{Commit: "abc", Day: "2026-01-31"}},
		OpenSSL: "OpenSSL 3.4",
	}
	for range elements {
		r.Local = append(r.Local, &measured{rounds: []map[string]map[int]figure{
			tlsRound(elements, 0.5, 1.25, 0.4), tlsRound(elements, 0.6, 1.5, 0.2), tlsRound(elements, 0.9, 1.75, 0.5),
		}})
	}
	r.Star.rounds = []map[string]map[int]figure{tlsRound([]int{starElements}, 1, 1.01, 1)}
	r.Star.failed = []string{glooTLS("ring")}
	// Of the other algorithms with TLS the last is the fastest.
	r.Local[1].failed, r.Local[1].without = []string{glooTLS("new_bcube"), glooTLS("new_bcube")}, []string{glooTLS("new_bcube")}
	text := string(r.markdown())
	for _, want := range []string{
		"commit abc, on 2026-01-31",
		"Gloo is Gloo 1.2, built here",
		"records by OpenSSL 3.4.",
		"| 4 processes, 1 element | 100.0 (100.0 to 100.0) us, new_bcube | Evenkeel, TLS with certificates | 60.0 (50.0 to 90.0) us | 0.60 | at most Gloo's best with TLS | yes |",
		"|  |  | Evenkeel, TLS with the job key | 150.0 (125.0 to 175.0) us | 1.50 | at most Gloo's best with TLS | no |",
		"| 4 hosts with links of 1gbit, 5000000 elements | 0.1 (0.1 to 0.1) ms, new_bcube | Evenkeel, TLS with certificates | 0.1 (0.1 to 0.1) ms | 1.00 | at most Gloo's best with TLS | yes |",
		"|  |  | Evenkeel, TLS with the job key | 0.1 (0.1 to 0.1) ms | 1.01 | at most Gloo's best with TLS | no |",
		"| 4 processes, 1000 elements | Gloo's best | 50.0 (50.0 to 50.0) us, ring | 101.0 (101.0 to 101.0) us, new_ring | 2.02 |",
		"|  | Evenkeel, TLS with certificates | 40.0 (20.0 to 50.0) us | 60.0 (50.0 to 90.0) us | 1.50 |",
		"|  | Evenkeel, TLS with the job key | 40.0 (20.0 to 50.0) us | 150.0 (125.0 to 175.0) us | 3.75 |",
		"Runs that failed and were repeated: Gloo with TLS, ring (4 hosts with links of 1gbit, 5000000 elements).",
		"did not end within 20s: Gloo with TLS, new_bcube (4 processes, 1000 elements).",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for _, wrong := range []string{"%!", "NaN", "interrupted"} {
		if strings.Contains(text, wrong) {
			t.Errorf("%q in\n%s", wrong, text)
		}
	}
}

func TestTLSPageWithoutAnyRunOfGloo(t *testing.T) {
	r := tlsResults{setting: setting{Elements: []int{1}}}
	m := &measured{rounds: []map[string]map[int]figure{tlsRound(r.Elements, 0.5, 0.5, 0.5)}}
	for _, algorithm := range algorithms {
		m.without = append(m.without, glooTLS(algorithm))
	}
	r.Local = []*measured{m}
	if text := string(r.markdown()); !strings.Contains(text, "| 4 processes, 1 element | no run ended |") {
		t.Error(text)
	}
}

// The page of an interrupted run has what was measured, and says that there is more.
func TestTLSPageOfAnInterruptedRun(t *testing.T) {
	r, folder := tlsResults{setting: setting{Elements: []int{1}}}, t.TempDir()
	r.Local = []*measured{{rounds: []map[string]map[int]figure{tlsRound(r.Elements, 0.5, 0.5, 0.5)}}}
	if err := r.write(folder); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(folder, "collectives-tls.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| 4 processes, 1 element |", "other cases were not measured"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.Contains(string(text), "hosts with links") {
		t.Errorf("a case that was not measured is in\n%s", text)
	}
}
