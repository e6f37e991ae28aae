package cli

import (
	"fmt"
	"io"
	"time"

	corev1 "k8s.io/api/core/v1"

	"evenkeel.dev/evenkeel/operator/internal/suspects"
)

// explainSuspects prints whom the ranks of a running job wait for, as the last of its pods said that named somebody.
func explainSuspects(pods []corev1.Pod, out io.Writer, now time.Time) error {
	var last *suspects.Standing
	for i := range pods {
		if pods[i].Status.Phase != corev1.PodRunning {
			continue
		}
		if s, ok := suspects.Of(&pods[i], now); ok && (last == nil || s.At.After(last.At)) {
			last = s
		}
	}
	if last == nil {
		return nil
	}
	fmt.Fprintf(out, "\nIts ranks wait, since %s\n  %s\n", formatTime(last.Since, now), last.Text)
	for i := range last.Suspects {
		s := &last.Suspects[i]
		fmt.Fprintf(out, "  %s: confidence %.0f %%\n", s.Words(), 100*s.Confidence)
	}
	return nil
}
