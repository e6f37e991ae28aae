// Package proc runs the programs of a benchmark on the hosts of a network lab.
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
	"strings"
	"syscall"
	"time"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// Timeout is how long a run may take beyond its own length.
const Timeout = 2 * time.Minute

// exitGrace is how long one side may take to exit after the other has failed.
const exitGrace = 10 * time.Second

// A Process is a program that runs on a host of a lab.
type Process struct {
	Role string // for error messages, such as "sender"
	Cmd  *exec.Cmd
	Out  *bufio.Reader

	started time.Time
	stderr  bytes.Buffer
}

// Start starts a program on a host; it ends with ctx.
func Start(ctx context.Context, lab *netns.Lab, host netns.Host, role string, environment []string, argv ...string) (*Process, error) {
	cmd, err := lab.Command(ctx, host, argv...)
	if err != nil {
		return nil, err
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
func (p *Process) Explain(err error) error {
	complaint := strings.TrimSpace(p.stderr.String())
	if lines := strings.Split(complaint, "\n"); len(lines) > 3 {
		complaint = strings.Join(lines[len(lines)-3:], "\n")
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
func (p *Process) CPUPerGB(bytes float64) float64 { return p.cpu().Seconds() / (bytes / 1e9) }

func (p *Process) cpu() time.Duration { return CPUTime(p.Cmd) }

// CPUTime is the processor time of a program that has exited, with its system calls.
func CPUTime(cmd *exec.Cmd) time.Duration {
	return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
}

// Share is the share of all processors' time that programs used in a period.
func Share(used, period time.Duration) float64 {
	return used.Seconds() / period.Seconds() / float64(runtime.NumCPU())
}

// CPUShare is the share of all processors' time that both processes used, since the receiver started.
func CPUShare(sender, receiver *Process) float64 {
	return Share(sender.cpu()+receiver.cpu(), time.Since(receiver.started))
}

// WaitBoth waits until both sides exit, and returns what one of them wrote. When one fails, the other is killed after a grace
// period.
func WaitBoth(receiver, sender, measuring *Process) ([]byte, error) {
	type exit struct {
		of   *Process
		text []byte
		err  error
	}
	exits := make(chan exit, 2)
	for _, p := range []*Process{receiver, sender} {
		go func() {
			text, err := p.Wait()
			exits <- exit{p, text, err}
		}()
	}
	var text []byte
	var all []error
	for range 2 {
		e := <-exits
		if e.of == measuring {
			text = e.text
		}
		if e.err != nil && all == nil {
			timer := time.AfterFunc(exitGrace, func() {
				receiver.Cmd.Process.Kill()
				sender.Cmd.Process.Kill()
			})
			defer timer.Stop()
		}
		if e.err != nil {
			all = append(all, e.err)
		}
	}
	return text, errors.Join(all...)
}

// Output runs a program on this machine and returns what it wrote. The error has the program's standard error.
func Output(ctx context.Context, program string, arguments ...string) ([]byte, error) {
	text, _, err := OutputAndCPU(ctx, program, arguments...)
	return text, err
}

// OutputAndCPU is Output, and the program's processor time.
func OutputAndCPU(ctx context.Context, program string, arguments ...string) ([]byte, time.Duration, error) {
	cmd := exec.CommandContext(ctx, program, arguments...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 10 * time.Second
	text, err := cmd.Output()
	if err == nil {
		return text, CPUTime(cmd), nil
	}
	if cause := context.Cause(ctx); cause != nil {
		return nil, 0, fmt.Errorf("%s: %w", filepath.Base(program), cause)
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil, 0, fmt.Errorf("%s: %w: %s", filepath.Base(program), err, strings.TrimSpace(string(exit.Stderr)))
	}
	return nil, 0, err
}

// JSON is a value of one of our own types as text.
func JSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // no such type has a value that cannot be encoded
	}
	return string(text)
}
