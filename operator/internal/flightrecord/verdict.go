package flightrecord

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel.dev/evenkeel/operator/internal/text"
)

const (
	// minHang is how long a call lasts before it is said to hang. The ranks do not write their records in the same moment, and so those
	// of a job that makes progress differ.
	minHang = 10 * time.Second
	// maxAftermath is how long after a record of a rank another one follows that is about the same failure.
	maxAftermath = time.Minute
	// maxFindings is the most calls that are told of: one rank that hangs has the others hang in calls of several groups.
	maxFindings = 8
	maxList     = 80
)

// A finding is one call that hangs.
type finding struct {
	group string
	text  string
	// culprits are the ranks that the others wait for, as far as that is known.
	culprits []int
	// hanging are the ranks that are in the call.
	hanging []int
}

// Explain says which calls hang, one sentence a line, and which rank the others wait for. Records of processes that the job has replaced,
// and of failures that it has survived, count for nothing. Missing are the ranks of the job's groups that have no record.
func Explain(records []*Record) (lines []string, missing []int) {
	ranks := snapshot(records)
	var findings []finding
	absent := map[int]bool{}
	for _, t := range tracks(ranks) {
		if t.tag == 0 {
			for _, member := range t.members {
				absent[member] = ranks[member] == nil
			}
		}
		if f := t.explain(ranks); f != nil {
			findings = append(findings, *f)
		}
	}
	findings = append(findings, explainMessages(ranks)...)
	for _, rank := range slices.Sorted(maps.Keys(absent)) {
		if absent[rank] {
			missing = append(missing, rank)
		}
	}
	return render(findings), missing
}

// snapshot returns the record of each rank that tells what the job last came to: of those that share a group with the newest of all, the
// newest of the rank. A call that fails has the calls of other ranks fail, and each writes a record: the first of these tells the cause.
func snapshot(records []*Record) map[int]*Record {
	latest := slices.SortedStableFunc(slices.Values(records), func(a, b *Record) int { return cmp.Compare(b.TimeNS, a.TimeNS) })
	ranks := map[int]*Record{}
	for _, r := range latest {
		if !slices.ContainsFunc(r.Groups, func(g Group) bool { return latest[0].group(g.ID) != nil }) && r != latest[0] {
			continue
		}
		if later := ranks[r.Rank]; later == nil || time.Duration(later.TimeNS-r.TimeNS) < maxAftermath {
			ranks[r.Rank] = r
		}
	}
	return ranks
}

// A track is the collectives of a group with one tag, which all members call in the same order.
type track struct {
	id, name string
	tag      uint32
	members  []int
}

func tracks(ranks map[int]*Record) []track {
	type key struct {
		id  string
		tag uint32
	}
	found := map[key]track{}
	for _, rank := range slices.Sorted(maps.Keys(ranks)) {
		r := ranks[rank]
		for i := range r.Groups {
			g := &r.Groups[i]
			if _, known := found[key{g.ID, 0}]; !known {
				found[key{g.ID, 0}] = track{id: g.ID, name: cmp.Or(g.Name, g.ID), members: g.Ranks}
			}
		}
		for i := range r.Calls {
			c := &r.Calls[i]
			if c.Kind == collective && c.Tag != 0 {
				g := found[key{c.Group, 0}]
				found[key{c.Group, c.Tag}] = track{id: c.Group, name: fmt.Sprintf("%s, tag %d", g.name, c.Tag), tag: c.Tag, members: g.members}
			}
		}
	}
	return slices.SortedFunc(maps.Values(found), func(a, b track) int {
		return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.id, b.id), cmp.Compare(a.tag, b.tag))
	})
}

// A position is how far a rank has come in a track.
type position struct {
	record *Record
	// at is the first call that has not completed; nil: the rank is in none.
	at *Call
	// last is the last call that has completed; nil: none is known.
	last *Call
	// next is the number of at, or of the call that the rank has not called yet.
	next int64
	// calls are all that are known, by number.
	calls map[int64]*Call
}

func (p *position) hangs() bool { return p.at != nil && p.record.hangs(p.at) }

