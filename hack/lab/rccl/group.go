package rccl

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// A Config describes a group of ranks.
type Config struct {
	// Ranks is their number, and PerHost how many of them are on one host, for RCCL; default 1. Ranks of a host share
	// memory.
	Ranks, PerHost int
	// Sockets is RCCL's own network, instead of the plugin.
	Sockets bool
	// Env are further settings, NAME=VALUE.
	Env []string
	// Command prepares the process of a host's rank; default a process of this machine, whose network is the loopback
	// interface.
	Command func(ctx context.Context, host int, argv ...string) (*exec.Cmd, error)
	// Logs is a folder for RCCL's log of each rank.
	Logs string
}

// A Group is the ranks of a job. Every command goes to all ranks, and each answers when it has done it, so that a
// command is a barrier.
type Group struct {
	Ranks []*Rank
	logs  string
}

// A Rank is a process.
type Rank struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers chan string // closed when the process has ended
	stderr  strings.Builder
}

// Start starts the ranks. They end with ctx.
func (l *Lab) Start(ctx context.Context, c Config) (*Group, error) {
	if c.PerHost == 0 {
		c.PerHost = 1
	}
	if c.Command == nil {
		c.Command = func(ctx context.Context, _ int, argv ...string) (*exec.Cmd, error) {
			cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			return cmd, nil
		}
		c.Env = append([]string{"NCCL_SOCKET_IFNAME=lo"}, c.Env...)
	}
	g := &Group{logs: c.Logs}
	for i := range c.Ranks {
		host := i / c.PerHost
		cmd, err := c.Command(ctx, host, l.argv()...)
		if err != nil {
			g.Kill()
			return nil, err
		}
		// Settings of the caller's environment would make this another run.
		cmd.Env = slices.DeleteFunc(os.Environ(), func(setting string) bool {
			return strings.HasPrefix(setting, "NCCL_") || strings.HasPrefix(setting, "RCCL_") || strings.HasPrefix(setting, "EVENKEEL_")
		})
		cmd.Env = append(cmd.Env, fmt.Sprintf("NCCL_HOSTID=host%d", host), "LAB_DEVICE="+strconv.Itoa(i%c.PerHost),
			"NCCL_P2P_DISABLE=1", "NCCL_IB_DISABLE=1", "NCCL_DEBUG=INFO", "NCCL_DEBUG_FILE="+g.logFile(i))
		if !c.Sockets {
			cmd.Env = append(cmd.Env, "NCCL_NET_PLUGIN=evenkeel")
		}
		cmd.Env = append(cmd.Env, c.Env...)
		r, err := startRank(cmd)
		if err != nil {
			g.Kill()
			return nil, err
		}
		g.Ranks = append(g.Ranks, r)
	}
	return g, nil
}

func startRank(cmd *exec.Cmd) (*Rank, error) {
	r := &Rank{cmd: cmd, answers: make(chan string, 1)}
	var err error
	if r.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stderr = &r.stderr
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a rank: %w", err)
	}
	go func() {
		defer close(r.answers)
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			// RCCL prints its version there too.
			if line := lines.Text(); strings.HasPrefix(line, "ok") || strings.HasPrefix(line, "failed ") {
				r.answers <- line
			}
		}
	}()
	return r, nil
}

func (g *Group) logFile(rank int) string {
	if g.logs == "" {
		return "/dev/null"
	}
	return filepath.Join(g.logs, fmt.Sprintf("rank%d.log", rank))
}

// Log is what RCCL and the plugin have logged at a rank.
func (g *Group) Log(rank int) (string, error) {
	text, err := os.ReadFile(g.logFile(rank))
	return string(text), err
}

// Send gives a rank a command, without waiting.
func (r *Rank) Send(command string) error {
	_, err := io.WriteString(r.in, command+"\n")
	return err
}

