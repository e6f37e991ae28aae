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
}

// With five pairs, the 2.5 % and 97.5 % quantiles of the resampled medians are the least and the greatest ratio: three
// of five draws hit one of them with a probability of 5.8 %.
func TestPairedRatioOfKnownValues(t *testing.T) {
	got := PairedRatio([]float64{2, 6, 4, 5, 9}, []float64{2, 3, 4, 2, 3})
	if want := (Ratio{Median: 2, Low: 1, High: 3, Pairs: 5}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if again := PairedRatio([]float64{2, 6, 4, 5, 9}, []float64{2, 3, 4, 2, 3}); again != got {
		t.Errorf("%+v, and then %+v of the same values", got, again)
	}
	if got := PairedRatio([]float64{1, 2}, []float64{0, 2}); got.Pairs != 1 || got.Median != 1 {
		t.Errorf("%+v, want the one pair that has a ratio", got)
	}
	if got := PairedRatio(nil, nil); got.String() != "-" || got.Verdict(false) != CannotTell {
		t.Errorf("%s, %s of nothing", got, got.Verdict(false))
	}
}

// The interval of 40 ratios around 1.1 is much narrower than their range.
func TestIntervalNarrowsWithPairs(t *testing.T) {
	var values, references []float64
	for i := range 40 {
		values, references = append(values, 1.1+0.2*(float64(i%10)-4.5)/10), append(references, 1)
	}
	r := PairedRatio(values, references)
	if r.Low < 1.02 || r.High > 1.18 || r.Low >= r.Median || r.High <= r.Median {
		t.Errorf("%+v", r)
	}
}

func TestVerdict(t *testing.T) {
	for _, test := range []struct {
		ratio        Ratio
		rate, length Verdict
	}{
		{Ratio{1.2, 1.1, 1.3, 5}, Better, Worse},
		{Ratio{0.8, 0.7, 0.9, 5}, Worse, Better},
		{Ratio{1.2, 1, 1.3, 5}, CannotTell, CannotTell},
		{Ratio{1.2, 0.9, 1.3, 50}, CannotTell, CannotTell},
		{Ratio{1.2, 1.1, 1.3, MinPairs - 1}, CannotTell, CannotTell},
	} {
		if rate, length := test.ratio.Verdict(false), test.ratio.Verdict(true); rate != test.rate || length != test.length {
			t.Errorf("%+v: %s for a rate and %s for a time, want %s and %s", test.ratio, rate, length, test.rate, test.length)
		}
	}
}

// By Wilson's formula, which gives neither 0 nor 100 % a width of zero.
func TestShareOfKnownCounts(t *testing.T) {
	for want, counts := range map[string][2]int{
		"0 of 10 (0 to 28 %)": {0, 10}, "10 of 10 (72 to 100 %)": {10, 10}, "1 of 10 (2 to 40 %)": {1, 10}, "219 of 225 (94 to 99 %)": {219, 225}, "-": {0, 0},
	} {
		if got := Share(counts[0], counts[1]); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestMean(t *testing.T) {
	if got := Mean([]float64{0, 0, 3}); got != 1 {
		t.Errorf("%g, want 1", got)
	}
	if got := Mean(nil); got != 0 {
		t.Errorf("%g of nothing", got)
	}
}
