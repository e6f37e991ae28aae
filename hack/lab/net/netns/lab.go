// Package netns creates networks on this machine for tests and measurements. Two hosts, each in a network namespace,
// are joined directly, or by parallel links between two routers. The routers choose a link by a hash of the
// connection's addresses and ports, as the switches of a data centre do:
//
//	h1 10.1.0.2 --- s1 ===( links )=== s2 --- 10.2.0.2 h2
//	     10.3.0.1 --------------------------- 10.3.0.2
//
// Each link has a rate, a loss and a state, which can be changed at any time. The hosts' interface to that network is
// eth0. A second interface, ctl0, joins them directly, for control traffic that must survive faults of the network
// under test.
//
// The other layout is a star: any number of hosts around one switch, each with a link of its own. The host's interface
// is eth0 too:
//
//	h1 10.1.0.2 ---\
//	h2 10.2.0.2 ---- s1
//	h3 10.3.0.2 ---/
//
// The namespaces have no names. They exist as long as the process that called [Up], or a process started in them, so
// nothing remains after the owner exits. Nothing is changed in the machine's own network. Needs root, iproute2,
// nftables and util-linux.
package netns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

// A Host is one of the two ends of a lab, or of the ends of a star.
type Host string

const (
	H1 Host = "h1"
	H2 Host = "h2"
)

// StarHost is a star's host at the end of a link. Links are counted from 0; the first host is [H1].
func StarHost(link int) Host { return Host(fmt.Sprintf("h%d", link+1)) }

// The routers, where there are links; of a star, the first is its switch.
const (
	s1 Host = "s1"
	s2 Host = "s2"
)

// Interfaces of each host.
const (
	DataInterface    = "eth0"
	ControlInterface = "ctl0"
)

const (
	// MaxLinks is the maximum number of links, and of caps of connections.
	MaxLinks = 32

	// DefaultMTU is Ethernet's.
	DefaultMTU = 1500
	// DefaultQueue is the length of a shaped link's queue.
	DefaultQueue = 10 * time.Millisecond

	timeout = 20 * time.Second
)

// Config describes a lab.
type Config struct {
	// Name distinguishes labs that are up at the same time.
	Name string
	// Links are the links between the routers. Without any there are no
	// routers: one unshaped link joins the hosts.
	Links []Link
	// Star are the rates of a star's links, with a host at the end of each. A star has neither Links nor FlowRates.
	Star []Rate
	// FlowRates caps TCP connections at the sending host, as clouds do. Connections are assigned to shaped queues, one for
	// each rate, in the order in which they are opened.
	FlowRates []Rate
	// Queue of each shaped link; default [DefaultQueue].
	Queue time.Duration
	// MTU of all interfaces, in bytes; default [DefaultMTU].
	MTU int
	// Congestion control of the hosts; default the machine's for new namespaces. It must be one that the machine allows to
	// unprivileged users.
	Congestion string
	// Seed of the routers' hash, so that a connection of the same addresses
	// and ports always takes the same link; default 1.
	Seed uint32
}

// A Link is one of several between the routers.
type Link struct {
	Rate Rate // of each direction
}

// Links returns links with those rates.
func Links(rates ...Rate) []Link {
	var links []Link
	for _, rate := range rates {
		links = append(links, Link{Rate: rate})
	}
	return links
}

