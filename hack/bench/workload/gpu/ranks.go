package gpu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
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

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	// prefix begins the line in which a rank reports its failure.
	prefix = "allreduce: "
	// failed is the exit status of a rank that got an error of NCCL, and timedOut of one that got none in time.
	failed, timedOut = 1, 3
	// killAfter is the number of all-reduces after which a rank is killed.
	killAfter = 20
	// exitGrace is how long other ranks may continue when one has failed.
	exitGrace = 10 * time.Second
	// abortTimeout is more than a rank needs to exit after its timeout.
	abortTimeout = 2 * time.Minute
)

// A world is the ranks of one run.
type world struct {
	Load
	*Lab
	name, network string // the network is the one that NCCL must report
	environment   []string
	forever       bool
	// collNet is set where NCCL must reach reduction servers.
	collNet bool
	// hosts are the ranks', one each; nil: all use the loopback interface.
	hosts *netns.Lab
}

// A row is one size of one type and operation, as a rank reports it.
type row struct {
	Type, Op string
	Bytes    int
	Seconds  float64 // median
	Skipped  string  // why, instead of a result
}

// An exit is how a rank's process exited.
type exit struct {
	rank, status int    // the status is -1 after a signal
	failure      string // empty after success
	at           time.Time
}

// causes reports whether this failure may have caused another one. A wrong element and a crash have no other cause. A
// crash may be known only after the errors that it caused at other ranks.
func (e exit) causes(other exit) bool {
	reported := func(e exit) bool { return e.status == failed || e.status == timedOut }
	if reported(e) != reported(other) {
		return reported(other)
	}
	return e.at.Before(other.at)
}

// id is the file by which the ranks meet.
func (w world) id() string { return filepath.Join(w.work, w.name+".id") }

// log is where NCCL's log of a rank is. Errors have its name alone, as they are on the page.
func (w world) log(rank int) string {
	return filepath.Join(w.logs, fmt.Sprintf("%s-rank%d.log", w.name, rank))
}

// command is one rank. To NCCL it is a host of its own, which reaches others only through the network.
func (w world) command(ctx context.Context, rank int) (*exec.Cmd, error) {
	number := func(d time.Duration) string { return strconv.Itoa(int(d / time.Second)) }
	args := []string{
		"--nccl", w.nccl, "--id", w.id(), "--rank", strconv.Itoa(rank), "--ranks", strconv.Itoa(w.Ranks),
		"--min", strconv.Itoa(w.Min), "--max", strconv.Itoa(w.Max), "--iterations", strconv.Itoa(w.Iterations), "--timeout", number(w.Timeout),
	}
	if w.forever {
		args = append(args, "--forever", "1")
	}
	if !w.AllTypes {
		args = append(args, "--only", timedType)
	}
	cmd, device := exec.CommandContext(ctx, w.program, args...), "lo"
	if w.hosts != nil {
		var err error
		if cmd, err = w.hosts.Command(ctx, netns.StarHost(rank), append([]string{w.program}, args...)...); err != nil {
			return nil, err
		}
		device = netns.DataInterface
	}
	cmd.Env = append(withoutSettings(os.Environ()),
		fmt.Sprintf("NCCL_HOSTID=node%c", 'A'+rank), "NCCL_SOCKET_IFNAME="+device,
		"NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_IB_DISABLE=1", "NCCL_MNNVL_ENABLE=0", "NCCL_NVLS_ENABLE=0", "NCCL_RAS_ENABLE=0",
		"NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=INIT,NET,ENV", "NCCL_DEBUG_FILE="+w.log(rank))
	cmd.Env = append(cmd.Env, w.environment...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second
	return cmd, nil
}

// withoutSettings leaves out what would make this another run than the page describes.
func withoutSettings(environment []string) []string {
	return slices.DeleteFunc(environment, func(setting string) bool {
		return strings.HasPrefix(setting, "NCCL_") || strings.HasPrefix(setting, "EVENKEEL_")
	})
}

// failureLog keeps a process's standard error, and the time of its failure line.
type failureLog struct {
	text bytes.Buffer
	at   time.Time
}

func (n *failureLog) Write(p []byte) (int, error) {
	n.text.Write(p)
	if n.at.IsZero() && bytes.Contains(n.text.Bytes(), []byte(prefix)) {
		n.at = time.Now()
	}
	return len(p), nil
}

// run runs all ranks until they exit. It passes every row to onRow, which may kill a rank. Once a rank has failed, the
// others have afterFailure to exit.
func (w world) run(ctx context.Context, afterFailure time.Duration, onRow func(rank int, r row, kill func(rank int))) ([]exit, error) {
	type event struct {
		rank int
		row  row
		exit *exit
	}
	ctx, cancel := context.WithCancel(ctx)
	events := make(chan event)
	var running sync.WaitGroup
	var commands []*exec.Cmd
	defer func() {
		cancel()
		go func() { running.Wait(); close(events) }()
		for range events { // until no process runs
		}
	}()
	if err := os.Remove(w.id()); err != nil && !errors.Is(err, os.ErrNotExist) { // that of an earlier run
		return nil, err
	}
	for rank := range w.Ranks {
		if err := os.Remove(w.log(rank)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		cmd, err := w.command(ctx, rank)
		if err != nil {
			return nil, err
		}
		stderr := &failureLog{}
		cmd.Stderr = stderr
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
			e := exit{rank: rank, status: cmd.ProcessState.ExitCode(), at: stderr.at}
			if e.at.IsZero() {
				e.at = time.Now()
			}
			if err != nil {
				e.failure = reason(stderr.text.String(), fmt.Sprintf("rank %d: %s", rank, err))
			}
			events <- event{rank: rank, exit: &e}
		})
	}
	var exits []exit
	limit := time.NewTimer(w.OutputTimeout)
	lost := false
	for len(exits) < w.Ranks {
		select {
		case e := <-events:
			if e.exit == nil {
				onRow(e.rank, e.row, func(rank int) { commands[rank].Process.Kill() })
			} else {
				exits = append(exits, *e.exit)
			}
			switch {
			case lost:
			case e.exit != nil && e.exit.failure != "":
				lost = true
				limit.Reset(min(afterFailure, w.OutputTimeout))
			default:
				limit.Reset(w.OutputTimeout)
			}
		case <-limit.C:
			if !lost {
				return exits, fmt.Errorf("%s: no output of any rank for %s; NCCL's logs are %s-rank*.log", w.name, w.OutputTimeout, w.name)
			}
			return exits, nil
		case <-ctx.Done():
			return exits, ctx.Err()
		}
	}
	return exits, nil
}

