package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// captured counts packets of TCP.
type captured struct {
	// Clear have the same four bytes again and again, as elements do that are equal. Encrypted bytes never have that.
	Clear int
	// Records have the header of a record of TLS with data.
	Records int
}

const (
	// sameBytes is for how many bytes four bytes are repeated in clear.
	sameBytes = 256
	// captureWait is how long a read of the capture waits before it looks whether it is to end.
	captureWait = 100 * time.Millisecond
)

// recordHeader begins the records with data of TLS 1.3 (RFC 8446, section 5.2).
var recordHeader = []byte{23, 3, 3}

// add looks at a packet of IPv4.
func (c *captured) add(packet []byte) {
	const protocol = 9 // its place in the header
	if len(packet) <= protocol || packet[protocol] != unix.IPPROTO_TCP {
		return
	}
	if bytes.Contains(packet, recordHeader) {
		c.Records++
	}
	same := 0
	for i := 4; i < len(packet) && same < sameBytes; i++ {
		same++
		if packet[i] != packet[i-4] {
			same = 0
		}
	}
	if same >= sameBytes {
		c.Clear++
	}
}

// capture looks at all packets of the loopback interface while a contender runs.
func capture(ctx context.Context, c contender, t task) (seen captured, err error) {
	lo, err := net.InterfaceByName(loopback.device)
	if err != nil {
		return seen, fmt.Errorf("capture: %w", err)
	}
	// In network byte order (packet(7)).
	protocol := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_IP))
	socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(protocol))
	if err != nil {
		return seen, fmt.Errorf("capture: a packet socket: %w", err)
	}
	defer unix.Close(socket)
	if err := unix.Bind(socket, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: lo.Index}); err != nil {
		return seen, fmt.Errorf("capture: bind to %s: %w", lo.Name, err)
	}
	wait := unix.NsecToTimeval(captureWait.Nanoseconds())
	if err := unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		return seen, fmt.Errorf("capture: %w", err)
	}
	ran := make(chan error, 1)
	go func() {
		_, err := c.attempt(ctx, t)
		ran <- err
	}()
	packet := make([]byte, 1<<16)
	for {
		select {
		case err := <-ran:
			return seen, err
		default:
		}
		n, err := unix.Read(socket, packet)
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
		case err != nil:
			return seen, errors.Join(fmt.Errorf("capture: %w", err), <-ran)
		default:
			seen.add(packet[:n])
		}
	}
}

// checkEncryption captures what contenders send, before they are measured: those that shall encrypt have to, and Gloo in clear shows
// that the capture sees elements.
func checkEncryption(ctx context.Context, contenders []contender) error {
	t := task{tlsProcesses, 100 * time.Millisecond, []int{100_000}, loopback}
	for _, c := range contenders {
		seen, err := capture(ctx, c, t)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		switch {
		case c.encrypts && seen.Clear > 0:
			return fmt.Errorf("%s sends elements in clear: %d packets have them (or other programs use the loopback interface)", c.name, seen.Clear)
		case c.encrypts && seen.Records == 0:
			return fmt.Errorf("%s has sent no record of TLS", c.name)
		case !c.encrypts && c.name != tcp && seen.Clear == 0:
			return fmt.Errorf("%s: the capture has seen no element, so it would see none in clear", c.name)
		}
	}
	return nil
}