// positionOf finds out how far a rank has come; nil: no call of the track is known.
func positionOf(r *Record, of func(*Call) bool) *position {
	p := &position{record: r, calls: map[int64]*Call{}}
	for i := range r.Calls {
		c := &r.Calls[i]
		if !of(c) {
			continue
		}
		p.calls[c.Number] = c
		if c.State == completed && (p.last == nil || p.last.Number < c.Number) {
			p.last = c
		}
	}
	for _, c := range p.calls {
		// A call that failed, and that another one completed after, is history.
		if c.State != completed && (p.last == nil || p.last.Number < c.Number) && (p.at == nil || c.Number < p.at.Number) {
			p.at = c
		}
	}
	switch {
	case p.at != nil:
		p.next = p.at.Number
	case p.last != nil:
		p.next = p.last.Number + 1
	default:
		return nil
	}
	return p
}

func (t *track) explain(records map[int]*Record) *finding {
	positions := map[int]*position{}
	hangs := false
	for rank, r := range records {
		if p := positionOf(r, func(c *Call) bool { return c.Kind == collective && c.Group == t.id && c.Tag == t.tag }); p != nil {
			positions[rank] = p
			hangs = hangs || p.hangs()
		}
	}
	if !hangs {
		return nil
	}
	ranks := slices.Sorted(maps.Keys(positions))
	number := positions[ranks[0]].next
	for _, p := range positions {
		number = min(number, p.next)
	}
	// Who is in that call, and who has not called it. Of the others, those that are in the next call that hangs.
	var in, idle, ahead []int
	for _, rank := range ranks {
		switch p := positions[rank]; {
		case p.next == number && p.at != nil:
			in = append(in, rank)
		case p.next == number:
			idle = append(idle, rank)
		case p.at == nil || len(ahead) > 0 && p.next > positions[ahead[0]].next:
		case len(ahead) > 0 && p.next < positions[ahead[0]].next:
			ahead = []int{rank}
		default:
			ahead = append(ahead, rank)
		}
	}
	f := &finding{group: t.name, hanging: slices.Concat(in, ahead)}
	switch {
	case t.disagree(f, positions, number):
		if len(idle) > 0 {
			f.text += fmt.Sprintf("; %s never called it", Names(idle))
		}
	case len(idle) > 0:
		f.culprits = idle
		t.explainIdle(f, positions, number, in, ahead, idle)
	case len(ahead) > 0:
		f.culprits = in
		f.text = fmt.Sprintf("%s %s at %s, %s at %s: %s never called it",
			Names(in), plural(in, "is", "are"), label(positions[in[0]].at), who(ahead, len(in), len(ranks)), label(positions[ahead[0]].at), Names(in))
	default:
		t.explainAllIn(f, positions, number, in)
	}
	if why := firstFailure(positions); why != "" {
		f.text += "; " + why
	}
	return f
}

// aspects are what the ranks of a collective have to agree about, and how to say what one of them, or several, do.
var aspects = []struct {
	one, several string
	of           func(*Call) string
}{
	{"calls", "call", func(c *Call) string { return c.Operation }},
	{"passes", "pass", func(c *Call) string { return c.Type }},
	{"passes", "pass", func(c *Call) string {
		// One that has not begun, as it is scheduled or failed before, has no sizes yet.
		if !equalSizes[c.Operation] || c.StartedNS == 0 {
			return ""
		}
		return fmt.Sprintf("%d bytes", max(c.InputBytes, c.OutputBytes))
	}},
}

// disagree says which ranks called something else as the call of this number than the others did, and reports whether any did.
func (t *track) disagree(f *finding, positions map[int]*position, number int64) bool {
	calls := map[int]*Call{}
	for rank, p := range positions {
		if c := p.calls[number]; c != nil && c.Operation != "" {
			calls[rank] = c
		}
	}
	for _, aspect := range aspects {
		by, all := map[string][]int{}, 0
		for _, rank := range slices.Sorted(maps.Keys(calls)) {
			if what := aspect.of(calls[rank]); what != "" {
				by[what] = append(by[what], rank)
				all++
			}
		}
		if len(by) < 2 {
			continue
		}
		// The few first: they are more likely to be wrong.
		wants := slices.SortedFunc(maps.Keys(by), func(a, b string) int {
			return cmp.Or(cmp.Compare(len(by[a]), len(by[b])), cmp.Compare(a, b))
		})
		if first, most := by[wants[0]], by[wants[len(wants)-1]]; len(first) < len(most) {
			f.culprits = first
		}
		var parts []string
		told := 0
		for _, what := range wants {
			parts = append(parts, fmt.Sprintf("%s %s %s", who(by[what], told, all), plural(by[what], aspect.one, aspect.several), what))
			told += len(by[what])
		}
		f.text = fmt.Sprintf("the ranks disagree about %s: %s", commonLabel(calls, number), strings.Join(parts, ", "))
		return true
	}
	return false
}

