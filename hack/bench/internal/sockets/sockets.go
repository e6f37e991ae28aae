// Package sockets sends and receives over plain TCP sockets like a C program, with blocking system calls. Transports
// are compared with it.
package sockets

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Options of one measurement; the same on both sides.
type Options struct {
	Address netip.AddrPort // where the receiver listens; port 0 on its side lets the system choose
	Flows   int            // connections, each served by a thread of its own
	Size    int            // bytes of each write, and maximum of each read
	Depth   int            // buffers of each flow, used in turn
	Length  time.Duration  // how long the receiver counts
	// PingPong sends the next message only when the last one has been echoed.
	PingPong bool
	Hubs     []netip.AddrPort // of a spoke: the addresses of its hubs
}

// A Report is the measurement of the receiver, or of the sender of a ping-pong.
type Report struct {
	Bytes   uint64
	Seconds float64
	P50     float64 `json:",omitempty"` // of a ping-pong's round trips, seconds
}

// Environment is required in a process that calls Send or Receive: without it the Go runtime interrupts long system
// calls.
const Environment = "GODEBUG=asyncpreemptoff=1"

// stallTimeout is the maximum time without progress of a socket.
const stallTimeout = 60 * time.Second

func (o Options) check() error {
	switch {
	case o.Flows < 1 || o.Flows > 256:
		return fmt.Errorf("%d flows: from 1 to 256", o.Flows)
	case o.Size < 1 || o.Size > 64<<20:
		return fmt.Errorf("size %d: from 1 byte to 64 MiB", o.Size)
	case o.Depth < 1 || o.Depth > 64:
		return fmt.Errorf("%d buffers: from 1 to 64", o.Depth)
	case o.Length <= 0:
		return fmt.Errorf("length %s: more than nothing", o.Length)
	}
	return nil
}

// prepare makes the process's threads behave like a C program's. Each flow's threads have a processor of the Go
// scheduler to themselves, and no garbage collection waits for them.
func (o Options) prepare() {
	runtime.GOMAXPROCS(2*o.Flows + 4)
	debug.SetGCPercent(-1)
}

func (o Options) buffers() [][]byte {
	all := make([][]byte, o.Depth)
	for i := range all {
		all[i] = make([]byte, o.Size)
		for at := range all[i] {
			all[i][at] = byte(at) // so that every page is mapped
		}
	}
	return all
}

// acceptAll listens, writes the address to out as a line, and accepts all flows. The caller closes them, also after an
// error.
func acceptAll(o Options, out io.Writer) ([]int, error) {
	listener, err := listen(o)
	if err != nil {
		return nil, err
	}
	defer unix.Close(listener)
	name, err := unix.Getsockname(listener)
	if err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintln(out, addressOf(name)); err != nil {
		return nil, err
	}
	var flows []int
	for range o.Flows {
		fd, err := accept(listener)
		if err != nil {
			return flows, err
		}
		flows = append(flows, fd)
	}
	return flows, nil
}

func closeAll(flows []int) {
	for _, fd := range flows {
		unix.Close(fd)
	}
}

// Receive listens, writes the address to out as a line, and receives on all flows, for the given length from the first
// byte on. Then it closes them and writes a Report to out, as a line of JSON.
func Receive(o Options, out io.Writer) error {
	if err := o.check(); err != nil {
		return err
	}
	o.prepare()
	flows, err := acceptAll(o, out)
	defer closeAll(flows)
	if err != nil {
		return err
	}
	if o.PingPong {
		return echo(o, flows[0])
	}
	var start atomic.Int64 // nanoseconds since zero; 0 until the first byte is there
	zero := time.Now()
	var total atomic.Uint64
	var last atomic.Int64
	err = each(flows, func(fd int) error {
		buffers := o.buffers()
		var bytes uint64
		defer func() { total.Add(bytes) }()
		for i := 0; ; i++ {
			n, err := transfer(unix.SYS_RECVFROM, fd, buffers[i%o.Depth], 0)
			if err != nil {
				// A flow whose link is lost receives nothing; that is no failure.
				if errors.Is(err, unix.EAGAIN) {
					return nil
				}
				return fmt.Errorf("receive: %w", err)
			}
			if n == 0 {
				return errors.New("the sender closed early")
			}
			bytes += uint64(n)
			if i%8 != 0 {
				continue // reading the clock has a cost
			}
			now := int64(time.Since(zero))
			start.CompareAndSwap(0, now)
			if now >= start.Load()+int64(o.Length) {
				last.CompareAndSwap(0, now)
				return nil
			}
		}
	}, func() bool { return last.Load() != 0 })
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(Report{Bytes: total.Load(), Seconds: o.Length.Seconds()})
}

