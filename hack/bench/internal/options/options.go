// Package options has the flags that the benchmarks over the network lab share.
package options

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/spf13/pflag"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/internal/cargo"
)

// MaxRounds bounds --rounds.
const MaxRounds = 1000

// Options are the values of the flags.
type Options struct {
	Quick      bool
	Rounds     int
	Only       string
	Library    string // the plugin
	Driver     string // evenkeel-bench
	Congestion string
	Output     string
}

// AddFlags adds the flags; page is the file that the program writes, and cases are the names that --only may match.
func (o *Options) AddFlags(flags *pflag.FlagSet, page string, fullRounds, quickRounds int, cases []string) {
	flags.BoolVar(&o.Quick, "quick", false, fmt.Sprintf("shorter runs, and %d rounds", quickRounds))
	flags.IntVar(&o.Rounds, "rounds", 0, fmt.Sprintf("rounds of each case (default %d)", fullRounds))
	flags.StringVar(&o.Only, "only", "", "only cases that this regular expression matches: "+strings.Join(cases, ", "))
	flags.StringVar(&o.Library, "library", "", "the plugin to measure (default: built from this checkout)")
	flags.StringVar(&o.Driver, "driver", "", "the evenkeel-bench to measure it with, in one folder with evenkeel-reduction-server (default: built from this checkout)")
	flags.StringVar(&o.Congestion, "congestion", "", "TCP congestion control (default the machine's for new namespaces)")
	flags.StringVar(&o.Output, "output", "", "folder for "+page+" and its drawings (default docs/results)")
}

// Check checks the values, and sets the number of rounds where none was given. It returns which cases are to be measured.
func (o *Options) Check(fullRounds, quickRounds int) (only *regexp.Regexp, err error) {
	if only, err = regexp.Compile(o.Only); err != nil {
		return nil, fmt.Errorf("--only: %w", err)
	}
	switch {
	case o.Rounds < 0 || o.Rounds > MaxRounds:
		return nil, fmt.Errorf("--rounds %d: from 1 to %d", o.Rounds, MaxRounds)
	case o.Rounds == 0 && o.Quick:
		o.Rounds = quickRounds
	case o.Rounds == 0:
		o.Rounds = fullRounds
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("making networks needs root")
	}
	return only, nil
}

// BuildMissing builds, from the checkout, the plugin and the driver where they were not given. Quick is that of [artifacts.Builder].
func (o *Options) BuildMissing(ctx context.Context, root string, quick bool) error {
	if o.Library == "" || o.Driver == "" {
		built, err := artifacts.Rust(ctx, root, os.Stderr, quick)
		if err != nil {
			return err
		}
		o.Library, o.Driver = cmp.Or(o.Library, filepath.Join(built, cargo.Library)), cmp.Or(o.Driver, filepath.Join(built, "evenkeel-bench"))
	}
	var err error
	o.Library, err = filepath.Abs(o.Library)
	return err
}
