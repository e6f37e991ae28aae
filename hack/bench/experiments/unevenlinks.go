package experiments

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/workload"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// Contenders of the experiment with links of unequal rates.
const (
	unevenShares = "direct, shares that fit the links"
	equalShares  = "direct, equal shares"
	ownRing      = "ring"
)

// ofGloo are Gloo's algorithms that send the fewest bytes.
var ofGloo = []string{"ring_chunked", "new_ring", "halving_doubling"}

// unevenLinks measures all-reduces between hosts whose links have unequal rates.
func unevenLinks() experiment.Experiment {
	build, open := opened(workload.DebianGloo)
	return experiment.Experiment{
		Name: "uneven-links", Title: "All-reduces over links of unequal rates", Summary: "all-reduces on CPUs where one host's link is slow, or all differ", Subject: unevenShares,
		DriverOnly: true,
		About: "An all-reduce (sum of float32) between hosts, each a network namespace with a link of its own to a switch. A ring goes at the pace of the slowest link.\n" +
			"In a direct all-reduce each rank owns a share of the buffer, and ranks with faster links own more. Evenkeel knows the links' rates here\n" +
			"(`--link-rates`). Gloo is Debian's, over TCP, with its algorithms that send the fewest bytes (" + strings.Join(ofGloo, ", ") + ").\n\n" +
			"With D bytes and p hosts whose links have the rates B, no all-reduce by the hosts alone takes less than the larger one of D / min(B) and\n" +
			"2(p - 1)D / sum(B). That is the bound, with the headers of packets.",
		Notes:  "All hosts share one machine. " + glooFails,
		Rounds: 5, QuickRounds: 2,
		Open: open,
		Cases: func(quick bool) []experiment.Case {
			const hosts = 8
			oneSlow := func(hosts int, rate netns.Rate, percent int) []netns.Rate {
				rates := slices.Repeat([]netns.Rate{rate}, hosts)
				rates[hosts/2] = rate * netns.Rate(percent) / 100
				return rates
			}
			mixed := []netns.Rate{250 * netns.Mbit, 140 * netns.Mbit, 220 * netns.Mbit, 190 * netns.Mbit, 160 * netns.Mbit, 240 * netns.Mbit, 200 * netns.Mbit, 130 * netns.Mbit}
			return []experiment.Case{
				// A ring has 1.67 and 2 times its healthy time in the first two.
				linksOf("one-at-60-percent", oneSlow(hosts, 250*netns.Mbit, 60), 0.69, quick, build),
				linksOf("one-at-half", oneSlow(2*hosts, 100*netns.Mbit, 50), 0.6, quick, build),
				linksOf("mixed", mixed, 0.8, quick, build),
				linksOf("equal", oneSlow(hosts, 250*netns.Mbit, 100), 1.03, quick, build),
			}
		},
	}
}

// linksOf has a host at the end of each link. The goal is a share of the ring's time.
func linksOf(name string, rates []netns.Rate, ofRing float64, quick bool, build func() *workload.Gloo) experiment.Case {
	const elements = 4_000_000
	w := workload.Collective{Ranks: len(rates), Elements: []int{elements}, Length: 5 * time.Second, Bound: allReduceBound(4*elements, rates)}
	if quick {
		w.Length = time.Second
	}
	slowest := slices.Min(rates)
	var known []string
	for _, rate := range rates {
		known = append(known, fmt.Sprint(int64(rate/netns.Mbit)))
	}
	c := experiment.Case{
		Name: name, Title: fmt.Sprintf("%d hosts with links of %s to %s, %s in all", len(rates), slowest, slices.Max(rates), sumOf(rates)),
		Load:    fmt.Sprintf("%d elements, one process on each host, %s for each run", elements, w.Length),
		Network: &netns.Config{Star: rates}, Timeout: workload.CollectiveTimeout,
		Contenders: []experiment.Contender{
			w.EvenkeelBy(unevenShares, "allreduce_direct", "--link-rates", strings.Join(known, ",")),
			w.EvenkeelBy(equalShares, "allreduce_direct"), w.EvenkeelBy(ownRing, "allreduce_ring_chunked"),
		},
		Headline: w.Median(), More: []experiment.Quantity{w.Minimum(), workload.BoundShare, workload.FailedTries}, Limit: w.Bound,
	}
	for _, algorithm := range ofGloo {
		c.Contenders = append(c.Contenders, w.Gloo(algorithm, build))
	}
	c.Goals = []experiment.Goal{median(workload.BoundShare, 0.93, ""), shareOf(ownRing, c.Headline, ofRing, "")}
	return c
}

// allReduceBound is the least time of an all-reduce by hosts with links of these rates, in ms.
func allReduceBound(bytes float64, rates []netns.Rate) float64 {
	slowest := bytes / netns.PayloadLimit(slices.Min(rates))
	all := 2 * float64(len(rates)-1) * bytes / netns.PayloadLimit(rates...)
	return max(slowest, all) / 1e6
}

func sumOf(rates []netns.Rate) netns.Rate {
	sum := netns.Rate(0)
	for _, rate := range rates {
		sum += rate
	}
	return sum
}
