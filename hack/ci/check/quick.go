package main

import (
	"context"
	"os"
	"slices"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/ci/check/affected"
	"evenkeel.dev/evenkeel/hack/ci/lint"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
)

// checkStages are those of `make check`: what a change most often breaks, the fastest answers first.
var checkStages = []stage{
	{
		Stage: affected.Stage{Name: "format"},
		about: "formatting, links, width of lines, and what go vet finds",
		parts: []part{{name: "format", run: linters(lint.Format()...)}, {name: "vet", run: linters(lint.Vet())}},
	},
	{
		Stage: affected.Stage{Name: "lint"},
		about: "what does not compile in Rust, and what clippy finds",
		parts: []part{{name: "clippy", run: linters(lint.Clippy()...)}},
	},
	{
		Stage: affected.Stage{Name: "unit"},
		about: "pure tests, Go and Rust",
		parts: []part{
			{name: "go", run: func(ctx context.Context, t *task) error {
				packages, err := t.unitPackages(ctx)
				if err != nil {
					return err
				}
				t.goTest(ctx, nil, slices.DeleteFunc(packages, func(pkg string) bool { return slices.Contains(slowPackages, short(pkg)) })...)
				return nil
			}},
			{name: "rust", needs: []string{"rust tests"}, run: func(ctx context.Context, t *task) error {
				return t.rustPrograms(ctx, func(test cargo.Test) bool {
					return slices.Contains(pureCrates, test.Package)
				})
			}},
		},
	},
	{
		// The last one, as it finds the least for its time.
		Stage: affected.Stage{Name: "staticcheck"},
		about: "what staticcheck finds",
		parts: []part{{run: linters(lint.Staticcheck())}},
	},
}

// What `make check` leaves out of stage unit, as it would take too long.
var (
	slowPackages = []string{"hack/bench/workload/gpu", "hack/ci/release"}
	// pureCrates are those whose tests need no other program, and take seconds.
	pureCrates = []string{
		"crates/protocol", "crates/diagnosis", "crates/tuner", "crates/nccl-abi", "crates/reduction-kernels", "crates/reduction",
		"crates/tls", "crates/verbs", "crates/testkit", "crates/simulator",
	}
)

// check is `make check`.
func check(ctx context.Context, o runOptions) error {
	s, err := newSession(newConsole(os.Stdout, time.Now))
	if err != nil {
		return err
	}
	// Go knows what its tests read, so that one that passed need not run again.
	s.cache = true
	leftOut := []string{
		"unit: " + strings.Join(slowPackages, ", ") + "; the Rust crates collectives, transport and bindings; the fuzz targets; the examples in comments",
		"lint: shellcheck, hadolint (make lint)",
	}
	for _, st := range stages {
		if !slices.ContainsFunc(checkStages, func(c stage) bool { return c.Name == st.Name }) {
			leftOut = append(leftOut, st.Name+": "+st.about+" (make test STAGE="+st.Name+")")
		}
	}
	return s.runAndReport(ctx, checkStages, o, leftOut)
}
