package health

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func suspicion(job string, class evenkeel.SuspectClass) evenkeel.Suspicion {
	return evenkeel.Suspicion{Job: evenkeel.SuspiciousJob{Namespace: "ml", Kind: "PyTorchJob", Name: job, UID: job}, Class: class, Since: metav1.NewTime(noon)}
}

// describe lists suspicions: the job and the class, and - where the job has withdrawn it, ! where the job has ended.
func describe(all []evenkeel.Suspicion) string {
	var words []string
	for _, s := range all {
		text := s.Job.UID + " " + string(s.Class)
		if s.WithdrawnTime != nil {
			text += "-"
		}
		if s.JobEndTime != nil {
			text += "!"
		}
		words = append(words, text)
	}
	return strings.Join(words, ", ")
}

func TestSuspicionsFollowTheJob(t *testing.T) {
	link, path := suspicion("a", evenkeel.SuspectLink), suspicion("a", evenkeel.SuspectPath)
	var all []evenkeel.Suspicion
	for _, step := range []struct {
		what    string
		job     JobView
		after   time.Duration
		changed bool
		want    string
	}{
		{"nothing is said", JobView{Namespace: "ml", UID: "a"}, 0, false, ""},
		{"a link", JobView{Namespace: "ml", UID: "a", Said: []evenkeel.Suspicion{link}}, 0, true, "a link"},
		{"again", JobView{Namespace: "ml", UID: "a", Said: []evenkeel.Suspicion{link}}, time.Minute, false, "a link"},
		{"another job says nothing", JobView{Namespace: "ml", UID: "b"}, time.Minute, false, "a link"},
		{"it changes its mind", JobView{Namespace: "ml", UID: "a", Said: []evenkeel.Suspicion{path}}, time.Minute, true, "a path, a link-"},
		{"and again", JobView{Namespace: "ml", UID: "a", Said: []evenkeel.Suspicion{link}}, time.Minute, true, "a path-, a link"},
		{"another job", JobView{Namespace: "ml", UID: "b", Said: []evenkeel.Suspicion{suspicion("b", evenkeel.SuspectLink)}}, time.Minute, true, "b link, a path-, a link"},
		{"the first job ends", JobView{Namespace: "ml", UID: "a", Ended: true}, time.Hour, true, "b link, a path-!, a link!"},
		{"its pod still says so", JobView{Namespace: "ml", UID: "a", Said: []evenkeel.Suspicion{link}, Ended: true}, time.Hour, false, "b link, a path-!, a link!"},
		{"nobody decides for a week", JobView{Namespace: "ml", UID: "b"}, 8 * 24 * time.Hour, true, "b link-"},
	} {
		next, changed := Suspect(all, step.job, noon.Add(step.after))
		if got := describe(next); got != step.want || changed != step.changed {
			t.Errorf("%s: %q, changed %t; want %q, %t", step.what, got, changed, step.want, step.changed)
		}
		all = next
	}
}

// There is room for a few suspicions. Those that come later do not push out others: their jobs would write them again and again. An ended
// one waits for its check.
func TestSuspicionsBeyondTheLimit(t *testing.T) {
	say := func(all []evenkeel.Suspicion, job string) ([]evenkeel.Suspicion, bool) {
		return Suspect(all, JobView{Namespace: "ml", UID: job, Said: []evenkeel.Suspicion{suspicion(job, evenkeel.SuspectLink)}}, noon)
	}
	var all []evenkeel.Suspicion
	for i := range 20 {
		all, _ = say(all, fmt.Sprint(i))
	}
	const first = "7 link, 6 link, 5 link, 4 link, 3 link, 2 link, 1 link, 0 link"
	for i := range 20 {
		var changed bool
		if all, changed = say(all, fmt.Sprint(i)); changed || describe(all) != first {
			t.Fatalf("job %d says the same again: %s, changed %t", i, describe(all), changed)
		}
	}
	all, _ = Suspect(all, JobView{Namespace: "ml", UID: "0", Ended: true}, noon)
	all, _ = Suspect(all, JobView{Namespace: "ml", UID: "1"}, noon)
	all, _ = Suspect(all, JobView{Namespace: "ml", UID: "3"}, noon)
	for _, step := range []struct{ job, want string }{
		{"8", "8 link, 7 link, 6 link, 5 link, 4 link, 3 link-, 2 link, 0 link!"},
		{"9", "9 link, 8 link, 7 link, 6 link, 5 link, 4 link, 2 link, 0 link!"},
		{"10", "9 link, 8 link, 7 link, 6 link, 5 link, 4 link, 2 link, 0 link!"},
	} {
		if all, _ = say(all, step.job); describe(all) != step.want {
			t.Errorf("job %s: %s, want %s", step.job, describe(all), step.want)
		}
	}
}

