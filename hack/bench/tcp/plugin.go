package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// plugin is an NCCL net plugin, or sockets in place of one, driven by evenkeel-bench.
type plugin struct {
	label, library string
	sockets        *polledSockets
	environment    []string
	driver         string
	// speed is the rate of the last run of each case, in GB/s. It sets the number of messages of the next run, so that the run
	// takes about as long as the case says.
	speed map[string]float64
}

const (
	// bootstrapPort is where the two ranks find each other, outside the network under test.
	bootstrapPort = 29500
	// maxMessages bounds the number of messages that it times.
	maxMessages = 1_000_000
)

func (p *plugin) name() string { return p.label }

// prepare finds out how fast the plugin is in a case, once.
func (p *plugin) prepare(ctx context.Context, lab *netns.Lab, c benchCase) error {
	if p.sockets != nil {
		if err := p.sockets.prepare(ctx, lab); err != nil {
			return err
		}
	}
	if c.fault != nil {
		p.speed[c.name] = c.limit() // so that the run is not over before the fault
	}
	if _, known := p.speed[c.name]; known || c.idle {
		return nil
	}
	// A short trial, with a low estimate.
	speed := 0.05
	if limit := c.limit(); limit > 0 {
		speed = limit / 4
	}
	if c.pingPong {
		speed = float64(c.size) / 50e-6 / 1e9
	}
	first := c
	first.length = time.Second
	trial, err := p.transfer(ctx, lab, first, speed)
	p.speed[c.name] = trial.Rate
	return err
}

func (p *plugin) run(ctx context.Context, lab *netns.Lab, c benchCase) (outcome, error) {
	if c.idle {
		return p.idle(ctx, lab, c)
	}
	got, err := p.transfer(ctx, lab, c, p.speed[c.name])
	if err != nil {
		return outcome{}, err
	}
	p.speed[c.name] = got.Rate
	return got, nil
}

// transfer sends the number of messages that takes the case's length at that speed.
func (p *plugin) transfer(ctx context.Context, lab *netns.Lab, c benchCase, speed float64) (outcome, error) {
	each := c.size * c.connections
	if c.bothWays {
		each *= 2
	}
	messages := int(speed * 1e9 * c.length.Seconds() / float64(each))
	messages = min(max(messages, 4*c.depth), maxMessages)
	receiver, err := p.start(ctx, lab, netns.H2, c, messages)
	if err != nil {
		return outcome{}, err
	}
	sender, err := p.start(ctx, lab, netns.H1, c, messages)
	if err != nil {
		return outcome{}, receiver.Kill(err)
	}
	text, err := proc.WaitBoth(receiver, sender, receiver)
	if err != nil {
		return outcome{}, err
	}
	var report struct {
		Rows []struct {
			Bandwidth float64
			P50       float64 `json:"p50_us"`
			Send      float64 `json:"send_cpu"`
			Receive   float64 `json:"receive_cpu"`
		}
	}
	if err := json.Unmarshal(text, &report); err != nil || len(report.Rows) != 1 {
		return outcome{}, fmt.Errorf("unexpected report of evenkeel-bench: %q", text)
	}
	row := report.Rows[0]
	got := outcome{Rate: row.Bandwidth, Send: row.Send, Receive: row.Receive, Own: proc.CPUShare(sender, receiver)}
	if c.pingPong {
		got.P50 = row.P50 / 1e6
	}
	return got, nil
}

// start starts the driver on a host: H1 sends.
func (p *plugin) start(ctx context.Context, lab *netns.Lab, host netns.Host, c benchCase, messages int) (*proc.Process, error) {
	rank, role := "1", "sender"
	if host == netns.H2 {
		rank, role = "0", "receiver"
	}
	environment := append([]string{"NCCL_SOCKET_IFNAME=" + netns.DataInterface}, p.environment...)
	command := []string{
		p.driver, "net", "--json", "--rank", rank, "--world-size", "2",
		"--master-addr", lab.ControlAddress(netns.H2).String(), "--master-port", strconv.Itoa(bootstrapPort),
		"-b", strconv.Itoa(c.size), "-e", strconv.Itoa(c.size), "-w", strconv.Itoa(c.warmup()), "-n", strconv.Itoa(messages),
	}
	if p.sockets != nil {
		command = append(command, p.sockets.arguments(lab)...)
	} else {
		command = append(command, "--plugin", p.library)
	}
	command = append(command, "--driver", c.driver())
	if c.fault != nil {
		command = append(command, "--check-all") // retransmitted data must be right
	}
	if c.bothWays {
		command = append(command, "--both-ways")
	}
	if c.pingPong {
		command = append(command, "--ping-pong")
	} else {
		command = append(command, "--connections", strconv.Itoa(c.connections), "--depth", strconv.Itoa(c.depth))
	}
	return proc.Start(ctx, lab, host, role, environment, command...)
}

// contains reports whether a library has a string, such as a setting's name. A library without the setting would ignore it, and
// the results would be shown under the wrong name.
func contains(library, text string) (bool, error) {
	content, err := os.ReadFile(library)
	if err != nil {
		return false, err
	}
	return bytes.Contains(content, []byte(text)), nil
}
