package networkcheckpolicy

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func TestPolicySchedule(t *testing.T) {
	at := func(s string) time.Time {
		v, err := time.Parse(time.RFC3339, s)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	for name, test := range map[string]struct{ schedule, zone, last, now, latest, next string }{
		"not yet":                   {"0 3 * * *", "", "2026-11-21T03:00:00Z", "2026-11-22T02:59:59Z", "", "2026-11-22T03:00:00Z"},
		"now":                       {"0 3 * * *", "", "2026-11-21T03:00:00Z", "2026-11-22T03:00:00Z", "2026-11-22T03:00:00Z", "2026-11-23T03:00:00Z"},
		"only the latest of many":   {"0 3 * * *", "", "2020-01-01T00:00:00Z", "2026-11-22T04:00:00Z", "2026-11-22T03:00:00Z", "2026-11-23T03:00:00Z"},
		"every minute, after years": {"* * * * *", "", "1990-01-01T00:00:00Z", "2026-11-22T04:00:30Z", "2026-11-22T04:00:00Z", "2026-11-22T04:01:00Z"},
		"a rare one that is past":   {"0 0 1 1 *", "", "2024-06-01T00:00:00Z", "2026-11-22T04:00:00Z", "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z"},
		"in the policy's own zone":  {"0 3 * * *", "America/New_York", "2026-11-21T12:00:00Z", "2026-11-22T08:00:00Z", "2026-11-22T08:00:00Z", "2026-11-23T08:00:00Z"},
		"by name":                   {"@daily", "", "2026-11-21T12:00:00Z", "2026-11-21T13:00:00Z", "", "2026-11-22T00:00:00Z"},
		"never":                     {"0 0 30 2 *", "", "2026-11-21T12:00:00Z", "2026-11-22T12:00:00Z", "", ""},
	} {
		s, err := parseSchedule(evenkeel.TriggerSpec{Schedule: test.schedule, TimeZone: test.zone})
		if err != nil {
			t.Fatal(err)
		}
		latest, next := s.due(at(test.last), at(test.now))
		for what, pair := range map[string]struct {
			got  time.Time
			want string
		}{"latest": {latest, test.latest}, "next": {next, test.next}} {
			if pair.want == "" && !pair.got.IsZero() || pair.want != "" && !pair.got.Equal(at(pair.want)) {
				t.Errorf("%s: %s %s, want %q", name, what, pair.got, pair.want)
			}
		}
	}
	for _, bad := range []evenkeel.TriggerSpec{{Schedule: "sometimes"}, {Schedule: "0 3 * * *", TimeZone: "Mars/Olympus"}, {Schedule: "61 * * * *"}, {Schedule: "@daily", TimeZone: "Local"}} {
		if _, err := parseSchedule(bad); err == nil {
			t.Errorf("%+v: no error", bad)
		}
	}
	if s, err := parseSchedule(evenkeel.TriggerSpec{}); s != nil || err != nil {
		t.Errorf("no schedule: %v %v", s, err)
	}
}

func TestPolicySelectsNodesAndPartners(t *testing.T) {
	node := func(name string, ready corev1.ConditionStatus) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid-" + "x"}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
		return n
	}
	known := func(h evenkeel.Health) *evenkeel.NodeNetworkHealthStatus {
		return &evenkeel.NodeNetworkHealthStatus{Health: h, History: make([]evenkeel.HealthResult, 1)}
	}
	states := map[string]*evenkeel.NodeNetworkHealthStatus{
		"a-bad": known(evenkeel.HealthUnhealthy), "b-unknown": known(evenkeel.HealthUnknown), "c-good": known(evenkeel.HealthHealthy), "d-good": known(evenkeel.HealthHealthy), "e-empty": {},
	}
	for _, test := range []struct{ nodes, wanted, chosen, partners []string }{
		{[]string{"new-1"}, nil, nil, nil},
		{[]string{"a-bad", "c-good"}, nil, nil, []string{"c-good"}},
		{[]string{"new-1", "a-bad", "b-unknown", "d-good", "c-good"}, nil, []string{"new-1"}, []string{"c-good"}},
		{[]string{"new-2", "new-1", "a-bad", "b-unknown"}, nil, []string{"new-1", "new-2"}, []string{"b-unknown", "a-bad"}},
		{[]string{"e-empty", "new-1"}, nil, []string{"e-empty", "new-1"}, nil},
		{[]string{"b-unknown", "c-good", "d-good"}, []string{"b-unknown"}, []string{"b-unknown"}, []string{"c-good"}},
		{[]string{"b-unknown", "c-good", "new-1"}, []string{"b-unknown", "not-ready"}, []string{"b-unknown", "new-1"}, []string{"c-good"}},
		{[]string{"b-unknown"}, []string{"b-unknown"}, nil, nil},
	} {
		var nodes []*corev1.Node
		for _, name := range test.nodes {
			nodes = append(nodes, node(name, corev1.ConditionTrue))
		}
		nodes = append(nodes, node("not-ready", corev1.ConditionFalse))
		wanted := map[string]bool{}
		for _, name := range test.wanted {
			wanted[name] = true
		}
		chosen, partners := selectDueNodes(nodes, states, true, wanted)
		if !slices.Equal(chosen, test.chosen) || len(chosen) > 0 && !slices.Equal(partners, test.partners) {
			t.Errorf("%v, %v wanted: %v with %v", test.nodes, test.wanted, chosen, partners)
		}
	}
	if chosen, _ := selectDueNodes([]*corev1.Node{node("new-1", corev1.ConditionTrue), node("new-2", corev1.ConditionTrue)}, states, false, nil); chosen != nil {
		t.Errorf("new nodes do not count, and yet: %v", chosen)
	}
}

