package suspects

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	// ManyRanks is the number of ranks of the job whose datagrams are counted, and manyTime how long.
	ManyRanks = 64
	manyTime  = 30 * time.Second
	// manyStartTime is how long the job may take until a verdict knows all its ranks.
	manyStartTime = 2 * startTime
	// DatagramsTimeout is for the network as well.
	DatagramsTimeout = manyStartTime + manyTime + time.Minute
)

// DatagramRate is what all ranks send together, with headers of IP.
var DatagramRate = experiment.Quantity{Name: "datagrams", Title: "what the ranks tell each other", Unit: "KB/s", LowerIsBetter: true}

// Datagrams runs a job of many ranks on one host, which exchange with all others, and counts what they tell each other.
func Datagrams(name string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		rate, err := countDatagrams(ctx, r)
		return experiment.Measured{Values: map[experiment.Quantity]float64{DatagramRate: rate / 1e3}}, err
	}}
}

var counted = regexp.MustCompile(`bytes (\d+)`)

func countDatagrams(ctx context.Context, r experiment.Run) (rate float64, err error) {
	folder, err := os.MkdirTemp("", "suspects")
	if err != nil {
		return 0, err
	}
	j := &job{lab: r.Lab, folder: folder}
	defer func() { err = errors.Join(err, j.close()) }()
	if _, err := r.Lab.Exec(ctx, netns.H1, "nft", "table inet cost { chain out { type filter hook output priority 0; meta l4proto udp counter; }; }"); err != nil {
		return 0, err
	}
	if err := j.compute(0, "100"); err != nil {
		return 0, err
	}
	// Each has a name of the length that a node has.
	environment := []string{"EVENKEEL_WATCH=on", "EVENKEEL_STATUS_DIR=" + folder, "EVENKEEL_NODE=ip-10-0-100-100.eu-central-1.compute.internal"}
	ranks, err := proc.Start(ctx, r.Lab, netns.H1, "ranks", environment, r.Driver, "collective", "--spawn", strconv.Itoa(ManyRanks), "--transport", "tcp",
		"--elements", "6400", "--no-verify", "--compute", j.computeFile(0), "--iteration-time", "86400s", "alltoall")
	if err != nil {
		return 0, err
	}
	j.processes = append(j.processes, ranks)
	if known, err := await(ctx, manyStartTime, func() bool { return j.ranks() == ManyRanks }); err != nil || !known {
		return 0, errors.Join(err, ranks.Kill(fmt.Errorf("no verdict knows the %d ranks, only %d", ManyRanks, j.ranks())))
	}
	count := func() (float64, error) {
		text, err := r.Lab.Exec(ctx, netns.H1, "nft", "list", "table", "inet", "cost")
		if err != nil {
			return 0, err
		}
		found := counted.FindStringSubmatch(text)
		if found == nil {
			return 0, fmt.Errorf("no counter in %q", text)
		}
		return strconv.ParseFloat(found[1], 64)
	}
	before, err := count()
	if err != nil {
		return 0, err
	}
	since := time.Now()
	if err := pause(ctx, manyTime); err != nil {
		return 0, err
	}
	after, err := count()
	return (after - before) / time.Since(since).Seconds(), err
}
