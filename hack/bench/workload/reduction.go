package workload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/experiment"
	"evenkeel.dev/evenkeel/hack/bench/internal/proc"
	"evenkeel.dev/evenkeel/hack/bench/internal/sockets"
	"evenkeel.dev/evenkeel/hack/internal/child"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// Quantities of [Reduction].
var (
	// Algbw is bytes of the vector per time.
	Algbw = experiment.Quantity{Name: "algbw", Title: "algbw", Unit: "GB/s", Digits: 4}
	// ClientsCPU is the processor time of all clients for each GB of the vector.
	ClientsCPU = experiment.Quantity{Name: "clients_cpu", Title: "processor time of all clients for each GB", Unit: "s", Digits: 2, LowerIsBetter: true}
	// OperationTime is the median of a run's operations.
	OperationTime = experiment.Quantity{Name: "operation", Title: "time of an operation", Unit: "us", Digits: 1, LowerIsBetter: true}
)

const (
	// EnterCommand is the subcommand that runs a line of shell on a lab's host: LAB HOST LINE.
	EnterCommand = "enter"
	// serverPort is where reduction servers listen.
	serverPort = 7470
	// plainLength is how long plain sockets are measured.
	plainLength = 2 * time.Second
)

// Reduction is all-reduces of hosts around a switch: the first of them are clients, the others servers.
type Reduction struct {
	Clients, Servers int
	Bytes            int // of the vector
	Operations       int // that are timed
	Warmup           int
}

// AllReduce has evenkeel-bench reduce with these flags. If drawn, the first run has a drawing of each piece.
func (w Reduction) AllReduce(name string, drawn bool, flags ...string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		folder, err := os.MkdirTemp("", "evenkeel-reduction-")
		if err != nil {
			return m, err
		}
		defer os.RemoveAll(folder)
		hosts, drawing := filepath.Join(folder, "hosts.yaml"), filepath.Join(folder, "timeline.svg")
		if err := os.WriteFile(hosts, []byte(w.hosts(r.Lab)), 0o644); err != nil {
			return m, err
		}
		more := slices.Clone(flags)
		if drawn && r.Round == 0 {
			more = append(more, "--plot", drawing)
		}
		if m.Values, err = w.allReduce(ctx, r, hosts, more); err != nil || !drawn || r.Round > 0 {
			return m, err
		}
		svg, err := os.ReadFile(drawing)
		m.Drawing = string(svg)
		return m, err
	}}
}

// hosts are the lab's, in the form that evenkeel-bench reads.
func (w Reduction) hosts(lab *netns.Lab) string {
	var text strings.Builder
	for link := range w.Clients + w.Servers {
		switch link {
		case 0:
			text.WriteString("clients:\n")
		case w.Clients:
			text.WriteString("servers:\n")
		}
		host := netns.StarHost(link)
		fmt.Fprintf(&text, "  - {name: %s, address: %s, port: %d, env: {NCCL_SOCKET_IFNAME: %s}}\n", host, lab.Address(host), serverPort, netns.DataInterface)
	}
	return text.String()
}

func (w Reduction) allReduce(ctx context.Context, r experiment.Run, hosts string, flags []string) (outcome, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	arguments := append([]string{
		"reduction", "--hosts", hosts, "--rsh", fmt.Sprintf("%s %s %s", self, EnterCommand, r.Lab.Config().Name), "--plugin", r.Library, "--json", "--timeout", "60",
		"--size", strconv.Itoa(w.Bytes), "-n", strconv.Itoa(w.Operations), "-w", strconv.Itoa(w.Warmup), "-c", "1",
	}, flags...)
	text, err := proc.Output(ctx, child.Command(ctx, "", r.Driver, arguments...))
	if err != nil {
		return nil, err
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
		return nil, fmt.Errorf("unexpected report of evenkeel-bench: %q", text)
	}
	c := report.Clients
	if c.Wrong > 0 {
		return nil, fmt.Errorf("%d elements are wrong", c.Wrong)
	}
	return outcome{Algbw: c.Algbw, OperationTime: c.E2E.Median, ClientsCPU: c.CPU / (c.Size / 1e9)}, nil
}