// reason is the line in which a rank reports its failure, or else the last line of its standard error.
func reason(stderr, otherwise string) string {
	var last string
	for line := range strings.Lines(stderr) {
		if after, ok := strings.CutPrefix(line, prefix); ok {
			return strings.TrimSpace(after)
		}
		last = ": " + strings.TrimSpace(line)
	}
	return otherwise + last
}

// allReduce runs all rows once, and returns those of rank 0.
func (w world) allReduce(ctx context.Context) ([]row, error) {
	var rows []row
	exits, err := w.run(ctx, exitGrace, func(rank int, r row, _ func(int)) {
		if rank == 0 {
			rows = append(rows, r)
		}
	})
	if err != nil {
		return nil, err
	}
	var first *exit
	for i, e := range exits {
		if e.failure != "" && (first == nil || e.causes(*first)) {
			first = &exits[i]
		}
	}
	// The wrong network is reported first: it may have caused the failure.
	if err := w.checkNetwork(first != nil); err != nil {
		return nil, err
	}
	if first != nil {
		return nil, fmt.Errorf("%s: %s; NCCL's logs are %s-rank*.log", w.name, first.failure, w.name)
	}
	return rows, nil
}

// viaServers is what NCCL logs of a channel of CollNet.
const viaServers = "via COLLNET/Evenkeel"

var using = regexp.MustCompile(`Using network ([^\r\n]+)`)

// checkNetwork checks in every rank's log which network NCCL used. A rank that failed may not have chosen one.
func (w world) checkNetwork(hasFailed bool) error {
	for rank := range w.Ranks {
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
			return fmt.Errorf("%s: NCCL used network %s instead of %s; %s has the reason", w.name, used, w.network, filepath.Base(w.log(rank)))
		}
		if w.collNet && !bytes.Contains(text, []byte(viaServers)) {
			return fmt.Errorf("%s: NCCL did not use the reduction servers; %s has the reason", w.name, filepath.Base(w.log(rank)))
		}
	}
	return nil
}

// lose kills something in the middle of a run: the rank `victim`, or something that is no rank, -1. NCCL must report an
// error to all others, and they must exit.
func (w world) lose(ctx context.Context, what string, victim int, killing func(killRank func(int))) (m experiment.Measured, err error) {
	w.forever = true
	var killed time.Time
	rows := 0
	exits, err := w.run(ctx, w.Timeout+abortTimeout, func(rank int, _ row, kill func(int)) {
		if rank == 0 {
			rows++
		}
		if rows == killAfter && killed.IsZero() {
			killed = time.Now()
			killing(kill)
		}
	})
	if err != nil {
		return m, err
	}
	if killed.IsZero() {
		return m, fmt.Errorf("%s: the run failed before %s was killed: %s", w.name, what, exits[0].failure)
	}
	if err := w.checkNetwork(false); err != nil {
		return m, err
	}
	var last exit // of those with an error
	reported, all := 0, w.Ranks
	if victim >= 0 {
		all--
	}
	for _, e := range exits {
		if e.rank == victim {
			continue
		}
		if e.status != failed {
			return m, fmt.Errorf("%s: rank %d got no error when %s was killed: %s; NCCL's logs are %s-rank*.log", w.name, e.rank, what, e.failure, w.name)
		}
		reported++
		if e.at.After(last.at) {
			last = e
		}
	}
	if reported != all {
		return m, fmt.Errorf("%s: %d of %d ranks had not exited %s after %s was killed; NCCL's logs are %s-rank*.log",
			w.name, all-reported, all, time.Since(killed).Round(time.Second), what, w.name)
	}
	return experiment.Measured{Values: map[experiment.Quantity]float64{ErrorAfter: last.at.Sub(killed).Seconds()}, Note: last.failure}, nil
}