// Whoever makes a pod writes which job it is of: that counts in its own namespace.
func TestSuspicionsAreOfOneNamespace(t *testing.T) {
	before := []evenkeel.Suspicion{suspicion("a", evenkeel.SuspectLink)}
	for name, job := range map[string]JobView{"withdraws": {Namespace: "other", UID: "a"}, "ends": {Namespace: "other", UID: "a", Ended: true}} {
		if after, changed := Suspect(before, job, noon); changed || describe(after) != "a link" {
			t.Errorf("a job of the same UID %s: %s", name, describe(after))
		}
	}
	other := suspicion("a", evenkeel.SuspectLink)
	other.Job.Namespace = "other"
	if after, _ := Suspect(before, JobView{Namespace: "other", UID: "a", Said: []evenkeel.Suspicion{other}}, noon); len(after) != 2 {
		t.Errorf("%s: want those of both", describe(after))
	}
}

// A check decides only what jobs said that had ended when it was done, and an inconclusive one nothing.
func TestSuspicionsAreDecidedByChecks(t *testing.T) {
	at := func(hour int) *metav1.Time {
		v := metav1.NewTime(noon.Add(time.Duration(hour) * time.Hour))
		return &v
	}
	before := evenkeel.NodeNetworkHealthStatus{Suspicions: []evenkeel.Suspicion{suspicion("runs", evenkeel.SuspectLink), suspicion("early", evenkeel.SuspectLink), suspicion("late", evenkeel.SuspectPath)}}
	before.Suspicions[1].JobEndTime, before.Suspicions[2].JobEndTime = at(1), at(3)
	if due := SuspicionDue(&before); !due.Equal(at(3).Time) {
		t.Errorf("due since %s", due)
	}
	for _, test := range []struct {
		result evenkeel.HealthResult
		want   string
	}{
		{result(2, "Inconclusive", ""), "runs link, early link!, late path!"},
		{result(0, "Pass", "1G"), "runs link, early link!, late path!"},
		{result(2, "Pass", "1G"), "runs link, late path!"},
		{result(3, "Fail", "1M"), "runs link"},
	} {
		s := AddResult(before, test.result, evenkeel.MeasuredNetwork{}, "m")
		if got := describe(s.Suspicions); got != test.want {
			t.Errorf("%s at %s: %s, want %s", test.result.Verdict, test.result.Time, got, test.want)
		}
		if unhealthy := s.Health == evenkeel.HealthUnhealthy; unhealthy != (test.result.Verdict == evenkeel.VerdictFail) {
			t.Errorf("%s: the node is %s", test.result.Verdict, s.Health)
		}
	}
	if len(before.Suspicions) != 3 {
		t.Error("the status before was changed")
	}
	if due := SuspicionDue(&evenkeel.NodeNetworkHealthStatus{Suspicions: before.Suspicions[:1]}); !due.IsZero() {
		t.Errorf("the job runs, and a check is due since %s", due)
	}
}

