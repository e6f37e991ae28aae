package workload

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
)

// perftestTries bounds the runs of perftest for a figure: on emulated processors it once printed 0 after a normal run.
const perftestTries = 3

// errNoFigure is the error of a perftest run without a figure.
var errNoFigure = errors.New("no result")

// runPerftest measures a case by one of perftest's programs.
func runPerftest(ctx context.Context, c RDMA, program string) (value float64, err error) {
	for range perftestTries {
		if value, err = perftestOnce(ctx, c, program); !errors.Is(err, errNoFigure) {
			break
		}
	}
	return value, err
}

func perftestOnce(ctx context.Context, c RDMA, program string) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, rdmaTimeout)
	defer cancel()
	port, err := freePort()
	if err != nil {
		return 0, err
	}
	args := []string{"-x", gidIndex, "-F", "-s", strconv.Itoa(c.Bytes), "-n", strconv.Itoa(c.Messages / c.QueuePairs), "-p", strconv.Itoa(port)}
	if !c.Latency {
		args = append(args, "-q", strconv.Itoa(c.QueuePairs))
	}
	listener, err := pinned(ctx, receiverCPU, "listener", nil, append([]string{program, "-d", server}, args...)...)
	if err != nil {
		return 0, err
	}
	if err := awaitPort(ctx, port); err != nil {
		return 0, listener.Kill(err)
	}
	connector, err := pinned(ctx, senderCPU, "connector", nil, append(append([]string{program, "-d", client}, args...), serverAddress)...)
	if err != nil {
		return 0, listener.Kill(err)
	}
	text, err := proc.WaitBoth(connector, listener)
	if err != nil {
		return 0, err
	}
	if c.Latency {
		return perftestColumn(string(text), c.Bytes, 4)
	}
	mib, err := perftestColumn(string(text), c.Bytes, 3)
	return mib * (1 << 20) / 1e6, err
}

// perftestColumn finds a column of perftest's row for a size: of bandwidth the fourth is the average, in MiB/s; of
// latency the fifth is the median, in microseconds.
func perftestColumn(text string, size, column int) (float64, error) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) > column && fields[0] == strconv.Itoa(size) {
			if value, err := strconv.ParseFloat(fields[column], 64); err == nil && value > 0 {
				return value, nil
			}
		}
	}
	return 0, fmt.Errorf("%w for %d bytes in its output: %s", errNoFigure, size, text)
}
