package sockets

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Hub is one of the servers of a star: it listens, writes the address to out as
// a line, and takes a connection from each of its spokes. Then it sends them as
// much as it can and takes what they send, both at a time on all connections,
// until they are gone; of a ping-pong, it waits for a message from each and
// answers all. It ends with a Report of what it took.
func Hub(o Options, out io.Writer) error {
	if err := o.check(); err != nil {
		return err
	}
	o.prepare()
	flows, err := takeIn(o, out)
	defer closeAll(flows)
	if err != nil {
		return err
	}
	if o.PingPong {
		return gather(o, flows)
	}
	return exchange(o, flows, false, out)
}

// Spoke is one of the clients: it connects to all hubs, and ends what they do
// with it after the length asked for. It writes a Report of what it took; of a
// ping-pong, where each message goes to the next hub, of the time that took.
func Spoke(o Options, out io.Writer) error {
	o.Flows = len(o.Hubs)
	if err := o.check(); err != nil {
		return err
	}
	o.prepare()
	flows, err := connectAll(o.Hubs)
	defer closeAll(flows)
	if err != nil {
		return err
	}
	if o.PingPong {
		return ping(o, flows, out)
	}
	return exchange(o, flows, true, out)
}

// exchange moves bytes in both directions of all flows, each with a thread of
// its own. Who ends it does so when it has counted long enough.
func exchange(o Options, flows []int, ends bool, out io.Writer) error {
	var total atomic.Uint64
	var start, last atomic.Int64 // nanoseconds since zero; 0 until the first byte is there
	zero := time.Now()
	// Who ends it says so on all flows, and the other side says so too: resets,
	// or a window that stays shut, would leave somebody waiting.
	end := sync.OnceFunc(func() {
		for _, fd := range flows {
			unix.Shutdown(fd, unix.SHUT_WR)
		}
	})
	receive := func(fd int) error {
		buffers := o.buffers()
		for i := 0; ; i++ {
			n, err := transfer(unix.SYS_RECVFROM, fd, buffers[i%o.Depth], 0)
			if gone(n, err) {
				unix.Shutdown(fd, unix.SHUT_WR)
				return nil
			}
			if err != nil {
				return fmt.Errorf("receive: %w", err)
			}
			now := int64(time.Since(zero))
			start.CompareAndSwap(0, now)
			if now < start.Load()+int64(o.Length) {
				total.Add(uint64(n))
				last.Store(now)
			} else if ends {
				end()
			}
		}
	}
	failures := make(chan error, 2*len(flows))
	for _, fd := range flows {
		for _, work := range []func(int) error{receive, o.sendOn} {
			go func() {
				runtime.LockOSThread()
				err := work(fd)
				failures <- err
			}()
		}
	}
	var all []error
	for range 2 * len(flows) {
		err := <-failures
		if err != nil {
			end() // the others would wait for its bytes
		}
		all = append(all, err)
	}
	if err := errors.Join(all...); err != nil {
		return err
	}
	counted := time.Duration(last.Load() - start.Load())
	if counted < o.Length/2 {
		return fmt.Errorf("the other side ended after %s of %s", counted, o.Length)
	}
	return json.NewEncoder(out).Encode(Report{Bytes: total.Load(), Seconds: counted.Seconds()})
}

// gone reports whether the other side, or this one, has ended the connection.
func gone(n int, err error) bool {
	return n == 0 && err == nil || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
}

// gather waits for a message on each flow and sends one back on all.
func gather(o Options, flows []int) error {
	message := o.buffers()[0]
	for {
		for _, call := range []struct {
			number uintptr
			flags  int
		}{{unix.SYS_RECVFROM, unix.MSG_WAITALL}, {unix.SYS_SENDTO, unix.MSG_NOSIGNAL}} {
			for _, fd := range flows {
				n, err := transfer(call.number, fd, message, call.flags)
				if gone(n, err) {
					return nil
				}
				if err != nil {
					return fmt.Errorf("gather: %w", err)
				}
			}
		}
	}
}

// ping sends a message when the last one has come back, on each flow in turn.
func ping(o Options, flows []int, out io.Writer) error {
	message := o.buffers()[0]
	times := make([]time.Duration, 0, 1<<20)
	for start := time.Now(); time.Since(start) < o.Length && len(times) < cap(times); {
		fd := flows[len(times)%len(flows)]
		sent := time.Now()
		if _, err := transfer(unix.SYS_SENDTO, fd, message, unix.MSG_NOSIGNAL); gone(1, err) {
			break
		} else if err != nil {
			return fmt.Errorf("send: %w", err)
		}
		n, err := transfer(unix.SYS_RECVFROM, fd, message, unix.MSG_WAITALL)
		if gone(n, err) {
			break // another spoke has ended first
		}
		if err != nil || n < o.Size {
			return fmt.Errorf("receive: %d of %d bytes: %w", n, o.Size, err)
		}
		times = append(times, time.Since(sent))
	}
	if len(times) == 0 {
		return errors.New("nothing came back")
	}
	slices.Sort(times)
	return json.NewEncoder(out).Encode(Report{
		Bytes: uint64(len(times) * o.Size), Seconds: o.Length.Seconds(), P50: times[len(times)/2].Seconds(),
	})
}
