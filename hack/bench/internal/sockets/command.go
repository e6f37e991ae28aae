package sockets

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// commandPrefix begins the names of the hidden subcommands.
const commandPrefix = "sockets-"

// sides are what a process can be, by the name of its subcommand.
var sides = map[string]func(Options, io.Writer) error{"receive": Receive, "send": Send, "hub": Hub, "spoke": Spoke}

// Commands are hidden subcommands for a benchmark: each runs one side of plain sockets in a process of its own.
func Commands() []*cobra.Command {
	var commands []*cobra.Command
	for name, run := range sides {
		commands = append(commands, &cobra.Command{
			Use: commandPrefix + name + " OPTIONS", Hidden: true, Args: cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				var o Options
				if err := json.Unmarshal([]byte(args[0]), &o); err != nil {
					return err
				}
				return run(o, cmd.OutOrStdout())
			},
		})
	}
	return commands
}

// IsCommand reports whether the program's arguments are those of one of the subcommands.
func IsCommand(args []string) bool { return len(args) > 1 && strings.HasPrefix(args[1], commandPrefix) }

// StartSide starts a side on a host of a lab, or without a lab on this machine, by the subcommand of the program that
// calls it: receive, send, hub or spoke.
func StartSide(ctx context.Context, lab *netns.Lab, host netns.Host, side string, o Options) (*proc.Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return proc.Start(ctx, lab, host, side, []string{Environment}, self, commandPrefix+side, proc.JSON(o))
}

// StartListening starts a side that listens, and returns the address that it reports.
func StartListening(ctx context.Context, lab *netns.Lab, host netns.Host, side string, o Options) (*proc.Process, netip.AddrPort, error) {
	o.Address = netip.MustParseAddrPort("127.0.0.1:0")
	if lab != nil {
		o.Address = netip.AddrPortFrom(lab.Address(host), 0)
	}
	p, err := StartSide(ctx, lab, host, side, o)
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	line, err := p.Out.ReadString('\n')
	if err != nil {
		return nil, netip.AddrPort{}, p.Kill(errors.New("plain sockets: a listener did not start"))
	}
	address, err := netip.ParseAddrPort(strings.TrimSpace(line))
	if err != nil {
		return nil, netip.AddrPort{}, p.Kill(fmt.Errorf("plain sockets: a listener's address: %w", err))
	}
	return p, address, nil
}

// ReadReport reads what a side wrote.
func ReadReport(text []byte) (Report, error) {
	var r Report
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("the report of plain sockets: %w: %q", err, text)
	}
	return r, nil
}