// Without a policy that avoids suspected nodes, a job's word changes no mark. With one, the node counts as unproven, and never as failed.
func TestSuspicionsChangeMarksIfThePolicySaysSo(t *testing.T) {
	nodes := []evenkeel.NodeNetworkHealthStatus{}
	withdrawn := suspicion("a", evenkeel.SuspectLink)
	at := metav1.NewTime(noon)
	withdrawn.WithdrawnTime = &at
	for _, s := range [][]evenkeel.Suspicion{nil, {suspicion("a", evenkeel.SuspectLink)}, {withdrawn}} {
		nodes = append(nodes, evenkeel.NodeNetworkHealthStatus{Health: evenkeel.HealthHealthy, Reason: "Proven", ObservedTime: &at, Suspicions: s})
	}
	for name, test := range map[string]struct {
		avoid evenkeel.Switch
		want  string
	}{
		"by default": {"", "True Proven healthy, True Proven healthy, True Proven healthy"},
		"avoid":      {evenkeel.SwitchEnabled, "True Proven healthy, Unknown Suspected , True Proven healthy"},
	} {
		var got []string
		for i := range nodes {
			p := policy("p", "", func(s *evenkeel.NetworkCheckPolicySpec) { s.OnSuspicion.Avoid = test.avoid })
			mark, stale := markersOf(&nodes[i], &p, noon.Add(time.Hour))
			got = append(got, fmt.Sprintf("%s %s %s", mark.Condition.Status, mark.Condition.Reason, mark.Label))
			if stale.IsZero() {
				t.Errorf("%s: the result of node %d never becomes stale", name, i)
			}
		}
		if text := strings.Join(got, ", "); text != test.want {
			t.Errorf("%s: %q, want %q", name, text, test.want)
		}
	}
	unhealthy := nodes[1]
	unhealthy.Health = evenkeel.HealthUnhealthy
	p := policy("p", "", func(s *evenkeel.NetworkCheckPolicySpec) { s.OnSuspicion.Avoid = evenkeel.SwitchEnabled })
	if mark, _ := markersOf(&unhealthy, &p, noon); mark.Label != evenkeel.UnhealthyValue {
		t.Errorf("a failed node that is suspected has the label %q", mark.Label)
	}
}

// A job is anybody's. It cannot have all nodes avoided, and those that it names later do not take the place of earlier ones.
func TestSuspectedNodesThatAreAvoidedAreLimited(t *testing.T) {
	p := policy("p", "gpu", func(s *evenkeel.NetworkCheckPolicySpec) { s.OnSuspicion.Avoid = evenkeel.SwitchEnabled })
	at := metav1.NewTime(noon)
	var nodes []corev1.Node
	healths := map[string]*evenkeel.NodeNetworkHealthStatus{}
	for i := range 10 {
		name := fmt.Sprint("n", i)
		nodes = append(nodes, node(name, nil))
		s := suspicion("a", evenkeel.SuspectLink)
		s.Since = metav1.NewTime(noon.Add(-time.Duration(i) * time.Minute))
		healths[name] = &evenkeel.NodeNetworkHealthStatus{Health: evenkeel.HealthHealthy, Reason: "Proven", Message: "passed", ObservedTime: &at, Suspicions: []evenkeel.Suspicion{s}}
	}
	marks, counts := Evaluate(nodes, healths, []evenkeel.NetworkCheckPolicy{p}, noon.Add(time.Hour))
	var avoided []string
	for _, n := range nodes {
		switch c := marks[n.Name].Condition; {
		case c.Reason == ReasonSuspected && marks[n.Name].Label == "":
			avoided = append(avoided, n.Name)
		case c.Status != corev1.ConditionTrue || c.Reason != "Proven" || marks[n.Name].Label != evenkeel.HealthyValue || !strings.Contains(c.Message, "more than 20 percent"):
			t.Errorf("%s: %+v, label %q", n.Name, c, marks[n.Name].Label)
		}
	}
	if got := strings.Join(avoided, " "); got != "n8 n9" {
		t.Errorf("%s are avoided, want the two of ten that were suspected first", got)
	}
	if c := counts["p"]; c.Healthy != 8 || c.Unknown != 2 || c.Nodes != 10 {
		t.Errorf("%+v", *c)
	}
}
