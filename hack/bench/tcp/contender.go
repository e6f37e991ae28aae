package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/hack/bench/internal/sockets"
	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// patience is how long a run may take beyond ten times what it should.
const patience = 2 * time.Minute

// An outcome is what one run gave.
type outcome struct {
	Rate    float64 // GB/s, 10^9 bytes
	P50     float64 // of a ping-pong's round trips, seconds
	Send    float64 // processor seconds for each GB, system calls included
	Receive float64
	Own     float64 // share of all processors' time that the two programs used
	Busy    float64 // and that any program did
	Trace   []point // of a fault
	Idle    float64 // share of one processor that idle connections use, on the worse side
	Threads int     // of the plugin, on the side that has more
	Failure string
}

// A contender moves a case's messages from H1 to H2.
type contender interface {
	// name is for tables.
	name() string
	// run moves messages for about as long as the case says.
	run(ctx context.Context, lab *netns.Lab, c benchCase) (outcome, error)
}

// plain is raw sockets with a number of connections.
type plain struct{ flows int }

func (p plain) name() string {
	if p.flows == 1 {
		return "plain socket"
	}
	return fmt.Sprintf("%d plain sockets", p.flows)
}

func (p plain) run(ctx context.Context, lab *netns.Lab, c benchCase) (outcome, error) {
	self, err := os.Executable()
	if err != nil {
		return outcome{}, err
	}
	o := sockets.Options{
		Address: netip.AddrPortFrom(lab.Address(netns.H2), 0), Flows: p.flows,
		Size: c.size, Depth: c.depth, Length: c.length, PingPong: c.pingPong,
	}
	receiver, err := start(ctx, lab, netns.H2, []string{sockets.Environment}, self, "raw-receive", asJSON(o))
	if err != nil {
		return outcome{}, err
	}
	line, err := receiver.out.ReadString('\n')
	if err != nil {
		return outcome{}, receiver.end(errors.New("the receiver did not start"))
	}
	if o.Address, err = netip.ParseAddrPort(strings.TrimSpace(line)); err != nil {
		return outcome{}, receiver.end(err)
	}
	sender, err := start(ctx, lab, netns.H1, []string{sockets.Environment}, self, "raw-send", asJSON(o))
	if err != nil {
		return outcome{}, receiver.end(err)
	}
	var report sockets.Report
	measuring := receiver
	if c.pingPong {
		measuring = sender
	}
	text, err := wait(receiver, sender, measuring)
	if err != nil {
		return outcome{}, err
	}
	if err := json.Unmarshal(text, &report); err != nil {
		return outcome{}, fmt.Errorf("what plain sockets reported: %w", err)
	}
	return outcome{
		Rate: float64(report.Bytes) / report.Seconds / 1e9, P50: report.P50,
		Send: sender.cost(float64(report.Bytes)), Receive: receiver.cost(float64(report.Bytes)),
		Own: share(sender, receiver),
	}, nil
}

// plugin is an NCCL net plugin, moved by evenkeel-bench.
type plugin struct {
	label, library string
	environment    []string
	driver         string
	// speed is what it did last in each case, GB/s, so that the next run has
	// a number of messages that takes about as long as the case says.
	speed map[string]float64
}

// masterPort is where the two sides meet, beside the network under test.
const masterPort = 29500

const (
	// warmup is the number of messages, on each connection, that the driver
	// sends before those it times.
	warmup = 16
	// mostMessages is the most that it times.
	mostMessages = 1_000_000
)

func (p *plugin) name() string { return p.label }

func (p *plugin) run(ctx context.Context, lab *netns.Lab, c benchCase) (outcome, error) {
	if c.idle {
		return p.idle(ctx, lab, c)
	}
	speed, known := p.speed[c.name]
	if c.fault != nil {
		speed, known = c.limit(), true // so that the run is not over before the fault
	}
	if !known {
		// Nothing is known yet: try with little.
		speed = 0.05
		if limit := c.limit(); limit > 0 {
			speed = limit / 4
		}
		if c.pingPong {
			speed = float64(c.size) / 50e-6 / 1e9
		}
		first := c
		first.length = time.Second
		tried, err := p.move(ctx, lab, first, speed)
		if err != nil {
			return outcome{}, err
		}
		speed = tried.Rate
	}
	got, err := p.move(ctx, lab, c, speed)
	if err != nil {
		return outcome{}, err
	}
	p.speed[c.name] = got.Rate
	return got, nil
}

// move moves as many messages as take the case's length at that speed.
func (p *plugin) move(ctx context.Context, lab *netns.Lab, c benchCase, speed float64) (outcome, error) {
	messages := int(speed * 1e9 * c.length.Seconds() / float64(c.size*c.connections))
	messages = min(max(messages, 4*c.depth), mostMessages)
	receiver, err := p.start(ctx, lab, netns.H2, c, messages)
	if err != nil {
		return outcome{}, err
	}
	sender, err := p.start(ctx, lab, netns.H1, c, messages)
	if err != nil {
		return outcome{}, receiver.end(err)
	}
	text, err := wait(receiver, sender, receiver)
	if err != nil {
		return outcome{}, err
	}
	var report struct {
		Rows []struct {
			Bandwidth float64
			P50       float64 `json:"p50_us"`
		}
	}
	if err := json.Unmarshal(text, &report); err != nil || len(report.Rows) != 1 {
		return outcome{}, fmt.Errorf("what evenkeel-bench reported: %q", text)
	}
	// The driver sends twice the depth first, and looks at every byte of it.
	moved := float64(c.size) * float64(c.connections) * float64(messages+warmup+2*c.depth)
	got := outcome{Rate: report.Rows[0].Bandwidth, Send: sender.cost(moved), Receive: receiver.cost(moved), Own: share(sender, receiver)}
	if c.pingPong {
		got.P50 = report.Rows[0].P50 / 1e6
	}
	return got, nil
}

