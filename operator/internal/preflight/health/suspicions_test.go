package health

import (
	"fmt"
	"strings"
	"testing"
	"time"

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
		{"nothing is said", JobView{UID: "a"}, 0, false, ""},
		{"a link", JobView{UID: "a", Said: []evenkeel.Suspicion{link}}, 0, true, "a link"},
		{"again", JobView{UID: "a", Said: []evenkeel.Suspicion{link}}, time.Minute, false, "a link"},
		{"another job says nothing", JobView{UID: "b"}, time.Minute, false, "a link"},
		{"it changes its mind", JobView{UID: "a", Said: []evenkeel.Suspicion{path}}, time.Minute, true, "a path, a link-"},
		{"and again", JobView{UID: "a", Said: []evenkeel.Suspicion{link}}, time.Minute, true, "a path-, a link"},
		{"another job", JobView{UID: "b", Said: []evenkeel.Suspicion{suspicion("b", evenkeel.SuspectLink)}}, time.Minute, true, "b link, a path-, a link"},
		{"the first job ends", JobView{UID: "a", Ended: true}, time.Hour, true, "b link, a path-!, a link!"},
		{"its pod still says so", JobView{UID: "a", Said: []evenkeel.Suspicion{link}, Ended: true}, time.Hour, false, "b link, a path-!, a link!"},
		{"nobody decides for a week", JobView{UID: "b"}, 8 * 24 * time.Hour, true, "b link-"},
	} {
		next, changed := Suspect(all, step.job, noon.Add(step.after))
		if got := describe(next); got != step.want || changed != step.changed {
			t.Errorf("%s: %q, changed %t; want %q, %t", step.what, got, changed, step.want, step.changed)
		}
		all = next
	}
	for i := range 20 {
		job := fmt.Sprint("job-", i)
		all, _ = Suspect(all, JobView{UID: job, Said: []evenkeel.Suspicion{suspicion(job, evenkeel.SuspectLink)}}, noon)
	}
	if len(all) != evenkeel.MaxSuspicions || all[0].Job.UID != "job-19" {
		t.Errorf("%s: want the newest %d", describe(all), evenkeel.MaxSuspicions)
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
