package workload

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
)

// loopback is the interface that all ranks on this machine share.
const loopback = "lo"

// Quantities of [Captured].
var (
	ClearPackets  = experiment.Quantity{Name: "clear_packets", Title: "packets with elements in clear", LowerIsBetter: true}
	RecordPackets = experiment.Quantity{Name: "record_packets", Title: "packets with records of TLS"}
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

// capture looks at all packets of the loopback interface while something runs.
func capture(run func() error) (seen captured, err error) {
	lo, err := net.InterfaceByName(loopback)
	if err != nil {
		return seen, fmt.Errorf("capture: %w", err)
	}
	// In network byte order (packet(7)).
	protocol := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_IP))
	socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(protocol))
	if err != nil {
		return seen, fmt.Errorf("capture: a packet socket, which needs root: %w", err)
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
	go func() { ran <- run() }()
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

// Captured runs a contender of [Collective] on this machine while it captures what is sent. It fails if a contender
// that encrypts sends elements in clear, or no record of TLS; and if one in clear sends no element that the capture
// sees, so that it would see none.
func Captured(of experiment.Contender, encrypts bool) experiment.Contender {
	return experiment.Contender{Name: "capture of " + of.Name, Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		seen, err := capture(func() error {
			of, err := of.Run(ctx, r)
			m.Versions = of.Versions
			return err
		})
		if err == nil {
			err = seen.check(encrypts)
		}
		m.Values = outcome{Passed: 1, ClearPackets: float64(seen.Clear), RecordPackets: float64(seen.Records)}
		return m, err
	}}
}

func (c captured) check(encrypts bool) error {
	switch {
	case encrypts && c.Clear > 0:
		return fmt.Errorf("it sends elements in clear: %d packets have them (or other programs use the loopback interface)", c.Clear)
	case encrypts && c.Records == 0:
		return errors.New("it has sent no record of TLS")
	case !encrypts && c.Clear == 0:
		return errors.New("the capture has seen no element, so it would see none in clear")
	}
	return nil
}