// Messages are messages of the vector's size, there and back between the first client and the first server.
func (w Reduction) Messages(name string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		driver := netDriver{
			program: r.Driver, master: r.Lab.Address(netns.H1).String(), port: bootstrapPort, size: w.Bytes, messages: w.Operations, warmup: w.Warmup,
			flags: []string{"--plugin", r.Library, "--ping-pong"},
		}
		hosts := []netns.Host{netns.H1, netns.StarHost(w.Clients)}
		row, _, _, err := runPair(func(rank int, role string) (*proc.Process, error) {
			return proc.Start(ctx, r.Lab, hosts[rank], role, []string{"NCCL_SOCKET_IFNAME=" + netns.DataInterface}, driver.command(rank)...)
		})
		if err != nil {
			return m, err
		}
		m.Values = outcome{OperationTime: row.P50}
		return m, nil
	}}
}

// Plain is a plain socket from each client to each server. All send and receive as much as they can, both directions at
// the same time, and nothing is summed: the maximum of what this machine can do. The rate is that of a client, in the
// slower direction.
func (w Reduction) Plain(name string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		hubs, spokes, err := w.runStar(ctx, r.Lab, sockets.Options{Size: 256 << 10, Depth: 4, Length: plainLength})
		if err != nil {
			return m, err
		}
		rate := func(reports []sockets.Report) (sum float64) {
			for _, report := range reports {
				sum += float64(report.Bytes) / report.Seconds / 1e9
			}
			return sum / float64(w.Clients)
		}
		m.Values = outcome{Algbw: min(rate(hubs), rate(spokes))}
		return m, nil
	}}
}

// PlainMessages are the messages of a small all-reduce over plain sockets: all clients send one to a server, which
// answers when it has received all of them.
func (w Reduction) PlainMessages(name string) experiment.Contender {
	return experiment.Contender{Name: name, Run: func(ctx context.Context, r experiment.Run) (m experiment.Measured, err error) {
		_, spokes, err := w.runStar(ctx, r.Lab, sockets.Options{Size: w.Bytes, Depth: 1, Length: plainLength / 2, PingPong: true})
		if err != nil {
			return m, err
		}
		m.Values = outcome{OperationTime: spokes[0].P50 * 1e6}
		return m, nil
	}}
}

// runStar runs a hub on each server and a spoke on each client, and returns their reports. Hubs of a ping-pong have
// none.
func (w Reduction) runStar(ctx context.Context, lab *netns.Lab, o sockets.Options) (hubs, spokes []sockets.Report, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // which kills those that still run
	o.Flows = w.Clients
	var all []*proc.Process
	var addresses []netip.AddrPort
	for link := range w.Servers {
		p, address, err := sockets.StartListening(ctx, lab, netns.StarHost(w.Clients+link), "hub", o)
		if err != nil {
			return nil, nil, err
		}
		all, addresses = append(all, p), append(addresses, address)
	}
	o.Hubs = addresses
	for link := range w.Clients {
		p, err := sockets.StartSide(ctx, lab, netns.StarHost(link), "spoke", o)
		if err != nil {
			return nil, nil, err
		}
		all = append(all, p)
	}
	for i, p := range all {
		text, err := p.Wait()
		if err != nil {
			return nil, nil, fmt.Errorf("plain sockets: %w", err)
		}
		if len(text) == 0 {
			continue
		}
		r, err := sockets.ReadReport(text)
		if err != nil {
			return nil, nil, err
		}
		if i < w.Servers {
			hubs = append(hubs, r)
		} else {
			spokes = append(spokes, r)
		}
	}
	if len(spokes) == 0 {
		return nil, nil, errors.New("plain sockets: no client has reported")
	}
	return hubs, spokes, nil
}
