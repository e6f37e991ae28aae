package pairing_test

import (
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
)

// world is a fabric with known troubles.
type world struct {
	bad   map[string]bool
	links map[[2]string]bool
	// fault says which groups meet an infrastructure fault, by round.
	fault func(round int, nodes []string) bool
	// run, if set, has the last word.
	run func(run *pairing.Run)
}

const good, slow = 10.0, 1.0

func link(a, b string) [2]string { return [2]string{min(a, b), max(a, b)} }

func (w world) test(round int, nodes []string) pairing.Run {
	run := pairing.Run{Round: round, Nodes: slices.Clone(nodes), Outcome: pairing.Measured, BusBW: good, Networks: []string{"Evenkeel"}}
	for i, a := range nodes {
		if w.bad[a] {
			run.BusBW = slow
		}
		for _, b := range nodes[:i] {
			if w.links[link(a, b)] {
				run.BusBW = slow
			}
		}
	}
	if w.fault != nil && w.fault(round, nodes) {
		run = pairing.Run{Round: round, Nodes: run.Nodes, Outcome: pairing.Fault, Detail: "image cannot be pulled"}
	}
	if w.run != nil {
		w.run(&run)
	}
	return run
}

func nodes(n int) []pairing.Node {
	all := make([]pairing.Node, n)
	for i := range all {
		all[i] = pairing.Node{Name: fmt.Sprintf("node-%03d", i), Pool: "h100"}
	}
	return all
}

func check(n int, seed uint64) pairing.Check {
	return pairing.Check{Nodes: nodes(n), Network: "Evenkeel", Thresholds: pairing.Thresholds{MinBusBW: 8}, Seed: seed}
}

// finish runs all rounds and gives the final decision and their number.
func finish(t testing.TB, c *pairing.Check, w world) (pairing.Decision, int) {
	t.Helper()
	rounds, bound := 0, 3*len(c.Nodes)+5
	for {
		d := pairing.Decide(*c)
		if d.Next == nil {
			return d, rounds
		}
		rounds++
		if rounds > bound {
			t.Fatalf("no end after %d rounds", bound)
		}
		if d.Next.Number != rounds || len(d.Next.Groups) == 0 || d.Next.Total != len(d.Next.Groups) {
			t.Fatalf("round %d is %+v", rounds, d.Next)
		}
		if len(d.Fabrics) == 1 && d.Fabrics[0].Verdict == evenkeel.VerdictFail {
			t.Fatalf("blamed before round %d: %+v", rounds, d.Fabrics)
		}
		seen := map[string]bool{}
		for i, g := range d.Next.Groups {
			if g.Index != i || len(g.Nodes) < 2 || len(g.Nodes) > 3 || len(g.Nodes) == 3 && rounds > 1 {
				t.Fatalf("round %d has the group %+v", rounds, g)
			}
			for _, name := range g.Nodes {
				if seen[name] {
					t.Fatalf("round %d has %s twice", rounds, name)
				}
				seen[name] = true
			}
			c.Runs = append(c.Runs, w.test(rounds, g.Nodes))
		}
	}
}

func count(d pairing.Decision) map[evenkeel.Verdict]int {
	all := map[evenkeel.Verdict]int{}
	for _, n := range d.Nodes {
		all[n.Verdict]++
	}
	return all
}

func verdicts(d pairing.Decision) map[string]evenkeel.Verdict {
	all := map[string]evenkeel.Verdict{}
	for _, n := range d.Nodes {
		all[n.Name] = n.Verdict
	}
	return all
}

func TestPairingRoundOneCoversEveryNode(t *testing.T) {
	for n := 2; n < 60; n++ {
		c := check(n, 3)
		var seen []string
		for _, g := range pairing.Decide(c).Next.Groups {
			seen = append(seen, g.Nodes...)
		}
		slices.Sort(seen)
		if len(seen) != n || len(slices.Compact(seen)) != n {
			t.Errorf("%d nodes: %v", n, seen)
		}
	}
}

func TestPairingVariesWithSeed(t *testing.T) {
	a, b := pairing.Decide(check(16, 1)), pairing.Decide(check(16, 2))
	if cmp.Equal(a.Next, b.Next) {
		t.Error("two seeds, the same pairs")
	}
	if diff := cmp.Diff(a, pairing.Decide(check(16, 1)), cmpopts.EquateEmpty()); diff != "" {
		t.Error(diff)
	}
}

