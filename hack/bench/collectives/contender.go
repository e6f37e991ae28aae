package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// A figure is the result of a run for one number of elements, in microseconds.
type figure struct{ min, median float64 }

// A task is what a contender has to run.
type task struct {
	ranks    int
	length   time.Duration // of each measurement
	elements []int
	network  network
}

// A network is where a task's ranks run.
type network struct {
	device string
	// command prepares a rank's command; it is killed with this process.
	command func(ctx context.Context, rank int, argv ...string) (*exec.Cmd, error)
}

// loopback has all ranks on this machine.
var loopback = network{"lo", func(ctx context.Context, _ int, argv ...string) (*exec.Cmd, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd, nil
}}

// A contender runs all ranks once and gives its figures by number of elements.
type contender struct {
	name string
	// encrypts is whether no byte of an element may be on the network.
	encrypts bool
	run      func(context.Context, task) (map[int]figure, error)
	tries    int // maximum number of attempts of a run; the page lists the failed ones
	// limit is how long a run may take, where that is less than for others. Where all tries fail, the measurement goes on without such
	// a contender, and the page lists it.
	limit time.Duration
}

// attempt runs the contender once.
func (c contender) attempt(ctx context.Context, t task) (map[int]figure, error) {
	limit := cmp.Or(c.limit, runTimeout)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it did not end within %s", limit))
	defer cancel()
	return c.run(ctx, t)
}

// glooTries is more than one because Gloo's ranks sometimes fail when one of them exits before the others.
const glooTries = 3

// runTimeout is longer than any run takes.
const runTimeout = 5 * time.Minute

// ranks runs a process for each rank, with a folder of their own as the store, and returns what rank 0 wrote.
func ranks(ctx context.Context, folder string, t task, argv func(rank int, store string) []string) ([]byte, error) {
	store, err := os.MkdirTemp(folder, "store-")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var others []*exec.Cmd
	defer func() {
		cancel()
		for _, cmd := range others {
			_ = cmd.Wait() // the error of rank 0 is the one that counts
		}
	}()
	for rank := t.ranks - 1; rank > 0; rank-- {
		cmd, err := t.network.command(ctx, rank, argv(rank, store)...)
		if err != nil {
			return nil, err
		}
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		others = append(others, cmd)
	}
	first, err := t.network.command(ctx, 0, argv(0, store)...)
	if err != nil {
		return nil, err
	}
	var stderr bytes.Buffer
	first.Stderr = &stderr
	out, err := first.Output()
	if cause := context.Cause(ctx); err != nil && cause != nil {
		return nil, cause
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}

// complete checks that there is a figure for each number of elements.
func complete(figures map[int]figure, elements []int) error {
	for _, n := range elements {
		if _, ok := figures[n]; !ok {
			return fmt.Errorf("no figure for %d elements", n)
		}
	}
	return nil
}
