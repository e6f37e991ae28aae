package netns

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
)

// addresses are a host's in the network under test, and its router's next to
// it; of no host, none. Labs share nothing, so all have the same.
func addresses(host Host) (data, gateway netip.Addr) {
	number, err := strconv.ParseUint(strings.TrimPrefix(string(host), "h"), 10, 8)
	if err != nil {
		return data, gateway
	}
	at := func(last byte) netip.Addr { return netip.AddrFrom4([4]byte{10, byte(number), 0, last}) }
	return at(2), at(1)
}

// controls are the addresses outside the network under test.
var controls = map[Host]netip.Addr{H1: netip.MustParseAddr("10.3.0.1"), H2: netip.MustParseAddr("10.3.0.2")}

// A shaper delays traffic above its rate. Whole segments of 64 KiB pass through it before they are cut to packets, and
// must fit its bucket. At low rates TCP sends short segments, and a bucket of that size would carry a good part of a
// message in no time.
const (
	minBurst = 128 << 10
	lowBurst = 32 << 10
	lowRate  = 100 * Mbit
)

// burst is the size of a shaper's bucket.
func burst(rate Rate) int {
	least := minBurst
	if rate <= lowRate {
		least = lowBurst
	}
	return max(least, rate.bytesIn(0.001))
}

// routerTable has an empty chain for each setting of a link. Rules are added to it when the setting is used.
const routerTable = `table inet lab {
	chain forward {
		type filter hook forward priority 0
		jump hole
%s	}
	chain hole {}
%s}
`

// configure configures the lab's new namespaces.
func (l *Lab) configure(ctx context.Context) error {
	c := l.config
	for host := range l.namespaces {
		if err := l.run(ctx, host, "ip -batch -", "link set lo up"); err != nil {
			return err
		}
	}
	if len(c.Star) > 0 {
		return l.configureStar(ctx)
	}
	if err := l.join(ctx, H1, ControlInterface, H2, ControlInterface, DefaultMTU); err != nil {
		return err
	}
	for host, address := range controls {
		if err := l.run(ctx, host, "ip -batch -", fmt.Sprintf("addr add %s/24 dev %s", address, ControlInterface)); err != nil {
			return err
		}
	}
	if len(c.Links) > 0 {
		if err := l.configureRouters(ctx); err != nil {
			return err
		}
	} else if err := l.join(ctx, H1, DataInterface, H2, DataInterface, c.MTU); err != nil {
		return err
	}
	for host, other := range map[Host]Host{H1: H2, H2: H1} {
		_, beyond := addresses(other)
		route := fmt.Sprintf("route add %s/24 dev %s", beyond.Prev(), DataInterface)
		data, gateway := addresses(host)
		if len(c.Links) > 0 {
			route += " via " + gateway.String()
		}
		if err := l.run(ctx, host, "ip -batch -", fmt.Sprintf("addr add %s/24 dev %s", data, DataInterface), route); err != nil {
			return err
		}
		if err := l.setTCP(host); err != nil {
			return err
		}
		if err := l.capFlows(ctx, host); err != nil {
			return err
		}
	}
	return nil
}

// configureStar configures a star: each link is shaped at the host and at the switch.
func (l *Lab) configureStar(ctx context.Context) error {
	err := l.namespaces[s1].do(func() error { return setSysctl("ipv4/ip_forward", "1") })
	if err != nil {
		return err
	}
	for link, rate := range l.config.Star {
		host, port := StarHost(link), linkName(link)
		if err := l.join(ctx, s1, port, host, DataInterface, l.config.MTU); err != nil {
			return err
		}
		data, gateway := addresses(host)
		for _, end := range []struct {
			at    Host
			name  string
			lines []string
		}{
			{s1, port, []string{fmt.Sprintf("addr add %s/24 dev %s", gateway, port)}},
			{host, DataInterface, []string{
				fmt.Sprintf("addr add %s/24 dev %s", data, DataInterface),
				fmt.Sprintf("route add default via %s", gateway),
			}},
		} {
			if err := l.run(ctx, end.at, "ip -batch -", end.lines...); err != nil {
				return err
			}
			if err := l.shape(ctx, end.at, end.name, rate); err != nil {
				return err
			}
		}
		if err := l.setTCP(host); err != nil {
			return err
		}
	}
	return nil
}

// shape sets the rate of what a host or router sends through an interface.
func (l *Lab) shape(ctx context.Context, host Host, name string, rate Rate) error {
	if rate == 0 {
		// Replaced first, because there may be none to remove.
		return l.run(ctx, host, "tc -batch -",
			fmt.Sprintf("qdisc replace dev %s root pfifo", name),
			fmt.Sprintf("qdisc del dev %s root", name))
	}
	return l.run(ctx, host, "tc -batch -", fmt.Sprintf("qdisc replace dev %s root tbf rate %s burst %d limit %d",
		name, rate, burst(rate), l.queueBytes(rate)))
}

