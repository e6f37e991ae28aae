package workload

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/internal/child"
)

// Quantities of a [Simulation]. Of many hosts, the rate is the slowest one's.
var (
	SimulatedShare   = experiment.Quantity{Name: "share", Title: "share of the wire limit", Digits: 2}
	SimulatedRate    = experiment.Quantity{Name: "rate", Title: "rate", Unit: "GB/s", Digits: 3}
	SimulatedAverage = experiment.Quantity{Name: "average", Title: "rate of an average host", Unit: "GB/s", Digits: 3}
	SimulatedOpened  = experiment.Quantity{Name: "opened", Title: "flows opened by a connection", LowerIsBetter: true}
)

// A Simulation is a case of evenkeel-simulate.
type Simulation struct{ Case string }

type simulatedReport struct {
	Share, Rate, Average float64
	Opened               float64
	Events               uint64
}

// By is the contender that evenkeel-simulate has by this name. Each round has a seed of its own.
func (s Simulation) By(title, name string) experiment.Contender {
	return experiment.Contender{Name: title, Reference: title != experiment.Ours, Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		root, err := toolbox.Root()
		if err != nil {
			return m, err
		}
		seed := strconv.FormatUint(r.Seed+uint64(r.Round), 10)
		cmd := child.Command(ctx, filepath.Join(root, "plugin"), "cargo", "run", "--release", "--locked", "-q", "-p", "evenkeel-simulator", "--",
			"run", "--case", s.Case, "--contender", name, "--seed", seed)
		text, err := proc.Output(ctx, cmd)
		if err != nil {
			return m, fmt.Errorf("simulate %s by %s with seed %s: %w", s.Case, name, seed, err)
		}
		m.Values, err = readSimulation(text)
		return m, err
	}}
}

func readSimulation(text []byte) (outcome, error) {
	var r simulatedReport
	if err := json.Unmarshal(text, &r); err != nil || r.Events == 0 {
		return nil, fmt.Errorf("unexpected report of evenkeel-simulate: %q", text)
	}
	return outcome{SimulatedShare: r.Share, SimulatedRate: r.Rate, SimulatedAverage: r.Average, SimulatedOpened: r.Opened}, nil
}
