package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/page"
	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

const fullRounds, quickRounds = 5, 2

// options are the flags that both commands have.
type options struct {
	quick  bool
	rounds int
	output string
}

func (o *options) addFlags(flags *pflag.FlagSet, files string) {
	flags.BoolVar(&o.quick, "quick", false, fmt.Sprintf("%d rounds, and less in each; the page is printed, and written only with --output", quickRounds))
	flags.IntVar(&o.rounds, "rounds", 0, fmt.Sprintf("rounds, in each of which every contender runs once (default %d)", fullRounds))
	flags.StringVar(&o.output, "output", "", "folder for "+files+" (default docs/results)")
}

// A workplace is what contenders run with.
type workplace struct {
	folder string // for files of this run; the caller removes it
	bench  string // evenkeel-bench
	output string // folder of the page, or empty
}

// prepare checks the flags, describes the setting, and builds what is measured: Gloo's part by a function, which may take a folder.
func (o options) prepare(ctx context.Context, s *setting, gloo func(ctx context.Context, root, folder string) error) (w workplace, err error) {
	s.Rounds, s.Length, s.StarLength, s.Quick = fullRounds, 100*time.Millisecond, time.Second, o.quick
	if o.quick {
		s.Rounds, s.Length, s.StarLength = quickRounds, 30*time.Millisecond, 300*time.Millisecond
	}
	if o.rounds < 0 {
		return w, fmt.Errorf("--rounds %d: 1 or more", o.rounds)
	} else if o.rounds > 0 {
		s.Rounds = o.rounds
	}
	if os.Geteuid() != 0 {
		return w, errors.New("making the network of several hosts needs root")
	}
	root, err := toolbox.Root()
	if err != nil {
		return w, err
	}
	switch {
	case o.output != "":
		if w.output, err = filepath.Abs(o.output); err != nil {
			return w, err
		}
	case !o.quick:
		w.output = filepath.Join(root, "docs", "results")
	}
	// Before the build, which raises the load.
	s.Machine, s.Source = machine.Describe(), page.NewSource(ctx, root, "plugin", "hack")
	if w.folder, err = os.MkdirTemp("", "evenkeel-gloo-"); err != nil {
		return w, err
	}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(w.folder)
		}
	}()
	if err := gloo(ctx, root, w.folder); err != nil {
		return w, err
	}
	built, err := artifacts.Rust(ctx, root, os.Stderr, false)
	if err != nil {
		return w, err
	}
	w.bench = filepath.Join(built, "evenkeel-bench")
	return w, nil
}

// run measures cases. It writes the page after each of them, so that an interrupted run keeps its results.
func (s *setting) run(cases []func() error, write func() error) error {
	start := time.Now()
	for _, measure := range cases {
		err := measure()
		s.Took = time.Since(start)
		if err := errors.Join(err, write()); err != nil {
			return err
		}
	}
	return nil
}