// Every set of bad nodes in every fabric of up to nine.
func TestPairingFindsEveryBadSet(t *testing.T) {
	for n := 2; n <= 9; n++ {
		for set := range 1 << n {
			for seed := range uint64(3) {
				w := world{bad: map[string]bool{}}
				c := check(n, seed)
				for i, node := range c.Nodes {
					w.bad[node.Name] = set>>i&1 == 1
				}
				bad := bits.OnesCount(uint(set))
				firstPairs := pairing.Decide(c).Next.Groups
				proven, trioBad := 0, false
				for _, g := range firstPairs {
					if !slices.ContainsFunc(g.Nodes, func(name string) bool { return w.bad[name] }) {
						proven += len(g.Nodes)
					} else if len(g.Nodes) == 3 {
						trioBad = true
					}
				}
				d, rounds := finish(t, &c, w)
				name := fmt.Sprintf("n %d, set %b, seed %d", n, set, seed)
				fabricBad := bad > n-bad || n-bad < 2
				if (d.Fabrics[0].Verdict == evenkeel.VerdictFail) != fabricBad {
					t.Fatalf("%s: fabric %+v", name, d.Fabrics[0])
				}
				for _, got := range d.Nodes {
					switch {
					case fabricBad && (got.Verdict == evenkeel.VerdictFail || w.bad[got.Name] && got.Verdict != evenkeel.VerdictInconclusive):
						t.Fatalf("%s: the fabric is to blame, and %+v", name, got)
					case !fabricBad && w.bad[got.Name] != (got.Verdict == evenkeel.VerdictFail), !fabricBad && !w.bad[got.Name] != (got.Verdict == evenkeel.VerdictPass):
						t.Fatalf("%s: %+v", name, got)
					}
				}
				switch {
				case bad == 0 && rounds != 1:
					t.Fatalf("%s: all good, %d rounds", name, rounds)
				case proven >= n-proven && !trioBad && rounds > 2, proven >= n-proven && rounds > 3:
					t.Fatalf("%s: a partner for every suspect, %d rounds", name, rounds)
				case rounds > n+1+bad:
					t.Fatalf("%s: %d rounds", name, rounds)
				}
			}
		}
	}
}

func TestPairingAllBadFailsFabric(t *testing.T) {
	for _, n := range []int{2, 3, 4, 7, 16} {
		c := check(n, 1)
		d, rounds := finish(t, &c, world{run: func(r *pairing.Run) { r.BusBW = slow }})
		spent := n - 1
		if n%2 == 1 {
			spent = n + 1
		}
		if d.Verdict != evenkeel.VerdictFail || d.Fabrics[0].Reason != pairing.ReasonNoPairPassed || rounds != spent {
			t.Errorf("%d nodes: %+v in %d rounds", n, d.Fabrics, rounds)
		}
		for _, got := range d.Nodes {
			if got.Verdict != evenkeel.VerdictInconclusive || got.Reason != pairing.ReasonFabricSuspect {
				t.Errorf("%+v", got)
			}
		}
		// All pairings were tried.
		met := map[[2]string]bool{}
		for _, run := range c.Runs {
			if len(run.Nodes) == 2 {
				if met[link(run.Nodes[0], run.Nodes[1])] {
					t.Errorf("%d nodes: %v meet twice", n, run.Nodes)
				}
				met[link(run.Nodes[0], run.Nodes[1])] = true
			}
		}
		if len(met) != n*(n-1)/2 {
			t.Errorf("%d nodes: %d pairs, want %d", n, len(met), n*(n-1)/2)
		}
	}
}

func TestPairingMaxRounds(t *testing.T) {
	c := check(16, 1)
	c.MaxRounds = 3
	d, rounds := finish(t, &c, world{run: func(r *pairing.Run) { r.BusBW = slow }})
	if rounds != 3 || d.Fabrics[0].Reason != pairing.ReasonNoPairPassed {
		t.Errorf("%d rounds, %+v", rounds, d.Fabrics)
	}
	c = check(16, 1)
	c.MaxRounds = 1
	d, _ = finish(t, &c, world{bad: map[string]bool{"node-003": true}})
	for _, n := range d.Nodes {
		if n.Verdict == evenkeel.VerdictFail || n.Name == "node-003" && n.Reason != pairing.ReasonUnconfirmed {
			t.Errorf("%+v", n)
		}
	}
}

