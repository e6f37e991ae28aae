package local

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const restartDelay = time.Second

// A service is a process that runs as long as the cluster.
type service struct {
	name string
	argv []string
	env  []string // besides the environment of its owner
}

// A keeper runs services. It restarts a service that exits, until its context ends, and then kills it. The kernel kills
// a service that outlives its keeper.
type keeper struct {
	// thread starts the services, and must run as long as they do.
	thread *netThread
	logs   string // folder, one file per service
	// ended is called each time a service exits by itself; may be nil.
	ended func(name string, err error)
}

// keep runs one service until ctx ends.
func (k *keeper) keep(ctx context.Context, s service) {
	for ctx.Err() == nil {
		err := k.once(ctx, s)
		if ctx.Err() != nil {
			return
		}
		log.Printf("%s ended (%v): starting it again", s.name, err)
		if k.ended != nil {
			k.ended(s.name, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(restartDelay):
		}
	}
}

func (k *keeper) logFile(name string) string { return filepath.Join(k.logs, name+".log") }

// once runs a service until it exits or ctx ends.
func (k *keeper) once(ctx context.Context, s service) error {
	output, err := os.OpenFile(k.logFile(s.name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer output.Close()
	cmd := exec.CommandContext(ctx, s.argv[0], s.argv[1:]...)
	cmd.Stdout, cmd.Stderr = output, output
	cmd.Env = append(os.Environ(), s.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := k.thread.do(cmd.Start); err != nil {
		return fmt.Errorf("start %s: %w", s.name, err)
	}
	return cmd.Wait()
}

// lastLines returns the last lines of a text file, for a message.
func lastLines(path string, n int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
