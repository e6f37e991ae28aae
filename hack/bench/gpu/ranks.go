package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// prefix begins the line in which a rank says what has failed.
	prefix = "allreduce: "
	// failed is the exit status of a rank that NCCL has told of an error, and
	// timedOut of one that it has told nothing.
	failed, timedOut = 1, 3
	// before is the number of all-reduces after which a rank is killed.
	before = 20
	// lostSize is that of the largest all-reduce meanwhile, in bytes.
	lostSize = 4 << 20
	// grace is how long other ranks may go on when one has failed.
	grace = 10 * time.Second
	// toAbort is more than a rank needs from its patience's end to its own.
	toAbort = 2 * time.Minute
)

// A world is the ranks of one run.
type world struct {
	name, network string // the network is the one that NCCL must say it uses
	program, nccl string
	ranks         int
	plan          plan
	environment   []string
	forever       bool
	work, logs    string
}

// A row is one size of one type and operation, as a rank reports it.
type row struct {
	Type, Op string
	Bytes    int
	Seconds  float64 // median
	Skipped  string  // why, instead of a result
}

// An end is how a rank's process ended.
type end struct {
	rank, status int    // the status is -1 if a signal ended it
	why          string // empty if all was well
	at           time.Time
}

// explains reports whether another failure may follow from this one. A rank
// that found a wrong element or crashed did so by itself, and when it crashed
// is known only later than what the others make of it.
func (e end) explains(other end) bool {
	told := func(e end) bool { return e.status == failed || e.status == timedOut }
	if told(e) != told(other) {
		return told(other)
	}
	return e.at.Before(other.at)
}

func (w world) log(rank int) string {
	return filepath.Join(w.logs, fmt.Sprintf("%s-rank%d.log", w.name, rank))
}

// command is one rank: to NCCL a host of its own, that reaches others only
// through the network, which is the loopback interface.
func (w world) command(ctx context.Context, rank int) *exec.Cmd {
	number := func(d time.Duration) string { return strconv.Itoa(int(d / time.Second)) }
	args := []string{
		"--nccl", w.nccl, "--id", filepath.Join(w.work, w.name+".id"), "--rank", strconv.Itoa(rank), "--ranks", strconv.Itoa(w.ranks),
		"--most", strconv.Itoa(w.plan.most), "--iterations", strconv.Itoa(w.plan.iterations), "--patience", number(w.plan.patience),
	}
	if w.forever {
		args = append(args, "--forever", "1")
	}
	cmd := exec.CommandContext(ctx, w.program, args...)
	// Settings that are around would make this another run than the page says.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(setting string) bool {
		return strings.HasPrefix(setting, "NCCL_") || strings.HasPrefix(setting, "EVENKEEL_")
	})
	cmd.Env = append(cmd.Env,
		fmt.Sprintf("NCCL_HOSTID=node%c", 'A'+rank), "NCCL_SOCKET_IFNAME=lo",
		"NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_IB_DISABLE=1", "NCCL_MNNVL_ENABLE=0", "NCCL_NVLS_ENABLE=0", "NCCL_RAS_ENABLE=0",
		"NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=INIT,NET,ENV", "NCCL_DEBUG_FILE="+w.log(rank))
	cmd.Env = append(cmd.Env, w.environment...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second
	return cmd
}

// A notice keeps what a process says, and when it said what has failed.
type notice struct {
	text bytes.Buffer
	at   time.Time
}

func (n *notice) Write(p []byte) (int, error) {
	n.text.Write(p)
	if n.at.IsZero() && bytes.Contains(n.text.Bytes(), []byte(prefix)) {
		n.at = time.Now()
	}
	return len(p), nil
}