// One node of many whose runs are all bad, in every way a run can be.
func TestPairingReasons(t *testing.T) {
	tests := map[string]struct {
		spoil  func(*pairing.Run)
		reason pairing.Reason
		says   string
	}{
		"slow":              {func(r *pairing.Run) { r.BusBW = 7.99 }, pairing.ReasonSlow, "7.99 GB/s, minimum 8"},
		"wrong data":        {func(r *pairing.Run) { r.Wrong = 3 }, pairing.ReasonWrongData, "3 wrong elements"},
		"broken":            {func(r *pairing.Run) { r.Outcome, r.Detail = pairing.Broken, "peer lost" }, pairing.ReasonBroken, "the run broke (peer lost)"},
		"fallback":          {func(r *pairing.Run) { r.Networks = []string{"Socket"} }, pairing.ReasonFallback, "ran over Socket, not Evenkeel"},
		"ranks differ":      {func(r *pairing.Run) { r.Networks = []string{"Evenkeel", "Socket"} }, pairing.ReasonFallback, "ran over Evenkeel and Socket"},
		"fault":             {func(r *pairing.Run) { r.Outcome = pairing.Fault; r.Detail = "evicted" }, pairing.ReasonInfrastructure, "inconclusive (evicted)"},
		"network not known": {func(r *pairing.Run) { r.Networks = nil }, pairing.ReasonInfrastructure, "the result cannot be used"},
		"not a number":      {func(r *pairing.Run) { r.BusBW = math.NaN() }, pairing.ReasonInfrastructure, "the result cannot be used"},
		"nothing measured":  {func(r *pairing.Run) { r.BusBW = 0 }, pairing.ReasonInfrastructure, "the result cannot be used"},
		"no outcome":        {func(r *pairing.Run) { r.Outcome = "" }, pairing.ReasonInfrastructure, "the result cannot be used"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			c := check(8, 5)
			d, rounds := finish(t, &c, world{run: func(r *pairing.Run) {
				if slices.Contains(r.Nodes, "node-002") {
					test.spoil(r)
				}
			}})
			want := evenkeel.VerdictFail
			if test.reason == pairing.ReasonInfrastructure {
				want = evenkeel.VerdictInconclusive
			}
			for _, n := range d.Nodes {
				if n.Name != "node-002" {
					if n.Verdict != evenkeel.VerdictPass || n.BusBW != good {
						t.Errorf("%+v", n)
					}
					continue
				}
				if n.Verdict != want || n.Reason != test.reason || !strings.Contains(n.Message, test.says) || len(n.Evidence) != 2 {
					t.Errorf("%+v", n)
				}
			}
			if d.Verdict != want || rounds != 2 || d.Fabrics[0].Verdict != evenkeel.VerdictPass || len(d.Fabrics[0].BadLinks) != 0 {
				t.Errorf("check %s in %d rounds, fabric %+v", d.Verdict, rounds, d.Fabrics)
			}
		})
	}
}

func TestPairingFallbackEverywhereFails(t *testing.T) {
	c := check(4, 1)
	d, _ := finish(t, &c, world{run: func(r *pairing.Run) { r.Networks = []string{"Socket"} }})
	if d.Verdict != evenkeel.VerdictFail || d.Fabrics[0].Reason != pairing.ReasonFallback {
		t.Errorf("%+v", d)
	}
}

func TestPairingFaultsAreInconclusive(t *testing.T) {
	for n := 2; n < 12; n++ {
		c := check(n, 1)
		d, rounds := finish(t, &c, world{fault: func(int, []string) bool { return true }})
		if d.Verdict != evenkeel.VerdictInconclusive || d.Fabrics[0].Reason != pairing.ReasonInfrastructure || rounds > 3 {
			t.Errorf("%d nodes: %+v in %d rounds", n, d, rounds)
		}
	}
}

// Random bad nodes and faults: a good node never fails, and a bad node without faults never passes.
func TestPairingGoodNodesNeverFail(t *testing.T) {
	blamed := 0
	for seed := range uint64(3000) {
		random := rand.New(rand.NewPCG(seed, 7))
		n := 2 + random.IntN(30)
		faulty := random.Float64() / 2
		w := world{bad: map[string]bool{}, fault: func(int, []string) bool { return random.Float64() < faulty }}
		c := check(n, seed)
		share := random.Float64()
		for _, node := range c.Nodes {
			w.bad[node.Name] = random.Float64() < share
		}
		if ill := random.IntN(n); seed%2 == 0 {
			w.fault = func(_ int, group []string) bool {
				return slices.ContainsFunc(group, func(name string) bool {
					return slices.IndexFunc(c.Nodes, func(n pairing.Node) bool { return n.Name == name }) < ill
				})
			}
		}
		d, _ := finish(t, &c, w)
		if all := count(d); 2*all[evenkeel.VerdictFail] > all[evenkeel.VerdictFail]+all[evenkeel.VerdictPass] {
			t.Fatalf("seed %d: most nodes fail: %v", seed, all)
		} else if f := d.Fabrics[0]; f.Reason == pairing.ReasonMostNodesFailed && all[evenkeel.VerdictPass] > 0 {
			blamed++
		}
		for _, got := range d.Nodes {
			if w.bad[got.Name] && got.Verdict == evenkeel.VerdictPass || !w.bad[got.Name] && got.Verdict == evenkeel.VerdictFail {
				t.Fatalf("seed %d, bad %v: %+v", seed, w.bad[got.Name], got)
			}
			bad := 0
			for _, i := range got.Evidence {
				if c.Runs[i].Outcome == pairing.Measured && c.Runs[i].BusBW < 8 {
					bad++
				}
			}
			if got.Verdict == evenkeel.VerdictFail && bad < 2 {
				t.Fatalf("seed %d: failed by %d bad runs: %+v", seed, bad, got)
			}
		}
	}
	if blamed == 0 {
		t.Error("no fabric was blamed with proven nodes in it")
	}
}

