package workload

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/internal/child"
)

// Slowest is the rate of the slowest of several pairs of processes.
var Slowest = experiment.Quantity{Name: "slowest", Title: "rate of the slowest pair", Unit: "GB/s", Digits: 3}

// Pairs are pairs of processes that send over the loopback interface at the same time.
type Pairs struct {
	Count       int
	Connections int // of each pair
	Size        int // bytes of a message
	Depth       int // messages in flight on each connection
	Bytes       int // that the driver of each pair sends, about
	// Pinned binds each pair to processors of its own, as many for each. With more pairs than processors several share one.
	Pinned bool
}

// Plugin sends by the plugin, with these variables of the environment.
func (p Pairs) Plugin(name string, environment ...string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		if err := known(r.Library, environment); err != nil {
			return experiment.Measured{}, err
		}
		return p.run(ctx, r.Driver, environment, "--plugin", r.Library)
	}}
}

// PlainSockets sends by plain sockets that the driver moves, a number of them for each connection.
func (p Pairs) PlainSockets(name string, each int) experiment.Contender {
	return experiment.Contender{Name: name, Reference: true, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		return p.run(ctx, r.Driver, nil, "--plain-sockets", strconv.Itoa(each))
	}}
}

// Threads sends by a plain socket for each connection, with a thread of its own on both sides, which blocks.
func (p Pairs) Threads(name string) experiment.Contender {
	t := Transfer{Size: p.Size, Depth: p.Depth, Length: time.Second}
	return experiment.Contender{Name: name, Reference: true, Run: func(ctx context.Context, _ experiment.Run) (experiment.Measured, error) {
		return p.all(ctx, func(ctx context.Context, _ int) (netRow, error) {
			got, err := t.plain(ctx, nil, p.Connections)
			return netRow{Bandwidth: got[Rate], Send: got[Sending], Receive: got[Receiving]}, err
		})
	}}
}

// run runs all pairs by the driver.
func (p Pairs) run(ctx context.Context, driver string, environment []string, transport ...string) (experiment.Measured, error) {
	return p.all(ctx, func(ctx context.Context, pair int) (netRow, error) {
		cmd := child.Command(ctx, "", "taskset", append([]string{"-c", p.processors(pair, runtime.NumCPU()), driver}, p.arguments(transport)...)...)
		cmd.Env = append(append(os.Environ(), "NCCL_SOCKET_IFNAME=lo"), environment...)
		text, err := proc.Output(ctx, cmd)
		if err != nil {
			return netRow{}, err
		}
		return readNet(text)
	})
}

// all runs all pairs at the same time, and adds their rates.
func (p Pairs) all(ctx context.Context, run func(ctx context.Context, pair int) (netRow, error)) (experiment.Measured, error) {
	rows := make([]netRow, p.Count)
	runs, ctx := errgroup.WithContext(ctx)
	for i := range rows {
		runs.Go(func() (err error) {
			rows[i], err = run(ctx, i)
			return err
		})
	}
	if err := runs.Wait(); err != nil {
		return experiment.Measured{}, err
	}
	values := map[experiment.Quantity]float64{Slowest: rows[0].Bandwidth}
	for _, row := range rows {
		values[Rate] += row.Bandwidth
		values[Slowest] = min(values[Slowest], row.Bandwidth)
		values[Sending] += row.Send / float64(p.Count)
		values[Receiving] += row.Receive / float64(p.Count)
	}
	values[Processor] = values[Sending] + values[Receiving]
	return experiment.Measured{Values: values}, nil
}

// processors are those of a pair on a machine with this many, as taskset takes them.
func (p Pairs) processors(pair, all int) string {
	if !p.Pinned {
		return fmt.Sprintf("0-%d", all-1)
	}
	each := max(1, all/p.Count)
	first := pair * each % all
	return fmt.Sprintf("%d-%d", first, first+each-1)
}

// arguments are those of a pair: both ranks are on this machine.
func (p Pairs) arguments(transport []string) []string {
	size := strconv.Itoa(p.Size)
	return append([]string{
		"net", "--json", "-b", size, "-e", size, "-w", "16", "-n", strconv.Itoa(p.Bytes / p.Size / p.Connections),
		"--connections", strconv.Itoa(p.Connections), "--depth", strconv.Itoa(p.Depth),
	}, transport...)
}