// equalSizes are the operations to which all ranks pass as much. Of others it may differ.
var equalSizes = map[string]bool{"all_reduce": true, "broadcast": true, "reduce": true}

func (t *track) explainIdle(f *finding, positions map[int]*position, number int64, in, ahead, idle []int) {
	if len(in) > 0 {
		f.text = fmt.Sprintf("%s never called %s, in which %s %s%s", Names(idle), label(positions[in[0]].at),
			who(in, len(idle), len(positions)), plural(in, "waits", "wait"), forLongest(positions, in))
	} else {
		// It ends on some ranks before others have called it, as a broadcast does.
		what := label(&Call{Number: number})
		for _, rank := range ahead {
			if c := positions[rank].calls[number]; c != nil {
				what = label(c)
			}
		}
		f.text = fmt.Sprintf("%s never called %s, and %s %s at %s", Names(idle), what,
			who(ahead, len(idle), len(positions)), plural(ahead, "is", "are"), label(positions[ahead[0]].at))
	}
	if elsewhere := t.elsewhere(positions[idle[0]].record); elsewhere != "" {
		f.text += fmt.Sprintf("; rank %d is in %s", idle[0], elsewhere)
	} else if last := positions[idle[0]].last; last != nil {
		f.text += fmt.Sprintf("; the last call of rank %d was %s", idle[0], label(last))
	}
}

// elsewhere is the call outside of the track that the rank is in; empty: none.
func (t *track) elsewhere(r *Record) string {
	for i := range r.Calls {
		c := &r.Calls[i]
		if c.State != started || c.Group == t.id && c.Tag == t.tag && c.Kind == collective {
			continue
		}
		g := r.group(c.Group)
		if c.Kind == collective {
			return fmt.Sprintf("%s of group %s", label(c), cmp.Or(g.Name, g.ID))
		}
		return messageLabel(g, c, r.Rank)
	}
	return ""
}

func (t *track) explainAllIn(f *finding, positions map[int]*position, number int64, in []int) {
	calls := map[int]*Call{}
	awaited := map[int]bool{}
	for rank, p := range positions {
		calls[rank] = p.at
		g := p.record.group(t.id)
		for _, other := range g.WaitsFor {
			awaited[g.Ranks[other]] = true
		}
	}
	f.text = fmt.Sprintf("%s %s in %s%s", every(in, t.members), plural(in, "is", "are"), commonLabel(calls, number), forLongest(positions, in))
	var without []int
	for _, member := range t.members {
		if positions[member] == nil {
			without = append(without, member)
		}
	}
	waits := slices.Sorted(maps.Keys(awaited))
	switch {
	case len(without) > 0:
		f.culprits = without
		f.text += fmt.Sprintf(", and %s %s no record of it", Names(without), plural(without, "has", "have"))
	default:
		f.text += ", and agree about it: data that one of them waits for does not come"
	}
	if len(waits) > 0 {
		f.text += "; data is awaited from " + Names(waits)
	}
}

// explainMessages says which messages are awaited.
func explainMessages(ranks map[int]*Record) []finding {
	var findings []finding
	for _, rank := range slices.Sorted(maps.Keys(ranks)) {
		r := ranks[rank]
		for i := range r.Calls {
			c := &r.Calls[i]
			if c.Kind == collective || c.State == completed || c.State == scheduled || !r.hangs(c) {
				continue
			}
			if f := explainMessage(ranks, r, c); f != nil {
				findings = append(findings, *f)
			}
		}
	}
	return findings
}

func explainMessage(ranks map[int]*Record, r *Record, c *Call) *finding {
	g := r.group(c.Group)
	f := &finding{group: cmp.Or(g.Name, g.ID), hanging: []int{r.Rank}}
	f.text = fmt.Sprintf("rank %d waits in %s", r.Rank, messageLabel(g, c, r.Rank))
	if c.State == failed && c.Failure != "" {
		f.text += ", which failed: " + c.Failure
	}
	if c.Peer == nil {
		return f
	}
	peer := g.Ranks[*c.Peer]
	other := ranks[peer]
	if other == nil {
		f.culprits = []int{peer}
		f.text += fmt.Sprintf("; rank %d has no record", peer)
		return f
	}
	kind, done := send, "sent"
	if c.Kind == send {
		kind, done = receive, "asked for"
	}
	p := positionOf(other, func(o *Call) bool {
		return o.Kind == kind && o.Group == c.Group && o.Tag == c.Tag && o.Peer != nil && *o.Peer == g.Rank
	})
	if p != nil && (p.next > c.Number || p.calls[c.Number] != nil) {
		if c.Kind == send {
			return nil // the receiver's own sentence says it
		}
		f.text += fmt.Sprintf("; rank %d has called it", peer)
		return f
	}
	f.culprits = []int{peer}
	f.text += fmt.Sprintf(", which rank %d has not %s", peer, done)
	return f
}

