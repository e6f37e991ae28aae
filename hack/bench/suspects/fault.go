package main

import (
	"fmt"
	"math/rand/v2"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// A kind is what a fault does.
type kind string

const (
	egress   kind = "card, sending"
	ingress  kind = "card, receiving"
	delay    kind = "delay on a card"
	loss     kind = "loss on a card"
	flapping kind = "flapping card"
	path     kind = "path"
	slow     kind = "slow process"
	stopped  kind = "stopped process"
	behind   kind = "late each step"
	two      kind = "two at once"
)

// kinds are all of them; those before the last one make up the last one.
var kinds = []kind{egress, ingress, delay, loss, flapping, path, slow, stopped, behind, two}

// amounts are how bad the faults of a kind are: what is left of a rate, the delay in milliseconds, the share of packets lost, the
// share of the time that a card is down or a process stopped, and by how many milliseconds a rank is late.
var amounts = map[kind][]float64{
	egress:   {0.5, 0.25, 0.1},
	ingress:  {0.5, 0.25, 0.1},
	delay:    {20, 50, 100},
	loss:     {0.001, 0.01, 0.02, 0.05},
	flapping: {0.1, 0.25, 0.5},
	path:     {0.5, 0.25, 0.1},
	slow:     {0.5, 0.75, 0.9},
	stopped:  {1},
	behind:   {10, 50, 100, 200, 500},
}

// The classes of verdicts, as the plugin names them, and that of none.
const (
	classLate   = "late"
	classLink   = "link"
	classPath   = "path"
	classNobody = "nobody"
)

// The patterns of a job. Faults are injected into the first two.
const (
	ring      = "all-reduce in a ring, over the plugin"
	allToAll  = "all-to-all, over the collectives"
	broadcast = "broadcast by rank 0, over the collectives"
	gather    = "gather at rank 0, over the collectives"
)

var patterns = []string{ring, allToAll}

// collective is the benchmark of a pattern that runs over the collectives.
var collective = map[string]string{allToAll: "alltoall", broadcast: "broadcast", gather: "gather"}

// A fault is drawn from a seed.
type fault struct {
	Kind    kind
	Pattern string
	Host    int // counted from 0
	Peer    int // the end of a path that begins at the host
	Amount  float64
	Both    []fault // of two at once
}

func draw(random *rand.Rand, hosts int) fault {
	k, pattern := kinds[random.IntN(len(kinds))], patterns[random.IntN(len(patterns))]
	first := drawOf(random, k, pattern, hosts)
	if k != two {
		return first
	}
	simple := func() fault { return drawOf(random, kinds[random.IntN(len(kinds)-1)], pattern, hosts) }
	both := []fault{simple(), simple()}
	for both[0].touches(both[1].Host) || both[1].touches(both[0].Host) {
		both[1] = simple()
	}
	return fault{Kind: two, Pattern: pattern, Both: both}
}

func drawOf(random *rand.Rand, k kind, pattern string, hosts int) fault {
	f := fault{Kind: k, Pattern: pattern, Host: random.IntN(hosts)}
	f.Peer = (f.Host + 1) % hosts // that of a ring
	if pattern == allToAll {
		f.Peer = (f.Host + 1 + random.IntN(hosts-1)) % hosts
	}
	if all := amounts[k]; len(all) > 0 {
		f.Amount = all[random.IntN(len(all))]
	}
	return f
}

// touches says whether a fault is of this host.
func (f fault) touches(host int) bool { return f.Host == host || f.Kind == path && f.Peer == host }

// isRight says whether a verdict names the fault's place and class; of two at once, one of them. A card whose only connection that
// carries anything is slow cannot be told from the path. The verdict has to say that.
func (f fault) isRight(v verdict) bool {
	if len(v.Suspects) == 0 {
		return false
	}
	s := v.Suspects[0]
	name, peer := hostName(f.Host), ""
	if s.Peer != nil {
		peer = s.Peer.Host
	}
	switch f.Kind {
	case slow, stopped, behind:
		return s.Class == classLate && s.Host == name
	case path:
		other := hostName(f.Peer)
		return s.Class == classPath && (s.Host == name && peer == other || s.Host == other && peer == name)
	case egress, ingress, delay, loss, flapping:
		return s.Class == classLink && s.Host == name || f.mayBePath(s)
	case two:
		return f.Both[0].isRight(v) || f.Both[1].isRight(v)
	}
	return false
}

// mayBePath says whether the fault, or one of two, is of a card, and the suspect a path from or to it that may be that card.
func (f fault) mayBePath(s suspect) bool {
	switch f.Kind {
	case egress, ingress, delay, loss, flapping:
		name := hostName(f.Host)
		return s.Class == classPath && s.OrCard && (s.Host == name || s.Peer != nil && s.Peer.Host == name)
	case two:
		return f.Both[0].mayBePath(s) || f.Both[1].mayBePath(s)
	}
	return false
}

// String is the fault in words, without the pattern.
func (f fault) String() string {
	switch f.Kind {
	case two:
		return fmt.Sprintf("%s and %s", f.Both[0], f.Both[1])
	case path:
		return fmt.Sprintf("%s from %s to %s (%g)", f.Kind, hostName(f.Host), hostName(f.Peer), f.Amount)
	default:
		return fmt.Sprintf("%s of %s (%g)", f.Kind, hostName(f.Host), f.Amount)
	}
}

func hostName(host int) string { return string(netns.StarHost(host)) }