// Random bad links, at most one at each node: no node fails, and the links that were tested are named.
func TestPairingBadLinkFailsNoNode(t *testing.T) {
	named := 0
	for seed := range uint64(1000) {
		random := rand.New(rand.NewPCG(seed, 9))
		c := check(4+random.IntN(20), seed)
		w := world{links: map[[2]string]bool{}}
		order := random.Perm(len(c.Nodes))
		for ; len(order) > 1 && random.IntN(3) > 0; order = order[2:] {
			w.links[link(c.Nodes[order[0]].Name, c.Nodes[order[1]].Name)] = true
		}
		d, _ := finish(t, &c, w)
		for _, got := range d.Nodes {
			if got.Verdict != evenkeel.VerdictPass {
				t.Fatalf("seed %d: %+v", seed, got)
			}
		}
		if links := d.Fabrics[0].BadLinks; len(slices.Compact(slices.Clone(links))) != len(links) {
			t.Fatalf("seed %d: links twice: %v", seed, links)
		}
		for _, i := range d.Fabrics[0].BadLinks {
			named++
			if c.Runs[i].BusBW == good {
				t.Fatalf("seed %d: %+v is no bad link", seed, c.Runs[i])
			}
		}
		for i, run := range c.Runs {
			if run.BusBW == slow && !slices.Contains(d.Fabrics[0].BadLinks, i) {
				t.Fatalf("seed %d: %+v is not named", seed, run)
			}
		}
	}
	if named == 0 {
		t.Error("no link was met")
	}
}

// A controller that stops anywhere continues with the same round: the decision depends on the set of runs only.
func TestPairingContinuesFromRecordedRuns(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 11))
		c := check(2+random.IntN(24), seed)
		w := world{bad: map[string]bool{}}
		for _, node := range c.Nodes {
			w.bad[node.Name] = random.IntN(3) == 0
		}
		final, _ := finish(t, &c, w)
		runs := c.Runs
		for range 10 {
			c.Runs = slices.Clone(runs[:random.IntN(len(runs)+1)])
			cut := len(c.Runs)
			random.Shuffle(cut, func(i, j int) { c.Runs[i], c.Runs[j] = c.Runs[j], c.Runs[i] })
			for i := range c.Runs {
				c.Runs[i].Nodes = slices.Clone(c.Runs[i].Nodes)
				slices.Reverse(c.Runs[i].Nodes)
			}
			for _, run := range c.Runs {
				run.BusBW = good + slow - run.BusBW
				c.Runs = append(c.Runs, run)
			}
			c.Runs = append(c.Runs, pairing.Run{Round: 1, Nodes: []string{"node-000", "unknown"}, Outcome: pairing.Broken}, pairing.Run{Round: 99, Nodes: []string{"node-000", "node-001"}, Outcome: pairing.Broken}, pairing.Run{Nodes: nil})
			d := pairing.Decide(c)
			if cut == len(runs) {
				if d.Next != nil || !cmp.Equal(verdicts(d), verdicts(final)) {
					t.Fatalf("seed %d: the order of the runs matters", seed)
				}
				continue
			}
			var open []string
			for _, run := range runs[cut:] {
				if run.Round == runs[cut].Round {
					open = append(open, strings.Join(run.Nodes, "+"))
				}
			}
			var next []string
			for _, g := range d.Next.Groups {
				next = append(next, strings.Join(g.Nodes, "+"))
			}
			if d.Next.Number != runs[cut].Round || !slices.Equal(open, next) {
				t.Fatalf("seed %d, %d of %d runs: next is %v, want %v", seed, cut, len(runs), next, open)
			}
		}
	}
}

