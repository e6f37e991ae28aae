package main

import (
	"fmt"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// A starCase is a star of clients and servers, with links of one rate.
type starCase struct {
	Name             string
	Clients, Servers int
	Rate             netns.Rate
	// Size is the vector's, in bytes.
	Size int
	// MaxCPU is the goal of the clients' processor time, seconds for each GB of the vector; zero: none.
	MaxCPU float64
	// OfLink and OfRing are the goals: shares of the link's rate and of the ring's.
	OfLink, OfRing float64
	// Timeline draws one all-reduce, piece by piece.
	Timeline bool
}

func (c starCase) title() string {
	return fmt.Sprintf("%d clients, %d servers, links of %s", c.Clients, c.Servers, c.Rate)
}

// limit is the algorithm bandwidth that the links allow: each byte crosses a client's link once in each direction.
func (c starCase) limit() float64 { return netns.PayloadLimit(c.Rate) }

// starCases are the cases with links. Slower ones show the network where the
// processors, which all hosts share, are too few for the faster ones.
func starCases() []starCase {
	var all []starCase
	for _, rate := range []netns.Rate{netns.Gbit, 250 * netns.Mbit} {
		for _, n := range []int{4, 2} {
			c := starCase{Name: fmt.Sprintf("%d+%d-%s", n, n, rate), Clients: n, Servers: n, Rate: rate, Size: 64 << 20, OfLink: 0.9, Timeline: n == 4}
			if rate < netns.Gbit {
				c.Size = 32 << 20
			} else {
				c.MaxCPU = 3
			}
			if n == 4 {
				c.OfRing = 1.3
			}
			all = append(all, c)
		}
	}
	return all
}

// A contender is one implementation of all-reduce, as flags of evenkeel-bench.
type contender struct {
	Name  string
	flags []string
	polls bool // it never sleeps, so it uses what the processors have left
}

var (
	servers        = contender{Name: "reduction servers", flags: []string{"--run-type", "servers"}}
	serversPolled  = contender{Name: "servers, polled as NCCL polls", flags: []string{"--run-type", "servers", "--driver", "nccl"}, polls: true}
	serversChunked = contender{Name: "servers, operations of 512 KiB", flags: []string{"--run-type", "servers", "--chunksize", "512K"}}
	ring           = contender{Name: "ring", flags: []string{"--run-type", "ring"}}
	contenders     = []contender{servers, serversPolled, serversChunked, ring}
)

// caseNames are all cases: those with limited links, and three others.
func caseNames() []string {
	var names []string
	for _, c := range starCases() {
		names = append(names, c.Name)
	}
	return append(names, "small", "memory", "kernels")
}
