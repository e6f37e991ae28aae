// Package proc runs the programs of a benchmark, on this machine or on the hosts of a network lab.
package proc

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
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"evenkeel.dev/evenkeel/hack/internal/child"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	// Timeout is how long a run may take beyond its own length.
	Timeout = 2 * time.Minute
	// exitGrace is how long the others may take to exit after one has failed.
	exitGrace = 10 * time.Second
	// complaintLines is how many lines of a program's standard error are part of an error: the last ones.
	complaintLines = 3
)

// A Process is a program that runs beside others.
type Process struct {
	Role string // for error messages, such as "sender"
	Cmd  *exec.Cmd
	Out  *bufio.Reader

	started time.Time
	stderr  bytes.Buffer
}

// Start starts a program on a host of a lab, or without a lab on this machine. It is killed when ctx or this process
// ends.
func Start(ctx context.Context, lab *netns.Lab, host netns.Host, role string, environment []string, argv ...string) (*Process, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if lab != nil {
		var err error
		if cmd, err = lab.Command(ctx, host, argv...); err != nil {
			return nil, err
		}
	}
	p := &Process{Role: role, Cmd: cmd, started: time.Now()}
	cmd.Env = append(os.Environ(), environment...)
	cmd.Stderr = &p.stderr
	cmd.WaitDelay = time.Second
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.Out = bufio.NewReader(pipe)
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", filepath.Base(argv[0]), err)
	}
	return p, nil
}

// Kill ends the process and returns cause with the end of the process's standard error.
func (p *Process) Kill(cause error) error {
	p.Cmd.Process.Kill()
	p.Cmd.Wait()
	return p.Explain(cause)
}

// Explain adds the last lines of the process's standard error to an error.
func (p *Process) Explain(err error) error { return explain(err, p.stderr.Bytes()) }

func explain(err error, stderr []byte) error {
	complaint := strings.TrimSpace(string(stderr))
	if lines := strings.Split(complaint, "\n"); len(lines) > complaintLines {
		complaint = strings.Join(lines[len(lines)-complaintLines:], "\n")
	}
	if complaint == "" {
		return err
	}
	return fmt.Errorf("%w: %s", err, complaint)
}

// Wait waits until the process exits and returns what it wrote.
func (p *Process) Wait() ([]byte, error) {
	text, err := io.ReadAll(p.Out)
	if exit := p.Cmd.Wait(); exit != nil {
		err = p.Explain(fmt.Errorf("%s: %w", p.Role, exit))
	}
	return text, err
}

// CPUPerGB is the processor time of a process that has exited, in seconds for each GB of these bytes.
func (p *Process) CPUPerGB(bytes float64) float64 { return CPUTime(p.Cmd).Seconds() / (bytes / 1e9) }

// CPUTime is the processor time of a program that has exited, with its system calls.
func CPUTime(cmd *exec.Cmd) time.Duration {
	return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
}

// ThreadTime is the processor time so far of those threads that are selected by their numbers and names, and how many
// they are. Its unit is fine enough for threads that do little.
func (p *Process) ThreadTime(selected func(id int, name string) bool) (used time.Duration, threads int, err error) {
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", p.Cmd.Process.Pid))
	if err != nil {
		return 0, 0, err
	}
	if len(all) == 0 {
		return 0, 0, fmt.Errorf("the %s exited early", p.Role)
	}
	for _, thread := range all {
		name, nameErr := os.ReadFile(filepath.Join(thread, "comm"))
		text, err := os.ReadFile(filepath.Join(thread, "schedstat"))
		if nameErr != nil || err != nil {
			continue // the thread has ended
		}
		if id, err := strconv.Atoi(filepath.Base(thread)); err != nil || !selected(id, strings.TrimSpace(string(name))) {
			continue
		}
		// The first is the time on a processor, in nanoseconds (sched-stats of the kernel's documentation).
		spent, _, _ := strings.Cut(string(text), " ")
		nanoseconds, err := strconv.ParseInt(spent, 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("unexpected %s/schedstat: %w", thread, err)
		}
		used += time.Duration(nanoseconds)
		threads++
	}
	return used, threads, nil
}

// Share is the share of all processors' time that programs used in a period.
func Share(used, period time.Duration) float64 {
	return used.Seconds() / period.Seconds() / float64(runtime.NumCPU())
}

// CPUShare is the share of all processors' time that both processes used, since the receiver started.
func CPUShare(sender, receiver *Process) float64 {
	return Share(CPUTime(sender.Cmd)+CPUTime(receiver.Cmd), time.Since(receiver.started))
}

// WaitBoth waits until both processes exit, and returns what the first of them wrote. When one fails, the other is
// killed after a grace period.
func WaitBoth(measuring, other *Process) ([]byte, error) {
	errs := make(chan error, 2)
	var text []byte
	go func() {
		var err error
		text, err = measuring.Wait()
		errs <- err
	}()
	go func() {
		_, err := other.Wait()
		errs <- err
	}()
	first := <-errs
	if first != nil {
		timer := time.AfterFunc(exitGrace, func() {
			measuring.Cmd.Process.Kill()
			other.Cmd.Process.Kill()
		})
		defer timer.Stop()
	}
	second := <-errs
	return text, errors.Join(first, second)
}

// Output runs a program of [child.Command] and returns what it wrote. An error has the end of the program's standard
// error.
func Output(ctx context.Context, cmd *exec.Cmd) ([]byte, error) {
	var text, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &said
	if err := child.Run(ctx, cmd); err != nil {
		return nil, explain(fmt.Errorf("%s: %w", filepath.Base(cmd.Path), err), said.Bytes())
	}
	return text.Bytes(), nil
}

// JSON is a value of one of our own types as text.
func JSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // no such type has a value that cannot be encoded
	}
	return string(text)
}
