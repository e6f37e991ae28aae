package workload

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	idleStep = 20 * time.Millisecond
	// usedBytes is the traffic after which all connections have surely been used.
	usedBytes = 32 << 20
	// idleAfter is the time without traffic after which connections count as idle.
	idleAfter = 300 * time.Millisecond
)

// idle opens the connections and uses them. Then it stops the driver, which is the first thread of each process, and
// measures the processor time of the plugin's own threads while there is no traffic.
func (d *driven) idle(ctx context.Context, r experiment.Run, transport []string) (outcome, error) {
	lab := r.Lab
	receiver, sender, err := startPair(d.starter(ctx, r, maxMessages, transport))
	if err != nil {
		return nil, err
	}
	var idle float64
	var most int // threads
	err = onOneThread(func() error {
		if err := awaitTraffic(ctx, lab, func(passed uint64, _ time.Duration) bool { return passed >= usedBytes }); err != nil {
			return err
		}
		// The sender first: an idle receiver has buffers that wait for messages.
		for _, side := range []*proc.Process{sender, receiver} {
			if err := stopDriver(ctx, side); err != nil {
				return err
			}
			if err := awaitTraffic(ctx, lab, func(_ uint64, quiet time.Duration) bool { return quiet >= idleAfter }); err != nil {
				return err
			}
		}
		var used [2]time.Duration
		for i, side := range []*proc.Process{sender, receiver} {
			busy, threads, err := pluginThreads(side)
			if err != nil {
				return err
			}
			used[i], most = busy, max(most, threads)
		}
		since := time.Now()
		if err := pause(ctx, d.Length); err != nil {
			return err
		}
		for i, side := range []*proc.Process{sender, receiver} {
			busy, _, err := pluginThreads(side)
			if err != nil {
				return err
			}
			idle = max(idle, (busy-used[i]).Seconds()/time.Since(since).Seconds())
		}
		return nil
	})
	// The driver would continue once the thread that stopped it has exited.
	sender.Cmd.Process.Kill()
	receiver.Cmd.Process.Kill()
	sender.Cmd.Wait()
	receiver.Cmd.Wait()
	if err != nil {
		return nil, receiver.Explain(sender.Explain(err))
	}
	return outcome{IdleUse: 100 * idle, Threads: float64(most)}, nil
}

// onOneThread runs f on a thread of its own, as ptrace belongs to a thread. When the thread exits, what it stopped
// continues.
func onOneThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		result <- f()
	}()
	return <-result
}

// stopDriver stops the process's first thread; the others continue.
func stopDriver(ctx context.Context, p *proc.Process) error {
	pid := p.Cmd.Process.Pid
	if err := errors.Join(unix.PtraceSeize(pid), unix.PtraceInterrupt(pid)); err != nil {
		return fmt.Errorf("stop the %s's driver: %w", p.Role, err)
	}
	return until(ctx, func() (bool, error) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/stat", pid, pid))
		if err != nil {
			return false, fmt.Errorf("the %s exited early: %w", p.Role, err)
		}
		// The state follows the name, which ends with the last parenthesis.
		_, state, ok := strings.Cut(string(text[strings.LastIndexByte(string(text), ')'):]), " ")
		return ok && strings.HasPrefix(state, "t"), nil
	})
}

// awaitTraffic waits until enough returns true. It is given the bytes since the call, in both directions, and the time
// since the last of them.
func awaitTraffic(ctx context.Context, lab *netns.Lab, enough func(passed uint64, quiet time.Duration) bool) error {
	received, sent, err := lab.Traffic(netns.H1)
	if err != nil {
		return err
	}
	first := received + sent
	last, since := first, time.Now()
	return until(ctx, func() (bool, error) {
		received, sent, err := lab.Traffic(netns.H1)
		if now := received + sent; now != last {
			last, since = now, time.Now()
		}
		return enough(last-first, time.Since(since)), err
	})
}

// pluginThreads is the processor time of all threads but the driver's, and their number.
func pluginThreads(p *proc.Process) (used time.Duration, threads int, err error) {
	return p.ThreadTime(func(id int, _ string) bool { return id != p.Cmd.Process.Pid })
}

// until looks again and again, unless ctx ends first.
func until(ctx context.Context, holds func() (bool, error)) error {
	for {
		if done, err := holds(); done || err != nil {
			return err
		}
		if err := pause(ctx, idleStep); err != nil {
			return err
		}
	}
}

// pause waits for a while, unless ctx ends first.
func pause(ctx context.Context, length time.Duration) error {
	timer := time.NewTimer(length)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
