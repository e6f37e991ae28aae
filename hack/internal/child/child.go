// Package child runs programs that end with this one.
package child

import (
	"context"
	"os/exec"
	"syscall"
	"time"
)

// Grace is how long a program and its children may clean up after an interrupt, and how long their output may stay open
// after the program's end.
const Grace = 90 * time.Second

// Command prepares a program in a process group of its own. The end of ctx interrupts the whole group, and so does the
// end of this process the program.
func Command(ctx context.Context, dir, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGINT}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = Grace
	return cmd
}

// Run runs such a program, and kills what an interrupt has left of its group.
func Run(ctx context.Context, cmd *exec.Cmd) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	return Wait(ctx, cmd)
}

// Wait waits for such a program, as [Run] does.
func Wait(ctx context.Context, cmd *exec.Cmd) error {
	err := cmd.Wait()
	if ctx.Err() != nil {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) //nolint:errcheck // the group is usually gone
		return context.Cause(ctx)
	}
	return err
}
