package networkcheckpolicy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

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

// fakeUse has users by node, and when the last one left.
type fakeUse struct {
	users map[string]string
	left  map[string]time.Time
}

func (u fakeUse) User(node string) string    { return u.users[node] }
func (u fakeUse) Left(node string) time.Time { return u.left[node] }

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// newView has ready nodes without results. The changes are made by name.
func newView(names ...string) *view {
	p := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p"}}
	v := &view{policy: p, states: map[string]*evenkeel.NodeNetworkHealthStatus{}, use: fakeUse{map[string]string{}, map[string]time.Time{}}, returned: func(string) time.Time { return time.Time{} }, occupied: map[string]bool{}, now: noon, settle: settleDelay}
	for _, name := range names {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid of " + name)}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		v.nodes = append(v.nodes, n)
	}
	return v
}

func (v *view) node(name string) *corev1.Node {
	return v.nodes[slices.IndexFunc(v.nodes, func(n *corev1.Node) bool { return n.Name == name })]
}

// known gives nodes one conclusive result of that age.
func (v *view) known(h evenkeel.Health, age time.Duration, names ...string) {
	at := metav1.NewTime(noon.Add(-age))
	verdict := map[evenkeel.Health]evenkeel.Verdict{evenkeel.HealthHealthy: evenkeel.VerdictPass, evenkeel.HealthUnhealthy: evenkeel.VerdictFail}[h]
	for _, name := range names {
		v.states[name] = &evenkeel.NodeNetworkHealthStatus{Health: h, ObservedTime: &at, History: []evenkeel.HealthResult{{Time: at, Verdict: verdict}}}
	}
}

// inconclusive gives a node inconclusive results of these ages, the newest first.
func (v *view) inconclusive(name, reason string, ages ...time.Duration) {
	s := v.states[name]
	if s == nil {
		s = &evenkeel.NodeNetworkHealthStatus{Health: evenkeel.HealthUnknown}
		v.states[name] = s
	}
	var history []evenkeel.HealthResult
	for _, age := range ages {
		history = append(history, evenkeel.HealthResult{Time: metav1.NewTime(noon.Add(-age)), Verdict: evenkeel.VerdictInconclusive, Reason: reason})
	}
	s.History = append(history, s.History...)
}

// suspected gives a node a suspicion of a job that ended so long ago; 0: it runs.
func (v *view) suspected(name string, ended time.Duration) {
	s := evenkeel.Suspicion{Class: evenkeel.SuspectLink}
	if ended > 0 {
		at := metav1.NewTime(noon.Add(-ended))
		s.JobEndTime = &at
	}
	v.states[name].Suspicions = append(v.states[name].Suspicions, s)
}

