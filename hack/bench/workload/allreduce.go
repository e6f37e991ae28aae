package workload

import (
	"context"
	"fmt"
	"os/exec"
	"slices"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/stats"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
	"evenkeel.dev/evenkeel/hack/lab/rccl"
)

// AllReduce is all-reduces of RCCL between the two hosts of a network, after a first one that connects. Its rate is the
// median's.
type AllReduce struct {
	Lab   func() *rccl.Lab // once it is open
	Bytes int              // of an all-reduce
	Count int
}

// Plugin has RCCL use the plugin, with these variables of the environment.
func (w AllReduce) Plugin(name string, environment ...string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		if err := known(r.Library, environment); err != nil {
			return experiment.Measured{}, err
		}
		if err := w.Lab().Use(r.Library); err != nil {
			return experiment.Measured{}, err
		}
		return w.run(ctx, r.Lab, false, environment)
	}}
}

// Sockets has RCCL use its own sockets, with these variables of the environment.
func (w AllReduce) Sockets(name string, environment ...string) experiment.Contender {
	return experiment.Contender{Name: name, Reference: true, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		return w.run(ctx, r.Lab, true, environment)
	}}
}

func (w AllReduce) run(ctx context.Context, network *netns.Lab, sockets bool, environment []string) (got experiment.Measured, err error) {
	group, err := w.Lab().Start(ctx, rccl.Config{
		Ranks: 2, Sockets: sockets, Env: append(slices.Clone(environment), "NCCL_SOCKET_IFNAME="+netns.DataInterface),
		Command: func(ctx context.Context, host int, argv ...string) (*exec.Cmd, error) {
			return network.Command(ctx, []netns.Host{netns.H1, netns.H2}[host], argv...)
		},
	})
	if err != nil {
		return got, err
	}
	defer group.Kill()
	communicator, err := group.Init(ctx, func(rank int) int { return rank })
	if err != nil {
		return got, err
	}
	seconds, err := group.AllReduce(ctx, communicator, w.Bytes, w.Count)
	if err != nil {
		return got, err
	}
	if _, err := group.All(ctx, fmt.Sprintf("destroy %d", communicator)); err != nil {
		return got, err
	}
	got.Values = map[experiment.Quantity]float64{Rate: float64(w.Bytes) / stats.Median(seconds) / 1e9}
	return got, group.End()
}