// Answer waits for the answer to the last command: what follows "ok", or an error.
func (r *Rank) Answer(ctx context.Context) (string, error) {
	select {
	case line, running := <-r.answers:
		if !running {
			return "", errors.Join(errors.New("the process has ended"), r.cmd.Wait(), errors.New(strings.TrimSpace(r.stderr.String())))
		}
		if failure, failed := strings.CutPrefix(line, "failed "); failed {
			return "", errors.New(failure)
		}
		return strings.TrimSpace(strings.TrimPrefix(line, "ok")), nil
	case <-ctx.Done():
		return "", fmt.Errorf("no answer: %w", context.Cause(ctx))
	}
}

// Signal sends a signal to the rank's process.
func (r *Rank) Signal(s os.Signal) error { return r.cmd.Process.Signal(s) }

// All gives every rank a command, and returns their answers.
func (g *Group) All(ctx context.Context, command string) ([]string, error) {
	return g.Each(ctx, func(int) string { return command })
}

// Each gives every rank a command of its own, and returns their answers.
func (g *Group) Each(ctx context.Context, command func(rank int) string) ([]string, error) {
	answers, failures := make([]string, len(g.Ranks)), make([]error, len(g.Ranks))
	var wait sync.WaitGroup
	for i, r := range g.Ranks {
		wait.Go(func() {
			if failures[i] = r.Send(command(i)); failures[i] == nil {
				answers[i], failures[i] = r.Answer(ctx)
			}
			if failures[i] != nil {
				failures[i] = fmt.Errorf("rank %d: %s: %w", i, strings.Fields(command(i))[0], failures[i])
			}
		})
	}
	wait.Wait()
	return answers, errors.Join(failures...)
}

// Init makes a communicator of all ranks, in an order that place gives; it returns the communicator's number.
func (g *Group) Init(ctx context.Context, place func(rank int) int) (int, error) {
	first := 0
	for i := range g.Ranks {
		if place(i) == 0 {
			first = i
		}
	}
	if err := g.Ranks[first].Send("id"); err != nil {
		return 0, err
	}
	id, err := g.Ranks[first].Answer(ctx)
	if err != nil {
		return 0, fmt.Errorf("rank %d: id: %w", first, err)
	}
	numbers, err := g.Each(ctx, func(rank int) string { return fmt.Sprintf("init %s %d %d", id, len(g.Ranks), place(rank)) })
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(numbers[0])
}

// AllReduce times all-reduces of a communicator, in seconds: of each the slowest rank's.
func (g *Group) AllReduce(ctx context.Context, communicator int, bytes, count int) ([]float64, error) {
	answers, err := g.All(ctx, fmt.Sprintf("allreduce %d %d %d", communicator, bytes, count))
	if err != nil {
		return nil, err
	}
	slowest := make([]float64, count)
	for i, a := range answers {
		times := strings.Fields(a)
		if len(times) != count {
			return nil, fmt.Errorf("rank %d measured %d all-reduces of %d", i, len(times), count)
		}
		for k, text := range times {
			t, err := strconv.ParseFloat(text, 64)
			if err != nil {
				return nil, fmt.Errorf("rank %d: %w", i, err)
			}
			slowest[k] = max(slowest[k], t)
		}
	}
	return slowest, nil
}

// End lets the ranks exit, and returns the error of one that does not end well.
func (g *Group) End() error {
	var all []error
	for i, r := range g.Ranks {
		r.in.Close() //nolint:errcheck // the end of its input ends the process
		for range r.answers {
		}
		if err := r.cmd.Wait(); err != nil {
			all = append(all, fmt.Errorf("rank %d: %w: %s", i, err, strings.TrimSpace(r.stderr.String())))
		}
	}
	return errors.Join(all...)
}

// Kill kills the ranks that still run, and waits for their end.
func (g *Group) Kill() {
	for _, r := range g.Ranks {
		r.cmd.Process.Kill() //nolint:errcheck // it may have ended
		for range r.answers {
		}
		r.cmd.Wait() //nolint:errcheck // it was killed, or was waited for before
	}
}
