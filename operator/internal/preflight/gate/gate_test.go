package gate

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// A scene is a World in the making.
type scene struct {
	nodes    []corev1.Node
	states   map[string]*evenkeel.NodeNetworkHealthStatus
	policies []evenkeel.NetworkCheckPolicy
	checks   []evenkeel.NetworkCheck
	use      fakeUse
	now      time.Time
}

// fakeUse has the number of GPUs of each node that somebody uses.
type fakeUse map[string]int64

func (u fakeUse) User(node string) string {
	if u[node] > 0 {
		return "ml/train"
	}
	return ""
}

func (u fakeUse) Used(node string) map[corev1.ResourceName]int64 {
	return map[corev1.ResourceName]int64{"nvidia.com/gpu": u[node]}
}

// newScene has one policy for all nodes, which gates jobs of the profile default.
func newScene(change func(*evenkeel.NetworkCheckPolicySpec)) *scene {
	p := evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "all"}}
	p.Spec.Triggers.JobStart = evenkeel.SwitchEnabled
	hundred := int32(100)
	p.Spec.OnFail.MaxUnhealthyPercent = &hundred
	if change != nil {
		change(&p.Spec)
	}
	return &scene{states: map[string]*evenkeel.NodeNetworkHealthStatus{}, policies: []evenkeel.NetworkCheckPolicy{p}, now: noon}
}

// node adds a ready node: healthy, unhealthy (and labelled), late (unhealthy without the label), or new.
func (s *scene) node(name, state string) *corev1.Node {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4")}
	observed := metav1.NewTime(noon.Add(-time.Hour))
	status := &evenkeel.NodeNetworkHealthStatus{ObservedTime: &observed}
	switch state {
	case "healthy":
		status.Health = evenkeel.HealthHealthy
		n.Labels[evenkeel.HealthKey] = evenkeel.HealthyValue
	case "unhealthy":
		status.Health, status.Reason, status.Message = evenkeel.HealthUnhealthy, "TooSlow", "with z: 0.1 GB/s, minimum 1 GB/s"
		n.Labels[evenkeel.HealthKey] = evenkeel.UnhealthyValue
	case "late":
		status.Health = evenkeel.HealthUnhealthy
	case "new":
		status = nil
	default:
		panic(state)
	}
	if status != nil {
		s.states[name] = status
	}
	s.nodes = append(s.nodes, n)
	return &s.nodes[len(s.nodes)-1]
}

// inconclusive adds an inconclusive result.
func (s *scene) inconclusive(name string, at time.Time) {
	status := s.states[name]
	if status == nil {
		status = &evenkeel.NodeNetworkHealthStatus{Health: evenkeel.HealthUnknown}
		s.states[name] = status
	}
	status.History = slices.Insert(status.History, 0, evenkeel.HealthResult{Check: "inconclusive", Time: metav1.NewTime(at), Verdict: evenkeel.VerdictInconclusive, Reason: "ImagePull"})
}

// check adds one of the policy's: running, or refused at the time.
func (s *scene) check(name string, refused time.Time, nodes ...string) {
	c := evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{evenkeel.PolicyKey: "all"}}}
	c.Spec.Nodes.Names = nodes
	if !refused.IsZero() {
		at := metav1.NewTime(refused)
		c.Status.CompletionTime, c.Status.Message = &at, "there is no NetworkProfile"
		c.Status.Conditions = []metav1.Condition{{Type: evenkeel.ConditionComplete, Status: metav1.ConditionTrue}}
	}
	s.checks = append(s.checks, c)
}

func (s *scene) decide(change func(*Job)) Decision {
	job := Job{Profile: "default", Since: noon.Add(-time.Minute), Pods: slices.Repeat([]*corev1.PodSpec{{}}, 9)}
	if change != nil {
		change(&job)
	}
	return s.snapshot().Decide(job)
}

func (s *scene) snapshot() *Snapshot {
	return NewSnapshot(s.nodes, s.states, s.policies, s.checks, s.use, s.now)
}

func waitRegardless(s *evenkeel.NetworkCheckPolicySpec) { s.Gate.OnTimeout = evenkeel.GateWait }