var (
	namePattern       = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,30}$`)
	congestionPattern = regexp.MustCompile(`^[a-z0-9_]{0,15}$`)
)

func (c Config) withDefaults() (Config, error) {
	if c.Queue == 0 {
		c.Queue = DefaultQueue
	}
	if c.MTU == 0 {
		c.MTU = DefaultMTU
	}
	if c.Seed == 0 {
		c.Seed = 1
	}
	switch {
	case !namePattern.MatchString(c.Name):
		return c, fmt.Errorf("lab name %q: lower-case letters, digits and dashes, at most 31", c.Name)
	case len(c.Links) > MaxLinks:
		return c, fmt.Errorf("%d links: at most %d", len(c.Links), MaxLinks)
	case len(c.Star) == 1 || len(c.Star) > MaxLinks:
		return c, fmt.Errorf("a star of %d links: from 2 to %d", len(c.Star), MaxLinks)
	case len(c.Star) > 0 && len(c.Links)+len(c.FlowRates) > 0:
		return c, errors.New("a star has neither links between routers nor capped connections")
	case len(c.FlowRates) > MaxLinks:
		return c, fmt.Errorf("%d caps of connections: at most %d", len(c.FlowRates), MaxLinks)
	case slices.Contains(c.FlowRates, 0):
		return c, errors.New("a connection's cap cannot be unlimited: leave it out")
	case c.Queue < time.Millisecond || c.Queue > time.Second:
		return c, fmt.Errorf("queue of %s: from 1ms to 1s", c.Queue)
	case c.MTU < 1280 || c.MTU > 9000:
		return c, fmt.Errorf("MTU %d: from 1280 to 9000", c.MTU)
	case !congestionPattern.MatchString(c.Congestion):
		return c, fmt.Errorf("congestion control %q: a name as in net.ipv4.tcp_allowed_congestion_control", c.Congestion)
	}
	return c, nil
}

// hosts are all namespaces that the lab needs.
func (c Config) hosts() []Host {
	switch {
	case len(c.Star) > 0:
		hosts := []Host{s1}
		for link := range c.Star {
			hosts = append(hosts, StarHost(link))
		}
		return hosts
	case len(c.Links) > 0:
		return []Host{H1, H2, s1, s2}
	}
	return []Host{H1, H2}
}

// String is the configuration in words.
func (c Config) String() string {
	text := "hosts joined directly"
	var rates []string
	for _, link := range c.Links {
		rates = append(rates, link.Rate.String())
	}
	for _, rate := range c.Star {
		rates = append(rates, rate.String())
	}
	switch all := strings.Join(rates, ", "); {
	case len(c.Star) > 0:
		text = "hosts around a switch, links " + all
	case len(c.Links) > 0:
		text = "links " + all
	}
	if len(c.FlowRates) > 0 {
		text += "; connections capped at "
		for i, rate := range c.FlowRates {
			if i > 0 {
				text += ", "
			}
			text += rate.String()
		}
	}
	return fmt.Sprintf("%s; MTU %d, %s", text, c.MTU, c.Congestion)
}

// A Lab is a network that is up.
type Lab struct {
	config     Config // with the congestion control that the hosts have
	namespaces map[Host]namespace
	// files keep the namespaces alive, in their owner.
	files []*os.File
}

var programs = []toolbox.Program{
	{Name: "ip", Package: "iproute2"},
	{Name: "tc", Package: "iproute2"},
	{Name: "nft", Package: "nftables"},
	{Name: "nsenter", Package: "util-linux"},
}

// Up creates a lab, which this process owns: it exists until [Lab.Down], or until this process exits. It first removes
// the remains of a lab of that name whose owner was killed. A lab whose owner runs is an error.
func Up(ctx context.Context, c Config) (_ *Lab, err error) {
	if c, err = c.withDefaults(); err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("a lab needs root: it makes network namespaces")
	}
	if err := toolbox.EnsurePrograms(ctx, os.Stderr, programs); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("lab %s: not done within %s", c.Name, timeout))
	defer cancel()
	unlock, err := lockRecords(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if old, err := readRecord(c.Name); err == nil {
		if old.alive() {
			return nil, fmt.Errorf("lab %q is up, owned by process %d: choose another name, or take it down", c.Name, old.owner())
		}
		if err := old.remove(ctx); err != nil {
			return nil, err
		}
	}
	l := &Lab{config: c, namespaces: map[Host]namespace{}}
	defer func() {
		if err != nil {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
			defer cancel()
			err = errors.Join(err, l.release(ctx))
		}
	}()
	for _, host := range c.hosts() {
		s, file, err := newNamespace()
		if err != nil {
			return nil, err
		}
		l.namespaces[host] = s
		l.files = append(l.files, file)
	}
	if err := l.configure(ctx); err != nil {
		return nil, fmt.Errorf("lab %s: %w", c.Name, err)
	}
	return l, writeRecord(record{Config: l.config, Namespaces: l.namespaces})
}

// Open returns a lab that is up; another process may own it.
func Open(name string) (*Lab, error) {
	if !namePattern.MatchString(name) {
		return nil, fmt.Errorf("lab name %q: lower-case letters, digits and dashes, at most 31", name)
	}
	r, err := readRecord(name)
	if err != nil || !r.alive() {
		return nil, fmt.Errorf(`no lab %q is up: "go run ./hack/lab/net up --name %s" makes one`, name, name)
	}
	return &Lab{config: r.Config, namespaces: r.Namespaces}, nil
}

// Down kills every process in the lab and removes it. In another process than the lab's owner, it makes the owner exit,
// which removes the lab.
func (l *Lab) Down(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), timeout, fmt.Errorf("lab %s: not down within %s", l.config.Name, timeout))
	defer cancel()
	r := record{Config: l.config, Namespaces: l.namespaces}
	if l.files == nil {
		return r.endOwner(ctx)
	}
	unlock, err := lockRecords(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	return errors.Join(l.release(ctx), removeRecord(l.config.Name))
}

// release kills the lab's processes and closes its namespaces.
func (l *Lab) release(ctx context.Context) error {
	var all []error
	for _, s := range l.namespaces {
		all = append(all, s.endProcesses(ctx))
	}
	for _, file := range l.files {
		all = append(all, file.Close())
	}
	l.files, l.namespaces = nil, nil
	return errors.Join(all...)
}

// Config returns the lab's settings at its start, with the congestion control that its hosts use.
func (l *Lab) Config() Config { return l.config }

// Owner is the process that owns the lab.
func (l *Lab) Owner() int { return record{Namespaces: l.namespaces}.owner() }

// Address is a host's address in the network under test.
func (l *Lab) Address(host Host) netip.Addr { data, _ := addresses(host); return data }

// ControlAddress is a host's address outside the network under test. A star's hosts have none.
func (l *Lab) ControlAddress(host Host) netip.Addr { return controls[host] }

// Do runs f, on a thread of its own, in a host's network: sockets opened by f belong to that host. f must not start
// goroutines that open sockets.
func (l *Lab) Do(host Host, f func() error) error {
	s, err := l.host(host)
	if err != nil {
		return err
	}
	return s.do(f)
}

// Command prepares a command that runs in a host's network, with the machine's files. It is killed when this process
// exits.
func (l *Lab) Command(ctx context.Context, host Host, argv ...string) (*exec.Cmd, error) {
	s, err := l.host(host)
	if err != nil {
		return nil, err
	}
	if len(argv) == 0 {
		return nil, errors.New("no command to run in the lab")
	}
	return s.command(ctx, argv...), nil
}

func (s namespace) command(ctx context.Context, argv ...string) *exec.Cmd {
	// nsenter executes the command in its own process.
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + s.path(), "--"}, argv...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	return cmd
}

// Exec runs a command in a host's network and returns its standard output. The error has its standard error.
func (l *Lab) Exec(ctx context.Context, host Host, argv ...string) (string, error) {
	cmd, err := l.Command(ctx, host, argv...)
	if err != nil {
		return "", err
	}
	return output(cmd, host, argv[0])
}

func output(cmd *exec.Cmd, host Host, name string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %s: %w: %s", host, name, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.String(), nil
}

func (l *Lab) host(host Host) (namespace, error) {
	s, ok := l.namespaces[host]
	if !ok {
		return namespace{}, fmt.Errorf("no host %q in the lab: %s", host, l.config)
	}
	return s, nil
}
