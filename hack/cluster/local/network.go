package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// makeNetwork creates the cluster's network: a bridge in the namespace "fabric", and one link from it to the control
// plane and to each node. The machine's own network namespace is not changed.
func makeNetwork(ctx context.Context, c Config) error {
	fabric, cp := netnsName(c.Name, "fabric"), netnsName(c.Name, "cp")
	if err := markNetnsFolder(); err != nil {
		return err
	}
	if err := commands(ctx,
		"ip netns add "+fabric,
		"ip -n "+fabric+" link set lo up",
		"ip -n "+fabric+" link add br0 type bridge",
		"ip -n "+fabric+" link set br0 up",
	); err != nil {
		return err
	}
	// The fabric only forwards frames; the nodes filter them.
	if err := setNetSysctl(fabric, "net/bridge/bridge-nf-call-iptables", "0"); err != nil {
		return err
	}
	if err := makeHost(ctx, fabric, cp, "cp", ControlPlaneIP); err != nil {
		return err
	}
	nodes := c.plan()
	for _, node := range nodes {
		if err := makeHost(ctx, fabric, node.netns, node.name, node.ip); err != nil {
			return err
		}
		// Replies on a node's pod bridge must pass its filter, which services between pods of one node need.
		if err := setNetSysctl(node.netns, "net/bridge/bridge-nf-call-iptables", "1"); err != nil {
			return err
		}
		// There is no other network, but programs expect a default route.
		if err := commands(ctx, "ip -n "+node.netns+" route add default via "+ControlPlaneIP); err != nil {
			return err
		}
		if c.LinkRate != "" {
			if err := limitLink(ctx, fabric, node, c.LinkRate); err != nil {
				return err
			}
		}
	}
	for _, to := range nodes {
		from := []string{cp}
		for _, other := range nodes {
			if other.name != to.name {
				from = append(from, other.netns)
			}
		}
		for _, netns := range from {
			if err := commands(ctx, "ip -n "+netns+" route add "+to.podCIDR+" via "+to.ip); err != nil {
				return err
			}
		}
	}
	return nil
}

// makeHost makes a namespace with an address and a link to the fabric.
func makeHost(ctx context.Context, fabric, netns, port, ip string) error {
	if err := commands(ctx,
		"ip netns add "+netns,
		"ip -n "+netns+" link set lo up",
		"ip -n "+fabric+" link add "+port+" type veth peer name eth0 netns "+netns,
		"ip -n "+fabric+" link set "+port+" master br0 up",
		"ip -n "+netns+" addr add "+ip+"/24 dev eth0",
		"ip -n "+netns+" link set eth0 up",
	); err != nil {
		return err
	}
	return setNetSysctl(netns, "net/ipv4/ip_forward", "1")
}

// LimitLink limits both directions of a node's link to a rate in tc's units, such as 100mbit. Without one, the link
// gets the rate of the cluster's start.
func (c *Cluster) LimitLink(ctx context.Context, node, rate string) error {
	plan, err := c.config.node(node)
	if err != nil {
		return err
	}
	if rate == "" {
		rate = c.config.LinkRate
	}
	if rate != "" && !validRate.MatchString(rate) {
		return badRate(rate)
	}
	fabric := netnsName(c.config.Name, "fabric")
	if err := freeLink(ctx, fabric, plan); err != nil || rate == "" {
		return err
	}
	return limitLink(ctx, fabric, plan, rate)
}

// freeLink removes the limit of a node's link.
func freeLink(ctx context.Context, fabric string, node nodePlan) error {
	for _, end := range []struct{ netns, device string }{{fabric, node.name}, {node.netns, "eth0"}} {
		// Replacing it by the default works also where there is nothing to delete.
		if err := commands(ctx,
			"tc -n "+end.netns+" qdisc replace dev "+end.device+" root pfifo",
			"tc -n "+end.netns+" qdisc del dev "+end.device+" root",
		); err != nil {
			return err
		}
	}
	return nil
}

// limitLink limits both directions of a node's link.
func limitLink(ctx context.Context, fabric string, node nodePlan, rate string) error {
	for _, end := range []struct{ netns, device string }{{fabric, node.name}, {node.netns, "eth0"}} {
		if err := commands(ctx,
			"tc -n "+end.netns+" qdisc add dev "+end.device+" root handle 1: htb default 1",
			// The quantum is a whole offloaded packet, so that none is
			// counted as an overdraft.
			"tc -n "+end.netns+" class add dev "+end.device+" parent 1: classid 1:1 htb rate "+rate+" ceil "+rate+" burst 64k quantum 60000",
		); err != nil {
			return err
		}
	}
	return nil
}

// removeNetwork removes every namespace of a cluster, and with them its links.
func removeNetwork(ctx context.Context, cluster string) error {
	var all []error
	for _, name := range allNetns(cluster) {
		if _, err := os.Lstat(netnsPath(name)); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		all = append(all, commands(ctx, "ip netns del "+name))
	}
	return errors.Join(append(all, removeNetnsFolder())...)
}

const netnsFolder = "/run/netns"

// The folder of "ip netns" is a mount, which is created with the first namespace. A mark beside the clusters' folders
// records that a cluster created it, so that the last cluster can remove it.
func netnsMark() (string, error) {
	root, err := stateRoot()
	return filepath.Join(root, "netns-folder"), err
}

func markNetnsFolder() error {
	if _, err := os.Stat(netnsFolder); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	mark, err := netnsMark()
	if err != nil {
		return err
	}
	return writeFile(mark, []byte(netnsFolder+"\n"), 0o644)
}

func removeNetnsFolder() error {
	mark, err := netnsMark()
	if err != nil {
		return err
	}
	if _, err := os.Stat(mark); err != nil {
		return nil // another program created it
	}
	if entries, err := os.ReadDir(netnsFolder); err != nil || len(entries) > 0 {
		return nil // it is gone, or others use it
	}
	if err := unix.Unmount(netnsFolder, 0); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount %s: %w", netnsFolder, err)
	}
	if err := os.Remove(netnsFolder); err != nil {
		return err
	}
	return os.Remove(mark)
}

// setNetSysctl changes a setting of a network namespace. It ignores a setting that this kernel lacks.
func setNetSysctl(netns, name, value string) error {
	thread, err := newNetThread(netns)
	if err != nil {
		return err
	}
	defer thread.close()
	return thread.do(func() error {
		// /proc/sys/net shows the namespace of the thread that opens it.
		err := os.WriteFile("/proc/sys/"+name, []byte(value), 0)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
}

// commands runs command lines, of words without spaces, in turn.
func commands(ctx context.Context, lines ...string) error {
	for _, line := range lines {
		words := strings.Fields(line)
		if output, err := exec.CommandContext(ctx, words[0], words[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", line, err, strings.TrimSpace(string(output)))
		}
	}
	return nil
}