func TestGateDecide(t *testing.T) {
	for name, test := range map[string]struct {
		policy func(*evenkeel.NetworkCheckPolicySpec)
		scene  func(*scene)
		job    func(*Job)
		action Action
		says   string
		check  string
		next   time.Duration // from noon
		late   bool
	}{
		"all proven": {
			scene:  func(s *scene) { s.node("a", "healthy"); s.node("b", "healthy") },
			action: Open, says: "all 2 nodes",
		},
		"one failed, the job avoids it": {
			scene:  func(s *scene) { s.node("a", "healthy"); s.node("b", "unhealthy") },
			action: Open, says: "that of b failed",
		},
		"one failed a moment ago and has no label yet": {
			scene:  func(s *scene) { s.node("a", "healthy"); s.node("b", "late") },
			action: Wait, says: "until b are labeled", next: 29 * time.Minute,
		},
		"all failed": {
			scene:  func(s *scene) { s.node("a", "unhealthy"); s.node("b", "unhealthy") },
			action: Wait, says: "failed a check: a, b; a: TooSlow: with z: 0.1 GB/s, minimum 1 GB/s", next: 29 * time.Minute,
		},
		"new nodes": {
			scene:  func(s *scene) { s.node("a", "healthy"); s.node("b", "new"); s.node("c", "new") },
			action: Check, says: "of b, c is checked", check: "b c", next: 29 * time.Minute,
		},
		"stale": {
			policy: func(s *evenkeel.NetworkCheckPolicySpec) { hour := int32(3600); s.FreshnessSeconds = &hour },
			scene:  func(s *scene) { s.node("a", "healthy"); s.node("b", "new") },
			action: Check, says: "of a, b is checked", check: "a b", next: 29 * time.Minute,
		},
		"a check runs": {
			scene: func(s *scene) {
				s.node("a", "healthy")
				s.node("b", "new")
				s.check("all-job-1", time.Time{}, "b")
			},
			action: Check, says: "NetworkCheck all-job-1 runs", check: "b", next: 29 * time.Minute,
		},
		"no policy gates jobs": {
			policy: func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.JobStart = "" },
			scene:  func(s *scene) { s.node("a", "new"); s.node("b", "new") },
			action: Open, says: "none of the nodes",
		},
		"the policy is for another profile": {
			policy: func(s *evenkeel.NetworkCheckPolicySpec) { s.Check.ProfileName = "other" },
			scene:  func(s *scene) { s.node("a", "new"); s.node("b", "new") },
			action: Open, says: "none of the nodes",
		},
		"the policy goes": {
			scene: func(s *scene) {
				s.node("a", "new")
				s.node("b", "new")
				s.policies[0].DeletionTimestamp = &metav1.Time{Time: noon}
			},
			action: Open, says: "none of the nodes",
		},
		"the policy that is named counts without the trigger": {
			policy: func(s *evenkeel.NetworkCheckPolicySpec) { s.Triggers.JobStart = "" },
			scene:  func(s *scene) { s.node("a", "new"); s.node("b", "new") },
			job:    func(j *Job) { j.Policy = "all" },
			action: Check, says: "of a, b", check: "a b", next: 29 * time.Minute,
		},
		"nodes that it cannot run on do not count": {
			scene:  func(s *scene) { s.node("a", "healthy").Labels["pool"] = "mine"; s.node("b", "new") },
			job:    func(j *Job) { j.Pods[0].NodeSelector = map[string]string{"pool": "mine"} },
			action: Open, says: "all 1 nodes",
		},
		"an autoscaler has yet to bring its nodes": {
			scene:  func(s *scene) { s.node("a", "new") },
			job:    func(j *Job) { j.Pods = []*corev1.PodSpec{{NodeSelector: map[string]string{"pool": "empty"}}} },
			action: Open, says: "no node that it may run on is there: it waits for a node, and not for its gate",
		},
		"assigned nodes alone count": {
			scene:  func(s *scene) { s.node("a", "healthy"); s.node("b", "new"); s.node("c", "unhealthy") },
			job:    func(j *Job) { j.Hosts, j.Pods = []string{"a"}, nil },
			action: Open, says: "all 1 nodes",
		},
		"an assigned node failed": {
			scene:  func(s *scene) { s.node("a", "healthy"); s.node("b", "new"); s.node("c", "unhealthy") },
			job:    func(j *Job) { j.Hosts, j.Pods = []string{"a", "c"}, nil },
			action: Reassign, says: "the network of c failed",
		},
		"an assigned node is gone": {
			scene:  func(s *scene) { s.node("a", "healthy"); s.node("b", "healthy") },
			job:    func(j *Job) { j.Policy, j.Hosts, j.Pods = "all", []string{"a", "z"}, nil },
			action: Reassign, says: "z is gone: other nodes are needed (attempt 1)",
		},
		"all assigned nodes are gone": {
			scene:  func(s *scene) { s.node("a", "healthy"); s.node("b", "healthy") },
			job:    func(j *Job) { j.Policy, j.Hosts, j.Pods = "all", []string{"y", "z"}, nil },
			action: Reassign, says: "y, z are gone: other nodes",
		},
		"an assigned node is gone, and so is the policy": {
			scene:  func(s *scene) { s.node("a", "healthy") },
			job:    func(j *Job) { j.Policy, j.Hosts, j.Pods = "gone", []string{"a", "z"}, nil },
			action: Open, says: "none of the nodes",
		},
		"its user turned the gate off": {
			scene:  func(s *scene) { s.node("a", "new"); s.node("b", "new") },
			job:    func(j *Job) { j.OptOut = true },
			action: Open, says: "evenkeel.dev/gate of the job is Disabled",
		},
		"its user turned off a gate that is mandatory": {
			policy: func(s *evenkeel.NetworkCheckPolicySpec) { s.Gate.OptOut = evenkeel.GateOptOutForbidden },
			scene:  func(s *scene) { s.node("a", "new"); s.node("b", "new") },
			job:    func(j *Job) { j.OptOut = true },
			action: Check, says: "of a, b", check: "a b", next: 29 * time.Minute,
		},
		"failed nodes are assigned again and again": {
			scene:  func(s *scene) { s.node("a", "healthy"); s.node("b", "unhealthy") },
			job:    func(j *Job) { j.Hosts, j.Pods, j.Reassigned = []string{"b"}, nil, maxReassignments },
			action: OpenUnproven, says: "starts although the network of b failed a check, as it was given such nodes 6 times; b: TooSlow: with z: 0.1 GB/s, minimum 1 GB/s",
		},
		"failed nodes are assigned again and again, and it waits regardless": {
			policy: waitRegardless,
			scene:  func(s *scene) { s.node("a", "healthy"); s.node("b", "unhealthy") },
			job:    func(j *Job) { j.Hosts, j.Pods, j.Reassigned = []string{"b"}, nil, 100 },
			action: Reassign, says: "(attempt 101); b: TooSlow: with z: 0.1 GB/s, minimum 1 GB/s",
		},
		"its time is up": {
			scene:  func(s *scene) { s.node("a", "new"); s.node("b", "new"); s.now = noon.Add(29 * time.Minute) },
			action: OpenUnproven, says: "waited for 30m0s: waits until the network of a, b",
		},
		"its time is up, and it waits regardless": {
			policy: waitRegardless,
			scene:  func(s *scene) { s.node("a", "new"); s.node("b", "new"); s.now = noon.Add(29 * time.Minute) },
			action: Check, says: "of a, b", check: "a b", late: true,
		},
		"its own time is up": {
			policy: func(s *evenkeel.NetworkCheckPolicySpec) { one := int32(60); s.Gate.TimeoutSeconds = &one },
			scene:  func(s *scene) { s.node("a", "new"); s.node("b", "new") },
			action: OpenUnproven, says: "waited for 1m0s",
		},
		"one check said nothing": {
			scene: func(s *scene) {
				s.node("a", "healthy")
				s.node("b", "new")
				s.inconclusive("b", noon.Add(-30*time.Second))
			},
			action: Check, says: "of b", check: "b", next: 29 * time.Minute,
		},
		"two checks said nothing": {
			scene: func(s *scene) {
				s.node("a", "healthy")
				s.node("b", "new")
				s.inconclusive("b", noon.Add(-30*time.Second))
				s.inconclusive("b", noon.Add(-10*time.Second))
			},
			action: OpenUnproven, says: "NetworkCheck inconclusive was inconclusive for b: ImagePull",
		},
		"two checks said nothing, long before": {
			scene: func(s *scene) {
				s.node("a", "healthy")
				s.node("b", "new")
				s.inconclusive("b", noon.Add(-3*time.Hour))
				s.inconclusive("b", noon.Add(-2*time.Hour))
			},
			action: Check, says: "of b", check: "b", next: 29 * time.Minute,
		},
		"two checks said nothing, and it waits regardless": {
			policy: waitRegardless,
			scene: func(s *scene) {
				s.node("a", "healthy")
				s.node("b", "new")
				s.inconclusive("b", noon.Add(-30*time.Second))
				s.inconclusive("b", noon.Add(-10*time.Second))
			},
			action: Wait, says: "was inconclusive for b", next: 4*time.Minute + 50*time.Second,
		},
		"after a pause it is tried again": {
			policy: waitRegardless,
			scene: func(s *scene) {
				s.node("a", "healthy")
				s.node("b", "new")
				s.inconclusive("b", noon.Add(-30*time.Second))
				s.inconclusive("b", noon.Add(-10*time.Second))
				s.now = noon.Add(5 * time.Minute)
			},
			action: Check, says: "of b", check: "b", next: 29 * time.Minute,
		},
		"the check could not be run": {
			scene: func(s *scene) {
				s.node("a", "new")
				s.node("b", "new")
				s.check("refused", noon.Add(-5*time.Second), "a", "b")
			},
			action: OpenUnproven, says: "NetworkCheck refused could not be run: there is no NetworkProfile",
		},
		"the check could not be run, and it waits regardless": {
			policy: waitRegardless,
			scene: func(s *scene) {
				s.node("a", "new")
				s.node("b", "new")
				s.check("refused", noon.Add(-5*time.Second), "a", "b")
			},
			action: Wait, says: "could not be run", next: 4*time.Minute + 55*time.Second,
		},
		"a node alone": {
			scene:  func(s *scene) { s.node("a", "new") },
			action: OpenUnproven, says: "no second node",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(test.policy)
			test.scene(s)
			d := s.decide(test.job)
			var check []string
			for _, list := range d.Check {
				check = append(check, list...)
			}
			if d.Action != test.action || !strings.Contains(d.Message, test.says) || strings.Join(check, " ") != test.check || d.Reason == "" || d.Overdue != test.late {
				t.Errorf("%+v", d)
			}
			if next := d.Next; d.Waits() && (test.next == 0) != next.IsZero() || !next.IsZero() && !next.Equal(noon.Add(test.next)) {
				t.Errorf("next look at %s, want noon and %s", next, test.next)
			}
		})
	}
}

