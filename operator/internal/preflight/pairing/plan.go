package pairing

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"slices"
)

// maxFaults is the number of faults after which an unproven node is not tested again, since its runs cost other nodes
// time too.
const maxFaults = 2

// state is derived from the complete rounds.
type state struct {
	check   *Check
	nodes   []*node
	byName  map[string]*node
	fabrics []*fabric
	// class holds the class of each of Check.Runs, or classNone if its round is not complete.
	class   []class
	limits  limits
	pending *Round
}

type node struct {
	name, pool     string
	fabric         *fabric
	runs           []int
	proven, failed bool
	// hadBadRun is set after a bad run of the node.
	hadBadRun bool
	// inUse is set when another pod began to use the node, which is then not tested again.
	inUse  bool
	faults int
}

// testable reports whether an unproven node may be tested again.
func (n *node) testable() bool { return !n.inUse && n.faults < maxFaults }

// fabric is a set of nodes that are tested among themselves.
type fabric struct {
	pools []string
	nodes []*node
	// Numbers of runs: all, bad ones, those over another network, faults.
	runs, bad, fallbacks, faults int
	// Numbers of nodes.
	proven, failed, nodesWithBadRuns int
	// uncompared is set after a run without anything to compare it with, until there is something.
	uncompared bool
	// circle is the next round of the circle method.
	circle int
	done   bool
}

// blamed reports whether the fabric is the cause. It is if more than half of the nodes with a verdict failed, or if no
// run passed, most nodes had bad runs, and bad runs outnumber faults.
func (f *fabric) blamed() bool {
	if f.proven > 0 {
		return f.done && 2*f.failed > f.failed+f.proven
	}
	return f.done && 2*f.nodesWithBadRuns > len(f.nodes) && f.bad > f.faults
}

// groupKey identifies a group's run.
type groupKey struct {
	round int
	nodes [3]string
}

func groupKeyOf(round int, nodes []string) (groupKey, bool) {
	k := groupKey{round: round}
	if len(nodes) < 2 || len(nodes) > len(k.nodes) {
		return k, false
	}
	copy(k.nodes[:], nodes)
	slices.Sort(k.nodes[:len(nodes)])
	return k, true
}

// replay plans the rounds again, as far as their runs are recorded.
func replay(c *Check) *state {
	s := newState(c)
	recorded := map[groupKey]int{}
	for i := range c.Runs {
		if k, ok := groupKeyOf(c.Runs[i].Round, c.Runs[i].Nodes); ok {
			if _, again := recorded[k]; !again {
				recorded[k] = i
			}
		}
	}
	for number := 1; ; number++ {
		var groups [][]*node
		for _, f := range s.fabrics {
			if c.MaxRounds > 0 && number > c.MaxRounds {
				f.done = true
			}
			groups = append(groups, f.plan(s, number)...)
		}
		if len(groups) == 0 {
			return s
		}
		round := Round{Number: number, Total: len(groups)}
		var runs []int
		for i, group := range groups {
			names := make([]string, len(group))
			for j, n := range group {
				names[j] = n.name
			}
			k, _ := groupKeyOf(number, names)
			if run, ok := recorded[k]; ok {
				runs = append(runs, run)
			} else {
				round.Groups = append(round.Groups, Group{Index: i, Nodes: names})
			}
		}
		if len(round.Groups) > 0 {
			s.pending = &round
			return s
		}
		s.applyRound(runs)
	}
}

