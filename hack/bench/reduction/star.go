package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// An outcome is the result of one run.
type outcome struct {
	Algbw float64 // GB/s
	E2E   float64 // median of an operation, seconds
	CPU   float64 // processor seconds of the clients for each GB of the vector
	Busy  float64 // share of all processors' time that any program used
}

// A starResult has the runs of a case with limited links.
type starResult struct {
	Case starCase             `json:"-"`
	Size int                  // of the vector, bytes
	Runs map[string][]outcome // by contender
	// Plain are the runs of plain sockets in the same rounds.
	Plain []plainStar
	// Timeline is a drawing of one all-reduce; empty where none was made.
	Timeline string
}

// star measures a case: the contenders run in turn.
func (b bench) star(ctx context.Context, c starCase) (_ starResult, err error) {
	lab, hosts, err := b.up(ctx, c)
	if err != nil {
		return starResult{}, err
	}
	defer func() { err = errors.Join(err, lab.Down(ctx)) }()
	fmt.Fprintf(b.out, "\n%s: %s (%s)\n", c.Name, c.title(), lab.Config())
	size, iterations := c.Size, 5
	if c.Rate < netns.Gbit {
		iterations = 2
	}
	if b.options.Quick {
		size, iterations = size/4, 3
	}
	drawing := filepath.Join(b.folder, "timeline.svg")
	result := starResult{Case: c, Size: size, Runs: map[string][]outcome{}}
	for round := range b.options.Rounds {
		for i := range contenders {
			// The order rotates by one in each round.
			r := contenders[(i+round)%len(contenders)]
			flags := append([]string{"--size", strconv.Itoa(size), "-n", strconv.Itoa(iterations), "-w", "1", "-c", "1"}, r.flags...)
			drawn := c.Timeline && r.Name == servers.Name && result.Timeline == ""
			if drawn {
				flags = append(flags, "--plot", drawing)
			}
			got, err := b.allReduce(ctx, hosts, flags...)
			if err != nil {
				return starResult{}, fmt.Errorf("%s: %w", r.Name, err)
			}
			if drawn {
				svg, err := os.ReadFile(drawing)
				if err != nil {
					return starResult{}, err
				}
				result.Timeline = string(svg)
			}
			result.Runs[r.Name] = append(result.Runs[r.Name], got)
			fmt.Fprintf(b.out, "  %d of %d  %-42s %.4f GB/s, %.2f of the link, clients %.2f CPU s/GB, processors %.0f %%\n",
				round+1, b.options.Rounds, r.Name, got.Algbw, got.Algbw/c.limit(), got.CPU, got.Busy*100)
		}
		plain, err := plainExchange(ctx, lab, c)
		if err != nil {
			return starResult{}, err
		}
		result.Plain = append(result.Plain, plain)
		fmt.Fprintf(b.out, "  %d of %d  %-42s %.4f GB/s, %.2f of the link, processors %.0f %%\n",
			round+1, b.options.Rounds, plainName, plain.Rate, plain.Rate/c.limit(), plain.Busy*100)
	}
	return result, nil
}