func messageLabel(g *Group, c *Call, rank int) string {
	from, to := fmt.Sprintf("rank %d", rank), "any rank"
	if c.Peer != nil {
		to = fmt.Sprintf("rank %d", g.Ranks[*c.Peer])
	}
	if c.Kind == receive {
		from, to = to, from
	}
	return fmt.Sprintf("%s of message #%d from %s to %s", c.Kind, c.Number, from, to)
}

// render lists first those findings that no other one explains: whose culprits are in no call that hangs.
func render(findings []finding) []string {
	hanging := map[int]bool{}
	for _, f := range findings {
		for _, rank := range f.hanging {
			hanging[rank] = true
		}
	}
	order := func(f finding) int {
		if slices.ContainsFunc(f.culprits, func(rank int) bool { return !hanging[rank] }) {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(findings, func(a, b finding) int { return cmp.Compare(order(a), order(b)) })
	var lines []string
	for _, f := range findings {
		if len(lines) == maxFindings {
			return append(lines, fmt.Sprintf("and %d more calls hang", len(findings)-maxFindings))
		}
		lines = append(lines, fmt.Sprintf("group %s: %s", f.group, f.text))
	}
	return lines
}

// firstFailure is the error of the call that failed first.
func firstFailure(positions map[int]*position) string {
	var first *position
	for _, rank := range slices.Sorted(maps.Keys(positions)) {
		p := positions[rank]
		if p.at != nil && p.at.State == failed && p.at.Failure != "" && (first == nil || p.at.EndedNS < first.at.EndedNS) {
			first = p
		}
	}
	if first == nil {
		return ""
	}
	return fmt.Sprintf("rank %d failed first: %s", first.record.Rank, first.at.Failure)
}

// forLongest says how long the ranks have been in the call.
func forLongest(positions map[int]*position, ranks []int) string {
	var most time.Duration
	for _, rank := range ranks {
		most = max(most, positions[rank].record.age(positions[rank].at))
	}
	if most < time.Second {
		return ""
	}
	return " for " + most.Round(time.Second).String()
}

func label(c *Call) string {
	return fmt.Sprintf("%s #%d", cmp.Or(c.Operation, "call"), c.Number)
}

// commonLabel names the call of a number, without its operation if the ranks disagree about that.
func commonLabel(calls map[int]*Call, number int64) string {
	common := Call{Number: number}
	for _, c := range calls {
		if common.Operation != "" && common.Operation != c.Operation {
			return label(&Call{Number: number})
		}
		common.Operation = c.Operation
	}
	return label(&common)
}

// Names lists ranks: "rank 3", or "ranks 1, 4-7".
func Names(ranks []int) string {
	if len(ranks) == 1 {
		return fmt.Sprintf("rank %d", ranks[0])
	}
	var parts []string
	for i := 0; i < len(ranks); {
		end := i
		for end+1 < len(ranks) && ranks[end+1] == ranks[end]+1 {
			end++
		}
		part := strconv.Itoa(ranks[i])
		if end > i {
			part += "-" + strconv.Itoa(ranks[end])
		}
		parts = append(parts, part)
		i = end + 1
	}
	return "ranks " + text.List(parts, maxList)
}

// who names ranks. Those that are all who were not told of yet are counted.
func who(ranks []int, told, all int) string {
	if told > 0 && len(ranks) > 2 && told+len(ranks) == all {
		return fmt.Sprintf("the other %d ranks", len(ranks))
	}
	return Names(ranks)
}

// every names ranks that may be all members.
func every(ranks, members []int) string {
	if len(ranks) == len(members) && len(ranks) > 1 {
		return fmt.Sprintf("all %d ranks", len(ranks))
	}
	return Names(ranks)
}

func plural(ranks []int, one, several string) string {
	if len(ranks) == 1 {
		return one
	}
	return several
}
