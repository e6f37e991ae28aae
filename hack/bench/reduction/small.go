package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	// smallBytes is the size of the small all-reduce's vector.
	smallBytes = 1 << 10
	// bootstrapPort is where two ranks find each other.
	bootstrapPort = 29500
)

// small measures a small all-reduce against a round trip of a message of its size between the same hosts.
func (b bench) small(ctx context.Context, result *caseResult) (err error) {
	c := starCase{Name: "small", Clients: 2, Servers: 2}
	lab, hosts, err := b.up(ctx, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lab.Down(ctx)) }()
	fmt.Fprintf(b.out, "\nsmall: %d bytes, %s\n", smallBytes, lab.Config())
	messages := 5000
	if b.options.Quick {
		messages = 500
	}
	for round := range b.options.Rounds {
		got, err := b.allReduce(ctx, hosts, "--size", strconv.Itoa(smallBytes), "-n", strconv.Itoa(messages), "-w", "100", "-c", "1", "--depth", "1")
		if err != nil {
			return err
		}
		there, err := b.pingPong(ctx, lab, messages)
		if err != nil {
			return err
		}
		plain, err := plainRound(ctx, lab, c)
		if err != nil {
			return err
		}
		result.Small = append(result.Small, smallRound{AllReduce: got.E2E, TwoMessages: there, Plain: plain, Busy: got.Busy})
		fmt.Fprintf(b.out, "  %d of %d  all-reduce %.1f us, two messages %.1f us, the same messages over plain sockets %.1f us\n", round+1, b.options.Rounds, got.E2E*1e6, there*1e6, plain*1e6)
	}
	return nil
}

// A smallRound is the medians of one round, in seconds.
type smallRound struct {
	AllReduce, TwoMessages float64
	// Plain is an all-reduce's messages over plain sockets, and no sum.
	Plain float64
	Busy  float64 // share of all processors' time during the all-reduces
}

// pingPong is the median round trip of a message, in seconds.
func (b bench) pingPong(ctx context.Context, lab *netns.Lab, messages int) (float64, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, proc.Timeout, fmt.Errorf("not done within %s", proc.Timeout))
	defer cancel()
	side := func(host netns.Host, role, rank string) (*proc.Process, error) {
		size := strconv.Itoa(smallBytes)
		return proc.Start(ctx, lab, host, role, []string{"NCCL_SOCKET_IFNAME=" + netns.DataInterface},
			b.options.Driver, "net", "--plugin", b.options.Library, "--json", "--ping-pong", "--rank", rank, "--world-size", "2",
			"--master-addr", lab.Address(netns.H1).String(), "--master-port", strconv.Itoa(bootstrapPort),
			"-b", size, "-e", size, "-w", "100", "-n", strconv.Itoa(messages))
	}
	receiver, err := side(netns.H1, "receiver", "0")
	if err != nil {
		return 0, err
	}
	sender, err := side(netns.StarHost(2), "sender", "1")
	if err != nil {
		return 0, receiver.Kill(err)
	}
	text, err := proc.WaitBoth(receiver, sender, receiver)
	if err != nil {
		return 0, err
	}
	var report struct {
		Rows []struct {
			P50 float64 `json:"p50_us"`
		}
	}
	if err := json.Unmarshal(text, &report); err != nil || len(report.Rows) != 1 {
		return 0, fmt.Errorf("unexpected report of evenkeel-bench: %q", text)
	}
	return report.Rows[0].P50 / 1e6, nil
}
