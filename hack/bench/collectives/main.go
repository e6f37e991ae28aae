// Command gloo measures Evenkeel's all-reduce beside Gloo's, on this machine, in turns, and writes the results page.
//
//	go run ./hack/bench/collectives            # Debian's libgloo-dev and g++ are needed, and root for the network of one part
//	go run ./hack/bench/collectives --quick    # less of everything, onto the terminal
//	go run ./hack/bench/collectives --gloo ~/gloo/build/gloo/benchmark/benchmark    # Gloo's own benchmark in the place of Debian's library
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

var sweep = []int{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000}

// Gloo's algorithms; the best of them at each size is the measure.
var algorithms = []string{"ring", "ring_chunked", "halving_doubling", "bcube", "new_ring", "new_bcube"}

// Numbers of processes on one machine.
var sizes = []int{2, 4}

// Between hosts: so many of them, each with a link of this rate.
const (
	hosts        = 4
	linkRate     = netns.Gbit
	starElements = 5_000_000
	starLength   = time.Second
)

// Ranks as threads of one process.
const threads = 64

func main() {
	// Children are killed when the thread that started them ends: it is to be this one.
	runtime.LockOSThread()
	quick := flag.Bool("quick", false, "two rounds, few sizes")
	rounds := flag.Int("rounds", 0, "rounds, in each of which everybody is measured once (default 5)")
	output := flag.String("output", "", "folder for collectives.md and its drawings (default docs/results; with --quick, the page goes to the terminal)")
	other := flag.String("gloo", "", "Gloo's benchmark program, built elsewhere, to measure instead of Debian's libgloo")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "error: %q: there are only flags, see --help\n", flag.Arg(0))
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := compare(ctx, *quick, *rounds, *output, *other); err != nil {
		fmt.Fprintf(os.Stderr, "error: %v\n", err)
		os.Exit(1)
	}
}

func compare(ctx context.Context, quick bool, rounds int, output, other string) error {
	r := results{Rounds: 5, Length: 100 * time.Millisecond, StarLength: starLength, Elements: sweep, Quick: quick}
	if quick {
		r.Rounds, r.Length, r.StarLength = 2, 30*time.Millisecond, 300*time.Millisecond
		r.Elements = []int{1, 100, 1000, 10_000, 100_000, 1_000_000, 5_000_000}
	}
	if rounds < 0 {
		return fmt.Errorf("--rounds %d: 1 or more", rounds)
	} else if rounds > 0 {
		r.Rounds = rounds
	}
	if os.Geteuid() != 0 {
		return errors.New("making the network of several hosts needs root")
	}
	theirs, err := whichGloo(other)
	if err != nil {
		return err
	}
	root, err := toolbox.Root()
	if err != nil {
		return err
	}
	if output == "" && !quick {
		output = filepath.Join(root, "docs", "results")
	}
	if output != "" {
		if output, err = filepath.Abs(output); err != nil {
			return err
		}
		if err := os.MkdirAll(output, 0o755); err != nil {
			return err
		}
	}
	if err := os.Chdir(root); err != nil { // the paths below are the checkout's
		return err
	}
	r.Machine, r.Commit = machine(), toolbox.Commit(ctx, root, "plugin", "hack")
	folder, err := os.MkdirTemp("", "evenkeel-gloo-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	if err := theirs.prepare(ctx, folder); err != nil {
		return err
	}
	r.Gloo = theirs.what
	bench, err := benchmark(ctx)
	if err != nil {
		return err
	}
	overTCP := []contender{{tcp, ours(bench, folder, "tcp"), 1}}
	for _, algorithm := range theirs.algorithms {
		overTCP = append(overTCP, contender{gloo(algorithm), theirs.runs(folder, algorithm), glooTries})
	}
	everybody := append([]contender{{shm, ours(bench, folder, "shm"), 1}}, overTCP...)
	for _, n := range sizes {
		r.Local = append(r.Local, &measured{ranks: n})
	}
	cases := []func() error{}
	for _, m := range r.Local {
		cases = append(cases, func() error {
			return m.turns(ctx, everybody, r.Rounds, task{m.ranks, r.Length, r.Elements, loopback})
		})
	}
	cases = append(cases,
		func() error {
			single := contender{oneFlow, ours(bench, folder, "tcp", "EVENKEEL_FLOWS=1"), 1}
			return star(ctx, &r.Star, append([]contender{single}, overTCP...), r.Rounds, r.StarLength)
		},
		func() error { return r.Threads.turns(ctx, bench, r.Rounds, r.Length) },
	)
	begun := time.Now()
	for _, measure := range cases {
		failed := measure()
		// What there is, is kept, whatever comes next.
		r.Took = time.Since(begun)
		if err := errors.Join(failed, r.write(output)); err != nil {
			return err
		}
	}
	if output == "" {
		_, err = os.Stdout.Write(r.page())
	}
	return err
}

