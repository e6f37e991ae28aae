// Command gloo measures Evenkeel's all-reduce beside Gloo's, on this machine, in turns, and writes the results page.
//
//	go run ./hack/gloo            # Debian's libgloo-dev and g++ are needed, and root for the network of the last part
//	go run ./hack/gloo --quick    # less of everything
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/netlab/netlab"
)

var sweep = []int{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000}

// Gloo's algorithms; the best of them at each size is the measure.
var algorithms = []string{"ring", "ring_chunked", "halving_doubling", "new_ring"}

// Numbers of processes on one machine.
var sizes = []int{2, 4}

// Between hosts: so many of them, each with a link of this rate.
const (
	hosts        = 4
	linkRate     = netlab.Gbit
	starElements = 5_000_000
	starLength   = 2 * time.Second
)

func main() {
	// Children are killed when the thread that started them ends: it is to be this one.
	runtime.LockOSThread()
	quick := flag.Bool("quick", false, "two rounds, few sizes; the page is not written")
	rounds := flag.Int("rounds", 5, "rounds, in each of which everybody is measured once")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "error: %q: there are only flags, see --help\n", flag.Arg(0))
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := compare(ctx, *quick, *rounds); err != nil {
		fmt.Fprintf(os.Stderr, "error: %v\n", err)
		os.Exit(1)
	}
}

func compare(ctx context.Context, quick bool, rounds int) error {
	if rounds < 1 {
		return fmt.Errorf("--rounds %d: 1 or more", rounds)
	}
	r := results{Rounds: rounds, Length: 100 * time.Millisecond, Elements: sweep, Machine: machine()}
	if quick {
		r.Rounds, r.Length, r.Elements = 2, 30*time.Millisecond, []int{1, 100, 1000, 10_000, 100_000, 1_000_000, 5_000_000}
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if err := os.Chdir(root); err != nil { // the paths below are the checkout's
		return err
	}
	folder, err := os.MkdirTemp("", "evenkeel-gloo-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	driver, err := build(ctx, folder)
	if err != nil {
		return err
	}
	bench, err := benchmark(ctx)
	if err != nil {
		return err
	}
	overTCP := []contender{{tcp, ours(bench, folder, "tcp")}}
	for _, algorithm := range algorithms {
		overTCP = append(overTCP, contender{gloo(algorithm), theirs(driver, folder, algorithm)})
	}
	everybody := append([]contender{{shm, ours(bench, folder, "shm")}}, overTCP...)
	for _, n := range sizes {
		figures, err := turns(ctx, everybody, r.Rounds, task{n, r.Length, r.Elements, loopback})
		if err != nil {
			return err
		}
		r.Local = append(r.Local, local{n, figures})
	}
	if r.Star, err = star(ctx, overTCP, r.Rounds); err != nil {
		return err
	}
	return r.write(quick)
}

// turns measures everybody in each round; whoever was first is last in the next one.
func turns(ctx context.Context, contenders []contender, rounds int, t task) (map[string]map[int]figure, error) {
	best := map[string]map[int]figure{}
	for round := range rounds {
		for i := range contenders {
			c := contenders[(i+round)%len(contenders)]
			fmt.Fprintf(os.Stderr, "%d processes over %s, round %d of %d: %s\n", t.ranks, t.network.device, round+1, rounds, c.name)
			figures, err := c.run(ctx, t)
			if err != nil {
				return nil, fmt.Errorf("%s, %d processes over %s: %w", c.name, t.ranks, t.network.device, err)
			}
			best[c.name] = better(best[c.name], figures)
		}
	}
	return best, nil
}

// better keeps the least times of both.
func better(before, now map[int]figure) map[int]figure {
	if before == nil {
		return now
	}
	for elements, f := range now {
		b := before[elements]
		before[elements] = figure{min(b.least, f.least), min(b.median, f.median)}
	}
	return before
}

// star measures between hosts, each in a network namespace of its own.
func star(ctx context.Context, contenders []contender, rounds int) (_ map[string]map[int]figure, err error) {
	lab, err := netlab.Up(ctx, netlab.Config{Name: "gloo", Star: slices.Repeat([]netlab.Rate{linkRate}, hosts)})
	if err != nil {
		return nil, err
	}
	defer func() {
		if down := lab.Down(ctx); err == nil {
			err = down
		}
	}()
	between := network{netlab.DataInterface, func(ctx context.Context, rank int, argv ...string) (*exec.Cmd, error) {
		return lab.Command(ctx, netlab.StarHost(rank), argv...)
	}}
	return turns(ctx, contenders, rounds, task{hosts, starLength, []int{starElements}, between})
}

// wireBound is the least time in which a ring can do it, in microseconds:
// each host sends all but one of its parts twice, in packets of Ethernet's
// length, with the headers of TCP with timestamps over IPv4.
func wireBound(elements int) float64 {
	const packet, head, frame = netlab.DefaultMTU, 20 + 20 + 12, 14
	payload := 2 * float64(4*elements) * float64(hosts-1) / float64(hosts)
	return payload * float64(packet+frame) / float64(packet-head) * 8 / float64(linkRate) * 1e6
}
