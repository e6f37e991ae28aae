package main

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// A benchCase is one network and one load on it.
type benchCase struct {
	name, title string
	lab         netns.Config
	loss        float64 // share of the packets that each link loses at random, in both directions
	size, depth int     // bytes of a message; messages in flight on each connection
	connections int
	length      time.Duration // of each run, about
	plainFlows  []int         // connections of the plain sockets that block, each in a thread of its own
	polled      []polledSockets
	goals       []goal
	fault       *fault
	pingPong    bool
	bothWays    bool
	cold        bool   // nothing is sent before: the runs are from the first byte on
	idle        bool   // connections that are open and not used
	missing     string // why the plugin is not measured
}

// layoutSeed is the seed of the links that are drawn at random.
const layoutSeed = 5

// What limits the cases that may miss a goal.
const (
	limitsProcessor = "system calls, and the benchmark's own driver. In a profile of 2.0 s/GB, the driver's `sched_yield` was 36 % of the sender's time and 43 % of the receiver's: it asked 400 times before it slept, now it asks 100 times, and sockets that block have none of it. " +
		"`sendmsg` was 36 % of the sender's, `recvmsg` 24 % of the receiver's, both with the interrupts of the links that fall into them. User space was 9 % and 11 %. " +
		"For each GB there were 10,500 `sendmsg` and 10,700 `ioctl` at the sender, and 26,300 `recvmsg` at the receiver, under the tracer (`perf record -e cpu-clock` and `strace -c -f` of 1.9 GB, at commit ac896ba)"
	limitsStart     = "the paths that are found by trial: a hash puts each of 4 flows on a link of its own in 9 of 100 cases only, so more flows are opened and tried before all links are full. 16 plain sockets are there at once"
	limitsDrawn     = "the paths that are found by trial: more flows are opened and tried until those kept use all links, and what a trial takes is lost. 16 plain sockets are there at once"
	limitsLoss      = "the number of flows: a flow that has lost a packet stands still for its repair, and with 16 flows from the start (`EVENKEEL_FLOWS=16`) 0.37 to 0.40 GB/s were reached, on a busy machine. Trials of more flows often end too early, as of no use"
	limitsPolled    = "acknowledgements: a message of 64 KiB or more is not copied, so its request is done only when the receiver has said that it is there, one write and one read more for nearly each message ([system calls](polling.md))"
	limitsRoundTrip = "system calls: the receiver asks `epoll` which of the process's connections have something, and reads once more than there are bytes, while NCCL's own sockets read their one socket at once. For each round trip there were 5.5 `epoll_pwait` and 6 reads, 2 of them in vain, under the tracer, and 8.4 reads of NCCL's sockets (`strace -f -c` of 20,000 round trips over loopback, at commit 319e890)"
)

// A quantity is what a goal is about.
type quantity string

const (
	medianRate quantity = "median"
	worstRate  quantity = "worst"
	processor  quantity = "processor time for each GB"
	roundTrip  quantity = "median round trip"
	idleUse    quantity = "worst use of a core while idle"
	maxThreads quantity = "maximum number of threads"
	riseTime   quantity = "median rise time"
)

// lowerIsBetter is true for costs and false for rates.
func (q quantity) lowerIsBetter() bool { return q != medianRate && q != worstRate }

// A goal is what the plugin has to reach: a figure, or a share of the reference's median.
type goal struct {
	of     quantity
	figure float64
	share  float64
	limit  string // what is known of why it is missed
}

func rates(config netns.Config) []netns.Rate {
	all := slices.Clone(config.FlowRates)
	for _, link := range config.Links {
		all = append(all, link.Rate)
	}
	return all
}

// limit is what the case's network can carry, in GB/s; zero where only the processor limits it.
func (c benchCase) limit() float64 { return netns.PayloadLimit(rates(c.lab)...) }

// warmup is the number of messages, on each connection, that the driver sends before those that it times.
func (c benchCase) warmup() int {
	if c.cold {
		return 0
	}
	return 16
}