func TestPairingThresholds(t *testing.T) {
	speeds := func(all ...float64) func(*pairing.Run) {
		next := 0
		return func(r *pairing.Run) {
			if r.Round == 1 {
				r.BusBW = all[next]
				next++
			} else {
				r.BusBW = slices.Max(all)
			}
		}
	}
	tests := map[string]struct {
		limits  pairing.Thresholds
		run     func(*pairing.Run)
		nodes   int
		want    pairing.Limit
		suspect int
	}{
		"explicit before the rest":          {pairing.Thresholds{MinBusBW: 5, PoolMinBusBW: map[string]float64{"h100": 9}}, speeds(5, 4.9, 9), 6, pairing.Limit{MinBusBW: 5}, 2},
		"product before median":             {pairing.Thresholds{PoolMinBusBW: map[string]float64{"h100": 9}}, speeds(9, 8.9), 4, pairing.Limit{MinBusBW: 9}, 2},
		"another product's":                 {pairing.Thresholds{PoolMinBusBW: map[string]float64{"a100": 9}}, speeds(2), 2, pairing.Limit{}, 0},
		"median of two":                     {pairing.Thresholds{}, speeds(10, 1), 4, pairing.Limit{MinBusBW: 5.5 * .85, Median: 5.5, MAD: 4.5}, 2},
		"median":                            {pairing.Thresholds{}, speeds(10, 10, 10, 10, 8.4), 10, pairing.Limit{MinBusBW: 8.5, Median: 10}, 2},
		"percent":                           {pairing.Thresholds{MinPercentOfMedian: 80}, speeds(10, 10, 10, 10, 8.4), 10, pairing.Limit{MinBusBW: 8, Median: 10}, 0},
		"a wide spread allows more":         {pairing.Thresholds{}, speeds(10, 9, 11, 9, 11, 10, 8), 14, pairing.Limit{MinBusBW: 10 - 3*1.4826, Median: 10, MAD: 1}, 0},
		"half is never enough":              {pairing.Thresholds{}, speeds(10, 7, 13, 7, 13, 10, 4.9), 14, pairing.Limit{MinBusBW: 5, Median: 10, MAD: 3}, 2},
		"one pair: nothing to compare with": {pairing.Thresholds{}, speeds(1), 2, pairing.Limit{}, 0},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			c := check(test.nodes, 1)
			c.Thresholds = test.limits
			d, _ := finish(t, &c, world{run: test.run})
			if diff := cmp.Diff(test.want, d.Limits["h100"], cmpopts.EquateApprox(0, 1e-9)); diff != "" {
				t.Error(diff)
			}
			again := 0
			for _, run := range c.Runs {
				if run.Round == 2 {
					again++
				}
			}
			if again != test.suspect {
				t.Errorf("%d nodes tried again, want %d", again, test.suspect)
			}
		})
	}
}

func TestPairingSeparatesPools(t *testing.T) {
	c := check(0, 1)
	for i, pool := range []string{"a", "b", "a", "b", "a", "b", "b", "c", "d"} {
		c.Nodes = append(c.Nodes, pairing.Node{Name: fmt.Sprint(i), Pool: pool})
	}
	c.Nodes = append(c.Nodes, c.Nodes[0])
	pool := func(name string) string {
		return c.Nodes[slices.IndexFunc(c.Nodes, func(n pairing.Node) bool { return n.Name == name })].Pool
	}
	for range 20 {
		if !cmp.Equal(pairing.Decide(c), pairing.Decide(c)) {
			t.Fatal("two decisions on the same check")
		}
	}
	d, _ := finish(t, &c, world{run: func(r *pairing.Run) {
		for _, name := range r.Nodes {
			if p := pool(name); p != pool(r.Nodes[0]) && p < "c" {
				t.Errorf("%v crosses pools", r.Nodes)
			}
			if pool(name) == "b" {
				r.BusBW = slow
			}
		}
	}})
	var got []string
	for _, f := range d.Fabrics {
		got = append(got, fmt.Sprint(f.Pools, f.Verdict))
	}
	if diff := cmp.Diff([]string{"[a]Pass", "[b]Fail", "[c d]Pass"}, got); diff != "" {
		t.Error(diff)
	}
	if len(d.Nodes) != 9 {
		t.Errorf("%d results for 9 nodes", len(d.Nodes))
	}
}

func TestPairingTooFewNodes(t *testing.T) {
	if d := pairing.Decide(check(0, 1)); d.Next != nil || d.Verdict != evenkeel.VerdictPass {
		t.Errorf("%+v", d)
	}
	d := pairing.Decide(check(1, 1))
	if d.Next != nil || d.Verdict != evenkeel.VerdictInconclusive || d.Nodes[0].Reason != pairing.ReasonNoPartner {
		t.Errorf("%+v", d)
	}
}

