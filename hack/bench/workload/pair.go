package workload

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"
)

// pinned is a command that runs on one processor.
func pinned(ctx context.Context, cpu, program string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "taskset", append([]string{"-c", cpu, program}, args...)...)
}

// runPair runs a program that listens and one that connects, and returns the output of the reporting one. Both end with ctx.
func runPair(ctx context.Context, listener, connector *exec.Cmd, ready func(context.Context) error, reporting *exec.Cmd) ([]byte, error) {
	var out bytes.Buffer
	var stderr [2]bytes.Buffer
	reporting.Stdout = &out
	listener.Stderr, connector.Stderr = &stderr[0], &stderr[1]
	if err := listener.Start(); err != nil {
		return nil, err
	}
	exited := make(chan error, 1)
	go func() { exited <- listener.Wait() }()
	err := ready(ctx)
	if err == nil {
		err = connector.Run()
	}
	if err != nil {
		_ = listener.Process.Kill() // it may have exited by itself
		<-exited
		return nil, fmt.Errorf("%w: %s%s", err, stderr[0].Bytes(), stderr[1].Bytes())
	}
	if err := <-exited; err != nil {
		return nil, fmt.Errorf("%w: %s", err, stderr[0].Bytes())
	}
	return out.Bytes(), nil
}

func freePort() (int, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil
}

// awaitPort waits until a program listens at a port. It does not connect, as perftest accepts one connection only.
func awaitPort(ctx context.Context, port int) error {
	wanted := fmt.Sprintf(":%04X", port)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
			text, err := os.ReadFile(table)
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(text)) {
				// Local address, peer's address, state: 0A is listening.
				fields := strings.Fields(line)
				if len(fields) > 3 && strings.HasSuffix(fields[1], wanted) && fields[3] == "0A" {
					return nil
				}
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no program listens at port %d: %w", port, context.Cause(ctx))
		case <-tick.C:
		}
	}
}
