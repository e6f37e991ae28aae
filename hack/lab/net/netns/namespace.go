package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// A namespace is a network namespace without a name. It exists as long as its owner has it open or a process runs in
// it, so nothing remains when the owner is killed.
type namespace struct {
	// PID and FD are the owner's process and its open file.
	PID, FD int
	// Inode is unique among present namespaces, Cookie among all that this kernel ever had.
	Inode, Cookie uint64
}

// newNamespace creates a network namespace, which this process owns until the file is closed.
func newNamespace() (namespace, *os.File, error) {
	var file *os.File
	s := namespace{PID: os.Getpid()}
	err := onThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		if file, err = os.Open(threadSpace); err != nil {
			return err
		}
		s.Cookie, err = cookie()
		return err
	})
	if err != nil {
		if file != nil {
			file.Close()
		}
		return namespace{}, nil, fmt.Errorf("make a network namespace: %w", err)
	}
	s.FD = int(file.Fd())
	var stat unix.Stat_t
	if err := unix.Fstat(s.FD, &stat); err != nil {
		return namespace{}, nil, errors.Join(fmt.Errorf("inspect a network namespace: %w", err), file.Close())
	}
	s.Inode = stat.Ino
	return s, file, nil
}

// path is where the namespace can be opened, from any network.
func (s namespace) path() string { return fmt.Sprintf("/proc/%d/fd/%d", s.PID, s.FD) }

// exists reports whether the owner still has it open.
func (s namespace) exists() bool { return s.isAt(s.path()) }

// isAt reports whether path leads to this namespace. The numbers of dead processes and namespaces are used again.
func (s namespace) isAt(path string) bool {
	var stat unix.Stat_t
	if unix.Stat(path, &stat) != nil || stat.Ino != s.Inode {
		return false
	}
	same := false
	err := inside(path, func() error {
		found, err := cookie()
		same = found == s.Cookie
		return err
	})
	return err == nil && same
}

// do runs f, on a thread of its own, in the namespace: sockets that f opens belong to it.
func (s namespace) do(f func() error) error { return inside(s.path(), f) }

// processes lists the processes in the namespace, other than this one.
func (s namespace) processes() ([]int, error) {
	links, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, link := range links {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(link))))
		if err == nil && pid != os.Getpid() && s.isAt(link) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// endProcesses kills all processes in the namespace and waits until they are gone.
func (s namespace) endProcesses(ctx context.Context) error {
	return poll(ctx, func() error {
		pids, err := s.processes()
		if err != nil {
			return err
		}
		for _, pid := range pids {
			unix.Kill(pid, unix.SIGKILL) // it may have exited by itself
		}
		if len(pids) > 0 {
			return fmt.Errorf("processes %v are still in the lab's network", pids)
		}
		return nil
	})
}

const threadSpace = "/proc/thread-self/ns/net"

// inside runs f in the network namespace that path leads to.
func inside(path string, f func() error) error {
	return onThread(func() error {
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter %s: %w", path, err)
		}
		return f()
	})
}

// onThread runs f, which may change the network namespace, on a thread that no other goroutine uses meanwhile.
func onThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		result <- func() error {
			home, err := os.Open(threadSpace)
			if err != nil {
				return err
			}
			defer home.Close()
			err = f()
			// A thread that cannot return stays locked, and so exits with this goroutine.
			if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
				runtime.UnlockOSThread()
			}
			return err
		}()
	}()
	return <-result
}

// cookie is the number of the calling thread's network namespace. The kernel never uses it again.
func cookie() (uint64, error) {
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(socket)
	return unix.GetsockoptUint64(socket, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}

// setSysctl sets a setting of the calling thread's network.
func setSysctl(name, value string) error {
	if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil {
		return fmt.Errorf("set net/%s to %s: %w", name, value, err)
	}
	return nil
}

// poll calls check until it returns nil. When ctx ends, it returns the last error.
func poll(ctx context.Context, check func() error) error {
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func isAbsent(err error) bool { return errors.Is(err, fs.ErrNotExist) }