// turns measures everybody in each round; whoever was first is last in the next one. Rounds that are whole are kept.
func (m *measured) turns(ctx context.Context, contenders []contender, rounds int, t task) error {
	for round := range rounds {
		all := map[string]map[int]figure{}
		for i := range contenders {
			c := contenders[(i+round)%len(contenders)]
			begun := time.Now()
			figures, err := c.run(ctx, t)
			for try := 1; err != nil && try < c.tries && ctx.Err() == nil; try++ {
				fmt.Fprintf(os.Stderr, "%s, %d processes over %s: %v; once more\n", c.name, t.ranks, t.network.device, err)
				m.failed = append(m.failed, c.name)
				figures, err = c.run(ctx, t)
			}
			if err != nil {
				return fmt.Errorf("%s, %d processes over %s: %w", c.name, t.ranks, t.network.device, err)
			}
			all[c.name] = figures
			fmt.Fprintf(os.Stderr, "%d processes over %s, round %d of %d, %d of %d: %s, %.1f s\n",
				t.ranks, t.network.device, round+1, rounds, i+1, len(contenders), c.name, time.Since(begun).Seconds())
		}
		m.rounds = append(m.rounds, all)
	}
	return nil
}

// star measures between hosts, each in a network namespace of its own.
func star(ctx context.Context, m *measured, contenders []contender, rounds int, length time.Duration) (err error) {
	lab, err := netns.Up(ctx, netns.Config{Name: "gloo", Star: slices.Repeat([]netns.Rate{linkRate}, hosts)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lab.Down(ctx)) }()
	between := network{netns.DataInterface, func(ctx context.Context, rank int, argv ...string) (*exec.Cmd, error) {
		return lab.Command(ctx, netns.StarHost(rank), argv...)
	}}
	return m.turns(ctx, contenders, rounds, task{hosts, length, []int{starElements}, between})
}

// turns measures ranks that are threads of one process, one element each.
func (t *threaded) turns(ctx context.Context, bench string, rounds int, length time.Duration) error {
	for round := range rounds {
		begun := time.Now()
		report, err := inProcess(ctx, bench, threads, length)
		if err != nil {
			return fmt.Errorf("%d threads: %w", threads, err)
		}
		t.rounds = append(t.rounds, report)
		fmt.Fprintf(os.Stderr, "%d ranks as threads of one process, round %d of %d: %.1f s\n", threads, round+1, rounds, time.Since(begun).Seconds())
	}
	return nil
}

// wireBound is the least time in which a ring can do it, in microseconds:
// each host sends all but one of its parts twice, in packets of Ethernet's
// length, with the headers of TCP with timestamps over IPv4.
func wireBound(elements int) float64 {
	const packet, head, frame = netns.DefaultMTU, 20 + 20 + 12, 14
	payload := 2 * float64(4*elements) * float64(hosts-1) / float64(hosts)
	return payload * float64(packet+frame) / float64(packet-head) * 8 / float64(linkRate) * 1e6
}
