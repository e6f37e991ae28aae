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

// Hub is one of the servers of a star. It listens, writes the address to out as a line, and accepts a connection of
// each spoke. Then it sends and receives as much as it can on all connections, until the spokes close them. In a
// ping-pong, it waits for a message of each spoke and answers all. At the end it writes a Report of what it received.
func Hub(o Options, out io.Writer) error {
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
		return answerAll(o, flows)
	}
	return exchange(o, flows, false, out)
}

// Spoke is one of the clients. It connects to all hubs, and closes the connections after the given length. It writes a
// Report of what it received. In a ping-pong each message goes to the next hub, and the Report has the round-trip time.
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

// exchange sends and receives on all flows, each direction with a thread of its own. The side that closes does so when
// it has counted for the given length.
func exchange(o Options, flows []int, closes bool, out io.Writer) error {
	var total atomic.Uint64
	var start, last atomic.Int64 // nanoseconds since zero; 0 until the first byte is there
	zero := time.Now()
	// Both sides shut down all flows. A reset, or a closed window, would leave a thread blocked.
	shutdown := sync.OnceFunc(func() {
		for _, fd := range flows {
			unix.Shutdown(fd, unix.SHUT_WR)
		}
	})
	receive := func(fd int) error {
		buffers := o.buffers()
		for i := 0; ; i++ {
			n, err := transfer(unix.SYS_RECVFROM, fd, buffers[i%o.Depth], 0)
			if closed(n, err) {
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
			} else if closes {
				shutdown()
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
			shutdown() // the others would wait for its bytes
		}
		all = append(all, err)
	}
	if err := errors.Join(all...); err != nil {
		return err
	}
	counted := time.Duration(last.Load() - start.Load())
	if counted < o.Length/2 {
		return fmt.Errorf("the other side closed after %s of %s", counted, o.Length)
	}
	return json.NewEncoder(out).Encode(Report{Bytes: total.Load(), Seconds: counted.Seconds()})
}

// closed reports whether either side has closed the connection.
func closed(n int, err error) bool {
	return n == 0 && err == nil || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
}

// answerAll waits for a message on each flow and then sends one back on all.
func answerAll(o Options, flows []int) error {
	message := o.buffers()[0]
	for {
		for _, call := range []struct {
			number uintptr
			flags  int
		}{{unix.SYS_RECVFROM, unix.MSG_WAITALL}, {unix.SYS_SENDTO, unix.MSG_NOSIGNAL}} {
			for _, fd := range flows {
				n, err := transfer(call.number, fd, message, call.flags)
				if closed(n, err) {
					return nil
				}
				if err != nil {
					return fmt.Errorf("ping-pong: %w", err)
				}
			}
		}
	}
}

// ping sends a message when the last one has been answered, on each flow in turn.
func ping(o Options, flows []int, out io.Writer) error {
	message := o.buffers()[0]
	times := make([]time.Duration, 0, 1<<20)
	for start := time.Now(); time.Since(start) < o.Length && len(times) < cap(times); {
		fd := flows[len(times)%len(flows)]
		sent := time.Now()
		if _, err := transfer(unix.SYS_SENDTO, fd, message, unix.MSG_NOSIGNAL); closed(1, err) {
			break
		} else if err != nil {
			return fmt.Errorf("send: %w", err)
		}
		n, err := transfer(unix.SYS_RECVFROM, fd, message, unix.MSG_WAITALL)
		if closed(n, err) {
			break // another spoke has closed first
		}
		if err != nil || n < o.Size {
			return fmt.Errorf("receive: %d of %d bytes: %w", n, o.Size, err)
		}
		times = append(times, time.Since(sent))
	}
	if len(times) == 0 {
		return errors.New("no answer arrived")
	}
	slices.Sort(times)
	return json.NewEncoder(out).Encode(Report{
		Bytes: uint64(len(times) * o.Size), Seconds: o.Length.Seconds(), P50: times[len(times)/2].Seconds(),
	})
}
