package netns

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// maxDelay is the longest delay, and delayQueue how many packets wait at a time. More are dropped, as by a full queue.
const (
	maxDelay   = time.Second
	delayQueue = 16384
)

// Delay delays all that a star's host sends, at the switch, until it is stopped. Linux does so by netem, which this
// machine's kernel may lack: here the switch routes the host's packets through a TUN device, and this process returns
// them later.
func (l *Lab) Delay(ctx context.Context, link int, delay time.Duration) (stop func() error, err error) {
	switch {
	case link < 0 || link >= len(l.config.Star):
		return nil, fmt.Errorf("no host %d in a star of %d", link, len(l.config.Star))
	case delay <= 0 || delay > maxDelay:
		return nil, fmt.Errorf("delay of %s: above 0, up to %s", delay, maxDelay)
	}
	name, table := fmt.Sprintf("delay%d", link), 100+link
	var device *os.File
	err = l.namespaces[s1].do(func() (err error) {
		if device, err = openTUN(name); err != nil {
			return err
		}
		for _, setting := range []string{"all", name} {
			// What it returns has the address of a host that is elsewhere.
			if err := setSysctl("ipv4/conf/"+setting+"/rp_filter", "0"); err != nil {
				return errors.Join(err, device.Close())
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("delay of host %d: %w", link, err)
	}
	packets := make(chan delayedPacket, delayQueue)
	var relay sync.WaitGroup
	relay.Go(func() { takePackets(device, delay, packets) })
	relay.Go(func() { returnPackets(device, packets) })
	closeDevice := func() error {
		err := device.Close()
		relay.Wait()
		return err
	}
	rule := fmt.Sprintf("iif %s lookup %d", linkName(link), table)
	err = l.run(ctx, s1, "ip -batch -", fmt.Sprintf("link set dev %s mtu %d up", name, l.config.MTU),
		fmt.Sprintf("route add default dev %s table %d", name, table), "rule add "+rule)
	if err != nil {
		return nil, errors.Join(err, closeDevice())
	}
	return func() error {
		return errors.Join(l.run(context.WithoutCancel(ctx), s1, "ip -batch -", "rule del "+rule), closeDevice())
	}, nil
}

// openTUN makes a TUN device in the calling thread's network. It goes when it is closed. The kernel cuts segments to
// packets before it hands them over.
func openTUN(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make TUN device %s: %w", name, err), unix.Close(fd))
	}
	// Not blocking, so that closing it ends a read.
	return os.NewFile(uintptr(fd), name), nil
}

type delayedPacket struct {
	due   time.Time
	bytes []byte
}

// takePackets reads packets until the device is closed.
func takePackets(device *os.File, delay time.Duration, into chan<- delayedPacket) {
	defer close(into)
	buffer := make([]byte, 1<<16)
	for {
		n, err := device.Read(buffer)
		if err != nil {
			return
		}
		select {
		case into <- delayedPacket{time.Now().Add(delay), append([]byte(nil), buffer[:n]...)}:
		default: // the queue is full
		}
	}
}

// returnPackets writes packets when they are due, until there are no more.
func returnPackets(device *os.File, from <-chan delayedPacket) {
	for p := range from {
		if wait := time.Until(p.due); wait > 0 {
			time.Sleep(wait)
		}
		// One that cannot be written is lost, as in a network.
		_, _ = device.Write(p.bytes)
	}
}
