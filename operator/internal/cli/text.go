package cli

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
)

// table prints rows in columns; the first row has their names.
func table(out io.Writer, indent string, rows [][]string) error {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	for _, row := range rows {
		for i, cell := range row {
			if cell == "" {
				row[i] = "-"
			}
		}
		if _, err := fmt.Fprintln(w, indent+strings.Join(row, "\t")); err != nil {
			return err
		}
	}
	return w.Flush()
}

// formatSpeed formats a bandwidth in bytes per second; empty for none.
func formatSpeed(bytes float64) string {
	units := []string{"B/s", "kB/s", "MB/s", "GB/s", "TB/s"}
	unit := 0
	for bytes >= 1000 && unit < len(units)-1 {
		bytes, unit = bytes/1000, unit+1
	}
	if bytes <= 0 {
		return ""
	}
	return fmt.Sprintf("%.3g %s", bytes, units[unit])
}

func formatQuantity(q *resource.Quantity) string {
	if q == nil {
		return ""
	}
	return formatSpeed(q.AsApproximateFloat64())
}

// formatTime formats a time and how long ago it was.
func formatTime(t, now time.Time) string {
	return fmt.Sprintf("%s (%s ago)", t.UTC().Format("2006-01-02 15:04:05 UTC"), duration.HumanDuration(now.Sub(t)))
}

func age(t metav1.Time, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	return duration.HumanDuration(now.Sub(t.Time))
}

func number(n *int32) int32 {
	if n == nil {
		return 0
	}
	return *n
}
