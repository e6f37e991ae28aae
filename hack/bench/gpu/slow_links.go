package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// Shaped networks, in namespaces of this machine: two hosts joined by unequal links, and a star in which each host has one card.
const (
	links     = "1gbit,1gbit,1gbit,200mbit"
	starRate  = netns.Gbit
	starRanks = 4
	starts    = 3 // how often a job over unequal links starts: each time its connections take other links
)

// sizes of an all-reduce in a shaped network.
const minShaped, maxShaped = 1 << 20, 64 << 20

// A shaped run is what an all-reduce took in a shaped network.
type shaped struct {
	Network, Way string
	// Seconds are those of each size, one for each time that the job started.
	Seconds map[int][]float64
}

// A way is how NCCL sends, with the settings for it.
type way struct {
	name, network string
	environment   []string
	servers       bool
}

// ways are those that are compared: the strongest settings of NCCL's own sockets are among them.
func ways(plugin string) []way {
	own := []string{"NCCL_NET_PLUGIN=none", "NCCL_NET=Socket"}
	return []way{
		{name: "Evenkeel", network: "Evenkeel", environment: []string{"NCCL_NET_PLUGIN=" + plugin}},
		{name: "NCCL's sockets", network: "Socket", environment: own},
		{name: "NCCL's sockets, 4 threads with 4 sockets each", network: "Socket",
			environment: append(slices.Clone(own), "NCCL_SOCKET_NTHREADS=4", "NCCL_NSOCKS_PERTHREAD=4")},
	}
}

// inShapedNetworks measures all-reduces of two ranks over unequal links, and of four ranks on cards of their own, also with as many
// reduction servers.
func inShapedNetworks(ctx context.Context, out io.Writer, w world, plugin, server string) (all []shaped, err error) {
	w.only, w.minBytes, w.plan.maxBytes = comparedType, min(minShaped, w.plan.maxBytes), min(maxShaped, w.plan.maxBytes)
	rates, err := netns.ParseRates(links)
	if err != nil {
		return nil, err
	}
	unequal := w
	unequal.ranks, unequal.hosts = 2, []netns.Host{netns.H1, netns.H2}
	name := "2 ranks, joined by links of " + strings.ReplaceAll(links, ",", ", ")
	if all, err = inLab(ctx, out, unequal, name, netns.Config{Name: "bench-gpu", Links: netns.Links(rates...)}, ways(plugin), starts, ""); err != nil {
		return nil, err
	}
	star := netns.Config{Name: "bench-gpu"}
	cards := w
	cards.ranks = starRanks
	for host := range 2 * starRanks {
		star.Star = append(star.Star, starRate)
		cards.hosts = append(cards.hosts, netns.StarHost(host))
	}
	withServers := append([]way{{name: fmt.Sprintf("Evenkeel, %d reduction servers", starRanks), network: "Evenkeel",
		environment: []string{"NCCL_NET_PLUGIN=" + plugin}, servers: true}}, ways(plugin)...)
	name = fmt.Sprintf("%d ranks, each on a card of %s", starRanks, starRate)
	more, err := inLab(ctx, out, cards, name, star, withServers, 1, server)
	return append(all, more...), err
}

// inLab measures each way in one network, that many times. The ranks have its first hosts, and reduction servers those after them.
func inLab(ctx context.Context, out io.Writer, w world, name string, config netns.Config, ways []way, times int, server string) (all []shaped, err error) {
	if w.lab, err = netns.Up(ctx, config); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.lab.Down(context.WithoutCancel(ctx))) }()
	for number, its := range ways {
		result := shaped{Network: name, Way: its.name, Seconds: map[int][]float64{}}
		for range times {
			if err := w.once(ctx, out, fmt.Sprintf("shaped-%d-%d", w.ranks, number), its, server, result.Seconds); err != nil {
				return nil, err
			}
		}
		all = append(all, result)
	}
	return all, nil
}

// once adds the times of one job.
func (w world) once(ctx context.Context, out io.Writer, name string, its way, server string, seconds map[int][]float64) error {
	w.name, w.network, w.environment, w.collNet = name, its.network, its.environment, its.servers
	if its.servers {
		s, err := startServers(ctx, server, w.lab, w.hosts[w.ranks:], w.ranks)
		if err != nil {
			return err
		}
		defer s.stop()
		w.environment = append(slices.Clone(w.environment), s.environment(w.version)...)
	}
	rows, err := w.allReduce(ctx, out)
	if err != nil {
		return err
	}
	for _, r := range rows {
		seconds[r.Bytes] = append(seconds[r.Bytes], r.Seconds)
	}
	return nil
}
