package gpu

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// Quantities of [Load].
var (
	// Time is the median of a run's all-reduces of a size, of float32, sum.
	Time = experiment.Quantity{Name: "time", Title: "time of an all-reduce", Unit: "ms", Digits: 3, LowerIsBetter: true}
	// Right counts types, operations and sizes. A wrong element fails the run.
	Right = experiment.Quantity{Name: "right", Title: "types, operations and sizes with every element right"}
	// ErrorAfter is the time from a kill until the last of the ranks that are left has its error from NCCL.
	ErrorAfter = experiment.Quantity{Name: "error_after", Title: "time until the last of the others had an error", Unit: "s", Digits: 1, LowerIsBetter: true}
)

const (
	// timedType and timedOp are those whose times are shown.
	timedType, timedOp = "float32", "sum"
	// minBytes is the size of the smallest all-reduce, and step the factor to the next one, by default of the program.
	minBytes, step = 8, 4
)

// A Way is how NCCL sends.
type Way struct {
	Name        string
	slug        string // in the names of logs
	sockets     bool   // NCCL's own, in place of the plugin
	servers     int    // reduction servers
	environment []string
}

// The ways that are compared: the strongest settings of NCCL's own sockets are among them.
var (
	Plugin      = Way{Name: experiment.Ours, slug: "plugin"}
	Sockets     = Way{Name: "NCCL's sockets", slug: "socket", sockets: true}
	ManySockets = Way{
		Name: "NCCL's sockets, 4 threads with 4 sockets each", slug: "sockets", sockets: true,
		environment: []string{"NCCL_SOCKET_NTHREADS=4", "NCCL_NSOCKS_PERTHREAD=4"},
	}
)

// Servers is the plugin with a number of reduction servers.
func Servers(count int) Way {
	return Way{Name: fmt.Sprintf("%d reduction servers", count), slug: "servers", servers: count}
}

// A Load is all-reduces whose elements are all checked. Ranks are on the loopback interface, or in a lab on its first
// hosts; reduction servers are on those after them.
type Load struct {
	Lab        func() *Lab // once it is open
	Name       string      // in the names of logs
	Ranks      int         // 2, 4 or 8, so that every type can hold all results exactly
	AllTypes   bool        // every type and operation, else only those of [Time]
	Min, Max   int         // bytes of an all-reduce
	Iterations int         // of each size
	// Timeout is that of one call or one all-reduce, in whole seconds, and OutputTimeout without output of any rank.
	Timeout, OutputTimeout time.Duration
}

// Sizes are those of the all-reduces, as the program of a rank has them.
func (w Load) Sizes() []int {
	var all []int
	for bytes := w.Min; bytes < w.Max; bytes *= step {
		all = append(all, bytes)
	}
	return append(all, w.Max)
}

// AllReduce measures each size over a way.
func (w Load) AllReduce(way Way) experiment.Contender {
	return w.contender(way, way.slug, func(ctx context.Context, of world, _ *servers) (m experiment.Measured, err error) {
		rows, err := of.allReduce(ctx)
		if err != nil {
			return m, err
		}
		m.Values = map[experiment.Quantity]float64{}
		var summed, skipped []string
		for _, r := range rows {
			what := r.Type + " " + r.Op
			if r.Skipped != "" {
				skipped = append(skipped, what+" "+r.Skipped)
				continue
			}
			m.Values[Right]++
			if !slices.Contains(summed, what) {
				summed = append(summed, what)
			}
			if r.Type == timedType && r.Op == timedOp {
				m.Values[Time.At(float64(r.Bytes))] = 1e3 * r.Seconds
			}
		}
		m.Note = "every element right, " + fmt.Sprintf("%d times each: ", w.Iterations) + strings.Join(summed, ", ")
		if len(skipped) > 0 {
			m.Note += "; not run: " + strings.Join(skipped, ", ")
		}
		return m, nil
	})
}

// KillRank kills the last rank in the middle of a run. NCCL must report an error to all others, and they must exit.
func (w Load) KillRank(way Way) experiment.Contender {
	return w.contender(way, "kill", func(ctx context.Context, of world, _ *servers) (experiment.Measured, error) {
		victim := of.Ranks - 1
		return of.lose(ctx, fmt.Sprintf("rank %d", victim), victim, func(kill func(int)) { kill(victim) })
	})
}

// KillServer kills a reduction server likewise.
func (w Load) KillServer(way Way) experiment.Contender {
	return w.contender(way, "kill-server", func(ctx context.Context, of world, s *servers) (experiment.Measured, error) {
		return of.lose(ctx, "a reduction server", -1, func(func(int)) { s.kill() })
	})
}

// contender runs something with the ranks, and with the reduction servers of a way that has them.
func (w Load) contender(
	way Way, name string, run func(context.Context, world, *servers) (experiment.Measured, error),
) experiment.Contender {
	return experiment.Contender{Name: way.Name, Reference: way.sockets, Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		of := w.world(way, name, r)
		var s *servers
		if way.servers > 0 {
			program := filepath.Join(filepath.Dir(r.Driver), "evenkeel-reduction-server")
			if s, err = startServers(ctx, program, r.Lab, func(number int) netns.Host { return netns.StarHost(w.Ranks + number) }, way.servers); err != nil {
				return m, err
			}
			defer s.stop()
			of.collNet, of.environment = true, append(of.environment, s.environment(of.NCCL)...)
		}
		m, err = run(ctx, of, s)
		m.Versions = of.versions()
		return m, err
	}}
}

// world has the settings of a way.
func (w Load) world(way Way, name string, r experiment.Run) world {
	of := world{Load: w, Lab: w.Lab(), name: w.Name + name, hosts: r.Lab, network: "Evenkeel", environment: []string{"NCCL_NET_PLUGIN=" + r.Library}}
	if way.sockets {
		of.network, of.environment = "Socket", append([]string{"NCCL_NET_PLUGIN=none", "NCCL_NET=Socket"}, way.environment...)
	}
	return of
}
