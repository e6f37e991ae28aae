package experiments

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// layoutSeed is the seed of the links that are drawn at random.
const layoutSeed = 5

// What limits the cases that may miss a goal.
const (
	limitsProcessor = "system calls, and the benchmark's own driver. In a profile of 2.0 s/GB, the driver's `sched_yield` was 36 % of the sender's time and 43 % of the receiver's: it asked 400 times before it slept, now it asks 100 times, and sockets that block have none of it. " +
		"`sendmsg` was 36 % of the sender's, `recvmsg` 24 % of the receiver's, both with the interrupts of the links that fall into them. User space was 9 % and 11 %. " +
		"For each GB there were 10,500 `sendmsg` and 10,700 `ioctl` at the sender, and 26,300 `recvmsg` at the receiver, under the tracer (`perf record -e cpu-clock` and `strace -c -f` of 1.9 GB, at commit ac896ba)"
	limitsStart   = "the paths that are found by trial: a hash puts each of 4 flows on a link of its own in 9 of 100 cases only, so more flows are opened and tried before all links are full. 16 plain sockets are there at once"
	limitsDrawn   = "the paths that are found by trial: more flows are opened and tried until those kept use all links, and what a trial takes is lost. 16 plain sockets are there at once"
	limitsLoss    = "the number of flows: a flow that has lost a packet stands still for its repair, and with 16 flows from the start (`EVENKEEL_FLOWS=16`) 0.37 to 0.40 GB/s were reached, on a busy machine. Trials of more flows often end too early, as of no use"
	limitsPolled  = "acknowledgements: a message of 64 KiB or more is not copied, so its request is done only when the receiver has said that it is there, one write and one read more for nearly each message ([system calls](polling.md))"
	limitsOneLink = "flows that share the link: a message is cut into pieces for all of them, a piece that loses its last packets waits for a probe, and paths are tried where there is none. " +
		"In runs of 3 s, 2 flows without trials (`EVENKEEL_FLOWS=2 EVENKEEL_REPATH=off`) had 0.99 of the plain socket's rate, 4 flows without trials 0.80 to 0.84, and 4 with them 0.85 to 0.91, on a busy machine, at commit 68b50d5a"
	limitsRoundTrip = "system calls: the receiver asks `epoll` which of the process's connections have something, and reads once more than there are bytes, while NCCL's own sockets read their one socket at once. For each round trip there were 5.5 `epoll_pwait` and 6 reads, 2 of them in vain, under the tracer, and 8.4 reads of NCCL's sockets (`strace -f -c` of 20,000 round trips over loopback, at commit 319e890)"
)

// staticSetting makes the plugin assign chunks to connections in turn, whatever their speed.
const staticSetting = "EVENKEEL_SCHEDULE=static"

// tcp measures the plugin on networks of its own, against plain sockets.
func tcp() experiment.Experiment {
	return experiment.Experiment{
		Name: "tcp", Title: "TCP results", Summary: "the plugin against plain sockets and other plugins, on links of many kinds",
		About: "One machine plays both hosts. Each case has a network of its own (`go run ./hack/lab/net --help`).\n" +
			"GB/s are 10^9 bytes of payload. Processor time is that of both programs with their system calls.\n" +
			"Where the processors are the limit, the plugins' driver asks for completions as NCCL's proxy does, and never sleeps. Where the network is, it sleeps after\n" +
			"100 rounds in which nothing moves, so that less of the processor time is the polling's. Sockets that are `polled` are moved by that driver, without a plugin.\n" +
			"With `equal shares`, each message is cut into equal parts, one for each socket, as NCCL's own sockets do: the slowest path sets the pace of all.\n" +
			"Other plain sockets have a thread and messages of their own each, and none waits for another.\n\n" +
			"`Evenkeel, static mode` is Evenkeel's own static mode (`" + staticSetting + "`): it assigns chunks to connections in turn, with re-pathing\n" +
			"and the caller's inline write off. It is not the behaviour of NCCL's own sockets, nor of bagua-net. Contenders with the name of another library are that\n" +
			"library's own code, built outside of this repository as a plugin for the same driver (`--plugin NAME=PATH`); the name says the version.",
		Notes: "Other pages: [thousands of connections that are open](scale.md), [a driver that polls as NCCL's proxy does](polling.md),\n" +
			"[half an hour of faults](soak.md), [a real collective library](rccl.md).",
		Rounds: 10, QuickRounds: 3,
		Cases: func(quick bool) []experiment.Case {
			var all []experiment.Case
			for _, of := range transfers(quick) {
				c := of.asCase()
				for _, flows := range of.plain {
					c.Contenders = append(c.Contenders, of.load.Plain(flows))
				}
				for _, sockets := range of.polled {
					c.Contenders = append(c.Contenders, of.load.Polled(sockets))
				}
				if of.mptcp {
					c.Contenders = append(c.Contenders, of.load.MPTCP())
				}
				c.Contenders = append(c.Contenders, of.load.Plugin(experiment.Ours), of.load.Plugin("Evenkeel, static mode", staticSetting))
				c.Goals = of.goals
				all = append(all, c)
			}
			return all
		},
	}
}

