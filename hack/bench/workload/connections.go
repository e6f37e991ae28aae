// Package workload has the loads that experiments run, each by contenders of several kinds, and the quantities that
// they measure.
package workload

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sync/errgroup"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/internal/child"
)

// IdleSeconds is how long connections are watched while nothing is sent.
const IdleSeconds = 3

// Quantities of [Connections]. A pair is both ends of a connection.
var (
	OpenAndClose    = experiment.Quantity{Name: "open_and_close", Title: "time to open and close", Unit: "s", Digits: 3, LowerIsBetter: true}
	Opening         = experiment.Quantity{Name: "open", Title: "listen and open", Unit: "s", Digits: 3, LowerIsBetter: true}
	Closing         = experiment.Quantity{Name: "close", Title: "close", Unit: "s", Digits: 3, LowerIsBetter: true}
	TimeOfAPair     = experiment.Quantity{Name: "pair_time", Title: "time to open and close each pair", Unit: "us", LowerIsBetter: true}
	PairDescriptors = experiment.Quantity{Name: "pair_descriptors", Title: "descriptors of a pair", Digits: 2, LowerIsBetter: true}
	PairMemory      = experiment.Quantity{Name: "pair_memory", Title: "memory of a pair", Unit: "KiB", Digits: 1, LowerIsBetter: true}
	IdleShare       = experiment.Quantity{Name: "idle", Title: "idle, of a processor", Unit: "%", Digits: 2, LowerIsBetter: true}
	Wakeups         = experiment.Quantity{Name: "wakeups", Title: "wake-ups a second", Digits: 1, LowerIsBetter: true}
)

// Connections are connections over loopback that are opened, used once, idle, and closed.
type Connections struct {
	Pairs     int // between two processes
	Processes int // pairs of processes that do so at the same time
}

// Plugin has the plugin open them, with these variables of the environment.
func (c Connections) Plugin(name string, environment ...string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		if err := known(r.Library, environment); err != nil {
			return experiment.Measured{}, err
		}
		return c.run(ctx, r.Driver, environment, "--plugin", r.Library)
	}}
}

// PlainSockets opens a number of plain sockets for each connection in its place.
func (c Connections) PlainSockets(each int) experiment.Contender {
	name := fmt.Sprintf("%d plain sockets", each)
	if each == 1 {
		name = "1 plain socket"
	}
	return experiment.Contender{Name: name, Reference: true, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		return c.run(ctx, r.Driver, nil, "--plain-sockets", strconv.Itoa(each))
	}}
}

// connectionsReport is what "evenkeel-bench scale --json" prints.
type connectionsReport struct {
	Listen      float64 `json:"listen_s"`
	Open        float64 `json:"open_s"`
	Close       float64 `json:"close_s"`
	Descriptors float64 // of a pair
	Memory      float64 `json:"memory_kib"` // of a pair
	Idle        float64 `json:"idle_percent"`
	Wakeups     float64 `json:"wakeups_per_s"`
}

// run runs all pairs of processes. Of several it is the slowest and the largest, and the sum of what they use while
// they are idle.
func (c Connections) run(ctx context.Context, driver string, environment []string, arguments ...string) (experiment.Measured, error) {
	reports := make([]connectionsReport, c.Processes)
	var runs errgroup.Group
	for i := range reports {
		runs.Go(func() (err error) {
			reports[i], err = c.runOnce(ctx, driver, environment, arguments)
			return err
		})
	}
	if err := runs.Wait(); err != nil {
		return experiment.Measured{}, err
	}
	var worst connectionsReport
	for _, got := range reports {
		worst = connectionsReport{
			max(worst.Listen, got.Listen), max(worst.Open, got.Open), max(worst.Close, got.Close),
			max(worst.Descriptors, got.Descriptors), max(worst.Memory, got.Memory), worst.Idle + got.Idle, worst.Wakeups + got.Wakeups,
		}
	}
	all := worst.Listen + worst.Open + worst.Close
	return experiment.Measured{Values: map[experiment.Quantity]float64{
		OpenAndClose: all, Opening: worst.Listen + worst.Open, Closing: worst.Close, TimeOfAPair: 1e6 * all / float64(c.Pairs*c.Processes),
		PairDescriptors: worst.Descriptors, PairMemory: worst.Memory, IdleShare: worst.Idle, Wakeups: worst.Wakeups,
	}}, nil
}

// runOnce runs one pair of processes. The driver ends its ranks when it is interrupted.
func (c Connections) runOnce(ctx context.Context, driver string, environment, arguments []string) (got connectionsReport, err error) {
	arguments = append([]string{"scale", "--json", "--idle", strconv.Itoa(IdleSeconds), "--connections", strconv.Itoa(c.Pairs)}, arguments...)
	cmd := child.Command(ctx, "", driver, arguments...)
	cmd.Env = append(append(os.Environ(), "NCCL_SOCKET_IFNAME=lo"), environment...)
	text, err := proc.Output(ctx, cmd)
	if err != nil {
		return got, err
	}
	if err := json.Unmarshal(text, &got); err != nil {
		return got, fmt.Errorf("unexpected report of evenkeel-bench: %q", text)
	}
	return got, nil
}