// configureRouters configures the links, and the routing between them.
func (l *Lab) configureRouters(ctx context.Context) error {
	c := l.config
	var jumps, chains strings.Builder
	for i := range c.Links {
		if err := l.join(ctx, s1, linkName(i), s2, linkName(i), c.MTU); err != nil {
			return err
		}
		fmt.Fprintf(&jumps, "\t\toifname %s jump out%d\n\t\tiifname %s jump in%d\n", linkName(i), i, linkName(i), i)
		fmt.Fprintf(&chains, "\tchain out%d {}\n\tchain in%d {}\n", i, i)
	}
	for _, side := range []struct {
		router, host, beyond Host
		own, others          int
	}{{s1, H1, H2, 1, 2}, {s2, H2, H1, 2, 1}} {
		if err := l.join(ctx, side.router, "host", side.host, DataInterface, c.MTU); err != nil {
			return err
		}
		_, near := addresses(side.host)
		_, far := addresses(side.beyond)
		lines := []string{fmt.Sprintf("addr add %s/24 dev host", near)}
		route := fmt.Sprintf("route add %s/24", far.Prev())
		for i := range c.Links {
			lines = append(lines, fmt.Sprintf("addr add 10.9.%d.%d/30 dev %s", i, side.own, linkName(i)))
			route += fmt.Sprintf(" nexthop via 10.9.%d.%d dev %s", i, side.others, linkName(i))
		}
		if err := l.run(ctx, side.router, "ip -batch -", append(lines, route)...); err != nil {
			return err
		}
		err := l.namespaces[side.router].do(func() error {
			for _, setting := range [][2]string{
				{"ipv4/ip_forward", "1"},
				{"ipv4/conf/all/rp_filter", "0"},
				// Hash the five fields themselves. The kernel's layer-4 policy uses the hash of the sending socket where that
				// is on the same machine, and this hash changes with retransmissions.
				{"ipv4/fib_multipath_hash_policy", "3"},
				{"ipv4/fib_multipath_hash_fields", "55"},
				{"ipv4/fib_multipath_hash_seed", fmt.Sprint(c.Seed)},
			} {
				if err := setSysctl(setting[0], setting[1]); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		if err := l.run(ctx, side.router, "nft -f -", fmt.Sprintf(routerTable, jumps.String(), chains.String())); err != nil {
			return err
		}
	}
	for i, link := range c.Links {
		if err := l.SetRate(ctx, i, link.Rate); err != nil {
			return err
		}
	}
	return nil
}

func linkName(i int) string { return fmt.Sprintf("p%d", i) }

// join connects two namespaces by a pair of virtual Ethernet interfaces.
func (l *Lab) join(ctx context.Context, a Host, nameA string, b Host, nameB string, mtu int) error {
	if err := l.run(ctx, a, "ip -batch -",
		fmt.Sprintf("link add %s mtu %d type veth peer name %s mtu %d netns %s", nameA, mtu, nameB, mtu, l.namespaces[b].path()),
		fmt.Sprintf("link set %s up", nameA)); err != nil {
		return err
	}
	return l.run(ctx, b, "ip -batch -", fmt.Sprintf("link set %s up", nameB))
}

// setTCP configures a host's TCP.
func (l *Lab) setTCP(host Host) error {
	const setting = "ipv4/tcp_congestion_control"
	return l.namespaces[host].do(func() error {
		// Metrics of one connection must not slow the start of the next.
		if err := setSysctl("ipv4/tcp_no_metrics_save", "1"); err != nil {
			return err
		}
		if want := l.config.Congestion; want != "" {
			if err := setSysctl(setting, want); err != nil {
				allowed, _ := os.ReadFile("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
				return fmt.Errorf("%w; this machine allows: %s", err, strings.TrimSpace(string(allowed)))
			}
		}
		text, err := os.ReadFile("/proc/sys/net/" + setting)
		l.config.Congestion = strings.TrimSpace(string(text))
		return err
	})
}

// capFlows assigns the host's connections to shaped queues.
func (l *Lab) capFlows(ctx context.Context, host Host) error {
	rates := l.config.FlowRates
	if len(rates) == 0 {
		return nil
	}
	shapes := []string{"qdisc add dev eth0 root handle 1: htb"}
	var choice []string
	for i, rate := range rates {
		class := fmt.Sprintf("1:%x", 0x10+i)
		shapes = append(shapes,
			fmt.Sprintf("class add dev eth0 parent 1: classid %s htb rate %s burst %d quantum 60000", class, rate, max(minBurst, rate.bytesIn(0.001))),
			fmt.Sprintf("qdisc add dev eth0 parent %s bfifo limit %d", class, l.queueBytes(rate)))
		choice = append(choice, fmt.Sprintf("%d : %s", i+1, class))
	}
	if err := l.run(ctx, host, "tc -batch -", shapes...); err != nil {
		return err
	}
	// The connection keeps its mark.
	return l.run(ctx, host, "nft -f -", fmt.Sprintf(`table inet lab {
	chain out {
		type filter hook postrouting priority 0
		oifname != eth0 accept
		meta l4proto != tcp accept
		ct mark 0 ct mark set numgen inc mod %d offset 1
		meta priority set ct mark map { %s }
	}
}`, len(rates), strings.Join(choice, ", ")))
}

// queueBytes is the size of a shaper's queue.
func (l *Lab) queueBytes(rate Rate) int {
	return max(2*minBurst, rate.bytesIn(l.config.Queue.Seconds()))
}

// run runs a program in a namespace, with lines as its standard input.
func (l *Lab) run(ctx context.Context, host Host, program string, lines ...string) error {
	words := strings.Fields(program)
	cmd := l.namespaces[host].command(ctx, words...)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	if _, err := output(cmd, host, program); err != nil {
		return fmt.Errorf("%w (given: %s)", err, strings.Join(lines, "; "))
	}
	return nil
}
