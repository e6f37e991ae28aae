package networkcheckpolicy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/robfig/cron/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
)

// A schedule says when all nodes are checked.
type schedule struct {
	cron.Schedule
	zone *time.Location
}

// parseSchedule parses the policy's schedule; nil if it has none.
func parseSchedule(t evenkeel.TriggerSpec) (*schedule, error) {
	if t.Schedule == "" {
		return nil, nil
	}
	zone, err := time.LoadLocation(cmp.Or(t.TimeZone, "Etc/UTC"))
	if err != nil || t.TimeZone == "Local" {
		return nil, fmt.Errorf("triggers.timeZone %q is not a name of the time zone database, such as Europe/Berlin", t.TimeZone)
	}
	s, err := cron.ParseStandard(t.Schedule)
	if err != nil {
		return nil, fmt.Errorf("triggers.schedule %q: %w", t.Schedule, err)
	}
	return &schedule{s, zone}, nil
}

// due returns the latest time of the schedule between last and now, and the next one after now; zero for none. All times that
// were missed give one check.
func (s *schedule) due(last, now time.Time) (latest, next time.Time) {
	next = s.Next(last.In(s.zone))
	// After years without a check: times before the last day cannot be the latest.
	if day := now.Add(-24 * time.Hour); next.Before(day) {
		if later := s.Next(day.In(s.zone)); !later.IsZero() && !later.After(now) {
			next = later
		}
	}
	for !next.IsZero() && !next.After(now) {
		latest, next = next, s.Next(next)
	}
	return latest, next
}

// scheduledName is the name of the check for a time of the schedule. It is deterministic.
func scheduledName(policy string, at time.Time) string {
	return policy + "-" + strconv.FormatInt(at.Unix()/60, 10)
}

// selectDueNodes returns the ready nodes of the policy to be checked outside of the schedule: the requested ones and, if newNodes
// is set, those never checked. Partners for them are other nodes of the policy, healthy ones first. Without two nodes to test
// together it returns none.
func selectDueNodes(nodes []*corev1.Node, states map[string]*evenkeel.NodeNetworkHealthStatus, newNodes bool, wanted map[string]bool) (chosen, partners []string) {
	var others []*corev1.Node
	for _, n := range nodes {
		if !gate.IsReady(n) {
			continue
		}
		switch isNew := isNew(states[n.Name]); {
		case wanted[n.Name], isNew && newNodes:
			chosen = append(chosen, n.Name)
		case !isNew:
			others = append(others, n)
		}
	}
	slices.Sort(chosen)
	slices.SortFunc(others, func(a, b *corev1.Node) int {
		return cmp.Or(cmp.Compare(healthOrder(states[a.Name]), healthOrder(states[b.Name])), cmp.Compare(a.Name, b.Name))
	})
	for _, n := range others[:min(len(others), max(1, len(chosen)))] {
		partners = append(partners, n.Name)
	}
	if len(chosen)+len(partners) < 2 {
		return nil, nil
	}
	return chosen, partners
}

func isNew(s *evenkeel.NodeNetworkHealthStatus) bool { return s == nil || len(s.History) == 0 }

func healthOrder(s *evenkeel.NodeNetworkHealthStatus) int {
	return slices.Index([]evenkeel.Health{evenkeel.HealthHealthy, evenkeel.HealthUnknown, evenkeel.HealthUnhealthy}, s.Health)
}

// resultsTimeout is the maximum time to wait until the results of a check are recorded on its nodes.
const resultsTimeout = time.Minute

// resultsPendingUntil is zero if the results of all ended checks are recorded on their nodes. Otherwise it is when to stop
// waiting for them: until then a node may appear new that was just checked.
func resultsPendingUntil(ended []*evenkeel.NetworkCheck, states map[string]*evenkeel.NodeNetworkHealthStatus, nodes []*corev1.Node, now time.Time) time.Time {
	for _, check := range ended {
		if check.Status.CompletionTime == nil || check.Status.ReportName == "" {
			continue
		}
		until := check.Status.CompletionTime.Add(resultsTimeout)
		missing := func(n *corev1.Node) bool {
			s := states[n.Name]
			return slices.Contains(check.Spec.Nodes.Names, n.Name) && (s == nil || !health.HasResult(s, string(check.UID), check.Status.CompletionTime.Time))
		}
		if now.Before(until) && slices.ContainsFunc(nodes, missing) {
			return until
		}
	}
	return time.Time{}
}

// unscheduledName is derived from the nodes and their last results, so that nothing is checked twice for the same reason.
func unscheduledName(policy, why string, nodes []*corev1.Node, states map[string]*evenkeel.NodeNetworkHealthStatus, chosen []string) string {
	hash := sha256.New()
	for _, n := range nodes {
		if slices.Contains(chosen, n.Name) {
			fmt.Fprintln(hash, n.UID)
			if s := states[n.Name]; !isNew(s) {
				fmt.Fprintln(hash, s.History[0].UID)
			}
		}
	}
	return policy + "-" + why + "-" + hex.EncodeToString(hash.Sum(nil)[:5])
}

// newCheck returns a check of the policy.
func newCheck(p *evenkeel.NetworkCheckPolicy, namespace, name string, nodes []string) *evenkeel.NetworkCheck {
	no := false
	return &evenkeel.NetworkCheck{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, Labels: map[string]string{evenkeel.PolicyKey: p.Name},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: evenkeel.GroupVersion.String(), Kind: "NetworkCheckPolicy", Name: p.Name, UID: p.UID, BlockOwnerDeletion: &no,
			}},
		},
		Spec: evenkeel.NetworkCheckSpec{Nodes: evenkeel.NodeSet{Names: nodes}, CheckOptions: *p.Spec.Check.DeepCopy()},
	}
}
