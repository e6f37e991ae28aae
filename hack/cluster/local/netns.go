package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// A netThread is an operating system thread that stays in one network namespace. Functions that it runs and processes
// that it starts use that network.
//
// The thread runs until the netThread is closed. That matters to its children: Linux sends a child its parent-death
// signal when the thread that started it exits, not the process.
type netThread struct {
	work chan func()
	quit chan struct{}
}

func netnsPath(name string) string { return filepath.Join(netnsFolder, name) }

// newNetThread starts a thread in the named network namespace, or in the
// process's own if name is empty.
func newNetThread(name string) (*netThread, error) {
	t := &netThread{work: make(chan func()), quit: make(chan struct{})}
	entered := make(chan error)
	body := func() {
		// Never unlocked: a thread in another namespace must not run other goroutines, and Go ends it with this one.
		if name != "" {
			if err := enterNetns(name); err != nil {
				entered <- err
				return
			}
		}
		entered <- nil
		for {
			select {
			case f := <-t.work:
				f()
			case <-t.quit:
				return
			}
		}
	}
	go onOwnThread(body)
	return t, <-entered
}

// onOwnThread runs f locked to a thread that is not the process's main one: other programs take the main thread's
// network for the process's.
func onOwnThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() != os.Getpid() {
		f()
		return
	}
	locked := make(chan struct{})
	go func() { // while this goroutine holds the main thread, the other gets another
		runtime.LockOSThread()
		close(locked)
		f()
	}()
	<-locked
	runtime.UnlockOSThread()
}

// enterNetns moves the calling thread, which must be locked.
func enterNetns(name string) error {
	file, err := os.Open(netnsPath(name))
	if err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	defer file.Close()
	if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", name, err)
	}
	return nil
}

// do runs f on the thread and returns its error.
func (t *netThread) do(f func() error) error {
	done := make(chan error)
	select {
	case t.work <- func() { done <- f() }:
		return <-done
	case <-t.quit:
		return errors.New("the network thread has exited")
	}
}

// close ends the thread after its current function.
func (t *netThread) close() { close(t.quit) }

// dial connects to an IP address from the thread's network; it fits
// http.Transport's DialContext.
func (t *netThread) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	dialer := net.Dialer{Timeout: 3 * time.Second}
	err = t.do(func() (err error) {
		// With a literal address, Go creates the socket on this thread.
		conn, err = dialer.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// forward copies connections from listener to address as the thread sees it,
// until the listener is closed.
func (t *netThread) forward(listener net.Listener, address string) error {
	for {
		client, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("forward %s: %w", listener.Addr(), err)
		}
		go func() {
			defer client.Close()
			server, err := t.dial(context.Background(), "tcp", address)
			if err != nil {
				return // the client sees its connection closed, as from a dead server
			}
			defer server.Close()
			done := make(chan struct{}, 2)
			pump := func(to, from net.Conn) {
				io.Copy(to, from)
				// Forward the end of the stream; the other direction may continue.
				to.(*net.TCPConn).CloseWrite()
				done <- struct{}{}
			}
			go pump(server, client)
			go pump(client, server)
			<-done
			<-done
		}()
	}
}

// processesIn lists the processes that run in a network namespace.
func processesIn(name string) ([]int, error) {
	var want unix.Stat_t
	if err := unix.Stat(netnsPath(name), &want); err != nil {
		return nil, err
	}
	var pids []int
	links, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		return nil, err
	}
	for _, link := range links {
		var got unix.Stat_t
		if unix.Stat(link, &got) != nil || got.Dev != want.Dev || got.Ino != want.Ino {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(link)))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// endProcessesIn kills the processes in a network namespace, if it exists, and waits until they are gone.
func endProcessesIn(name string, timeout time.Duration) error {
	return poll(timeout, 20*time.Millisecond, nil, func() error {
		pids, err := processesIn(name)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, pid := range pids {
			unix.Kill(pid, unix.SIGKILL) // it may have exited by itself
		}
		if len(pids) > 0 {
			return fmt.Errorf("processes %v are still in network namespace %s", pids, name)
		}
		return nil
	})
}
