package gate

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
)

// maxReaches is the number of reaches that a Snapshot keeps. Beyond that, all are dropped, and computed again.
const maxReaches = 64

// A reach is the nodes that jobs with pods of the same shapes may run on, by their health. Names are sorted. It is
// computed once for all such jobs, so that a pass over thousands of them reads each node once.
type reach struct {
	// policy is the first of the policies of these nodes: the one with the highest priority, and then by name.
	policy *evenkeel.NetworkCheckPolicy
	// nowhere is set if such a job can run on no node, under any policy.
	nowhere            bool
	healthy, unhealthy []string
	// unlabeled are unhealthy nodes without the label by which pods avoid them.
	unlabeled []string
	// unproven are the nodes that a check could test now, and inUse is the number of nodes that it could not. Nodes that
	// checks for jobs test already come first. Nodes of other checks, which take longer, come last.
	unproven []string
	inUse    int
	// assigned are unproven nodes that were assigned to the job, and assignedUnhealthy assigned nodes that failed. gone
	// are the host names of assigned nodes that no longer exist.
	assigned, assignedUnhealthy, gone []string

	// spots are the healthy nodes and the unproven ones. Proven is the room on the healthy ones, and free the number of
	// unproven ones that have room.
	spots  map[string]*spot
	proven int
	free   int
	// claimed is the number of unproven nodes whose whole room jobs with earlier decisions will take.
	claimed int
	// stuck is the result for jobs for which no node can be proven now.
	stuck map[stuckKey]proving
	// claims is how many of the Snapshot's claims this accounts for. Before the two places, no node has room.
	claims                      int
	firstHealthy, firstUnproven int
}

// A spot is the room on a node that is neither used nor claimed.
type spot struct {
	room   int
	health spotHealth
}

type spotHealth int

const (
	spotHealthy spotHealth = iota
	spotUnproven
	spotAssigned
)

// A claim is room on a node that a job with an earlier decision will take.
type claim struct {
	node string
	pods int
}

// busy is the number of unproven nodes that no check can be made of for the job: they have no room for it, or are in
// use by others.
func (r *reach) busy() int { return r.inUse + len(r.unproven) - r.free }

// reachOf returns the nodes that the job may run on, with the room that earlier jobs left.
func (w *Snapshot) reachOf(job Job, g gang) *reach {
	if len(job.Hosts) > 0 {
		return w.newReach(job, g)
	}
	key := strings.Join([]string{job.Policy, job.Profile, g.shapes}, "\n")
	r := w.reaches[key]
	if r == nil {
		r = w.newReach(job, g)
		if len(w.reaches) >= maxReaches {
			clear(w.reaches)
		}
		w.reaches[key] = r
		return r
	}
	for _, c := range w.claims[r.claims:] {
		r.take(c)
	}
	r.claims = len(w.claims)
	for r.firstHealthy < len(r.healthy) && r.spots[r.healthy[r.firstHealthy]].room == 0 {
		r.firstHealthy++
	}
	for r.firstUnproven < len(r.unproven) && r.spots[r.unproven[r.firstUnproven]].room == 0 {
		r.firstUnproven++
	}
	return r
}

// take accounts for a claim.
func (r *reach) take(c claim) {
	s := r.spots[c.node]
	if s == nil {
		return
	}
	taken := min(s.room, c.pods)
	s.room -= taken
	switch {
	case s.health == spotHealthy:
		r.proven -= taken
	case s.health == spotUnproven && taken > 0 && s.room == 0:
		r.free--
		r.claimed++
	}
}

// addGone adds the job's hosts that are not nodes, if the policy that the job waits for exists.
func (w *Snapshot) addGone(r *reach, job Job) {
	if len(job.Hosts) == 0 {
		return
	}
	there := make(map[string]bool, len(w.nodes))
	for _, node := range w.nodes {
		there[hostName(node)] = true
	}
	for i := range w.policies {
		if p := &w.policies[i]; p.Name == job.Policy && p.DeletionTimestamp == nil {
			r.gone = slices.DeleteFunc(slices.Clone(job.Hosts), func(host string) bool { return there[host] })
			if len(r.gone) > 0 {
				r.policy = p // all of them may be gone
			}
		}
	}
}

func hostName(node *corev1.Node) string { return cmp.Or(node.Labels[corev1.LabelHostname], node.Name) }

// newReach computes a reach from all nodes.
func (w *Snapshot) newReach(job Job, g gang) *reach {
	r := &reach{spots: map[string]*spot{}, stuck: map[stuckKey]proving{}, claims: len(w.claims)}
	fits := nodeFilter(g.specs, w.hasAccelerators)
	for _, node := range w.nodes {
		p := w.policyOf[node.Name]
		switch {
		case p == nil:
			continue
		case job.Policy != "" && p.Name != job.Policy, job.Policy == "" && !AppliesTo(p, job.Profile):
			continue
		}
		assigned := slices.Contains(job.Hosts, hostName(node))
		if !assigned && !fits(node) {
			continue
		}
		if r.policy == nil || health.ComparePolicies(p, r.policy) < 0 {
			r.policy = p
		}
		mark := w.markers[node.Name]
		failed := mark.Condition.Status == corev1.ConditionFalse
		if assigned && failed {
			r.assignedUnhealthy = append(r.assignedUnhealthy, node.Name)
		}
		beside := func() int { return g.room(node, w.use, w.hasAccelerators) }
		room := func() int { return max(0, beside()-w.claimed[node.Name]) }
		switch {
		case mark.Label == evenkeel.HealthyValue:
			s := &spot{room(), spotHealthy}
			r.healthy, r.spots[node.Name], r.proven = append(r.healthy, node.Name), s, r.proven+s.room
		case mark.Label == evenkeel.UnhealthyValue && node.Labels[evenkeel.HealthKey] != mark.Label:
			r.unlabeled = append(r.unlabeled, node.Name)
		case failed:
			r.unhealthy = append(r.unhealthy, node.Name)
		case !w.canTest(node, p):
			r.inUse++
		case assigned:
			r.assigned, r.spots[node.Name] = append(r.assigned, node.Name), &spot{room(), spotAssigned}
		default:
			s := &spot{room(), spotUnproven}
			r.unproven, r.spots[node.Name] = append(r.unproven, node.Name), s
			switch {
			case s.room > 0:
				r.free++
			case w.claimed[node.Name] > 0 && beside() > 0:
				r.claimed++
			}
		}
	}
	w.addGone(r, job)
	r.nowhere = r.policy == nil && len(job.Hosts) == 0 && !slices.ContainsFunc(w.nodes, fits)
	slices.SortStableFunc(r.unproven, func(a, b string) int { return cmp.Compare(w.order[a], w.order[b]) })
	return r
}
