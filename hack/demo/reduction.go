package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// withReduction is the job with one more annotation. Its program calls the plugin's collectives, as NCCL does.
func withReduction(manifest string) string {
	return strings.NewReplacer(
		"name: demo\n", "name: demo-reduction\n",
		"evenkeel.dev/profile: default", "evenkeel.dev/profile: default\n    evenkeel.dev/reduction: \"2\"",
		"[evenkeel-bench, allreduce]", "[evenkeel-bench, reduction]",
		`["-b", "64K", "-e", "64M", "-f", "4", "-n", "10", "-w", "2"]`, `["--size", "16M", "-n", "10", "-w", "2", "-c", "1"]`,
	).Replace(manifest)
}

// reductionPage prints the servers that the ranks joined, and that the sums were right.
func reductionPage(out io.Writer, result *jobResult) error {
	joined := append(grep(result.master.logs, " joined "), grep(result.worker.logs, " joined ")...)
	sums := slices.DeleteFunc(grep(result.master.logs, "ranks reduce"), func(line string) bool { return !strings.Contains(line, ", 0 wrong") })
	if len(joined) < 2 || len(sums) == 0 {
		return fmt.Errorf("the job succeeded, but its logs show no sums of reduction servers:\n%s%s", result.master.logs, result.worker.logs)
	}
	p := func(format string, args ...any) { fmt.Fprintf(out, format, args...) }
	p("\n%s\n", rule("4. The same with reduction servers: the annotation evenkeel.dev/reduction"))
	for _, line := range append(joined, sums...) {
		p("%s\n", line)
	}
	return nil
}
