package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// loadCommand is the hidden command of a process that only computes.
const loadCommand = "compute-until-killed"

// startLoad starts processes that keep processors busy, at the usual priority, until stop is called or this process
// ends.
func startLoad(n int) (stop func() error, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	begin, quit := make(chan error), make(chan struct{})
	ended := make(chan error)
	go func() {
		// A child gets its signal when the thread that started it ends, which then must be this goroutine's alone.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var children []*exec.Cmd
		for range n {
			cmd := exec.Command(self, loadCommand)
			cmd.Stderr = os.Stderr
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
			if err = cmd.Start(); err != nil {
				break
			}
			children = append(children, cmd)
		}
		begin <- err
		<-quit
		var all []error
		for _, cmd := range children {
			if err := cmd.Process.Kill(); err != nil {
				all = append(all, fmt.Errorf("load: %w before its end", err))
			}
			cmd.Wait() //nolint:errcheck // it was killed
		}
		ended <- errors.Join(all...)
	}()
	stop = func() error {
		close(quit)
		return <-ended
	}
	if err := <-begin; err != nil {
		return nil, errors.Join(fmt.Errorf("load: %w", err), stop())
	}
	return stop, nil
}

// compute is such a process.
func compute() error {
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, 0); err != nil {
		return fmt.Errorf("load: nice 0: %w (this program runs at a lower priority, which only root can raise)", err)
	}
	//lint:ignore SA5002 computing is all that it does
	for {
	}
}
