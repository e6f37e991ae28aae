package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	idleStep = 20 * time.Millisecond
	// inUse is how much has passed when all connections are surely in use.
	inUse = 32 << 20
	// quietFor is how long nothing may pass for connections to count as idle.
	quietFor = 300 * time.Millisecond
)

// idle opens the case's connections and uses them; then it stops the driver,
// which is the first thread of each process, and looks at what the plugin's
// own threads use when nothing passes any more.
func (p *plugin) idle(ctx context.Context, lab *netns.Lab, c benchCase) (outcome, error) {
	receiver, err := p.start(ctx, lab, netns.H2, c, mostMessages)
	if err != nil {
		return outcome{}, err
	}
	sender, err := p.start(ctx, lab, netns.H1, c, mostMessages)
	if err != nil {
		return outcome{}, receiver.end(err)
	}
	var got outcome
	err = onOneThread(func() error {
		if err := awaitTraffic(ctx, lab, func(passed uint64, _ time.Duration) bool { return passed >= inUse }); err != nil {
			return err
		}
		// The sender first: the receiver is left with what an idle one has,
		// buffers that wait for messages.
		for _, side := range []*process{sender, receiver} {
			if err := side.stopDriver(ctx); err != nil {
				return err
			}
			if err := awaitTraffic(ctx, lab, func(_ uint64, quiet time.Duration) bool { return quiet >= quietFor }); err != nil {
				return err
			}
		}
		var used [2]time.Duration
		for i, side := range []*process{sender, receiver} {
			busy, threads, err := side.pluginThreads()
			if err != nil {
				return err
			}
			used[i], got.Threads = busy, max(got.Threads, threads)
		}
		since := time.Now()
		if err := pause(ctx, c.length); err != nil {
			return err
		}
		for i, side := range []*process{sender, receiver} {
			busy, _, err := side.pluginThreads()
			if err != nil {
				return err
			}
			got.Idle = max(got.Idle, (busy-used[i]).Seconds()/time.Since(since).Seconds())
		}
		return nil
	})
	// They would go on once the thread that stopped them is gone.
	sender.cmd.Process.Kill()
	receiver.cmd.Process.Kill()
	sender.cmd.Wait()
	receiver.cmd.Wait()
	if err != nil {
		return outcome{}, receiver.explain(sender.explain(err))
	}
	return got, nil
}

// onOneThread runs f on a thread that then ends, and with it whatever it has
// stopped goes on.
func onOneThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		result <- f()
	}()
	return <-result
}

// stopDriver stops the process's first thread and leaves the others alone.
func (p *process) stopDriver(ctx context.Context) error {
	pid := p.cmd.Process.Pid
	if err := errors.Join(unix.PtraceSeize(pid), unix.PtraceInterrupt(pid)); err != nil {
		return fmt.Errorf("stop the %s's driver: %w", p.role, err)
	}
	for {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/stat", pid, pid))
		if err != nil {
			return fmt.Errorf("the %s ended early: %w", p.role, err)
		}
		// The state follows the name, which ends with the last parenthesis.
		if _, state, ok := strings.Cut(string(text[strings.LastIndexByte(string(text), ')'):]), " "); ok && strings.HasPrefix(state, "t") {
			return nil
		}
		if err := pause(ctx, idleStep); err != nil {
			return err
		}
	}
}

// awaitTraffic waits until enough says so of the bytes that have passed since
// it was called, both ways, and of how long there were no more.
func awaitTraffic(ctx context.Context, lab *netns.Lab, enough func(passed uint64, quiet time.Duration) bool) error {
	var first, last uint64
	since := time.Now()
	for i := 0; ; i++ {
		received, sent, err := lab.Traffic(netns.H1)
		if err != nil {
			return err
		}
		if now := received + sent; now != last {
			last, since = now, time.Now()
		}
		if i == 0 {
			first = last
		}
		if enough(last-first, time.Since(since)) {
			return nil
		}
		if err := pause(ctx, idleStep); err != nil {
			return err
		}
	}
}

// pluginThreads is the processor time of all threads but the driver's, and
// their number.
func (p *process) pluginThreads() (used time.Duration, threads int, err error) {
	pid := strconv.Itoa(p.cmd.Process.Pid)
	files, err := filepath.Glob(filepath.Join("/proc", pid, "task", "*", "schedstat"))
	if err != nil {
		return 0, 0, err
	}
	for _, file := range files {
		if filepath.Base(filepath.Dir(file)) == pid {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			continue // the thread has ended
		}
		nanoseconds, _, _ := strings.Cut(string(text), " ")
		n, err := strconv.ParseInt(nanoseconds, 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("%s: %w", file, err)
		}
		used += time.Duration(n)
		threads++
	}
	if len(files) == 0 {
		return 0, 0, fmt.Errorf("the %s ended early", p.role)
	}
	return used, threads, nil
}

// pause waits for a while, unless ctx ends first.
func pause(ctx context.Context, length time.Duration) error {
	select {
	case <-time.After(length):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