// run runs all ranks to their ends. It shows every row to see, which may kill
// a rank. Once a rank has failed, the others have so much time to end.
func (w world) run(ctx context.Context, afterFailure time.Duration, see func(rank int, r row, kill func(rank int))) ([]end, error) {
	type event struct {
		rank int
		row  row
		end  *end
	}
	ctx, cancel := context.WithCancel(ctx)
	events := make(chan event)
	var running sync.WaitGroup
	var commands []*exec.Cmd
	defer func() {
		cancel()
		go func() { running.Wait(); close(events) }()
		for range events { // until no process is left
		}
	}()
	for rank := range w.ranks {
		if err := os.Remove(w.log(rank)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		cmd, said := w.command(ctx, rank), &notice{}
		cmd.Stderr = said
		pipe, err := cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		if err := cmd.Start(); err != nil {
			return nil, fmt.Errorf("start a rank: %w", err)
		}
		commands = append(commands, cmd)
		running.Go(func() {
			for line := bufio.NewScanner(pipe); line.Scan(); {
				var r row
				if json.Unmarshal(line.Bytes(), &r) == nil { // NCCL and its plugins may write here, too
					events <- event{rank: rank, row: r}
				}
			}
			err := cmd.Wait()
			e := end{rank: rank, status: cmd.ProcessState.ExitCode(), at: said.at}
			if e.at.IsZero() {
				e.at = time.Now()
			}
			if err != nil {
				e.why = reason(said.text.String(), fmt.Sprintf("rank %d: %s", rank, err))
			}
			events <- event{rank: rank, end: &e}
		})
	}
	var ends []end
	limit := time.NewTimer(w.plan.silence)
	lost := false
	for len(ends) < w.ranks {
		select {
		case e := <-events:
			if e.end == nil {
				see(e.rank, e.row, func(rank int) { commands[rank].Process.Kill() })
			} else {
				ends = append(ends, *e.end)
			}
			switch {
			case lost:
			case e.end != nil && e.end.why != "":
				lost = true
				limit.Reset(min(afterFailure, w.plan.silence))
			default:
				limit.Reset(w.plan.silence)
			}
		case <-limit.C:
			if !lost {
				return ends, fmt.Errorf("%s: no rank has said anything for %s; what NCCL said is in %s", w.name, w.plan.silence, w.logs)
			}
			return ends, nil
		case <-ctx.Done():
			return ends, ctx.Err()
		}
	}
	return ends, nil
}

// reason is the line in which a rank says what failed, or else the last line
// that it said.
func reason(said, otherwise string) string {
	var last string
	for line := range strings.Lines(said) {
		if after, ok := strings.CutPrefix(line, prefix); ok {
			return strings.TrimSpace(after)
		}
		last = ": " + strings.TrimSpace(line)
	}
	return otherwise + last
}

// allReduce goes through all rows once, and returns those of rank 0.
func (w world) allReduce(ctx context.Context, out io.Writer) ([]row, error) {
	var rows []row
	ends, err := w.run(ctx, grace, func(rank int, r row, _ func(int)) {
		if rank != 0 {
			return
		}
		rows = append(rows, r)
		if r.Bytes == w.plan.most {
			fmt.Fprintf(out, "%s: %s %s done\n", w.name, r.Type, r.Op)
		}
	})
	if err != nil {
		return nil, err
	}
	var first *end
	for i, e := range ends {
		if e.why != "" && (first == nil || e.explains(*first)) {
			first = &ends[i]
		}
	}
	// The wrong network explains more than what it led to.
	if err := w.checkNetwork(first != nil); err != nil {
		return nil, err
	}
	if first != nil {
		return nil, fmt.Errorf("%s: %s; what NCCL said is in %s", w.name, first.why, w.logs)
	}
	return rows, nil
}

var using = regexp.MustCompile(`Using network ([^\r\n]+)`)

// checkNetwork looks in every rank's log for the network that NCCL used. A
// rank that has failed may not have come to one.
func (w world) checkNetwork(hasFailed bool) error {
	for rank := range w.ranks {
		text, err := os.ReadFile(w.log(rank))
		if err != nil && !hasFailed {
			return fmt.Errorf("%s: NCCL wrote no log: %w", w.name, err)
		}
		used := "none"
		if m := using.FindSubmatch(text); m != nil {
			used = strings.TrimSpace(string(m[1]))
		} else if hasFailed {
			continue
		}
		if used != w.network {
			return fmt.Errorf("%s: NCCL used network %s instead of %s; %s says why", w.name, used, w.network, w.log(rank))
		}
	}
	return nil
}

// A loss is what became of the ranks that were left when one was killed.
type loss struct {
	Why   string
	After time.Duration // until the last of them had its error
}

// loseOne kills the last rank in the middle of a run. All others must be told
// so by NCCL, and end.
func (w world) loseOne(ctx context.Context) (loss, error) {
	w.forever = true
	w.plan.most = min(w.plan.most, lostSize)
	victim := w.ranks - 1
	var killed time.Time
	seen := 0
	ends, err := w.run(ctx, w.plan.patience+toAbort, func(rank int, _ row, kill func(int)) {
		if rank == 0 {
			seen++
		}
		if seen == before && killed.IsZero() {
			killed = time.Now()
			kill(victim)
		}
	})
	if err != nil {
		return loss{}, err
	}
	if killed.IsZero() {
		return loss{}, fmt.Errorf("kill: it failed before a rank was killed: %s", ends[0].why)
	}
	if err := w.checkNetwork(false); err != nil {
		return loss{}, err
	}
	var l loss
	told := 0
	for _, e := range ends {
		if e.rank == victim {
			continue
		}
		if e.status != failed {
			return loss{}, fmt.Errorf("kill: rank %d was to get an error when rank %d was killed: %s; what NCCL said is in %s", e.rank, victim, e.why, w.logs)
		}
		told++
		if after := e.at.Sub(killed); after > l.After {
			l = loss{Why: e.why, After: after}
		}
	}
	if told != w.ranks-1 {
		return loss{}, fmt.Errorf("kill: %d of %d ranks had not ended %s after rank %d was killed; what NCCL said is in %s",
			w.ranks-1-told, w.ranks-1, time.Since(killed).Round(time.Second), victim, w.logs)
	}
	return l, nil
}
