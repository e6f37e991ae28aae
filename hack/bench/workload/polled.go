package workload

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// Polled sends by plain sockets that the driver moves, a number of them for each connection.
func (t Transfer) Polled(each int) experiment.Contender { return t.polled(polledSockets{each: each}) }

// MPTCP sends by a plain socket of several paths for each connection, which the driver moves.
func (t Transfer) MPTCP() experiment.Contender { return t.polled(polledSockets{each: 1, mptcp: true}) }

func (t Transfer) polled(s polledSockets) experiment.Contender {
	d := &driven{Transfer: t, speed: map[string]float64{}}
	return experiment.Contender{Name: s.label(), Reference: true, Run: func(ctx context.Context, r experiment.Run) (experiment.Measured, error) {
		if err := s.prepare(ctx, r.Lab); err != nil {
			return experiment.Measured{}, err
		}
		return d.run(ctx, r, s.arguments(r.Lab)...)
	}}
}

// polledSockets are plain sockets in place of a plugin: the driver moves them itself, without threads, when it asks for
// a completion. That is the least that any plugin can cost.
type polledSockets struct {
	each  int  // sockets of each connection, which share each message
	mptcp bool // of several paths each
}

const (
	// mptcpPaths is the number of paths of an MPTCP connection. The kernel's limit is one more.
	mptcpPaths = 8
	// firstSubflowPort is the first of the ports to which the further paths of an MPTCP connection go. A path is chosen by
	// a hash that includes the ports.
	firstSubflowPort = 7001
)

func (s polledSockets) label() string {
	switch {
	case s.mptcp:
		return fmt.Sprintf("MPTCP, %d paths, polled", mptcpPaths)
	case s.each == 1:
		return "plain socket, polled"
	}
	return fmt.Sprintf("%d plain sockets, polled, equal shares", s.each)
}

// arguments are those of evenkeel-bench net.
func (s polledSockets) arguments(lab *netns.Lab) []string {
	arguments := []string{"--plain-sockets", strconv.Itoa(s.each), "--listen", lab.Address(netns.H2).String()}
	if s.mptcp {
		arguments = append(arguments, "--mptcp")
	}
	return arguments
}

// prepare makes the receiver's host announce a port for each further path, and lets the sender's host use them.
func (s polledSockets) prepare(ctx context.Context, lab *netns.Lab) error {
	if !s.mptcp {
		return nil
	}
	limit := strconv.Itoa(mptcpPaths)
	for _, host := range []netns.Host{netns.H1, netns.H2} {
		if _, err := lab.Exec(ctx, host, "ip", "mptcp", "limits", "set", "subflow", limit, "add_addr_accepted", limit); err != nil {
			return err
		}
	}
	// A port that was taken back cannot be announced again at once, so those of an earlier run stay.
	announced, err := lab.Exec(ctx, netns.H2, "ip", "mptcp", "endpoint", "show")
	if err != nil {
		return err
	}
	for i := range mptcpPaths - 1 {
		port := strconv.Itoa(firstSubflowPort + i)
		if strings.Contains(announced, "port "+port+" ") {
			continue
		}
		if _, err := lab.Exec(ctx, netns.H2, "ip", "mptcp", "endpoint", "add", lab.Address(netns.H2).String(), "port", port, "signal"); err != nil {
			return err
		}
	}
	return nil
}