func planned(checks []plannedCheck) string {
	var all []string
	for _, c := range checks {
		var names []string
		for _, n := range c.chosen {
			names = append(names, n.Name)
		}
		text := string(c.trigger) + " " + strings.Join(names, ",")
		if len(c.partners) > 0 {
			text += fmt.Sprintf(" with %d", len(c.partners))
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}

// given has the node given back at the time, and no other.
func (v *view) given(name string, at time.Time) {
	v.returned = func(node string) time.Time {
		if node == name {
			return at
		}
		return time.Time{}
	}
}

func TestPolicyPlan(t *testing.T) {
	use := func(v *view) fakeUse { return v.use.(fakeUse) }
	for name, test := range map[string]struct {
		scene  func(v *view)
		wanted [][]string
		want   string
		next   time.Duration // from noon
	}{
		"new nodes":               {scene: func(v *view) { v.known(evenkeel.HealthHealthy, time.Hour, "a", "b") }, want: "new c,d,e with 1"},
		"a new node and partners": {scene: func(v *view) { v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d") }, want: "new e with 3"},
		"not ready": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.node("e").Status.Conditions = nil
		}},
		"a startup taint": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.node("e").Spec.Taints = []corev1.Taint{{Key: "node.cilium.io/agent-not-ready", Effect: corev1.TaintEffectNoSchedule}}
		}},
		"in use": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			use(v).users["e"] = "ml/train"
		}},
		"partners in use": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			use(v).users["a"], use(v).users["b"], use(v).users["c"] = "x", "x", "x"
		}, want: "new e with 1"},
		"no partner": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			for _, n := range []string{"a", "b", "c", "d"} {
				use(v).users[n] = "x"
			}
		}},
		"new nodes off": {scene: func(v *view) { v.policy.Spec.Triggers.NewNodes = evenkeel.SwitchDisabled }},
		"inconclusive once, waits": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.inconclusive("e", "ImagePull", time.Minute)
		}, next: 4 * time.Minute},
		"inconclusive once, again": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.inconclusive("e", "ImagePull", 5*time.Minute)
		}, want: "new e with 3"},
		"inconclusive three times": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.inconclusive("e", "ImagePull", 5*time.Minute, 15*time.Minute, 20*time.Minute)
		}, next: 15 * time.Minute},
		"disturbed by a job, soon again": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.inconclusive("e", "NodeInUse", time.Minute, 2*time.Minute, 3*time.Minute)
		}, want: "new e with 3"},
		"scheduled, all but those in use": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.scheduled = noon.Add(-time.Minute)
			use(v).users["b"] = "x"
		}, want: "schedule a,c,d,e"},
		"scheduled, checked since": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.scheduled = noon.Add(-2 * time.Hour)
		}},
		"scheduled before the node came": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.policy.Spec.Triggers.NewNodes = evenkeel.SwitchDisabled
			v.scheduled = noon.Add(-2 * time.Hour)
			v.node("e").CreationTimestamp = metav1.NewTime(noon)
		}},
		"a job ended": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, 13*time.Hour, "a", "b", "c", "d", "e")
			use(v).left["b"], use(v).left["d"] = noon.Add(-time.Minute), noon.Add(-time.Minute)
		}, want: "idle b,d with 2"},
		"a job ends": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, 13*time.Hour, "a", "b", "c", "d", "e")
			use(v).left["b"] = noon.Add(-time.Second)
		}, next: 4 * time.Second},
		"a job ended, and the verdict is fresh": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, 11*time.Hour, "a", "b", "c", "d", "e")
			use(v).left["b"] = noon.Add(-time.Minute)
		}},
		"a job ended, switched off": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, 13*time.Hour, "a", "b", "c", "d", "e")
			v.policy.Spec.Triggers.JobEnd = evenkeel.SwitchDisabled
			use(v).left["b"] = noon.Add(-time.Minute)
		}},
		"suspected, and the job runs": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.suspected("b", 0)
		}},
		"suspected, and the job ended": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.suspected("b", time.Minute)
		}, want: "suspicion b with 3"},
		"suspected, and the job ended just now": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.suspected("b", time.Second)
		}, next: 4 * time.Second},
		"suspected, and the next job runs there": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.suspected("b", time.Minute)
			use(v).users["b"] = "ml/next"
		}},
		"suspected, switched off": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.suspected("b", time.Minute)
			v.policy.Spec.Triggers.Suspicions = evenkeel.SwitchDisabled
		}},
		"suspected before it was checked": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.suspected("b", 2*time.Hour)
		}},
		"suspected until the second in which it was checked": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.suspected("b", time.Hour)
		}, want: "suspicion b with 3"},
		"suspected, after inconclusive checks": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.inconclusive("b", "ImagePull", 2*time.Minute, 3*time.Minute)
			v.suspected("b", time.Minute)
		}, want: "suspicion b with 3"},
		"suspected, and the check was inconclusive": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.suspected("b", 3*time.Minute)
			v.inconclusive("b", "ImagePull", time.Minute)
		}, next: 4 * time.Minute},
		"suspected beside a new node": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.suspected("b", time.Minute)
		}, want: "suspicion e,b with 2"},
		"failed": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.known(evenkeel.HealthUnhealthy, time.Hour, "e")
			v.node("e").Status.Conditions[0].LastTransitionTime = metav1.NewTime(noon.Add(-2 * time.Hour))
		}, next: 23 * time.Hour},
		"failed, and rebooted": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.known(evenkeel.HealthUnhealthy, time.Hour, "e")
			v.node("e").Status.Conditions[0].LastTransitionTime = metav1.NewTime(noon.Add(-time.Minute))
		}, want: "repair e with 3"},
		"failed, and rebooted just now": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.known(evenkeel.HealthUnhealthy, time.Hour, "e")
			v.node("e").Status.Conditions[0].LastTransitionTime = metav1.NewTime(noon.Add(-time.Second))
		}, next: 4 * time.Second},
		"failed, rebooted and still cordoned": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.known(evenkeel.HealthUnhealthy, time.Hour, "e")
			v.node("e").Status.Conditions[0].LastTransitionTime = metav1.NewTime(noon.Add(-time.Minute))
			v.node("e").Spec.Unschedulable = true
		}},
		"failed, and uncordoned": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.known(evenkeel.HealthUnhealthy, time.Hour, "e")
			v.given("e", noon.Add(-time.Minute))
		}, want: "repair e with 3"},
		"uncordoned, and failed again": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.known(evenkeel.HealthUnhealthy, time.Hour, "e")
			v.given("e", noon.Add(-2*time.Hour))
		}, next: 23 * time.Hour},
		"passed, and uncordoned": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.given("e", noon.Add(-time.Minute))
		}},
		"failed, rebooted, and the check was inconclusive": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.known(evenkeel.HealthUnhealthy, time.Hour, "e")
			v.inconclusive("e", "ImagePull", time.Minute)
			v.node("e").Status.Conditions[0].LastTransitionTime = metav1.NewTime(noon.Add(-2 * time.Minute))
		}, next: 4 * time.Minute},
		"failed a day ago": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.known(evenkeel.HealthUnhealthy, 24*time.Hour, "e")
		}, want: "repair e with 3"},
		"failed a day ago, switched off": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.known(evenkeel.HealthUnhealthy, 24*time.Hour, "e")
			v.node("e").Status.Conditions[0].LastTransitionTime = metav1.NewTime(noon.Add(-time.Minute))
			v.policy.Spec.Triggers.Repairs = evenkeel.SwitchDisabled
		}},
		"healthy, and rebooted": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d", "e")
			v.node("e").Status.Conditions[0].LastTransitionTime = metav1.NewTime(noon.Add(-time.Minute))
		}},
		"jobs in parallel": {scene: func(v *view) {
			v.policy.Spec.Triggers.NewNodes = evenkeel.SwitchDisabled
			v.nodes = append(v.nodes, newView("f", "g", "h").nodes...)
		}, wanted: [][]string{{"a", "b", "c", "d"}, {"e", "f", "g", "h"}}, want: "job a,b,c,d; job e,f,g,h"},
		"the first job's check has the second one's nodes too": {scene: func(v *view) {
			v.policy.Spec.Triggers.NewNodes = evenkeel.SwitchDisabled
			v.node("e").Spec.Unschedulable = true
		}, wanted: [][]string{{"a", "b"}, {"c", "d"}}, want: "job a,b with 2"},
		"two jobs want a node": {scene: func(v *view) {
			v.policy.Spec.Triggers.NewNodes = evenkeel.SwitchDisabled
			v.nodes = append(v.nodes, newView("f", "g").nodes...)
		}, wanted: [][]string{{"a", "b", "c", "d"}, {"d", "e", "f", "g"}}, want: "job a,b,c,d"},
		"too few beside a check that runs": {scene: func(v *view) {
			v.policy.Spec.Triggers.NewNodes = evenkeel.SwitchDisabled
			v.occupied["a"], v.occupied["b"] = true, true
		}, wanted: [][]string{{"c", "d"}}},
		"too few beside jobs that run": {scene: func(v *view) {
			v.policy.Spec.Triggers.NewNodes = evenkeel.SwitchDisabled
			use(v).users["a"], use(v).users["b"], use(v).users["c"] = "x", "x", "x"
		}, wanted: [][]string{{"d", "e"}}, want: "job d,e"},
		"nothing to compare with, waits": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			use(v).users["a"], use(v).users["b"] = "x", "x"
			v.inconclusive("e", "NothingToCompare", 5*time.Minute, 15*time.Minute)
		}, next: 5 * time.Minute},
		"nothing to compare with, until now": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.inconclusive("e", "NothingToCompare", 5*time.Minute, 15*time.Minute)
		}, want: "new e with 3"},
		"partners of the same pool": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "a", "b", "c", "d")
			v.policy.Spec.Check.PoolLabel = "gpu"
			v.node("e").Labels, v.node("d").Labels = map[string]string{"gpu": "new"}, map[string]string{"gpu": "new"}
		}, want: "new e with 1"},
		"alone in their pools": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, time.Hour, "b", "c", "d")
			v.policy.Spec.Check.PoolLabel = "gpu"
			v.node("a").Labels, v.node("e").Labels = map[string]string{"gpu": "a"}, map[string]string{"gpu": "e"}
		}, want: "new a,e"},
		"a node of another check": {scene: func(v *view) {
			v.policy.Spec.Triggers.NewNodes = evenkeel.SwitchDisabled
			v.occupied["a"] = true
		}, wanted: [][]string{{"a", "b"}}, want: "job b with 3"},
		"a job's nodes beside new ones": {scene: func(v *view) {
			v.known(evenkeel.HealthHealthy, 48*time.Hour, "a", "b", "c", "d")
			v.nodes = append(v.nodes, newView("f", "g", "h").nodes...)
		}, wanted: [][]string{{"a", "b"}}, want: "job a,b with 2; new e,f,g,h"},
	} {
		t.Run(name, func(t *testing.T) {
			v := newView("a", "b", "c", "d", "e")
			test.scene(v)
			if got := planned(v.plan(test.wanted, 0, 0)); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
			if test.next == 0 && !v.next.IsZero() || test.next > 0 && !v.next.Equal(noon.Add(test.next)) {
				t.Errorf("next at %s, want noon and %s", v.next, test.next)
			}
		})
	}
	v := newView("a", "b", "c", "d")
	if got := planned(v.plan([][]string{{"a", "b"}}, maxJobChecks, maxOtherChecks)); got != "" {
		t.Errorf("enough checks run, and yet: %q", got)
	}
}