func TestPairingPreliminaryVerdictsFailNoNode(t *testing.T) {
	c := check(8, 1)
	for _, g := range pairing.Decide(c).Next.Groups {
		c.Runs = append(c.Runs, world{bad: map[string]bool{"node-001": true}}.test(1, g.Nodes))
	}
	d := pairing.Decide(c)
	if all := count(d); d.Next == nil || d.Verdict != evenkeel.VerdictInconclusive || all[evenkeel.VerdictPass] != 6 || all[evenkeel.VerdictFail] != 0 {
		t.Errorf("%+v", d)
	}
	c = check(8, 1)
	for _, g := range pairing.Decide(c).Next.Groups {
		c.Runs = append(c.Runs, world{run: func(r *pairing.Run) { r.BusBW = slow }}.test(1, g.Nodes))
	}
	d = pairing.Decide(c)
	if d.Next == nil || d.Fabrics[0].Reason != pairing.ReasonUnfinished || d.Nodes[0].Reason != pairing.ReasonUnfinished {
		t.Errorf("%+v", d)
	}
}

// Two of twelve are good, and meet in round 1: each round tries two suspects with them and the rest among themselves, until
// more than half have failed.
func TestPairingEndsEarlyIfMostFail(t *testing.T) {
	c := check(12, 1)
	first := pairing.Decide(c).Next.Groups[2].Nodes
	w := world{bad: map[string]bool{}}
	for _, n := range c.Nodes {
		w.bad[n.Name] = !slices.Contains(first, n.Name)
	}
	d, rounds := finish(t, &c, w)
	all, groups := count(d), map[int]int{}
	met, again := map[[2]string]bool{}, 0
	for _, run := range c.Runs {
		groups[run.Round]++
		if met[link(run.Nodes[0], run.Nodes[1])] {
			again++
		}
		met[link(run.Nodes[0], run.Nodes[1])] = true
	}
	if again > 3 {
		t.Errorf("%d of %d pairs met before", again, len(c.Runs))
	}
	if rounds != 5 || d.Fabrics[0].Reason != pairing.ReasonMostNodesFailed || all[evenkeel.VerdictPass] != 2 || all[evenkeel.VerdictFail] != 0 {
		t.Errorf("%d rounds, %+v", rounds, d)
	}
	if diff := cmp.Diff(map[int]int{1: 6, 2: 6, 3: 5, 4: 4, 5: 3}, groups); diff != "" {
		t.Error(diff)
	}
}

// Bad runs do not fail a fabric if most runs are faults.
func TestPairingFewBadRunsAmongFaultsFailNothing(t *testing.T) {
	hidden := map[string]bool{"node-000": true, "node-001": true, "node-002": true, "node-003": true}
	tests := map[string]func(*pairing.Run){
		"faults after a bad round": func(r *pairing.Run) {
			if r.BusBW = slow; r.Round > 1 {
				r.Outcome = pairing.Fault
			}
		},
		"half of the nodes": func(r *pairing.Run) {
			if r.BusBW = slow; slices.ContainsFunc(r.Nodes, func(name string) bool { return hidden[name] }) {
				r.Outcome = pairing.Fault
			}
		},
	}
	for name, run := range tests {
		for seed := range uint64(20) {
			c := check(8, seed)
			d, _ := finish(t, &c, world{run: run})
			if d.Verdict != evenkeel.VerdictInconclusive || d.Fabrics[0].Reason != pairing.ReasonUnconfirmed {
				t.Errorf("%s: %+v", name, d.Fabrics)
			}
		}
	}
}

func TestPairingRetriesFaultWithAnotherPartner(t *testing.T) {
	for seed := range uint64(20) {
		c := check(10, seed)
		d, rounds := finish(t, &c, world{bad: map[string]bool{"node-004": true}, fault: func(round int, group []string) bool {
			return round == 2 && slices.Contains(group, "node-004")
		}})
		runs := slices.DeleteFunc(slices.Clone(c.Runs), func(r pairing.Run) bool { return !slices.Contains(r.Nodes, "node-004") })
		if rounds != 3 || len(runs) != 3 || slices.Equal(runs[1].Nodes, runs[2].Nodes) || count(d)[evenkeel.VerdictFail] != 1 {
			t.Errorf("seed %d: %d rounds, %v", seed, rounds, runs)
		}
	}
}

func TestPairingReportsWorstReason(t *testing.T) {
	c := check(8, 1)
	d, _ := finish(t, &c, world{bad: map[string]bool{"node-004": true}, run: func(r *pairing.Run) {
		if r.Round == 1 && r.BusBW == slow {
			r.Networks = []string{"Socket"}
		}
	}})
	if n := d.Nodes[4]; n.Verdict != evenkeel.VerdictFail || n.Reason != pairing.ReasonFallback {
		t.Errorf("%+v", n)
	}
}