func newState(c *Check) *state {
	s := &state{check: c, byName: map[string]*node{}, class: make([]class, len(c.Runs)), limits: newLimits(c)}
	pools := map[string][]*node{}
	for _, n := range c.Nodes {
		if s.byName[n.Name] == nil {
			added := &node{name: n.Name, pool: n.Pool}
			s.nodes, s.byName[n.Name] = append(s.nodes, added), added
			pools[n.Pool] = append(pools[n.Pool], added)
		}
	}
	names := make([]string, 0, len(pools))
	for pool := range pools {
		names = append(names, pool)
	}
	slices.Sort(names)
	alone := &fabric{}
	for _, pool := range names {
		if len(pools[pool]) > 1 {
			s.fabrics = append(s.fabrics, &fabric{pools: []string{pool}, nodes: pools[pool]})
			continue
		}
		alone.pools, alone.nodes = append(alone.pools, pool), append(alone.nodes, pools[pool]...)
	}
	if len(alone.nodes) > 0 {
		s.fabrics = append(s.fabrics, alone)
	}
	for _, f := range s.fabrics {
		shuffle(f.nodes, c.Seed)
		for _, n := range f.nodes {
			n.fabric = f
		}
	}
	return s
}

// shuffle orders nodes by a hash of seed and name, so that the order is reproducible.
func shuffle(nodes []*node, seed uint64) {
	places := make(map[*node]uint64, len(nodes))
	for _, n := range nodes {
		h := fnv.New128a()
		var bytes [8]byte
		binary.LittleEndian.PutUint64(bytes[:], seed)
		_, _ = h.Write(bytes[:]) // a hash never fails to write
		_, _ = h.Write([]byte(n.name))
		places[n] = mix(binary.LittleEndian.Uint64(h.Sum(nil)))
	}
	slices.SortFunc(nodes, func(a, b *node) int {
		return cmp.Or(cmp.Compare(places[a], places[b]), cmp.Compare(a.name, b.name))
	})
}

// mix spreads each bit over all others. FNV hashes of names that differ only at the end are close together.
func mix(v uint64) uint64 {
	v = (v ^ v>>33) * 0xff51afd7ed558ccd
	v = (v ^ v>>33) * 0xc4ceb9fe1a85ec53
	return v ^ v>>33
}

// applyRound adds the runs of a complete round.
func (s *state) applyRound(runs []int) {
	for _, i := range runs {
		s.class[i] = s.check.classify(&s.check.Runs[i])
	}
	s.limits.addRound(s, runs)
	for _, i := range runs {
		run := &s.check.Runs[i]
		if s.class[i] == classPass {
			switch limit := s.limits.limitFor(s, run.Nodes); {
			case run.BusBW < limit:
				s.class[i] = classSlow
			case !(limit > 0):
				s.class[i] = classUncompared
			}
		}
		s.countRun(i, run)
	}
	for _, f := range s.fabrics {
		f.uncompared = f.uncompared && !(f.comparable() && s.limits[f.pools[0]].MinBusBW > 0)
		if f.uncompared && (!f.comparable() || f.proven > 0) {
			f.acceptUncompared(s)
		}
	}
	s.failConfirmed()
}

// failConfirmed fails the nodes whose bad runs are confirmed by now.
func (s *state) failConfirmed() {
	for _, n := range s.nodes {
		if !n.proven && !n.failed && n.confirmed(s) {
			n.failed = true
			n.fabric.failed++
		}
	}
}

// countBadRun counts a run that is bad for its fabric and its nodes.
func (s *state) countBadRun(i int) {
	run := &s.check.Runs[i]
	f := s.byName[run.Nodes[0]].fabric
	f.bad++
	if s.class[i] == classFallback {
		f.fallbacks++
	}
	for _, name := range run.Nodes {
		if n := s.byName[name]; !n.hadBadRun {
			n.hadBadRun = true
			f.nodesWithBadRuns++
		}
	}
}

func (s *state) countRun(i int, run *Run) {
	f := s.byName[run.Nodes[0]].fabric
	f.runs++
	switch class := s.class[i]; {
	case class.bad():
		s.countBadRun(i)
	case class == classFault:
		f.faults++
	}
	for _, name := range run.Nodes {
		n := s.byName[name]
		n.runs = append(n.runs, i)
		switch {
		case len(run.InUse) > 0: // it says nothing against the other nodes
			n.inUse = n.inUse || slices.Contains(run.InUse, name)
		case s.class[i] == classFault:
			n.faults++
		case s.class[i] == classPass:
			n.prove()
		case s.class[i] == classUncompared:
			f.uncompared = true
		}
	}
}

