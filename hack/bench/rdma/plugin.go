package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strconv"
)

// runPlugin measures the plugin: rank 1 sends to rank 0.
func (c programs) runPlugin(ctx context.Context, of benchCase) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, caseTimeout)
	defer cancel()
	port, err := freePort()
	if err != nil {
		return 0, err
	}
	size := strconv.Itoa(of.Bytes)
	args := []string{
		"net", "--plugin", c.Library, "--transport", "rdma", "--json", "-b", size, "-e", size, "-n", strconv.Itoa(of.Messages),
		"--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", strconv.Itoa(port),
	}
	if of.Latency {
		args = append(args, "--ping-pong")
	}
	rank := func(number, device, cpu string) *exec.Cmd {
		cmd := pinned(ctx, cpu, c.Driver, append(args, "--rank", number)...)
		cmd.Env = append(os.Environ(), "NCCL_IB_HCA=="+device, "EVENKEEL_QUEUE_PAIRS="+strconv.Itoa(of.QueuePairs))
		return cmd
	}
	receiver, sender := rank("0", server, receiverCPU), rank("1", client, senderCPU)
	// Ranks wait for each other.
	text, err := runPair(ctx, receiver, sender, func(context.Context) error { return nil }, receiver)
	if err != nil {
		return 0, err
	}
	return driverResult(text, of.Latency)
}

// driverResult reads the report of evenkeel-bench: MB/s, or half a round trip in microseconds.
func driverResult(text []byte, latency bool) (float64, error) {
	var report struct {
		Rows []struct {
			Bandwidth float64 `json:"bandwidth"`
			P50       float64 `json:"p50_us"`
			Wrong     int     `json:"wrong"`
		} `json:"rows"`
	}
	if err := json.Unmarshal(text, &report); err != nil {
		return 0, fmt.Errorf("%w in its output: %s", err, text)
	}
	if len(report.Rows) != 1 || report.Rows[0].Wrong > 0 {
		return 0, fmt.Errorf("expected one row without wrong messages: %s", text)
	}
	if latency {
		return report.Rows[0].P50 / 2, nil
	}
	return report.Rows[0].Bandwidth * 1e3, nil
}
