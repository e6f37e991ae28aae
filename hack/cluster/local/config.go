package local

import (
	"fmt"
	"io"
	"regexp"
)

// MaxNodes is the maximum number of nodes of the address plan.
const MaxNodes = 32

// MaxGPUs is the maximum number of pretend GPUs of a node.
const MaxGPUs = 64

// Config describes a cluster.
type Config struct {
	// Name distinguishes clusters on one machine; "dev" if empty.
	Name string
	// Nodes is the number of nodes, 1 to MaxNodes; 2 if zero.
	Nodes int
	// GPUs is the number of pretend nvidia.com/gpu devices on each node.
	GPUs int
	// LinkRate limits each node's link in both directions, in tc's units
	// ("500mbit", "10gbit"); empty means no limit.
	LinkRate string
	// Progress receives one line per step; nothing is written if nil.
	Progress io.Writer `json:"-"`
}

var (
	validName = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$`)
	validRate = regexp.MustCompile(`^[1-9][0-9]*(k|m|g)bit$`)
)

// withDefaults sets the defaults and checks the values.
func (c Config) withDefaults() (Config, error) {
	if c.Name == "" {
		c.Name = "dev"
	}
	if c.Nodes == 0 {
		c.Nodes = 2
	}
	if c.Progress == nil {
		c.Progress = io.Discard
	}
	if err := checkName(c.Name); err != nil {
		return c, err
	}
	if c.Nodes < 1 || c.Nodes > MaxNodes {
		return c, fmt.Errorf("nodes: %d is not between 1 and %d", c.Nodes, MaxNodes)
	}
	if c.GPUs < 0 || c.GPUs > MaxGPUs {
		return c, fmt.Errorf("gpus: %d is not between 0 and %d", c.GPUs, MaxGPUs)
	}
	if c.LinkRate != "" && !validRate.MatchString(c.LinkRate) {
		return c, badRate(c.LinkRate)
	}
	return c, nil
}

func badRate(rate string) error {
	return fmt.Errorf("link rate: %q is not a number followed by kbit, mbit or gbit, like 500mbit", rate)
}

func checkName(name string) error {
	if !validName.MatchString(name) {
		return fmt.Errorf("cluster name: %q is not 1 to 20 lower-case letters, digits and dashes, starting with a letter", name)
	}
	return nil
}

// same reports whether two configurations are equal.
func (c Config) same(other Config) bool {
	c.Progress, other.Progress = nil, nil
	return c == other
}

func (c Config) String() string {
	rate := c.LinkRate
	if rate == "" {
		rate = "unlimited"
	}
	return fmt.Sprintf("nodes %d, pretend GPUs per node %d, link rate %s", c.Nodes, c.GPUs, rate)
}