func (n *node) prove() {
	if !n.proven {
		n.proven = true
		n.fabric.proven++
	}
}

// comparable reports whether runs of the fabric can be compared with each other: two of them need four nodes.
func (f *fabric) comparable() bool { return len(f.pools) == 1 && len(f.nodes) >= 4 }

// minNodesToCompare is the minimum number of nodes whose best runs are compared.
const minNodesToCompare = 3

// limitAmongNodes sets the limit of a fabric whose rounds never had two runs to compare, such as when one of five nodes
// fails for other reasons. It is computed from the best run of each node: a slow node is slow in all of its runs, and
// its partners are in some.
func (f *fabric) limitAmongNodes(s *state) {
	var best []float64
	for _, n := range f.nodes {
		if bw := n.bestBusBW(s); bw > 0 {
			best = append(best, bw)
		}
	}
	if pool := f.pools[0]; f.comparable() && len(best) >= minNodesToCompare && !(s.limits[pool].MinBusBW > 0) {
		s.limits[pool] = limitFromMedian(best, s.check.Thresholds.MinPercentOfMedian)
	}
}

// acceptUncompared ends a fabric's wait for runs to compare with, if its pools have no node that other runs could be
// made with at another time: runs pass unless they are slower than the runs of its other nodes. Once a run was
// accepted, all are. It reports whether this proved a node.
func (f *fabric) acceptUncompared(s *state) bool {
	before := f.proven
	if before == 0 && (slices.ContainsFunc(f.pools, func(pool string) bool { return s.check.Partial[pool] }) || slices.ContainsFunc(f.nodes, func(n *node) bool { return n.inUse })) {
		return false
	}
	f.limitAmongNodes(s)
	for _, n := range f.nodes {
		for _, i := range n.runs {
			if s.class[i] == classUncompared {
				s.class[i] = classPass
				if run := &s.check.Runs[i]; run.BusBW < s.limits.limitFor(s, run.Nodes) {
					s.class[i] = classSlow
					s.countBadRun(i)
				}
			}
			if s.class[i] == classPass {
				n.prove()
			}
		}
	}
	f.uncompared = false
	s.failConfirmed()
	return f.proven > before
}

// badPartners returns the partners of the node's bad runs of two. A bad run of three does not count: the fault may be
// between the other two.
func (n *node) badPartners(s *state) map[string]bool {
	partners := map[string]bool{}
	for _, i := range n.runs {
		if run := &s.check.Runs[i]; s.class[i].bad() && len(run.Nodes) == 2 {
			partners[run.others(n.name)[0]] = true
		}
	}
	return partners
}

// confirmed reports whether the node has bad runs with two partners, at least one of them proven.
func (n *node) confirmed(s *state) bool {
	if n.fabric.proven == 0 || !n.hadBadRun {
		return false
	}
	partners := n.badPartners(s)
	for name := range partners {
		if s.byName[name].proven {
			return len(partners) > 1
		}
	}
	return false
}

func (s *state) allProven(names []string) bool {
	return !slices.ContainsFunc(names, func(name string) bool { return !s.byName[name].proven })
}

// plan returns the fabric's groups of a round, or none when the fabric is done.
func (f *fabric) plan(s *state, number int) [][]*node {
	var groups [][]*node
	switch {
	case f.done || len(f.nodes) < 2 || 2*f.failed > len(f.nodes):
	case number == 1:
		groups = f.firstRound()
	case f.proven == 0 && f.uncompared && !f.comparable():
	case f.proven == 0:
		groups = f.nextCircleRound()
		if len(groups) == 0 && f.uncompared && f.acceptUncompared(s) {
			groups = f.retryGroups(s, number)
		}
	default:
		groups = f.retryGroups(s, number)
	}
	f.done = len(groups) == 0
	return groups
}