func TestPolicyCheckNameIsDeterministic(t *testing.T) {
	nodes := []*corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "1"}}, {ObjectMeta: metav1.ObjectMeta{Name: "b", UID: "2"}}}
	states := map[string]*evenkeel.NodeNetworkHealthStatus{}
	both := []string{"a", "b"}
	first := unscheduledName("p", "job", nodes, states, both)
	if again := unscheduledName("p", "job", nodes, states, both); again != first || !strings.HasPrefix(first, "p-job-") {
		t.Errorf("%s, then %s", first, again)
	}
	if one := unscheduledName("p", "job", nodes, states, both[:1]); one == first {
		t.Error("other nodes, the same name")
	}
	states["b"] = &evenkeel.NodeNetworkHealthStatus{History: []evenkeel.HealthResult{{UID: "check"}}}
	if later := unscheduledName("p", "job", nodes, states, both); later == first {
		t.Error("b was checked since, and the name is the same: it would never be checked again")
	}
}

func TestCheckRequests(t *testing.T) {
	d := NewCheckRequests()
	changed := func() bool {
		select {
		case <-d.changed:
			return true
		default:
			return false
		}
	}
	d.Set("x", map[string][]string{"p": {"a", "b"}})
	d.Set("y", map[string][]string{"p": {"b"}, "q": {"c"}})
	if !changed() || changed() {
		t.Error("a pending change is signalled once")
	}
	if got := d.forPolicy("p"); len(got) != 2 || !got["a"] || !got["b"] {
		t.Errorf("%v", got)
	}
	d.Set("y", map[string][]string{"p": {"b"}, "q": {"c"}})
	d.Set("x", nil)
	if changed() {
		t.Error("nobody asks for more")
	}
	if got := d.forPolicy("p"); len(got) != 1 || !got["b"] || len(d.forPolicy("q")) != 1 {
		t.Errorf("%v", got)
	}
}

func TestPolicyWaitsForPendingResults(t *testing.T) {
	ended := metav1.NewTime(time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC))
	check := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{UID: "1"}}
	check.Spec.Nodes.Names = []string{"a", "b", "gone"}
	check.Status.CompletionTime, check.Status.ReportName = &ended, "report"
	nodes := []*corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, {ObjectMeta: metav1.ObjectMeta{Name: "b"}}, {ObjectMeta: metav1.ObjectMeta{Name: "new"}}}
	arrived := &evenkeel.NodeNetworkHealthStatus{History: []evenkeel.HealthResult{{UID: "1", Time: ended}}}
	half := map[string]*evenkeel.NodeNetworkHealthStatus{"a": arrived}
	if until := resultsPendingUntil([]*evenkeel.NetworkCheck{check}, half, nodes, ended.Time); !until.Equal(ended.Add(time.Minute)) {
		t.Errorf("b has no result yet: %s", until)
	}
	if until := resultsPendingUntil([]*evenkeel.NetworkCheck{check}, half, nodes, ended.Add(time.Minute)); !until.IsZero() {
		t.Errorf("its minute is over: %s", until)
	}
	half["b"] = arrived
	if until := resultsPendingUntil([]*evenkeel.NetworkCheck{check}, half, nodes, ended.Time); !until.IsZero() {
		t.Errorf("all have arrived: %s", until)
	}
}