func TestPairingMixedPoolsUseLowestLimit(t *testing.T) {
	c := pairing.Check{Nodes: []pairing.Node{{Name: "x", Pool: "a"}, {Name: "y", Pool: "b"}}}
	for _, limits := range []map[string]float64{{"a": 9, "b": 5}, {"a": 5, "b": 9}} {
		c.Thresholds.PoolMinBusBW = limits
		for speed, want := range map[float64]evenkeel.Verdict{5: evenkeel.VerdictPass, 4.9: evenkeel.VerdictFail} {
			c.Runs = nil
			if d, _ := finish(t, &c, world{run: func(r *pairing.Run) { r.BusBW = speed }}); d.Verdict != want {
				t.Errorf("limits %v, %v GB/s: %+v", limits, speed, d)
			}
		}
	}
}

func FuzzDecide(f *testing.F) {
	f.Add(uint8(4), uint64(1), []byte{0, 1, 2, 3})
	f.Add(uint8(9), uint64(7), []byte{5, 5, 5, 1, 0, 0, 0, 3, 2})
	f.Fuzz(func(t *testing.T, n uint8, seed uint64, script []byte) {
		c := check(int(n%24), seed)
		if len(script) > 0 && script[0] > 127 {
			c.Thresholds = pairing.Thresholds{}
		}
		at := 0
		d, _ := finish(t, &c, world{run: func(r *pairing.Run) {
			if len(script) == 0 {
				return
			}
			switch script[at%len(script)] % 8 {
			case 0:
				r.BusBW = slow
			case 1:
				r.Outcome = pairing.Fault
			case 2:
				r.Outcome = pairing.Broken
			case 3:
				r.Networks = []string{"Socket"}
			case 4:
				r.BusBW = math.Inf(1)
			}
			at++
		}})
		failed, judged := 0, 0
		for _, got := range d.Nodes {
			bad := 0
			for _, i := range got.Evidence {
				if run := c.Runs[i]; run.Outcome != pairing.Fault && (run.Outcome == pairing.Broken || run.BusBW < good || run.Networks[0] == "Socket") {
					bad++
				}
			}
			if got.Message == "" || got.Verdict == evenkeel.VerdictFail && bad < 2 {
				t.Fatalf("%+v", got)
			}
			if got.Verdict == evenkeel.VerdictFail {
				failed++
			}
			if got.Verdict != evenkeel.VerdictInconclusive {
				judged++
			}
		}
		if 2*failed > judged {
			t.Fatalf("%d of %d nodes fail", failed, judged)
		}
	})
}

// What a check of 1,000 nodes costs in all, 20 of them bad.
func BenchmarkThousandNodes(b *testing.B) {
	w := world{bad: map[string]bool{}}
	for i := range 20 {
		w.bad[fmt.Sprintf("node-%03d", i*50)] = true
	}
	for b.Loop() {
		c := check(1000, 1)
		if d, rounds := finish(b, &c, w); rounds > 3 || d.Verdict != evenkeel.VerdictFail {
			b.Fatal(rounds, d.Verdict)
		}
	}
}

// A slow node passes only where nothing in the cluster could tell that it is slow.
func TestPairingNeedsComparison(t *testing.T) {
	usual, none := map[string]float64{"h100": good}, map[string]float64(nil)
	for name, test := range map[string]struct {
		count   int
		partial bool
		usual   map[string]float64
		change  func(*pairing.Check)
		want    evenkeel.Verdict // of the slow node
		reason  pairing.Reason
		others  evenkeel.Verdict
		rounds  int
	}{
		"two of many":                       {2, true, none, nil, evenkeel.VerdictInconclusive, pairing.ReasonNothingToCompare, evenkeel.VerdictInconclusive, 1},
		"three of many":                     {3, true, none, nil, evenkeel.VerdictInconclusive, pairing.ReasonNothingToCompare, evenkeel.VerdictInconclusive, 1},
		"two of many, their usual is known": {2, true, usual, nil, evenkeel.VerdictInconclusive, pairing.ReasonFabricSuspect, evenkeel.VerdictInconclusive, 1},
		"three of many, usual is known":     {3, true, usual, nil, evenkeel.VerdictFail, pairing.ReasonSlow, evenkeel.VerdictPass, 4},
		"two of many, with a minimum": {2, true, none, func(c *pairing.Check) { c.Thresholds.MinBusBW = 8 },
			evenkeel.VerdictInconclusive, pairing.ReasonFabricSuspect, evenkeel.VerdictInconclusive, 1},
		"four of many":        {4, true, none, nil, evenkeel.VerdictFail, pairing.ReasonSlow, evenkeel.VerdictPass, 2},
		"all two there are":   {2, false, none, nil, evenkeel.VerdictPass, pairing.ReasonProven, evenkeel.VerdictPass, 1},
		"all three there are": {3, false, none, nil, evenkeel.VerdictPass, pairing.ReasonProven, evenkeel.VerdictPass, 1},
		"each alone in its pool": {4, false, none, func(c *pairing.Check) {
			for i := range c.Nodes {
				c.Nodes[i].Pool = c.Nodes[i].Name
			}
		}, evenkeel.VerdictPass, pairing.ReasonProven, evenkeel.VerdictPass, 1},
	} {
		t.Run(name, func(t *testing.T) {
			c := check(test.count, 1)
			c.Thresholds, c.Partial = pairing.Thresholds{UsualBusBW: test.usual}, map[string]bool{"h100": test.partial}
			if test.change != nil {
				test.change(&c)
			}
			d, rounds := finish(t, &c, world{bad: map[string]bool{"node-000": true}})
			for _, n := range d.Nodes {
				want := test.others
				if n.Name == "node-000" {
					want = test.want
					if n.Reason != test.reason {
						t.Errorf("%+v, want %s", n, test.reason)
					}
				}
				if n.Verdict != want {
					t.Errorf("%+v, want %s", n, want)
				}
			}
			if rounds != test.rounds {
				t.Errorf("%d rounds, want %d", rounds, test.rounds)
			}
		})
	}
}

