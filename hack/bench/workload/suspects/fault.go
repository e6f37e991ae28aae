package suspects

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"

	"evenkeel.dev/evenkeel/hack/lab/net/netns"
)

// A Kind is what a fault does, in words.
type Kind string

const (
	egress   Kind = "card, sending"
	ingress  Kind = "card, receiving"
	delay    Kind = "delay on a card"
	loss     Kind = "loss on a card"
	flapping Kind = "flapping card"
	path     Kind = "path"
	slow     Kind = "slow process"
	stopped  Kind = "stopped process"
	behind   Kind = "late each step"
	two      Kind = "two at once"
)

// Kinds are all of them; those before the last one make up the last one.
var Kinds = []Kind{egress, ingress, delay, loss, flapping, path, slow, stopped, behind, two}

// amounts are how bad the faults of a kind are: what is left of a rate, the delay in milliseconds, the share of packets
// lost, the share of the time that a card is down or a process stopped, and by how many milliseconds a rank is late.
var amounts = map[Kind][]float64{
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

// The classes of verdicts, as the plugin names them.
const (
	classLate = "late"
	classLink = "link"
	classPath = "path"
)

// A fault is drawn from a seed.
type fault struct {
	Kind   Kind
	Host   int // counted from 0
	Peer   int // the end of a path that begins at the host
	Amount float64
	Both   []fault // of two at once
}

// draw draws the fault of a round. Kinds, patterns and rounds do not depend on each other.
func draw(seed uint64, k Kind, p Pattern, round int) fault {
	stream := fnv.New64a()
	fmt.Fprintf(stream, "%s, %s, %d", k, p, round)
	random := rand.New(rand.NewPCG(seed, stream.Sum64())) //nolint:gosec // the same faults for the same seed
	if k != two {
		return drawOf(random, k, p)
	}
	simple := func() fault { return drawOf(random, Kinds[random.IntN(len(Kinds)-1)], p) }
	both := []fault{simple(), simple()}
	for both[0].touches(both[1].Host) || both[1].touches(both[0].Host) {
		both[1] = simple()
	}
	return fault{Kind: two, Both: both}
}

func drawOf(random *rand.Rand, k Kind, p Pattern) fault {
	f := fault{Kind: k, Host: random.IntN(Hosts)}
	f.Peer = (f.Host + 1) % Hosts // that of a ring
	if p == AllToAll {
		f.Peer = (f.Host + 1 + random.IntN(Hosts-1)) % Hosts
	}
	if all := amounts[k]; len(all) > 0 {
		f.Amount = all[random.IntN(len(all))]
	}
	return f
}

// touches says whether a fault is of this host.
func (f fault) touches(host int) bool { return f.Host == host || f.Kind == path && f.Peer == host }

// isRight says whether a verdict names the fault's place and class; of two at once, one of them. A card whose only
// connection that carries anything is slow cannot be told from the path. The verdict has to say that.
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

// mayBePath says whether the fault, or one of two, is of a card, and the suspect a path from or to it that may be that
// card.
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

// String is the fault in words.
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