// connectAll opens a flow to each address. The caller closes them, also after an error.
func connectAll(addresses []netip.AddrPort) ([]int, error) {
	var flows []int
	for _, address := range addresses {
		fd, err := connect(address)
		if err != nil {
			return flows, err
		}
		flows = append(flows, fd)
	}
	return flows, nil
}

// sendOn sends on a flow until either side closes it.
func (o Options) sendOn(fd int) error {
	buffers := o.buffers()
	for i := 0; ; i++ {
		for left := buffers[i%o.Depth]; len(left) > 0; {
			n, err := transfer(unix.SYS_SENDTO, fd, left, unix.MSG_NOSIGNAL)
			if closed(n, err) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("send: %w", err)
			}
			left = left[n:]
		}
	}
}

// Send sends until the receiver closes the flows. In a ping-pong it writes a Report to out.
func Send(o Options, out io.Writer) error {
	if err := o.check(); err != nil {
		return err
	}
	o.prepare()
	flows, err := connectAll(slices.Repeat([]netip.AddrPort{o.Address}, o.Flows))
	defer closeAll(flows)
	if err != nil {
		return err
	}
	if o.PingPong {
		return ping(o, flows, out)
	}
	return each(flows, o.sendOn, nil)
}

func echo(o Options, fd int) error {
	message := o.buffers()[0]
	for {
		n, err := transfer(unix.SYS_RECVFROM, fd, message, unix.MSG_WAITALL)
		if n == 0 && err == nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		if _, err := transfer(unix.SYS_SENDTO, fd, message[:n], unix.MSG_NOSIGNAL); err != nil {
			return fmt.Errorf("send: %w", err)
		}
	}
}

// each runs f for every flow on a thread of its own. If done is given and true after one has returned, each makes the
// others return too.
func each(flows []int, f func(fd int) error, done func() bool) error {
	failures := make(chan error, len(flows))
	var all sync.WaitGroup
	for _, fd := range flows {
		all.Go(func() {
			runtime.LockOSThread()
			failures <- f(fd)
		})
	}
	var err error
	for range flows {
		one := <-failures
		if done != nil && done() {
			// A shutdown unblocks those that wait for bytes; their errors are ignored.
			for _, fd := range flows {
				unix.Shutdown(fd, unix.SHUT_RDWR)
			}
			if err == nil {
				err = one
			}
			all.Wait()
			return err
		}
		err = errors.Join(err, one)
	}
	return err
}

// transfer is one blocking system call, without the Go scheduler's hooks.
func transfer(call uintptr, fd int, buffer []byte, flags int) (int, error) {
	for {
		n, _, errno := unix.RawSyscall6(call, uintptr(fd), uintptr(unsafe.Pointer(&buffer[0])), uintptr(len(buffer)), uintptr(flags), 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

func listen(o Options) (int, error) {
	fd, err := socket(o.Address.Addr())
	if err != nil {
		return 0, err
	}
	if err := errors.Join(unix.Bind(fd, sockaddr(o.Address)), unix.Listen(fd, o.Flows)); err != nil {
		unix.Close(fd)
		return 0, fmt.Errorf("listen on %s: %w", o.Address, err)
	}
	return fd, nil
}

func accept(listener int) (int, error) {
	fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	if err != nil {
		return 0, fmt.Errorf("accept: %w", err)
	}
	return fd, tune(fd)
}

func connect(address netip.AddrPort) (int, error) {
	fd, err := socket(address.Addr())
	if err != nil {
		return 0, err
	}
	if err := errors.Join(unix.Connect(fd, sockaddr(address)), tune(fd)); err != nil {
		unix.Close(fd)
		return 0, fmt.Errorf("connect to %s: %w", address, err)
	}
	return fd, nil
}

// socket creates a blocking socket with timeouts.
func socket(address netip.Addr) (int, error) {
	family := unix.AF_INET
	if address.Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	// Accept and connect use these timeouts too.
	limit := unix.NsecToTimeval(int64(stallTimeout))
	err = errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit))
	if err != nil {
		unix.Close(fd)
		return 0, os.NewSyscallError("setsockopt", err)
	}
	return fd, nil
}

func tune(fd int) error {
	return os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
}

func sockaddr(address netip.AddrPort) unix.Sockaddr {
	if address.Addr().Is6() {
		return &unix.SockaddrInet6{Port: int(address.Port()), Addr: address.Addr().As16()}
	}
	return &unix.SockaddrInet4{Port: int(address.Port()), Addr: address.Addr().As4()}
}

func addressOf(name unix.Sockaddr) netip.AddrPort {
	switch name := name.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(name.Addr), uint16(name.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(name.Addr), uint16(name.Port))
	}
	return netip.AddrPort{}
}