// firstRound covers every node. Of an odd number of nodes three are together, so that no node is in two groups at once.
func (f *fabric) firstRound() [][]*node {
	groups, bye := f.pairs(0)
	if bye != nil {
		groups[0] = append(groups[0], bye)
	}
	f.circle = 1
	return groups
}

// nextCircleRound returns the next round of the circle method that has a pair left. It ends when every two nodes have
// been a pair. The two nodes that had a third with them in round 1 come last.
func (f *fabric) nextCircleRound() [][]*node {
	odd := len(f.nodes) % 2
	rounds := len(f.nodes) - 1 + odd
	for f.circle < rounds+odd {
		pairs, _ := f.pairs(f.circle % rounds)
		if f.circle == rounds {
			pairs = pairs[:1]
		}
		f.circle++
		pairs = slices.DeleteFunc(pairs, func(pair []*node) bool {
			return !pair[0].testable() || !pair[1].testable()
		})
		if len(pairs) > 0 {
			return pairs
		}
	}
	return nil
}

// pairs returns round r of the circle method, from 0. Of an odd number of nodes one is left over.
func (f *fabric) pairs(r int) (pairs [][]*node, bye *node) {
	places := len(f.nodes) + len(f.nodes)%2
	turning := places - 1
	if turning < len(f.nodes) {
		pairs = append(pairs, []*node{f.nodes[r], f.nodes[turning]})
	} else {
		bye = f.nodes[r]
	}
	for i := 1; i < places/2; i++ {
		pairs = append(pairs, []*node{f.nodes[(r+i)%turning], f.nodes[(r-i+turning)%turning]})
	}
	return pairs, bye
}

// retryGroups pairs nodes without a verdict with proven partners. If there are too few partners, the rest are paired
// among themselves, which may prove more nodes.
func (f *fabric) retryGroups(s *state, number int) [][]*node {
	var open, free []*node
	for _, n := range f.nodes {
		switch {
		case n.inUse:
		case n.proven:
			free = append(free, n)
		case !n.failed && n.testable():
			open = append(open, n)
		}
	}
	var groups [][]*node
	var rest []*node
	for _, n := range open {
		at := n.choosePartner(s, free)
		if at < 0 {
			rest = append(rest, n)
			continue
		}
		groups = append(groups, []*node{n, free[at]})
		// Partners that were skipped stay first in line.
		copy(free[1:at+1], free[:at])
		free = free[1:]
	}
	shuffle(rest, s.check.Seed+uint64(number))
	for len(rest) > 1 {
		n := rest[0]
		rest = rest[1:]
		at := slices.IndexFunc(rest, func(p *node) bool { return !n.faultyWith(s, p) })
		if at < 0 {
			if len(groups) > 0 {
				continue // a later round has proven partners for it
			}
			at = 0
		}
		groups = append(groups, []*node{n, rest[at]})
		rest = slices.Delete(rest, at, at+1)
	}
	return groups
}

// faultyWith reports whether a run of both nodes was a fault.
func (n *node) faultyWith(s *state, p *node) bool {
	return slices.ContainsFunc(n.runs, func(i int) bool {
		return s.class[i] == classFault && slices.Contains(s.check.Runs[i].Nodes, p.name)
	})
}

// choosePartner returns the index of a partner for n, or -1. It excludes partners of bad runs, and prefers partners
// without a fault.
func (n *node) choosePartner(s *state, free []*node) int {
	bad := n.badPartners(s)
	at := slices.IndexFunc(free, func(p *node) bool { return !bad[p.name] && !n.faultyWith(s, p) })
	if at < 0 {
		at = slices.IndexFunc(free, func(p *node) bool { return !bad[p.name] })
	}
	return at
}