func gpuPods(pods int, gpus string) []*corev1.PodSpec {
	limits := corev1.ResourceList{"nvidia.com/gpu": resource.MustParse(gpus)}
	return slices.Repeat([]*corev1.PodSpec{{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: limits, Requests: limits}}}}}, pods)
}

// claimPods get their GPUs by a ResourceClaim.
func claimPods(pods int) []*corev1.PodSpec {
	return slices.Repeat([]*corev1.PodSpec{{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpus"}}}}}}}, pods)
}

// draNodes adds nodes whose GPUs DRA offers: labels alone tell of them.
func (s *scene) draNodes(state string, names ...string) {
	for _, name := range names {
		s.node(name, state).Labels["nvidia.com/gpu.present"] = "true"
	}
}

// gpuNodes adds nodes with eight GPUs.
func (s *scene) gpuNodes(state string, names ...string) {
	for _, name := range names {
		s.node(name, state).Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("8")
	}
}

func TestGateWaitsForNodesWithRoomOnly(t *testing.T) {
	for name, test := range map[string]struct {
		scene  func(*scene)
		pods   []*corev1.PodSpec
		action Action
		check  string
	}{
		"as many nodes as it needs, and one to spare": {
			func(s *scene) { s.gpuNodes("new", "a", "b", "c", "d", "e", "f") }, gpuPods(2, "8"), Check, "a b c",
		},
		"two pods fit on a node": {
			func(s *scene) { s.gpuNodes("new", "a", "b", "c", "d", "e", "f") }, gpuPods(4, "4"), Check, "a b c",
		},
		"its nodes are proven": {
			func(s *scene) { s.gpuNodes("healthy", "a", "b"); s.gpuNodes("new", "c", "d") }, gpuPods(2, "8"), Open, "",
		},
		"the proven nodes are in use": {
			func(s *scene) {
				s.gpuNodes("healthy", "a", "b")
				s.gpuNodes("new", "c", "d", "e", "f")
				s.use["a"], s.use["b"] = 8, 8
			}, gpuPods(2, "8"), Check, "c d e",
		},
		"unproven nodes are in use": {
			func(s *scene) {
				s.gpuNodes("new", "a", "b", "c", "d", "e", "f")
				s.use["a"], s.use["b"] = 8, 1
			}, gpuPods(2, "8"), Check, "c d e",
		},
		"half of a proven node is free": {
			func(s *scene) {
				s.gpuNodes("healthy", "a")
				s.gpuNodes("new", "b", "c")
				s.use["a"] = 4
			}, gpuPods(1, "4"), Open, "",
		},
		"no node has room": {
			func(s *scene) { s.gpuNodes("new", "a", "b"); s.use["a"], s.use["b"] = 8, 8 }, gpuPods(2, "8"), Open, "",
		},
		"less room than it needs, all of it proven": {
			func(s *scene) { s.gpuNodes("healthy", "a", "b"); s.gpuNodes("new", "c"); s.use["a"], s.use["c"] = 8, 8 }, gpuPods(2, "8"), Open, "",
		},
		"a launcher without GPUs needs no node": {
			func(s *scene) { s.gpuNodes("healthy", "a", "b"); s.gpuNodes("new", "c", "d") }, append(gpuPods(2, "8"), &corev1.PodSpec{}), Open, "",
		},
		"a claim waits for no node without accelerators": {
			func(s *scene) { s.draNodes("healthy", "a", "b"); s.node("c", "new"); s.node("d", "new") }, claimPods(2), Open, "",
		},
		"a claim does not count on proven nodes without accelerators": {
			func(s *scene) {
				s.node("a", "healthy")
				s.node("b", "healthy")
				s.draNodes("new", "c", "d", "e", "f")
			}, claimPods(2), Check, "c d e",
		},
		"a claim does not count on proven nodes in use": {
			func(s *scene) {
				s.draNodes("healthy", "a", "b")
				s.draNodes("new", "c", "d", "e", "f")
				s.use["a"], s.use["b"] = 1, 1
			}, claimPods(2), Check, "c d e",
		},
		"a launcher without a claim needs no node": {
			func(s *scene) { s.draNodes("healthy", "a", "b"); s.draNodes("new", "c", "d"); s.node("e", "new") }, append(claimPods(2), &corev1.PodSpec{}), Open, "",
		},
		"a claim where nothing tells of accelerators": {
			func(s *scene) {
				for _, name := range []string{"a", "b", "c", "d"} {
					s.node(name, "new")
				}
			}, claimPods(2), Check, "a b c",
		},
		"nodes that a job's check tests already come first": {
			func(s *scene) {
				s.gpuNodes("new", "a", "b", "c", "d", "e", "f")
				s.check("all-job-1", time.Time{}, "e", "f")
				s.checks[0].Labels[evenkeel.TriggerKey] = "job"
			}, gpuPods(2, "8"), Check, "a e f",
		},
		"nodes of other checks come last": {
			func(s *scene) {
				s.gpuNodes("new", "a", "b", "c", "d", "e", "f")
				s.check("all-29411", time.Time{}, "a", "b")
				s.checks[0].Labels[evenkeel.TriggerKey] = "schedule"
			}, gpuPods(2, "8"), Check, "c d e",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(nil)
			s.use = fakeUse{}
			test.scene(s)
			d := s.decide(func(j *Job) { j.Pods = test.pods })
			slices.Sort(d.Check["all"])
			if d.Action != test.action || strings.Join(d.Check["all"], " ") != test.check {
				t.Errorf("%+v", d)
			}
		})
	}
}

// Of the policies of a job's nodes, the one with the highest priority says how long the job waits.
func TestGateGoesByPriorityOfPolicies(t *testing.T) {
	for name, test := range map[string]struct {
		priorities [2]int32
		action     Action
		mandatory  string
	}{
		"the second has the highest": {[2]int32{-1, 5}, OpenUnproven, "strict-2"},
		"the first has the highest":  {[2]int32{5, -1}, Wait, "strict-1"},
		"the first by name":          {[2]int32{0, 0}, Wait, "strict-1"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(waitRegardless)
			s.policies = append(s.policies, *s.policies[0].DeepCopy())
			s.policies[1].Spec.Gate.OnTimeout = evenkeel.GateStart
			for i := range s.policies {
				p := &s.policies[i]
				p.Name, p.Spec.Priority = fmt.Sprintf("strict-%d", i+1), &test.priorities[i]
				p.Spec.Gate.OptOut = evenkeel.GateOptOutForbidden
				p.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"pool": p.Name}}
				for range 2 {
					node := s.node(fmt.Sprintf("n%d", len(s.nodes)), "unhealthy")
					node.Labels["pool"] = p.Name
				}
			}
			s.now = noon.Add(24 * time.Hour)
			for _, state := range s.states {
				at := metav1.NewTime(s.now)
				state.ObservedTime = &at
			}
			if d := s.decide(nil); d.Action != test.action {
				t.Errorf("%+v", d)
			}
			if got := Mandatory(s.policies, "default").Name; got != test.mandatory {
				t.Errorf("%s is mandatory", got)
			}
		})
	}
}

// Ten jobs wait, and none for the nodes of another.
func TestGateJobsWaitInParallel(t *testing.T) {
	s := newScene(nil)
	for i := range 40 {
		s.gpuNodes("new", fmt.Sprintf("n%02d", i))
	}
	w := s.snapshot()
	seen := map[string]bool{}
	for range 10 {
		d := w.Decide(Job{Profile: "default", Since: noon, Pods: gpuPods(2, "8")})
		if d.Action != Check || len(d.Check["all"]) != 3 {
			t.Fatalf("%+v", d)
		}
		claimed := 0
		for _, name := range d.Check["all"] {
			if !seen[name] {
				claimed++
			}
			seen[name] = true
		}
		if claimed < 2 {
			t.Errorf("of %v only %d are its own", d.Check, claimed)
		}
	}
	s = newScene(nil)
	s.gpuNodes("healthy", "a", "b")
	s.gpuNodes("new", "c", "d", "e", "f")
	w = s.snapshot()
	if d := w.Decide(Job{Profile: "default", Since: noon, Pods: gpuPods(2, "8")}); d.Action != Open {
		t.Errorf("the first: %+v", d)
	}
	if d := w.Decide(Job{Profile: "default", Since: noon, Pods: gpuPods(2, "8")}); d.Action != Check || len(d.Check["all"]) != 3 {
		t.Errorf("the second counts on the nodes of the first: %+v", d)
	}
}

// There are nodes for two jobs. A third one waits too: the first two have no pods yet, so that its own would run on unproven nodes at
// once. It does not wait for nodes that somebody uses.
func TestGateWaitsBehindJobsThatWait(t *testing.T) {
	for name, pods := range map[string][]*corev1.PodSpec{"GPUs": gpuPods(2, "8"), "no accelerators": slices.Repeat([]*corev1.PodSpec{{}}, 2)} {
		s := newScene(waitRegardless)
		s.gpuNodes("new", "a", "b", "c", "d")
		decide := func(w *Snapshot, want Action, says string) {
			t.Helper()
			if d := w.Decide(Job{Profile: "default", Since: noon, Pods: pods}); d.Action != want || !strings.Contains(d.Message, says) {
				t.Errorf("%s: %+v, want %v", name, d, want)
			}
		}
		w := s.snapshot()
		decide(w, Check, "is checked")
		decide(w, Check, "is checked")
		for range 3 {
			decide(w, Wait, "until jobs that wait already have their nodes")
		}
		// The same where others of the same shape were not decided about before.
		w = s.snapshot()
		for range 2 {
			w.Decide(Job{Profile: "default", Since: noon, Pods: append(slices.Clone(pods[:1:1]), &corev1.PodSpec{NodeSelector: map[string]string{}, Containers: pods[0].Containers, Tolerations: []corev1.Toleration{{Key: "x"}}})})
		}
		decide(w, Wait, "until jobs that wait already have their nodes")
	}
	s := newScene(waitRegardless)
	s.use = fakeUse{"a": 8, "b": 8}
	s.gpuNodes("new", "a", "b")
	if d := s.decide(func(j *Job) { j.Pods = gpuPods(2, "8") }); d.Action != Open || d.Reason != ReasonNothingToCheck {
		t.Errorf("nodes that others use: %+v", d)
	}
}

// A job that asks for more nodes than can be proven waits without the proven ones: others start on them. One that waits for the label of
// a failed node keeps them, as it starts soon.
func TestGateStuckJobKeepsNoProvenNodes(t *testing.T) {
	s := newScene(waitRegardless)
	s.gpuNodes("healthy", "a", "b", "c")
	s.gpuNodes("new", "x", "y")
	s.use = fakeUse{"y": 8}
	for range maxAttempts {
		s.inconclusive("x", noon)
	}
	w := s.snapshot()
	if d := w.Decide(Job{Profile: "default", Since: noon, Pods: gpuPods(1000, "8")}); d.Action != Wait || !strings.Contains(d.Message, "inconclusive for x") {
		t.Errorf("%+v", d)
	}
	if d := w.Decide(Job{Profile: "default", Since: noon, Pods: gpuPods(1, "8")}); d.Action != Open || d.Reason != ReasonProven {
		t.Errorf("a small job behind one that is stuck: %+v", d)
	}
	s = newScene(waitRegardless)
	s.gpuNodes("healthy", "a")
	s.gpuNodes("late", "b")
	s.gpuNodes("new", "c", "d")
	w = s.snapshot()
	if d := w.Decide(Job{Profile: "default", Since: noon, Pods: gpuPods(1, "8")}); d.Action != Wait {
		t.Errorf("%+v", d)
	}
	if d := w.Decide(Job{Profile: "default", Since: noon, Pods: gpuPods(1, "8")}); d.Action != Check {
		t.Errorf("a job behind one that starts soon: %+v", d)
	}
}

// No check clears what a job says that still runs. So others do not ask for one after the other.
func TestGateChecksSuspectedNodeOnce(t *testing.T) {
	for name, test := range map[string]struct {
		passed time.Duration // after the job began to wait
		want   Action
	}{"it passed before": {-time.Second, Check}, "it has passed since": {time.Second, OpenUnproven}} {
		s := newScene(func(p *evenkeel.NetworkCheckPolicySpec) { p.OnSuspicion.Avoid = evenkeel.SwitchEnabled })
		s.gpuNodes("healthy", "a", "b")
		s.use = fakeUse{"b": 4}
		s.policies[0].Spec.Check.BusyNodes = evenkeel.BusyNodesTest
		state := s.states["a"]
		state.Suspicions = []evenkeel.Suspicion{{Job: evenkeel.SuspiciousJob{Namespace: "ml", Kind: "Job", Name: "slow", UID: "1"}, Class: evenkeel.SuspectLink, Since: metav1.NewTime(noon), Message: "waits for a"}}
		state.History = []evenkeel.HealthResult{{Check: "c", Time: metav1.NewTime(noon.Add(-time.Minute).Add(test.passed)), Verdict: evenkeel.VerdictPass}}
		d := s.decide(func(j *Job) { j.Pods = gpuPods(1, "8") })
		if d.Action != test.want || test.want == OpenUnproven && !strings.Contains(d.Message, "Job ml/slow has reported it as slow") {
			t.Errorf("%s: %+v", name, d)
		}
	}
}

func TestGateChangeTracker(t *testing.T) {
	var n ChangeTracker
	for i, step := range []struct {
		d    Decision
		news bool
	}{
		{Decision{Reason: ReasonChecking}, true},
		{Decision{Reason: ReasonChecking, Message: "fewer nodes"}, false},
		{Decision{Reason: ReasonChecking, Running: "x"}, true},
		{Decision{Reason: ReasonChecking, Running: "x", Message: "fewer nodes"}, false},
		{Decision{Reason: ReasonChecking}, false},
		{Decision{Reason: ReasonUnhealthyHost, Attempt: 1}, true},
		{Decision{Reason: ReasonUnhealthyHost, Attempt: 1}, false},
		{Decision{Reason: ReasonUnhealthyHost, Attempt: 2}, true},
		{Decision{Reason: ReasonProven}, true},
	} {
		if news := n.Changed("job", step.d); news != step.news {
			t.Errorf("step %d: %t", i, news)
		}
		n.Record("job", step.d)
	}
	n.Forget(func(types.UID) bool { return false })
	if !n.Changed("job", Decision{Reason: ReasonProven}) {
		t.Error("it was not forgotten")
	}
}

func TestGateNodeFilter(t *testing.T) {
	affinity := func(operator corev1.NodeSelectorOperator, values ...string) *corev1.Affinity {
		return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "pool", Operator: operator, Values: values}}}},
		}}}
	}
	wants := func(cpu string) []corev1.Container {
		return []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)}}}}
	}
	claims := claimPods(1)[0].Containers
	for name, test := range map[string]struct {
		node func(*corev1.Node)
		pod  corev1.PodSpec
		fits bool
	}{
		"anywhere":                      {nil, corev1.PodSpec{}, true},
		"selector":                      {nil, corev1.PodSpec{NodeSelector: map[string]string{"pool": "x"}}, true},
		"another selector":              {nil, corev1.PodSpec{NodeSelector: map[string]string{"pool": "y"}}, false},
		"affinity":                      {nil, corev1.PodSpec{Affinity: affinity(corev1.NodeSelectorOpIn, "x", "y")}, true},
		"another affinity":              {nil, corev1.PodSpec{Affinity: affinity(corev1.NodeSelectorOpNotIn, "x")}, false},
		"affinity that is none":         {nil, corev1.PodSpec{Affinity: affinity("Resembles", "x")}, false},
		"placed":                        {nil, corev1.PodSpec{NodeName: "n"}, true},
		"placed elsewhere":              {nil, corev1.PodSpec{NodeName: "m"}, false},
		"small enough":                  {nil, corev1.PodSpec{Containers: wants("4")}, true},
		"too large":                     {nil, corev1.PodSpec{Containers: wants("4100m")}, false},
		"too large in all":              {nil, corev1.PodSpec{Containers: append(wants("3"), wants("2")...)}, false},
		"not ready":                     {func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown }, corev1.PodSpec{}, false},
		"cordoned":                      {func(n *corev1.Node) { n.Spec.Unschedulable = true }, corev1.PodSpec{}, false},
		"tainted":                       {func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "gpu", Effect: "NoSchedule"}} }, corev1.PodSpec{}, false},
		"tainted softly":                {func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "gpu", Effect: "PreferNoSchedule"}} }, corev1.PodSpec{}, true},
		"tainted, and tolerated":        {func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "gpu", Effect: "NoSchedule"}} }, corev1.PodSpec{Tolerations: []corev1.Toleration{{Key: "gpu", Operator: "Exists"}}}, true},
		"a claim, without accelerators": {nil, corev1.PodSpec{Containers: claims}, false},
		"a claim":                       {func(n *corev1.Node) { n.Labels["nvidia.com/gpu.count"] = "8" }, corev1.PodSpec{Containers: claims}, true},
		"tainted by ourselves":          {func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: evenkeel.HealthKey, Effect: "NoSchedule"}} }, corev1.PodSpec{}, true},
		"tainted by a readiness rule": {func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: evenkeel.ReadinessTaintKey, Effect: "NoSchedule"}}
		}, corev1.PodSpec{}, true},
	} {
		s := newScene(nil)
		node := s.node("n", "new")
		node.Labels["pool"] = "x"
		if test.node != nil {
			test.node(node)
		}
		if fits := NodeFilter([]*corev1.PodSpec{{NodeName: "nowhere"}, &test.pod})(node); fits != test.fits {
			t.Errorf("%s: %t", name, fits)
		}
	}
}

func TestGateRequired(t *testing.T) {
	zero, one := int32(0), int32(1)
	policy := func(change func(*evenkeel.NetworkCheckPolicy)) []evenkeel.NetworkCheckPolicy {
		p := evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Generation: 2}}
		p.Spec.Triggers.JobStart = evenkeel.SwitchEnabled
		p.Status.ObservedGeneration, p.Status.Unknown = 2, &zero
		p.Status.Conditions = []metav1.Condition{{Type: evenkeel.ConditionReady, Status: metav1.ConditionTrue}}
		change(&p)
		return []evenkeel.NetworkCheckPolicy{p}
	}
	for name, test := range map[string]struct {
		policies []evenkeel.NetworkCheckPolicy
		needed   bool
	}{
		"no policy":         {nil, false},
		"all proven":        {policy(func(*evenkeel.NetworkCheckPolicy) {}), false},
		"one is not":        {policy(func(p *evenkeel.NetworkCheckPolicy) { p.Status.Unknown = &one }), true},
		"too many bad":      {policy(func(p *evenkeel.NetworkCheckPolicy) { p.Status.Conditions[0].Status = metav1.ConditionFalse }), true},
		"changed meanwhile": {policy(func(p *evenkeel.NetworkCheckPolicy) { p.Generation = 3 }), true},
		"no status yet":     {policy(func(p *evenkeel.NetworkCheckPolicy) { p.Status = evenkeel.NetworkCheckPolicyStatus{} }), true},
		"no trigger":        {policy(func(p *evenkeel.NetworkCheckPolicy) { p.Status.Unknown = &one; p.Spec.Triggers.JobStart = "" }), false},
		"another profile":   {policy(func(p *evenkeel.NetworkCheckPolicy) { p.Status.Unknown = &one; p.Spec.Check.ProfileName = "other" }), false},
	} {
		if needed := Required(test.policies, "default"); needed != test.needed {
			t.Errorf("%s: %t", name, needed)
		}
	}
}

// Whatever the nodes are: a job starts as proven only if no node that it may run on is without a verdict, what is checked
// is never what has one, and one that does not wait regardless starts when its time is up.
func TestGateDecideProperties(t *testing.T) {
	kinds := []string{"healthy", "unhealthy", "late", "new"}
	for seed := range uint64(500) {
		random := rand.New(rand.NewPCG(seed, 1))
		s := newScene(nil)
		if random.IntN(3) == 0 {
			waitRegardless(&s.policies[0].Spec)
		}
		count := map[string]int{}
		of := map[string]string{}
		for i := range random.IntN(8) {
			name, kind := fmt.Sprintf("n%d", i), kinds[random.IntN(len(kinds))]
			s.node(name, kind)
			of[name] = kind
			count[kind]++
			for range random.IntN(3) {
				if kind == "new" {
					s.inconclusive(name, noon.Add(-time.Duration(random.IntN(120))*time.Second))
				}
			}
		}
		if random.IntN(4) == 0 {
			s.check("running", time.Time{}, "n0")
		}
		d := s.decide(nil)
		if d.Reason == ReasonProven && (count["new"] > 0 || count["late"] > 0 || count["healthy"] == 0) {
			t.Errorf("seed %d: %v: %+v", seed, of, d)
		}
		if (d.Action == Check) != (len(d.Check) > 0) {
			t.Errorf("seed %d: %v: %+v", seed, of, d)
		}
		for _, n := range d.Check["all"] {
			if of[n] != "new" {
				t.Errorf("seed %d: %s is %s, and is to be checked", seed, n, of[n])
			}
		}
		waits := s.policies[0].Spec.Gate.OnTimeout == evenkeel.GateWait
		if waits && d.Action == OpenUnproven {
			t.Errorf("seed %d: it has to wait: %+v", seed, d)
		}
		s.now = noon.Add(24 * time.Hour)
		for i := range s.nodes { // the verdicts stay fresh
			if st := s.states[s.nodes[i].Name]; st != nil && st.ObservedTime != nil {
				at := metav1.NewTime(s.now)
				st.ObservedTime = &at
			}
		}
		if later := s.decide(nil); !waits && later.Waits() {
			t.Errorf("seed %d: a day later it still waits: %+v", seed, later)
		}
	}
}
