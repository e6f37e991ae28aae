package workload

import (
	"maps"
	"strconv"
	"strings"
	"testing"
	"time"
)

const collectiveOutput = `{"io_threads": 2, "rows": [{"elements": 1, "min_us": 5, "p50_us": 11}, {"elements": 1000, "min_us": 6000, "p50_us": 20000}]}`

func TestTimesOfACollective(t *testing.T) {
	report, err := readCollective([]byte(collectiveOutput))
	if err != nil || report.IOThreads != 2 {
		t.Fatalf("%+v, %v", report, err)
	}
	swept, hosts := Collective{Elements: []int{1, 1000}}, Collective{Elements: []int{1000}, Bound: 19}
	for _, test := range []struct {
		of   Collective
		want outcome
	}{
		{swept, outcome{swept.Minimum().At(1): 5, swept.Median().At(1): 11, swept.Minimum().At(1000): 6000, swept.Median().At(1000): 20000}},
		{Collective{Elements: []int{1}}, outcome{swept.Minimum(): 5, swept.Median(): 11}},
		{hosts, outcome{hosts.Minimum(): 6, hosts.Median(): 20, BoundShare: 0.95}},
	} {
		got, err := test.of.measured(report.figures())
		if err != nil || !maps.Equal(got.Values, test.want) {
			t.Errorf("%+v: %v, %v; want %v", test.of, got.Values, err, test.want)
		}
	}
	if swept.Median().Unit != "us" || hosts.Median().Unit != "ms" {
		t.Errorf("times are in %s and %s", swept.Median().Unit, hosts.Median().Unit)
	}
	if _, err := (Collective{Elements: []int{1, 2}}).measured(report.figures()); err == nil || !strings.Contains(err.Error(), "2 elements") {
		t.Errorf("without a figure of a size: %v", err)
	}
	if _, err := readCollective([]byte("no JSON")); err == nil {
		t.Error("text is a report")
	}
}

// Ranks that wait for rank 0 end with it, whether it fails or not. They would sleep for longer than this may take.
func TestRanksEndWithRankZero(t *testing.T) {
	const script = `[ $0 = 0 ] || exec sleep 60; echo $EVENKEEL_FLOWS; echo "it broke" >&2; exit `
	w := Collective{Ranks: 3}
	run := func(status string) ([]byte, error) {
		return w.ranks(t.Context(), nil, []string{"EVENKEEL_FLOWS=1"}, func(rank int, device, store string) []string {
			if device != "lo" || store == "" {
				t.Errorf("rank %d has the device %q and the store %q", rank, device, store)
			}
			return []string{"sh", "-c", script + status, strconv.Itoa(rank)}
		})
	}
	start := time.Now()
	if out, err := run("0"); err != nil || string(out) != "1\n" {
		t.Errorf("%q, %v", out, err)
	}
	if _, err := run("3"); err == nil || !strings.Contains(err.Error(), "it broke") {
		t.Errorf("the error of rank 0 is %v", err)
	}
	if took := time.Since(start); took > 30*time.Second {
		t.Errorf("the ranks took %s to end", took)
	}
}
