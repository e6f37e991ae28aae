// Package stats has the statistics that the results pages show.
package stats

import (
	"fmt"
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
	if median == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f %%", 100*(slices.Max(values)-slices.Min(values))/median)
}

// MedianAndRange is the median with the least and the greatest value in brackets.
func MedianAndRange(values []float64) string {
	return fmt.Sprintf("%.1f (%.1f to %.1f)", Median(values), slices.Min(values), slices.Max(values))
}
