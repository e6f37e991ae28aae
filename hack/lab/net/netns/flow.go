package netns

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"time"
)

// A Flow is a TCP connection from H1 to H2 that sends zeroes as fast as the network allows.
type Flow struct {
	from, to *net.TCPConn
	received atomic.Uint64
}

// OpenFlow opens a flow and starts it.
func (l *Lab) OpenFlow(ctx context.Context) (*Flow, error) {
	var listener *net.TCPListener
	err := l.Do(H2, func() (err error) {
		listener, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(l.Address(H2), 0)))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open a flow: %w", err)
	}
	defer listener.Close()
	dialer := net.Dialer{Timeout: timeout}
	f := &Flow{}
	err = l.Do(H1, func() error {
		// Without a name to resolve, the dial stays on this thread.
		conn, err := dialer.DialContext(ctx, "tcp", listener.Addr().String())
		if err == nil {
			f.from = conn.(*net.TCPConn)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open a flow: %w", err)
	}
	listener.SetDeadline(time.Now().Add(timeout))
	if f.to, err = listener.AcceptTCP(); err != nil {
		f.from.Close()
		return nil, fmt.Errorf("open a flow: %w", err)
	}
	// Both end when the flow is closed.
	go io.Copy(f.from, endless{})
	go io.Copy(f, f.to)
	return f, nil
}

// Ports returns the flow's source and destination ports.
func (f *Flow) Ports() (from, to uint16) {
	port := func(address net.Addr) uint16 { return address.(*net.TCPAddr).AddrPort().Port() }
	return port(f.from.LocalAddr()), port(f.from.RemoteAddr())
}

// Received is the number of bytes that have arrived so far.
func (f *Flow) Received() uint64 { return f.received.Load() }

// Write counts the bytes that arrive.
func (f *Flow) Write(p []byte) (int, error) {
	f.received.Add(uint64(len(p)))
	return len(p), nil
}

// Close closes the flow; data in flight is lost.
func (f *Flow) Close() {
	f.from.SetLinger(0)
	f.from.Close()
	f.to.Close()
}

// endless is a source of zeroes.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }
