package health

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func result(hour int, v evenkeel.Verdict, speed string) evenkeel.HealthResult {
	r := evenkeel.HealthResult{Check: "c", UID: fmt.Sprint(hour), Time: metav1.NewTime(noon.Add(time.Duration(hour) * time.Hour)), Verdict: v, Reason: string(v)}
	if speed != "" {
		q := resource.MustParse(speed)
		r.BusBandwidth = &q
	}
	return r
}

func TestHealthFollowsNewestConclusiveResult(t *testing.T) {
	for _, test := range []struct {
		results []evenkeel.HealthResult
		want    evenkeel.Health
		reason  string
	}{
		{[]evenkeel.HealthResult{result(1, "Inconclusive", "")}, evenkeel.HealthUnknown, "Inconclusive"},
		{[]evenkeel.HealthResult{result(1, "Pass", "1G"), result(2, "Inconclusive", "")}, evenkeel.HealthHealthy, "Pass"},
		{[]evenkeel.HealthResult{result(1, "Pass", "1G"), result(2, "Fail", "1M")}, evenkeel.HealthUnhealthy, "Fail"},
		{[]evenkeel.HealthResult{result(1, "Fail", "1M"), result(2, "Inconclusive", ""), result(3, "Pass", "1G")}, evenkeel.HealthHealthy, "Pass"},
		// One that was found first and is written last does not undo what came after it.
		{[]evenkeel.HealthResult{result(2, "Fail", "1M"), result(1, "Pass", "1G")}, evenkeel.HealthUnhealthy, "Fail"},
	} {
		var s evenkeel.NodeNetworkHealthStatus
		for _, r := range test.results {
			s = AddResult(s, r, evenkeel.MeasuredNetwork{}, "m")
		}
		if s.Health != test.want || s.Reason != test.reason || len(s.History) != len(test.results) {
			t.Errorf("%+v: %+v", test.results, s)
		}
	}
}

func latency(us int32) *int32 { return &us }

func TestHealthHasWhatItsResultMeasured(t *testing.T) {
	with := func(us int32) evenkeel.MeasuredNetwork {
		return evenkeel.MeasuredNetwork{ProfileName: "default", LatencyMicroseconds: latency(us)}
	}
	s := AddResult(evenkeel.NodeNetworkHealthStatus{}, result(2, "Pass", "1G"), with(30), "m")
	for _, later := range []evenkeel.NodeNetworkHealthStatus{
		AddResult(s, result(3, "Inconclusive", ""), with(40), "m"), // it says nothing about the node
		AddResult(s, result(1, "Pass", "1G"), with(40), "m"),       // it ended before
	} {
		if us := later.Measured.LatencyMicroseconds; us == nil || *us != 30 {
			t.Errorf("%+v", later.Measured)
		}
	}
	if m := AddResult(s, result(3, "Pass", "1G"), evenkeel.MeasuredNetwork{ProfileName: "rdma"}, "m").Measured; m.ProfileName != "rdma" || m.LatencyMicroseconds != nil {
		t.Errorf("%+v", m)
	}
}

func TestHealthHistoryIsBounded(t *testing.T) {
	var s evenkeel.NodeNetworkHealthStatus
	for hour := range 30 {
		r := result(hour, "Pass", fmt.Sprintf("%dM", 1000+hour))
		if HasResult(&s, r.UID, r.Time.Time) {
			t.Errorf("hour %d is not known yet", hour)
		}
		s = AddResult(s, r, evenkeel.MeasuredNetwork{}, strings.Repeat("x", 5000))
		if !HasResult(&s, r.UID, r.Time.Time) {
			t.Errorf("hour %d was added", hour)
		}
	}
	if len(s.History) != evenkeel.HistoryLength || s.History[0].UID != "29" || len(s.Message) > 400 {
		t.Errorf("%d results, the newest %s", len(s.History), s.History[0].UID)
	}
	// Results as long as they can be.
	full := evenkeel.NodeNetworkHealth{ObjectMeta: metav1.ObjectMeta{Name: strings.Repeat("n", 253)}, Status: *s.DeepCopy()}
	for i := range full.Status.History {
		r := &full.Status.History[i]
		r.Check, r.UID, r.Reason, r.Verdict = strings.Repeat("c", 63), strings.Repeat("u", 36), strings.Repeat("r", 64), evenkeel.VerdictInconclusive
	}
	full.Status.Measured = evenkeel.MeasuredNetwork{ProfileName: strings.Repeat("p", 253), LatencyMicroseconds: latency(1_000_000), Devices: latency(64)}
	if text, err := json.Marshal(full); err != nil || len(text) > 8<<10 {
		t.Errorf("%d bytes (%v), more than 8 KiB", len(text), err)
	}
	// A result that was dropped is not added again.
	if !HasResult(&s, "3", noon.Add(3*time.Hour)) {
		t.Error("hour 3 was forgotten, and would be added again")
	}
	if b := s.Baseline; *b.Samples != 20 || b.MedianBusBandwidth.Value() != 1019500000 || b.MADBusBandwidth.Value() != 5000000 {
		t.Errorf("%+v", b)
	}
}

func node(name string, labels map[string]string) corev1.Node {
	if labels == nil {
		labels = map[string]string{}
	}
	labels["gpu"] = "yes"
	return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
}

func policy(name, label string, change func(*evenkeel.NetworkCheckPolicySpec)) evenkeel.NetworkCheckPolicy {
	p := evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	p.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{label: "yes"}}
	if change != nil {
		change(&p.Spec)
	}
	return p
}

func TestHealthStartupTaintIsKeptUntilProven(t *testing.T) {
	passed := AddResult(evenkeel.NodeNetworkHealthStatus{}, result(0, "Pass", "1G"), evenkeel.MeasuredNetwork{}, "fine")
	failed := AddResult(evenkeel.NodeNetworkHealthStatus{}, result(0, "Fail", "1M"), evenkeel.MeasuredNetwork{}, "slow")
	unclear := AddResult(evenkeel.NodeNetworkHealthStatus{}, result(0, "Inconclusive", ""), evenkeel.MeasuredNetwork{}, "no image")
	unproven := corev1.Taint{Key: evenkeel.HealthKey, Value: evenkeel.UnprovenValue, Effect: corev1.TaintEffectNoSchedule}
	other := corev1.Taint{Key: evenkeel.HealthKey, Value: "other", Effect: corev1.TaintEffectNoSchedule}
	wait := func(s *evenkeel.NetworkCheckPolicySpec) { s.Gate.OnTimeout = evenkeel.GateWait }
	for name, test := range map[string]struct {
		taint  corev1.Taint
		state  *evenkeel.NodeNetworkHealthStatus
		label  string
		change func(*evenkeel.NetworkCheckPolicySpec)
		age    time.Duration
		keeps  bool
		until  time.Duration // when time alone changes it
	}{
		"new":                    {taint: unproven, age: time.Minute, keeps: true, until: 30 * time.Minute},
		"inconclusive":           {taint: unproven, state: &unclear, age: time.Minute, keeps: true, until: 30 * time.Minute},
		"for too long":           {taint: unproven, state: &unclear, age: 30 * time.Minute},
		"however long":           {taint: unproven, state: &unclear, change: wait, age: 30 * time.Hour, keeps: true},
		"nobody checks it":       {taint: unproven, change: func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.NewNodes = evenkeel.SwitchDisabled }},
		"no policy":              {taint: unproven, label: "another"},
		"it passed":              {taint: unproven, state: &passed, until: 24 * time.Hour},
		"it passed long ago":     {taint: unproven, state: &passed, age: 48 * time.Hour},
		"it failed":              {taint: unproven, state: &failed, age: 48 * time.Hour, keeps: true},
		"another taint":          {taint: other},
		"tainted by its failure": {taint: unproven, state: &failed, change: func(s *evenkeel.NetworkCheckPolicySpec) { s.OnFail.Taint = evenkeel.SwitchEnabled }, keeps: true},
	} {
		n := node("n", nil)
		n.CreationTimestamp, n.Spec.Taints = metav1.NewTime(noon), []corev1.Taint{test.taint}
		label := "gpu"
		if test.label != "" {
			label = test.label
		}
		healths := map[string]*evenkeel.NodeNetworkHealthStatus{}
		if test.state != nil {
			healths["n"] = test.state
		}
		marks, counts := Evaluate([]corev1.Node{n}, healths, []evenkeel.NetworkCheckPolicy{policy("p", label, test.change)}, noon.Add(test.age))
		next := counts["p"].NextStale
		if marks["n"].Unproven != test.keeps || test.until == 0 && !next.IsZero() || test.until != 0 && !next.Equal(noon.Add(test.until)) {
			t.Errorf("%s: %+v, until %s", name, marks["n"], next)
		}
	}
}

func TestHealthMarkersFollowPolicy(t *testing.T) {
	passed := AddResult(evenkeel.NodeNetworkHealthStatus{}, result(0, "Pass", "1G"), evenkeel.MeasuredNetwork{}, "fine")
	failed := AddResult(evenkeel.NodeNetworkHealthStatus{}, result(0, "Fail", "1M"), evenkeel.MeasuredNetwork{}, "slow")
	unclear := AddResult(evenkeel.NodeNetworkHealthStatus{}, result(0, "Inconclusive", ""), evenkeel.MeasuredNetwork{}, "no image")
	nodes := []corev1.Node{node("new", nil), node("good", nil), node("bad", nil), node("unclear", nil)}
	healths := map[string]*evenkeel.NodeNetworkHealthStatus{"good": &passed, "bad": &failed, "unclear": &unclear}
	taint := policy("p", "gpu", func(s *evenkeel.NetworkCheckPolicySpec) { s.OnFail.Taint = evenkeel.SwitchEnabled })

	marks, counts := Evaluate(nodes, healths, []evenkeel.NetworkCheckPolicy{taint}, noon.Add(time.Hour))
	for name, want := range map[string]string{"new": "Unknown  false", "good": "True healthy false", "bad": "False unhealthy true", "unclear": "Unknown  false"} {
		if m := marks[name]; fmt.Sprintf("%s %s %t", m.Condition.Status, m.Label, m.Taint) != want {
			t.Errorf("%s: %+v, want %s", name, m, want)
		}
	}
	if c := counts["p"]; c.Nodes != 4 || c.Healthy != 1 || c.Unhealthy != 1 || c.Unknown != 2 || !slices.Equal(c.UnhealthyNames, []string{"bad"}) || !c.NextStale.Equal(noon.Add(24*time.Hour)) {
		t.Errorf("%+v", c)
	}

	// A day later the good one is stale; the bad one stays bad until a check clears it.
	marks, _ = Evaluate(nodes, healths, []evenkeel.NetworkCheckPolicy{taint}, noon.Add(24*time.Hour))
	if m := marks["good"]; m.Condition.Status != "Unknown" || m.Condition.Reason != ReasonStale || m.Label != "" {
		t.Errorf("%+v", m)
	}
	if m := marks["bad"]; m.Label != evenkeel.UnhealthyValue {
		t.Errorf("%+v", m)
	}

	for name, policies := range map[string][]evenkeel.NetworkCheckPolicy{"none": nil, "elsewhere": {policy("p", "other", nil)}} {
		marks, _ = Evaluate(nodes, healths, policies, noon)
		for node, m := range marks {
			if m.Condition != nil || m.Label != "" || m.Taint {
				t.Errorf("policy %s: %s carries %+v", name, node, m)
			}
		}
	}
	gone := taint
	gone.DeletionTimestamp = &metav1.Time{Time: noon}
	under := PolicyByNode(nodes, []evenkeel.NetworkCheckPolicy{policy("b", "gpu", nil), policy("a", "gpu", nil), gone})
	if under["bad"] == nil || under["bad"].Name != "a" {
		t.Errorf("the first by name counts, not %+v", under["bad"])
	}
}

func TestHealthMaxUnhealthyPercent(t *testing.T) {
	failed := AddResult(evenkeel.NodeNetworkHealthStatus{}, result(0, "Fail", "1M"), evenkeel.MeasuredNetwork{}, "slow")
	healths := map[string]*evenkeel.NodeNetworkHealthStatus{}
	var nodes []corev1.Node
	for i := range 20 {
		name := fmt.Sprintf("n-%02d", i)
		nodes = append(nodes, node(name, nil))
		if i < 6 {
			healths[name] = &failed
		}
	}
	nodes[5].Labels[evenkeel.HealthKey] = evenkeel.UnhealthyValue // was marked before the others failed
	labelled := func(percent int32) (names []string, unmarked int) {
		marks, counts := Evaluate(nodes, healths, []evenkeel.NetworkCheckPolicy{policy("p", "gpu", func(s *evenkeel.NetworkCheckPolicySpec) { s.OnFail.MaxUnhealthyPercent = &percent })}, noon)
		for name, m := range marks {
			if m.Label == evenkeel.UnhealthyValue {
				names = append(names, name)
			} else if healths[name] != nil && !strings.HasPrefix(m.Condition.Message, "not labeled") {
				t.Errorf("%s does not say why it is not labeled: %s", name, m.Condition.Message)
			}
		}
		slices.Sort(names)
		return names, counts["p"].Unmarked
	}
	if names, unmarked := labelled(20); !slices.Equal(names, []string{"n-00", "n-01", "n-02", "n-05"}) || unmarked != 2 {
		t.Errorf("20 percent: %v, %d not labeled", names, unmarked)
	}
	if names, unmarked := labelled(1); !slices.Equal(names, []string{"n-05"}) || unmarked != 5 {
		t.Errorf("1 percent: %v, %d not labeled", names, unmarked)
	}
	if names, _ := labelled(100); len(names) != 6 {
		t.Errorf("100 percent: %v", names)
	}
}

func TestHealthPolicyPriority(t *testing.T) {
	nodes := []corev1.Node{node("a", nil), node("b", map[string]string{"new": "yes"})}
	low, high := int32(-1), int32(1)
	for name, test := range map[string]struct {
		first, second *int32
		want          string // policy of node b
	}{
		"by name":            {nil, nil, "all"},
		"the second is more": {nil, &high, "few"},
		"the first is less":  {&low, nil, "few"},
		"equal":              {&high, &high, "all"},
	} {
		all := policy("all", "gpu", func(s *evenkeel.NetworkCheckPolicySpec) { s.Priority = test.first })
		few := policy("few", "new", func(s *evenkeel.NetworkCheckPolicySpec) { s.Priority = test.second })
		policies := []evenkeel.NetworkCheckPolicy{few, all}
		if p := PolicyByNode(nodes, policies)["b"]; p.Name != test.want {
			t.Errorf("%s: node b is of %s", name, p.Name)
		}
		_, counts := Evaluate(nodes, nil, policies, noon)
		for _, p := range []string{"all", "few"} {
			c := counts[p]
			if lost := p != test.want; (c.Overlapping == 1) != lost || (len(c.Others) == 1) != lost {
				t.Errorf("%s: policy %s: %+v", name, p, c)
			}
		}
	}
}

func TestHealthPolicyLeavesWindowsNodesAlone(t *testing.T) {
	nodes := []corev1.Node{node("linux", map[string]string{corev1.LabelOSStable: "linux"}), node("unlabelled", nil), node("windows", map[string]string{corev1.LabelOSStable: "windows"})}
	all := policy("all", "gpu", func(s *evenkeel.NetworkCheckPolicySpec) { s.NodeSelector = nil })
	marks, counts := Evaluate(nodes, nil, []evenkeel.NetworkCheckPolicy{all, policy("pool", "gpu", nil)}, noon)
	if c := counts["all"]; c.Nodes != 2 || c.Unknown != 2 || counts["pool"].Overlapping != 2 {
		t.Errorf("%+v, %+v", c, counts["pool"])
	}
	if m := marks["windows"]; m.Condition != nil || marks["linux"].Condition == nil {
		t.Errorf("%+v", marks)
	}
}