// driver is how evenkeel-bench asks for completions. Where the network is the limit, it sleeps after many rounds in which nothing moves:
// one that polls as NCCL does would use all processor time that is left, whatever the plugin uses.
func (c benchCase) driver() string {
	if c.limit() > 0 || c.idle {
		return "sleep"
	}
	return "nccl"
}

func cases(quick bool) []benchCase {
	shaped, unshaped, margin := 10*time.Second, 3*time.Second, 3*time.Second
	if quick {
		shaped, unshaped, margin = 3*time.Second, time.Second, 2*time.Second
	}
	const outage = 5 * time.Second
	equal := netns.Links(netns.Gbit, netns.Gbit, netns.Gbit, netns.Gbit)
	threeLinks := netns.PayloadLimit(rates(netns.Config{Links: equal[1:]})...)
	unequal := netns.Links(netns.Gbit, 700*netns.Mbit, 400*netns.Mbit, 150*netns.Mbit, 50*netns.Mbit)
	const halfMiB = 512 << 10
	one, multipath := []polledSockets{{each: 1}}, []polledSockets{{each: 16}, {each: 1, mptcp: true}}
	noDearer := []goal{{of: medianRate, share: 1, limit: limitsPolled}, {of: processor, share: 1, limit: limitsPolled}}
	all := []benchCase{
		{
			name: "four-links", title: "4 links of 1 Gbit/s, chosen by a hash of addresses and ports, from the first byte on",
			lab:  netns.Config{Links: equal},
			size: halfMiB, depth: 8, connections: 1, length: 4 * time.Second, cold: true, plainFlows: []int{16, 4}, polled: multipath,
			goals: []goal{
				{of: medianRate, figure: 0.46, limit: limitsStart}, {of: worstRate, figure: 0.44, limit: limitsStart},
				{of: riseTime, figure: 0.5, limit: limitsStart}, {of: processor, figure: 1.3, limit: limitsProcessor},
			},
		},
		{
			name: "slow-link", title: "4 links, three of 1 Gbit/s and one of 200 Mbit/s",
			lab:  netns.Config{Links: netns.Links(netns.Gbit, netns.Gbit, netns.Gbit, 200*netns.Mbit)},
			size: halfMiB, depth: 8, connections: 1, length: shaped, plainFlows: []int{16, 4}, polled: multipath,
			goals: []goal{{of: medianRate, figure: 0.34}, {of: worstRate, figure: 0.28}},
		},
		{
			name: "capped-flows", title: "connections capped: three at 400 Mbit/s, one at 100 Mbit/s",
			lab:  netns.Config{FlowRates: []netns.Rate{400 * netns.Mbit, 400 * netns.Mbit, 400 * netns.Mbit, 100 * netns.Mbit}},
			size: 1 << 20, depth: 4, connections: 1, length: shaped, plainFlows: []int{4},
			goals: []goal{{of: medianRate, figure: 1.15 / 8}},
		},
		{
			name: "unequal-links", title: "5 links of 1,000, 700, 400, 150 and 50 Mbit/s",
			lab:  netns.Config{Links: unequal},
			size: halfMiB, depth: 8, connections: 1, length: shaped, plainFlows: []int{16, 4}, polled: multipath,
			goals: ofSum(unequal),
		},
	}
	for _, count := range []int{3, 4, 6} {
		links := drawnLinks(count)
		all = append(all, benchCase{
			name: "links-" + mbits(links, "-", "-"), title: fmt.Sprintf("%d links of %s Mbit/s, drawn at random", count, mbits(links, ", ", " and ")),
			lab:  netns.Config{Links: links},
			size: halfMiB, depth: 8, connections: 1, length: shaped, plainFlows: []int{16, 4}, polled: multipath,
			goals: ofSum(links),
		})
	}
	all = append(all, []benchCase{
		{
			name: "lossy-links", title: "4 links of 1 Gbit/s, each of which loses half a per cent of the packets",
			lab: netns.Config{Links: equal}, loss: 0.005,
			size: halfMiB, depth: 8, connections: 1, length: shaped, plainFlows: []int{16, 4}, polled: multipath,
			goals: []goal{{of: medianRate, figure: 0.43, limit: limitsLoss}},
		},
		{
			name: "silent-link", title: "4 links of 1 Gbit/s, one of them silent for 5 s",
			lab:  netns.Config{Links: equal},
			size: halfMiB, depth: 8, connections: 1, length: 2*margin + outage, plainFlows: []int{16}, polled: multipath,
			fault: &fault{start: margin, length: outage, recovery: time.Second, remaining: threeLinks},
			goals: []goal{{of: worstRate, figure: 0.9 * threeLinks}},
		},
		{
			name: "one-connection", title: "hosts joined directly, unshaped, 1 connection",
			size: halfMiB, depth: 8, connections: 1, length: unshaped, plainFlows: []int{1}, polled: one,
			goals: noDearer,
		},
		{
			name: "four-connections", title: "hosts joined directly, unshaped, 4 connections",
			size: halfMiB, depth: 8, connections: 4, length: unshaped, plainFlows: []int{4}, polled: one,
			goals: noDearer,
		},
		{
			name: "small-messages", title: "hosts joined directly, unshaped, 1 connection, 8 KiB messages",
			size: 8 << 10, depth: 8, connections: 1, length: unshaped, plainFlows: []int{1}, polled: one,
			goals: []goal{{of: medianRate, share: 1}},
		},
		{
			name: "both-ways", title: "hosts joined directly, unshaped, 8 connections both ways, 128 KiB messages",
			size: 128 << 10, depth: 8, connections: 8, length: unshaped, bothWays: true, polled: one,
			goals: []goal{{of: medianRate, share: 1, limit: limitsPolled}},
		},
		{
			name: "ping-pong", title: "hosts joined directly, 8 bytes there and back",
			size: 8, depth: 1, connections: 1, length: unshaped, plainFlows: []int{1}, pingPong: true,
			goals: []goal{{of: roundTrip, share: 1.2, limit: limitsRoundTrip}},
		},
		{
			name: "idle-connections", title: "hosts joined directly, 64 connections open and not used",
			size: 8 << 10, depth: 1, connections: 64, length: unshaped, idle: true,
			goals: []goal{{of: idleUse, figure: 0.005}, {of: maxThreads, figure: 4}},
		},
	}...)
	for _, connections := range []int{64, 512, 1024} {
		all = append(all, benchCase{
			name: fmt.Sprintf("%d-connections", connections), title: fmt.Sprintf("hosts joined directly, unshaped, %d connections, 64 KiB messages", connections),
			size: 64 << 10, depth: 8, connections: connections, length: unshaped, polled: one, goals: noDearer,
		})
	}
	return all
}

// ofSum are the goals on links of any rates.
func ofSum(links []netns.Link) []goal {
	sum := netns.PayloadLimit(rates(netns.Config{Links: links})...)
	return []goal{{of: medianRate, figure: 0.93 * sum, limit: limitsDrawn}, {of: worstRate, figure: 0.88 * sum, limit: limitsDrawn}}
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

func caseNames() []string {
	var names []string
	for _, c := range cases(true) {
		names = append(names, c.name)
	}
	return names
}

// String is the load in words, for the page.
func (c benchCase) String() string {
	if c.pingPong {
		return fmt.Sprintf("%d bytes, one at a time", c.size)
	}
	if c.idle {
		return fmt.Sprintf("%d connections, used once and then watched for %s", c.connections, c.length)
	}
	size := fmt.Sprintf("%d KiB", c.size>>10)
	if c.size >= 1<<20 {
		size = fmt.Sprintf("%d MiB", c.size>>20)
	}
	direction, since := "", ""
	if c.bothWays {
		direction = " in each direction"
	}
	if c.cold {
		since = " from the first byte on"
	}
	return fmt.Sprintf("messages of %s, %d in flight on each of %d connections%s, runs of about %s%s", size, c.depth, c.connections, direction, c.length, since)
}
