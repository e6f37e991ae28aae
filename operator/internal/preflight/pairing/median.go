package pairing

import (
	"math"
	"slices"
)

// Median of the values. Of an even number of values it is the mean of the middle two; without any it is 0.
func Median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return sorted[(n-1)/2] + (sorted[n/2]-sorted[(n-1)/2])/2
}

// MedianAndMAD returns the median and the median absolute deviation from it.
func MedianAndMAD(values []float64) (median, mad float64) {
	median = Median(values)
	deviations := make([]float64, len(values))
	for i, v := range values {
		deviations[i] = math.Abs(v - median)
	}
	return median, Median(deviations)
}
