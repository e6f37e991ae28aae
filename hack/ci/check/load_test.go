package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// holdLoad makes the test binary a program that starts load and then waits.
const holdLoad = "hold-load"

func TestMain(m *testing.M) {
	switch {
	case slices.Contains(os.Args, loadCommand):
		fmt.Fprintln(os.Stderr, compute())
		os.Exit(1)
	case slices.Contains(os.Args, holdLoad):
		if _, err := startLoad(2); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println("started")
		// Not select: the runtime would report a deadlock.
		unix.Pause() //nolint:errcheck // it ends with the process
	}
	os.Exit(m.Run())
}

// childrenOf lists the children of a process.
func childrenOf(t *testing.T, pid int) []int {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	var all []int
	for _, thread := range threads {
		text, err := os.ReadFile(thread)
		if errors.Is(err, os.ErrNotExist) {
			continue // the thread has ended
		}
		if err != nil {
			t.Fatal(err)
		}
		for word := range strings.FieldsSeq(string(text)) {
			child, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, child)
		}
	}
	return all
}

// A runner that is killed leaves no busy process, though it cannot end them itself.
func TestLoadEndsWithAKilledRunner(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), os.Args[0], holdLoad)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	children := childrenOf(t, cmd.Process.Pid)
	if len(children) != 2 {
		t.Errorf("%d busy processes, not 2", len(children))
	}
	var open []unix.PollFd
	for _, pid := range children {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		open = append(open, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the runner was not killed")
	}
	const limit = 30_000 // ms
	for i := range open {
		n, err := 0, error(unix.EINTR)
		for err == unix.EINTR {
			n, err = unix.Poll(open[i:i+1], limit)
		}
		if err != nil || n != 1 {
			t.Errorf("process %d still runs (%v)", children[i], err)
		}
	}
}

func TestLoadEndsWhenItIsStopped(t *testing.T) {
	stop, err := startLoad(1)
	if err != nil {
		t.Fatal(err)
	}
	children := childrenOf(t, os.Getpid())
	if len(children) != 1 {
		t.Errorf("%v run, not one process", children)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if left := childrenOf(t, os.Getpid()); len(left) > 0 {
		t.Errorf("%v still run", left)
	}
}
