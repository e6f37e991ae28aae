package workload

import (
	"encoding/json"
	"fmt"
	"strconv"

	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
)

// bootstrapPort is where the two ranks find each other, outside the network under test.
const bootstrapPort = 29500

// A netDriver is "evenkeel-bench net": messages from rank 1 to rank 0, which reports.
type netDriver struct {
	program  string
	master   string // address at which rank 0 meets rank 1
	port     int    // there
	size     int    // bytes of a message
	messages int    // that are timed
	warmup   int    // messages before those
	flags    []string
}

// command is the command of a rank.
func (d netDriver) command(rank int) []string {
	size := strconv.Itoa(d.size)
	return append([]string{
		d.program, "net", "--json", "--rank", strconv.Itoa(rank), "--world-size", "2", "--master-addr", d.master, "--master-port", strconv.Itoa(d.port),
		"-b", size, "-e", size, "-w", strconv.Itoa(d.warmup), "-n", strconv.Itoa(d.messages),
	}, d.flags...)
}

// A netRow is what the driver reports of messages of one size.
type netRow struct {
	Bandwidth float64 // GB/s
	P50       float64 `json:"p50_us"`      // round trip, if messages come back
	Send      float64 `json:"send_cpu"`    // seconds of a processor for each GB
	Receive   float64 `json:"receive_cpu"` // the same
	Wrong     int     // messages
}

// readNet reads the report of one size. Wrong messages are an error.
func readNet(text []byte) (netRow, error) {
	var report struct{ Rows []netRow }
	if err := json.Unmarshal(text, &report); err != nil || len(report.Rows) != 1 || report.Rows[0].Wrong > 0 {
		return netRow{}, fmt.Errorf("unexpected report of evenkeel-bench, want one row without wrong messages: %q", text)
	}
	return report.Rows[0], nil
}

// startPair starts rank 0, which receives, and then rank 1. If rank 1 does not start, rank 0 is ended.
func startPair(start func(rank int, role string) (*proc.Process, error)) (receiver, sender *proc.Process, err error) {
	if receiver, err = start(0, "receiver"); err != nil {
		return nil, nil, err
	}
	if sender, err = start(1, "sender"); err != nil {
		return nil, nil, receiver.Kill(err)
	}
	return receiver, sender, nil
}

// runPair runs both ranks until they exit, and returns the report.
func runPair(start func(rank int, role string) (*proc.Process, error)) (row netRow, receiver, sender *proc.Process, err error) {
	if receiver, sender, err = startPair(start); err != nil {
		return row, nil, nil, err
	}
	text, err := proc.WaitBoth(receiver, sender)
	if err == nil {
		row, err = readNet(text)
	}
	return row, receiver, sender, err
}