// start starts the driver on a host: H1 sends.
func (p *plugin) start(ctx context.Context, lab *netns.Lab, host netns.Host, c benchCase, messages int) (*process, error) {
	rank := map[netns.Host]string{netns.H1: "1", netns.H2: "0"}[host]
	environment := append([]string{"NCCL_SOCKET_IFNAME=" + netns.DataInterface}, p.environment...)
	command := []string{
		p.driver, "net", "--plugin", p.library, "--json", "--rank", rank, "--world-size", "2",
		"--master-addr", lab.ControlAddress(netns.H2).String(), "--master-port", strconv.Itoa(masterPort),
		"-b", strconv.Itoa(c.size), "-e", strconv.Itoa(c.size), "-w", strconv.Itoa(warmup), "-n", strconv.Itoa(messages),
	}
	if c.fault != nil {
		command = append(command, "--check-all") // what is sent again must not be wrong
	}
	if c.pingPong {
		command = append(command, "--ping-pong")
	} else {
		command = append(command, "--connections", strconv.Itoa(c.connections), "--depth", strconv.Itoa(c.depth))
	}
	return start(ctx, lab, host, environment, command...)
}

// mentions reports whether a library knows a setting. One that does not would
// take no notice of it, and be measured as what it is not.
func mentions(library, setting string) (bool, error) {
	text, err := os.ReadFile(library)
	if err != nil {
		return false, err
	}
	return bytes.Contains(text, []byte(setting)), nil
}

var roles = map[netns.Host]string{netns.H1: "sender", netns.H2: "receiver"}

// A process is a program that runs in a lab.
type process struct {
	role   string
	since  time.Time
	cmd    *exec.Cmd
	out    *bufio.Reader
	errors bytes.Buffer
}

func start(ctx context.Context, lab *netns.Lab, host netns.Host, environment []string, argv ...string) (*process, error) {
	cmd, err := lab.Command(ctx, host, argv...)
	if err != nil {
		return nil, err
	}
	p := &process{role: roles[host], since: time.Now(), cmd: cmd}
	cmd.Env = append(os.Environ(), environment...)
	cmd.Stderr = &p.errors
	cmd.WaitDelay = time.Second
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReader(pipe)
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", filepath.Base(argv[0]), err)
	}
	return p, nil
}

// end kills a process that is of no more use, and returns why it is not, with
// what it said.
func (p *process) end(why error) error {
	p.cmd.Process.Kill()
	p.cmd.Wait()
	return p.explain(why)
}

func (p *process) explain(why error) error {
	said := strings.TrimSpace(p.errors.String())
	if lines := strings.Split(said, "\n"); len(lines) > 3 {
		said = strings.Join(lines[len(lines)-3:], "\n")
	}
	if said == "" {
		return why
	}
	return fmt.Errorf("%w: %s", why, said)
}

// cost is the processor time of a process that has ended, in seconds for each
// GB of those bytes.
func (p *process) cost(bytes float64) float64 { return p.used().Seconds() / (bytes / 1e9) }

func (p *process) used() time.Duration {
	return p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()
}

// share is the share of all processors' time, since the first of two
// processes began, that they used.
func share(sender, receiver *process) float64 {
	return (sender.used() + receiver.used()).Seconds() / time.Since(receiver.since).Seconds() / float64(runtime.NumCPU())
}

// wait waits for both sides to end, and returns what one of them wrote. When
// one fails, the other one has a moment to end by itself.
func wait(receiver, sender, measuring *process) ([]byte, error) {
	const moment = 10 * time.Second
	type end struct {
		of   *process
		text []byte
		err  error
	}
	ends := make(chan end, 2)
	for _, p := range []*process{receiver, sender} {
		go func() {
			text, err := io.ReadAll(p.out)
			if waited := p.cmd.Wait(); waited != nil {
				err = p.explain(fmt.Errorf("%s: %w", p.role, waited))
			}
			ends <- end{p, text, err}
		}()
	}
	var text []byte
	var all []error
	for range 2 {
		e := <-ends
		if e.of == measuring {
			text = e.text
		}
		if e.err != nil && all == nil {
			late := time.AfterFunc(moment, func() {
				receiver.cmd.Process.Kill()
				sender.cmd.Process.Kill()
			})
			defer late.Stop()
		}
		if e.err != nil {
			all = append(all, e.err)
		}
	}
	return text, errors.Join(all...)
}

func asJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // of our own types
	}
	return string(text)
}
