// Package stats has the statistics that the results pages show.
package stats

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// Median is the median of values in any order: of an even number, the mean of the middle two; of none, zero.
func Median(values []float64) float64 {
	n := len(values)
	if n == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// Spread is the distance of the greatest value from the least, relative to the median.
func Spread(values []float64) string {
	median := Median(values)
	if median == 0 || math.IsInf(median, 0) {
		return "-"
	}
	return fmt.Sprintf("%.0f %%", 100*(slices.Max(values)-slices.Min(values))/median)
}

const (
	// MinPairs is the least number of pairs that have a verdict. By chance alone, all of 4 pairs point the same way in 1
	// of 8 cases.
	MinPairs = 5

	resamples = 10_000
	// coverage is the share of the resampled medians that is inside an interval.
	coverage = 0.95
	// seed makes the same values have the same interval, so that a page can be written again.
	seed = 1
)

// A Verdict says how a value compares with its reference.
type Verdict string

const (
	Better     Verdict = "better"
	Worse      Verdict = "worse"
	CannotTell Verdict = "cannot tell"
)

// A Ratio is the median of paired ratios, with its 95 % confidence interval.
type Ratio struct {
	Median, Low, High float64
	Pairs             int
}

// PairedRatio compares values with references that were measured beside them: values[i] with references[i]. The
// interval is the percentile bootstrap's. A pair whose ratio is not a finite number is left out.
func PairedRatio(values, references []float64) Ratio {
	var ratios []float64
	for i := range min(len(values), len(references)) {
		if r := values[i] / references[i]; !math.IsNaN(r) && !math.IsInf(r, 0) {
			ratios = append(ratios, r)
		}
	}
	r := Ratio{Median: Median(ratios), Pairs: len(ratios)}
	if r.Pairs == 0 {
		return r
	}
	draw := rand.New(rand.NewPCG(seed, uint64(r.Pairs)))
	sample, medians := make([]float64, r.Pairs), make([]float64, resamples)
	for i := range medians {
		for k := range sample {
			sample[k] = ratios[draw.IntN(r.Pairs)]
		}
		medians[i] = Median(sample)
	}
	slices.Sort(medians)
	outside := (1 - coverage) / 2
	r.Low, r.High = medians[int(outside*resamples)], medians[int((1-outside)*resamples)-1]
	return r
}

// Verdict is better or worse where the whole interval is on one side of 1, and there are enough pairs.
func (r Ratio) Verdict(lowerIsBetter bool) Verdict {
	switch {
	case r.Pairs < MinPairs || r.Low <= 1 && r.High >= 1:
		return CannotTell
	case (r.High < 1) == lowerIsBetter:
		return Better
	}
	return Worse
}

// String is the ratio with its interval in brackets; a dash without pairs.
func (r Ratio) String() string {
	if r.Pairs == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f (%.2f to %.2f)", r.Median, r.Low, r.High)
}

// normal95 is the quantile of the normal distribution between which and its negative there are 95 %.
const normal95 = 1.96

// Share is how many of a number of things are something, with the share's 95 % confidence interval by Wilson. It holds
// for few things, and where all or none are. A dash where there are no things.
func Share(are, of int) string {
	if of == 0 {
		return "-"
	}
	n, p := float64(of), float64(are)/float64(of)
	z := normal95 * normal95 / n
	middle, half := (p+z/2)/(1+z), normal95*math.Sqrt(p*(1-p)/n+z/4/n)/(1+z)
	return fmt.Sprintf("%d of %d (%.0f to %.0f %%)", are, of, 100*max(middle-half, 0), 100*min(middle+half, 1))
}

// Mean is the mean of values; of none, zero.
func Mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / max(float64(len(values)), 1)
}
