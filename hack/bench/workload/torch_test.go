package workload

import (
	"maps"
	"testing"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

func TestReportOfTorch(t *testing.T) {
	report, err := readTorch([]byte("a warning\n" + `{"torch": "2.15.0", "seconds": {"4": 0.5, "16": 0.25}, "missed": {"1000": "no end within 180 s"}}` + "\n"))
	if err != nil || report.Missed[1000] == "" {
		t.Fatalf("%+v, %v", report, err)
	}
	sweep := TorchOperation{Bytes: []int{4, 16}}
	got := sweep.measured(report)
	if want := (outcome{sweep.Time().At(4): 500_000, sweep.Time().At(16): 250_000}); !maps.Equal(got.Values, want) || got.Versions != "torch 2.15.0" {
		t.Errorf("%v of %s, want %v", got.Values, got.Versions, want)
	}
	one := TorchOperation{Bytes: []int{25 << 20}}
	if got := one.measured(torchReport{Seconds: map[int]float64{25 << 20: 0.02}}).Values; !maps.Equal(got, map[experiment.Quantity]float64{one.Time(): 20}) {
		t.Errorf("%v, want 20 ms", got)
	}
	for _, wrong := range []string{"", "{}\n", "a warning\n"} {
		if _, err := readTorch([]byte(wrong)); err == nil {
			t.Errorf("%q is a report", wrong)
		}
	}
}
