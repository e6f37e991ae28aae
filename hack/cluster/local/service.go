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

// A service is a process that is to run as long as the cluster does.
type service struct {
	name string
	argv []string
	env  []string // besides the environment of its owner
}

// A keeper runs services: it starts each again when it ends, until its
// context does, and kills it then. A service that outlives its keeper is
// killed by the kernel.
type keeper struct {
	// thread the services are started on; it must live as long as they do.
	thread *netThread
	logs   string // folder, one file per service
	// ended is told each time a service ends by itself; may be nil.
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

// once runs a service until it ends or ctx does.
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

// lastLines returns the end of a text file, for a message.
func lastLines(path string, n int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