// Faults fail random runs for other reasons. The slow node must not pass by a comparison with itself, and all checks must end.
func TestPairingFindsSlowNodeDespiteFaults(t *testing.T) {
	for n := 2; n <= 9; n++ {
		for seed := range uint64(300) {
			random := rand.New(rand.NewPCG(seed, uint64(n)))
			c := check(n, seed)
			c.Thresholds, c.Partial = pairing.Thresholds{}, map[string]bool{"h100": true}
			share := random.Float64()
			d, _ := finish(t, &c, world{bad: map[string]bool{"node-000": true}, fault: func(int, []string) bool { return random.Float64() < share }})
			if got := verdicts(d)["node-000"]; got == evenkeel.VerdictPass {
				t.Fatalf("%d nodes, seed %d: the slow node passed: %+v", n, seed, c.Runs)
			}
			c.Runs, c.Partial = nil, nil
			finish(t, &c, world{bad: map[string]bool{"node-000": true}, fault: func(int, []string) bool { return random.Float64() < share }})
		}
	}
}

// With nodes whose runs all fail for other reasons, a round can have one result, to be compared with those of other rounds.
func TestPairingComparesRunsOfSeveralRounds(t *testing.T) {
	for n := 4; n <= 9; n++ {
		for seed := range uint64(300) {
			c := check(n, seed)
			c.Thresholds = pairing.Thresholds{}
			w := world{bad: map[string]bool{"node-000": true}, fault: func(_ int, nodes []string) bool { return slices.Contains(nodes, "node-001") }}
			d, _ := finish(t, &c, w)
			for name, verdict := range verdicts(d) {
				want := evenkeel.VerdictPass
				switch name {
				case "node-000":
					want = evenkeel.VerdictFail
				case "node-001":
					want = evenkeel.VerdictInconclusive
				}
				if verdict != want {
					t.Errorf("%d nodes, seed %d: %s is %s: %+v", n, seed, name, verdict, c.Runs)
				}
			}
		}
	}
}

func TestPairingLatencyIsTheLeastOfTheNodesRuns(t *testing.T) {
	c := check(4, 3)
	decision, rounds := finish(t, &c, world{bad: map[string]bool{"node-000": true}, run: func(run *pairing.Run) {
		run.LatencyUS = 50
		if run.Round > 1 {
			run.LatencyUS = 40
		}
		if run.Nodes[0] == "node-002" || run.Nodes[1] == "node-002" {
			run.LatencyUS = 0
		}
	}})
	if rounds < 2 {
		t.Fatalf("%d rounds, so that no node has two runs", rounds)
	}
	for _, n := range decision.Nodes {
		var want float64
		for _, i := range n.Evidence {
			if us := c.Runs[i].LatencyUS; us > 0 && (want == 0 || us < want) {
				want = us
			}
		}
		if n.LatencyUS != want {
			t.Errorf("%s: %v, want %v of %d runs", n.Name, n.LatencyUS, want, len(n.Evidence))
		}
	}
	fallback := check(2, 3)
	fallback.Runs = []pairing.Run{{Round: 1, Nodes: []string{"node-000", "node-001"}, Outcome: pairing.Measured, BusBW: good, LatencyUS: 9, Networks: []string{"Socket"}}}
	if n := pairing.Decide(fallback).Nodes[0]; n.LatencyUS != 0 {
		t.Errorf("another network's latency is %v", n.LatencyUS)
	}
}