// Partners take turns: over many checks of new nodes, no proven node is tested much more often than another.
func TestPolicyPartnersTakeTurns(t *testing.T) {
	var names []string
	for i := range 20 {
		names = append(names, fmt.Sprintf("n%02d", i))
	}
	v := newView(append(names, "new")...)
	v.known(evenkeel.HealthHealthy, time.Hour, names...)
	tested := map[string]int{}
	const checks = 200
	for i := range checks {
		v.occupied, v.now = map[string]bool{}, noon.Add(time.Duration(i)*time.Minute)
		for _, p := range v.plan([][]string{{"new"}}, 0, maxOtherChecks)[0].partners {
			tested[p.Name]++
			v.states[p.Name].History[0].Time = metav1.NewTime(v.now)
		}
	}
	for _, name := range names {
		if n, even := tested[name], checks*3/len(names); n < even/2 || n > 2*even {
			t.Errorf("%s was a partner in %d checks, and an even share is %d", name, n, even)
		}
	}
}

func TestPolicyCheckNameIsDeterministic(t *testing.T) {
	v := newView("a", "b")
	first := unscheduledName("p", triggerJob, v.states, v.nodes)
	if again := unscheduledName("p", triggerJob, v.states, v.nodes); again != first || !strings.HasPrefix(first, "p-job-") {
		t.Errorf("%s, then %s", first, again)
	}
	if one := unscheduledName("p", triggerJob, v.states, v.nodes[:1]); one == first {
		t.Error("other nodes, the same name")
	}
	v.states["b"] = &evenkeel.NodeNetworkHealthStatus{History: []evenkeel.HealthResult{{UID: "check"}}}
	if later := unscheduledName("p", triggerJob, v.states, v.nodes); later == first {
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
	if got := d.forPolicy("p"); len(got) != 2 || !slices.Equal(got[0], []string{"a", "b"}) || !slices.Equal(got[1], []string{"b"}) {
		t.Errorf("%v", got)
	}
	d.Set("y", map[string][]string{"p": {"b"}, "q": {"c"}})
	d.Set("x", nil)
	if changed() {
		t.Error("nobody asks for more")
	}
	if got := d.forPolicy("p"); len(got) != 1 || !slices.Equal(got[0], []string{"b"}) || len(d.forPolicy("q")) != 1 {
		t.Errorf("%v", got)
	}
}

func TestPolicyWaitsForPendingResults(t *testing.T) {
	ended := metav1.NewTime(noon)
	check := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{UID: "1"}}
	started := metav1.NewTime(noon.Add(-time.Hour))
	check.Spec.Nodes.Names = []string{"a", "b", "gone", "replaced"}
	check.Status.StartTime, check.Status.CompletionTime, check.Status.ReportName = &started, &ended, "report"
	nodes := newView("a", "b", "new", "replaced").nodes
	for _, n := range nodes {
		n.CreationTimestamp = started
		if n.Name == "replaced" {
			n.CreationTimestamp = metav1.NewTime(noon.Add(-time.Minute))
		}
	}
	arrived := &evenkeel.NodeNetworkHealthStatus{History: []evenkeel.HealthResult{{UID: "1", Time: ended}}}
	states := map[string]*evenkeel.NodeNetworkHealthStatus{"a": arrived}
	for name, test := range map[string]struct {
		now  time.Time
		want []string
	}{"b has no result yet": {noon, []string{"b"}}, "its time is over": {noon.Add(resultsTimeout), nil}} {
		pending, until := pendingResults([]*evenkeel.NetworkCheck{check}, states, nodes, test.now)
		if !slices.Equal(pending, test.want) || until.IsZero() != (test.want == nil) {
			t.Errorf("%s: %v until %s", name, pending, until)
		}
	}
	states["b"] = arrived
	if pending, until := pendingResults([]*evenkeel.NetworkCheck{check}, states, nodes, noon); len(pending) > 0 || !until.IsZero() {
		t.Errorf("all have arrived: %v until %s", pending, until)
	}
}
