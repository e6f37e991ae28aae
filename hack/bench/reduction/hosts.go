package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"evenkeel.dev/evenkeel/hack/bench/internal/machine"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

const (
	labName = "reduction"
	// serverPort is where servers listen.
	serverPort = 7470
)

// up makes the network of a case, and writes the file of hosts for evenkeel-bench.
func (b bench) up(ctx context.Context, c starCase) (lab *netns.Lab, hosts string, err error) {
	config := netns.Config{Name: labName, Congestion: b.options.Congestion}
	for range c.Clients + c.Servers {
		config.Star = append(config.Star, c.Rate)
	}
	if lab, err = netns.Up(ctx, config); err != nil {
		return nil, "", err
	}
	var text strings.Builder
	list := func(kind string, from, count int) {
		fmt.Fprintf(&text, "%s:\n", kind)
		for link := from; link < from+count; link++ {
			host := netns.StarHost(link)
			fmt.Fprintf(&text, "  - {name: %s, address: %s, port: %d, env: {NCCL_SOCKET_IFNAME: %s}}\n", host, lab.Address(host), serverPort, netns.DataInterface)
		}
	}
	list("clients", 0, c.Clients)
	list("servers", c.Clients, c.Servers)
	hosts = filepath.Join(b.folder, "hosts.yaml")
	if err := os.WriteFile(hosts, []byte(text.String()), 0o644); err != nil {
		return nil, "", errors.Join(err, lab.Down(ctx))
	}
	return lab, hosts, nil
}

// enterCommand runs a line of shell on a host of a lab, as ssh does on a real host.
func enterCommand() *cobra.Command {
	return &cobra.Command{
		Use: "enter LAB HOST LINE", Hidden: true, Args: cobra.ExactArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			lab, err := netns.Open(args[0])
			if err != nil {
				return err
			}
			inside, err := lab.Command(cmd.Context(), netns.Host(args[1]), "sh", "-c", args[2])
			if err != nil {
				return err
			}
			// The process becomes the command, so that a signal reaches it.
			return syscall.Exec(inside.Path, inside.Args, os.Environ())
		},
	}
}

// allReduce runs evenkeel-bench on the hosts of a file.
func (b bench) allReduce(ctx context.Context, hosts string, flags ...string) (outcome, error) {
	self, err := os.Executable()
	if err != nil {
		return outcome{}, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, proc.Timeout, fmt.Errorf("not done within %s", proc.Timeout))
	defer cancel()
	rsh := fmt.Sprintf("%s enter %s", self, labName)
	flags = append([]string{"reduction", "--hosts", hosts, "--rsh", rsh, "--plugin", b.options.Library, "--json", "--timeout", "60"}, flags...)
	before := machine.ReadCPUTime()
	text, err := proc.Output(ctx, b.options.Driver, flags...)
	if err != nil {
		return outcome{}, err
	}
	var report struct {
		Clients struct {
			Size       float64
			Algbw, CPU float64
			Wrong      int
			E2E        struct{ Median float64 }
		}
	}
	if err := json.Unmarshal(text, &report); err != nil || report.Clients.Algbw == 0 {
		return outcome{}, fmt.Errorf("unexpected report of evenkeel-bench: %q", text)
	}
	c := report.Clients
	if c.Wrong > 0 {
		return outcome{}, fmt.Errorf("%d elements are wrong", c.Wrong)
	}
	return outcome{Algbw: c.Algbw, E2E: c.E2E.Median / 1e6, CPU: c.CPU / (c.Size / 1e9), Busy: before.BusySince()}, nil
}
