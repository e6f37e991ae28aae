package stats

import "testing"

func TestMedian(t *testing.T) {
	for _, test := range []struct {
		values []float64
		want   float64
	}{{[]float64{3, 1, 2}, 2}, {[]float64{4, 1, 2, 3}, 2.5}, {[]float64{7}, 7}, {nil, 0}} {
		if got := Median(test.values); got != test.want {
			t.Errorf("median of %v: %v, want %v", test.values, got, test.want)
		}
	}
}

func TestSpread(t *testing.T) {
	for want, values := range map[string][]float64{"50 %": {5, 4, 3}, "-": {0}, "0 %": {2}} {
		if got := Spread(values); got != want {
			t.Errorf("spread of %v: %s, want %s", values, got, want)
		}
	}
	if got, want := MedianAndRange([]float64{3, 1, 2}), "2.0 (1.0 to 3.0)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
