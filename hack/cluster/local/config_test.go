package local

import (
	"net/netip"
	"strings"
	"testing"
)

func TestConfigDefaults(t *testing.T) {
	c, err := Config{}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	if c.Name != "dev" || c.Nodes != 2 || c.GPUs != 0 || c.Progress == nil {
		t.Errorf("defaults are %+v", c)
	}
}

func TestConfigRejectsInvalidValues(t *testing.T) {
	for _, c := range []struct {
		name   string
		config Config
		want   string
	}{
		{"a path as name", Config{Name: "../x"}, "letters"},
		{"capitals", Config{Name: "Dev"}, "lower-case"},
		{"a dash at the end", Config{Name: "dev-"}, "letters"},
		{"a long name", Config{Name: strings.Repeat("a", 21)}, "1 to 20"},
		{"negative nodes", Config{Nodes: -1}, "between 1 and"},
		{"too many nodes", Config{Nodes: MaxNodes + 1}, "between 1 and"},
		{"negative GPUs", Config{GPUs: -1}, "between 0 and"},
		{"too many GPUs", Config{GPUs: MaxGPUs + 1}, "between 0 and"},
		{"a rate without unit", Config{LinkRate: "500"}, "500mbit"},
		{"a rate of nothing", Config{LinkRate: "0mbit"}, "500mbit"},
		{"a rate with more behind it", Config{LinkRate: "1gbit; true"}, "500mbit"},
	} {
		if _, err := c.config.withDefaults(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error is %v, want one with %q", c.name, err, c.want)
		}
	}
}

func TestConfigAcceptsRates(t *testing.T) {
	for _, rate := range []string{"1kbit", "500mbit", "10gbit"} {
		if _, err := (Config{LinkRate: rate}).withDefaults(); err != nil {
			t.Error(err)
		}
	}
}

func TestConfigSameComparesEverySetting(t *testing.T) {
	base := Config{Name: "a", Nodes: 2, GPUs: 1, LinkRate: "1gbit"}
	if !base.same(base) {
		t.Error("a cluster differs from itself")
	}
	for _, other := range []Config{
		{Name: "b", Nodes: 2, GPUs: 1, LinkRate: "1gbit"},
		{Name: "a", Nodes: 3, GPUs: 1, LinkRate: "1gbit"},
		{Name: "a", Nodes: 2, GPUs: 2, LinkRate: "1gbit"},
		{Name: "a", Nodes: 2, GPUs: 1, LinkRate: "2gbit"},
	} {
		if base.same(other) {
			t.Errorf("%v counts as the same as %v", other, base)
		}
	}
}

func TestPlanAddressesAreUnique(t *testing.T) {
	nodes := Config{Name: "x", Nodes: MaxNodes}.plan()
	fabric, pods := netip.MustParsePrefix(ControlPlaneIP+"/24"), netip.MustParsePrefix(podCIDR)
	seen := map[string]bool{ControlPlaneIP: true}
	for _, node := range nodes {
		ip, err := netip.ParseAddr(node.ip)
		if err != nil || !fabric.Contains(ip) {
			t.Errorf("%s: address %s is not in %s", node.name, node.ip, fabric)
		}
		subnet, err := netip.ParsePrefix(node.podCIDR)
		if err != nil || !pods.Contains(subnet.Addr()) || subnet.Bits() <= pods.Bits() {
			t.Errorf("%s: pods' subnet %s is not in %s", node.name, node.podCIDR, pods)
		}
		for _, value := range []string{node.ip, node.podCIDR, node.netns, node.name} {
			if seen[value] {
				t.Errorf("%s is used twice", value)
			}
			seen[value] = true
		}
	}
}

// A cluster's clean-up uses names, so those of two clusters must differ.
func TestNamespaceNamesDifferBetweenClusters(t *testing.T) {
	seen := map[string]string{}
	for _, cluster := range []string{"a", "a-n1", "a-cp", "a-n1-n1", "n1", "fabric"} {
		for _, netns := range allNetns(cluster) {
			if other, ok := seen[netns]; ok {
				t.Errorf("%s is a namespace of both %s and %s", netns, other, cluster)
			}
			seen[netns] = cluster
		}
	}
}

func TestNamespaceCleanUpIncludesEveryNode(t *testing.T) {
	all := strings.Join(allNetns("x"), " ") + " "
	for _, node := range (Config{Name: "x", Nodes: MaxNodes}).plan() {
		if !strings.Contains(all, node.netns+" ") {
			t.Errorf("%s is not among %s", node.netns, all)
		}
	}
}