// A transfer is a network and a load on it, with what plain sockets it is compared with.
type transfer struct {
	name, title string
	network     netns.Config
	loss        float64 // share of the packets that each link loses at random, in both directions
	load        workload.Transfer
	plain       []int // numbers of plain sockets that block
	polled      []int // numbers of sockets for each connection that the driver moves
	mptcp       bool
	goals       []experiment.Goal
}

func rates(config netns.Config) []netns.Rate {
	all := slices.Clone(config.FlowRates)
	for _, link := range config.Links {
		all = append(all, link.Rate)
	}
	return all
}

// asCase is the case, still without contenders and goals.
func (t *transfer) asCase() experiment.Case {
	c := experiment.Case{
		Name: t.name, Title: t.title, Load: t.load.String(), Notes: t.load.Notes(), Network: &t.network,
		Headline: t.load.Headline(), More: t.load.More(), Limit: t.load.Limit, Timeout: t.load.Timeout(),
	}
	if fault := t.load.Fault; fault != nil {
		c.Limit = fault.Remaining
		links := len(t.network.Links)
		c.Traces = []experiment.Level{{At: t.load.Limit, Label: fmt.Sprintf("%d links", links)}, {At: fault.Remaining, Label: fmt.Sprintf("%d links", links-1)}}
	}
	if t.loss > 0 {
		c.Notes = append(c.Notes, fmt.Sprintf("Each link loses %g %% of the packets at random, in both directions. It carries single packets instead of segments of\n"+
			"up to 64 KiB, which takes processor time.", t.loss*100))
		c.SetUp = func(ctx context.Context, lab *netns.Lab) error {
			for link := range t.network.Links {
				if err := lab.SetLoss(ctx, link, t.loss); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return c
}

// transfers are the networks and loads of a full or of a quick run.
func transfers(quick bool) []*transfer {
	const halfMiB, eighthMiB = 512 << 10, 128 << 10
	const outage = 5 * time.Second
	shaped, unshaped, margin := 10*time.Second, 3*time.Second, 3*time.Second
	if quick {
		shaped, unshaped, margin = 3*time.Second, time.Second, 2*time.Second
	}
	equal := netns.Links(netns.Gbit, netns.Gbit, netns.Gbit, netns.Gbit)
	unequal := netns.Links(netns.Gbit, 700*netns.Mbit, 400*netns.Mbit, 150*netns.Mbit, 50*netns.Mbit)
	threeLinks := netns.PayloadLimit(netns.Gbit, netns.Gbit, netns.Gbit)
	big := workload.Transfer{Size: halfMiB, Depth: 8, Connections: 1, Length: shaped}
	cold, capped, faulty := big, workload.Transfer{Size: 1 << 20, Depth: 4, Connections: 1, Length: shaped}, big
	few := workload.Transfer{Size: halfMiB, Depth: 2, Connections: 1, Length: shaped, BothWays: true}
	cold.Cold, cold.Length = true, 4*time.Second
	faulty.Length, faulty.Fault = 2*margin+outage, &workload.Fault{Start: margin, Length: outage, Recovery: time.Second, Remaining: threeLinks}

	noDearer := []experiment.Goal{share(workload.Rate, 1, limitsPolled), share(workload.Processor, 1, limitsPolled)}
	// links has 16 and 4 plain sockets, 16 that are polled, and MPTCP.
	links := func(name, title string, links []netns.Link, load workload.Transfer, goals ...experiment.Goal) *transfer {
		return &transfer{
			name: name, title: title, network: netns.Config{Links: links}, load: load, plain: []int{16, 4}, polled: []int{16}, mptcp: true, goals: goals,
		}
	}
	direct := func(name, title string, load workload.Transfer, plain []int, polled []int, goals ...experiment.Goal) *transfer {
		load.Length = unshaped
		return &transfer{name: name, title: "hosts joined directly, " + title, load: load, plain: plain, polled: polled, goals: goals}
	}
	all := []*transfer{
		links("four-links", "4 links of 1 Gbit/s, chosen by a hash of addresses and ports, from the first byte on", equal, cold,
			median(workload.Rate, 0.46, limitsStart), every(workload.Rate, 0.44, limitsStart),
			median(workload.RiseTime, 0.5, limitsStart), median(workload.Processor, 1.3, limitsProcessor)),
		links("slow-link", "4 links, three of 1 Gbit/s and one of 200 Mbit/s", netns.Links(netns.Gbit, netns.Gbit, netns.Gbit, 200*netns.Mbit), big,
			median(workload.Rate, 0.34, ""), every(workload.Rate, 0.28, "")),
		{
			name: "capped-flows", title: "connections capped: three at 400 Mbit/s, one at 100 Mbit/s",
			network: netns.Config{FlowRates: []netns.Rate{400 * netns.Mbit, 400 * netns.Mbit, 400 * netns.Mbit, 100 * netns.Mbit}},
			load:    capped, plain: []int{4}, goals: []experiment.Goal{median(workload.Rate, 1.15/8, "")},
		},
		{
			name: "one-link", title: "1 link of 500 Mbit/s, both ways", network: netns.Config{Links: netns.Links(500 * netns.Mbit)},
			load: few, polled: []int{1}, goals: []experiment.Goal{share(workload.Rate, 0.98, limitsOneLink)},
		},
		links("unequal-links", "5 links of 1,000, 700, 400, 150 and 50 Mbit/s", unequal, big, ofSum(unequal)...),
	}
	for _, count := range []int{3, 4, 6} {
		drawn := drawnLinks(count)
		title := fmt.Sprintf("%d links of %s Mbit/s, drawn at random", count, mbits(drawn, ", ", " and "))
		all = append(all, links("links-"+mbits(drawn, "-", "-"), title, drawn, big, ofSum(drawn)...))
	}
	lossy := links("lossy-links", "4 links of 1 Gbit/s, each of which loses half a per cent of the packets", equal, big,
		median(workload.Rate, 0.43, limitsLoss))
	lossy.loss = 0.005
	silent := links("silent-link", "4 links of 1 Gbit/s, one of them silent for 5 s", equal, faulty, every(workload.Rate, 0.9*threeLinks, ""))
	silent.plain = []int{16}
	four, small := workload.Transfer{Size: halfMiB, Depth: 8, Connections: 4}, workload.Transfer{Size: 8 << 10, Depth: 8, Connections: 1}
	bothWays := workload.Transfer{Size: eighthMiB, Depth: 8, Connections: 8, BothWays: true}
	pingPong := workload.Transfer{Size: 8, Depth: 1, Connections: 1, PingPong: true}
	idle := workload.Transfer{Size: 8 << 10, Depth: 1, Connections: 64, Idle: true}
	one := []int{1}
	all = append(all, lossy, silent,
		direct("one-connection", "unshaped, 1 connection", big, one, one, noDearer...),
		direct("four-connections", "unshaped, 4 connections", four, []int{4}, one, noDearer...),
		direct("small-messages", "unshaped, 1 connection, 8 KiB messages", small, one, one, share(workload.Rate, 1, "")),
		direct("both-ways", "unshaped, 8 connections both ways, 128 KiB messages", bothWays, nil, one, noDearer[:1]...),
		direct("ping-pong", "8 bytes there and back", pingPong, one, nil, share(workload.RoundTrip, 1.2, limitsRoundTrip)),
		direct("idle-connections", "64 connections open and not used", idle, nil, nil, every(workload.IdleUse, 0.5, ""), every(workload.Threads, 4, "")),
	)
	for _, connections := range []int{64, 512, 1024} {
		all = append(all, direct(fmt.Sprintf("%d-connections", connections), fmt.Sprintf("unshaped, %d connections, 64 KiB messages", connections),
			workload.Transfer{Size: 64 << 10, Depth: 8, Connections: connections}, nil, one, noDearer...))
	}
	for _, of := range all {
		of.load.Limit = netns.PayloadLimit(rates(of.network)...)
		if of.load.BothWays {
			of.load.Limit *= 2
		}
	}
	return all
}

// ofSum are the goals on links of any rates.
func ofSum(links []netns.Link) []experiment.Goal {
	sum := netns.PayloadLimit(rates(netns.Config{Links: links})...)
	return []experiment.Goal{median(workload.Rate, 0.93*sum, limitsDrawn), every(workload.Rate, 0.88*sum, limitsDrawn)}
}

// drawnLinks are links of rates between 50 Mbit/s and 1 Gbit/s, the fastest first. They are always the same.
func drawnLinks(count int) []netns.Link {
	draw := rand.New(rand.NewPCG(layoutSeed, uint64(count)))
	var rates []netns.Rate
	for range count {
		rates = append(rates, netns.Rate(5+draw.IntN(96))*10*netns.Mbit)
	}
	slices.SortFunc(rates, func(a, b netns.Rate) int { return cmp.Compare(b, a) })
	return netns.Links(rates...)
}

// mbits lists rates in Mbit/s.
func mbits(links []netns.Link, separator, last string) string {
	var text strings.Builder
	for i, link := range links {
		switch {
		case i > 0 && i == len(links)-1:
			text.WriteString(last)
		case i > 0:
			text.WriteString(separator)
		}
		fmt.Fprintf(&text, "%d", link.Rate/netns.Mbit)
	}
	return text.String()
}
