package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// A kind is what a fault does.
type kind string

const (
	egress  kind = "card, sending"
	ingress kind = "card, receiving"
	loss    kind = "loss on a card"
	slow    kind = "slow process"
	stopped kind = "stopped process"
)

var kinds = []kind{egress, ingress, loss, slow, stopped}

// The classes of verdicts, as the plugin names them, and that of none.
const (
	classLate   = "late"
	classLink   = "link"
	classPath   = "path"
	classNobody = "nobody"
)

// The patterns of a job.
const (
	ring     = "all-reduce in a ring, over the plugin"
	allToAll = "all-to-all, over the collectives"
)

var patterns = []string{ring, allToAll}

// A fault is drawn from a seed.
type fault struct {
	Kind    kind
	Pattern string
	Host    int     // counted from 0
	Amount  float64 // what is left of a card's rate, the share of packets lost, or the share of its time that a process is stopped
}

func draw(random *rand.Rand, hosts int) fault {
	f := fault{Kind: kinds[random.IntN(len(kinds))], Pattern: patterns[random.IntN(len(patterns))], Host: random.IntN(hosts)}
	switch f.Kind {
	case egress, ingress:
		f.Amount = []float64{0.5, 0.25, 0.1}[random.IntN(3)]
	case loss:
		f.Amount = []float64{0.01, 0.02, 0.05}[random.IntN(3)]
	case slow:
		f.Amount = []float64{0.5, 0.75, 0.9}[random.IntN(3)]
	case stopped:
		f.Amount = 1
	}
	return f
}

// isRight says whether a verdict names the fault's host and class. In a ring each card has one peer, so the end of a path cannot be told.
func (f fault) isRight(v verdict, hosts int) bool {
	if len(v.Suspects) == 0 {
		return false
	}
	s := v.Suspects[0]
	name, peer := hostName(f.Host), ""
	if s.Peer != nil {
		peer = s.Peer.Host
	}
	switch f.Kind {
	case slow, stopped:
		return s.Class == classLate && s.Host == name
	case egress, ingress, loss:
		if f.Pattern == ring {
			return s.Class == classPath && (s.Host == name || peer == name) || s.Class == classLink && s.Host == name
		}
		return s.Class == classLink && s.Host == name
	}
	return false
}

func hostName(host int) string { return string(netns.StarHost(host)) }

// inject begins the fault. The result ends it.
func (f fault) inject(ctx context.Context, j *job) (end func() error, err error) {
	host, port := netns.StarHost(f.Host), fmt.Sprintf("p%d", f.Host)
	shape := func(at netns.Host, name string, rate float64) error {
		_, err := j.lab.Exec(ctx, at, "tc", "qdisc", "replace", "dev", name, "root", "tbf", "rate", fmt.Sprintf("%.0f", rate), "burst", "32768", "limit", "1000000")
		return err
	}
	switch f.Kind {
	case egress:
		return func() error { return nil }, shape(host, netns.DataInterface, float64(cardRate)*f.Amount)
	case ingress:
		return func() error { return nil }, shape(switchHost, port, float64(cardRate)*f.Amount)
	case loss:
		// On the switch: the host's TCP would notice a packet that its own host drops.
		table := fmt.Sprintf("table netdev fault { chain lose { type filter hook ingress device %s priority 0; numgen random mod 1000 < %d drop; }; }", port, int(f.Amount*1000))
		_, err := j.lab.Exec(ctx, switchHost, "nft", table)
		return func() error { return nil }, err
	case stopped:
		return func() error { return j.processes[f.Host].Cmd.Process.Signal(syscall.SIGCONT) }, j.processes[f.Host].Cmd.Process.Signal(syscall.SIGSTOP)
	case slow:
		ctx, cancel := context.WithCancel(ctx)
		done := make(chan struct{})
		go pulse(ctx, j.processes[f.Host].Cmd.Process, f.Amount, done)
		return func() error { cancel(); <-done; return nil }, nil
	}
	return nil, fmt.Errorf("unknown fault %q", f.Kind)
}

// pulse stops a process for a share of each tenth of a second, as a CPU quota does, until the context ends.
func pulse(ctx context.Context, process *os.Process, share float64, done chan<- struct{}) {
	defer close(done)
	const period = 100 * time.Millisecond
	rest := time.NewTicker(period)
	defer rest.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-rest.C:
		}
		if process.Signal(syscall.SIGSTOP) != nil {
			return // it has ended
		}
		run := time.NewTimer(time.Duration(share * float64(period)))
		select {
		case <-ctx.Done():
		case <-run.C:
		}
		run.Stop()
		if process.Signal(syscall.SIGCONT) != nil {
			return
		}
	}
}
