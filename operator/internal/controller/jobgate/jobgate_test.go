package jobgate

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/networkcheckpolicy"
	"evenkeel.dev/evenkeel/operator/internal/nodeuse"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func TestGateEvaluate(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), evenkeel.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	policy := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "all"}}
	policy.Spec.Triggers.JobStart = evenkeel.SwitchEnabled
	builder := fake.NewClientBuilder().WithScheme(scheme).WithObjects(policy)
	for _, name := range []string{"n1", "n2"} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}}
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		builder = builder.WithObjects(node)
	}
	k := &Evaluator{Namespace: "system", Requests: networkcheckpolicy.NewCheckRequests(), Use: nodeuse.New("system", clocktesting.NewFakePassiveClock(noon)), Clock: clocktesting.NewFakePassiveClock(noon), Client: builder.Build()}
	var acts []string
	waiter := func(name string, since time.Time, err error) Waiter {
		return Waiter{
			Key: name, Subject: types.UID(name), Job: gate.Job{Profile: "default", Since: since, Pods: []*corev1.PodSpec{{}}},
			Apply: func(_ context.Context, d gate.Decision, news bool) error {
				acts = append(acts, fmt.Sprintf("%s %s %t", name, d.Action, news))
				return err
			},
		}
	}
	for name, round := range []struct {
		waiting []Waiter
		acts    []string
		after   time.Duration
		failed  bool
	}{
		{[]Waiter{waiter("a", noon, errors.New("no")), waiter("b", noon, nil)}, []string{"a Check true", "b Check true"}, 0, true},
		// The decision was not recorded for a. b waits longer: it is first, and so is its timeout.
		{[]Waiter{waiter("a", noon, nil), waiter("b", noon.Add(-10*time.Minute), nil)}, []string{"b Check false", "a Check true"}, 20 * time.Minute, false},
		// Nor was it reported on an object that somebody changed meanwhile.
		{[]Waiter{waiter("c", noon, ErrStale)}, []string{"c Check true"}, 30 * time.Minute, false},
		{[]Waiter{waiter("c", noon, nil)}, []string{"c Check true"}, 30 * time.Minute, false},
		{nil, nil, 0, false},
		{[]Waiter{waiter("b", noon, nil)}, []string{"b Check true"}, 30 * time.Minute, false},
	} {
		acts = nil
		result, err := k.Evaluate(t.Context(), round.waiting)
		if (err != nil) != round.failed || result.RequeueAfter != round.after {
			t.Errorf("round %d: again after %s, %v", name, result.RequeueAfter, err)
		}
		if diff := cmp.Diff(round.acts, acts); diff != "" {
			t.Errorf("round %d: %s", name, diff)
		}
	}
}

// A pass has a minute. Gates do not stay closed as it was spent on what waits.
func TestGatesThatOpenComeFirst(t *testing.T) {
	var applied []string
	decided := func(name string, what gate.Action) decision {
		return decision{Waiter{Key: name, Apply: func(context.Context, gate.Decision, bool) error {
			applied = append(applied, name)
			return nil
		}}, gate.Decision{Action: what}, true}
	}
	closed, all := (&Evaluator{}).apply(t.Context(), []decision{decided("a", gate.Wait), decided("b", gate.Open), decided("c", gate.Check), decided("d", gate.OpenUnproven)})
	if diff := cmp.Diff([]string{"b", "d", "a", "c"}, applied); diff != "" || len(closed) != 2 || len(all) != 0 {
		t.Errorf("%s, %d closed, %v", diff, len(closed), all)
	}
}

// gatedMetrics are the number of gated jobs and the time of the oldest one, as the controller's metrics say; zero: they do not.
func gatedMetrics(t *testing.T, controller string) (count, oldest float64) {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			if labels := metric.GetLabel(); len(labels) != 1 || labels[0].GetValue() != controller {
				continue
			}
			switch family.GetName() {
			case "evenkeel_gated_jobs":
				count = metric.GetGauge().GetValue()
			case "evenkeel_gated_job_oldest_timestamp_seconds":
				oldest = metric.GetGauge().GetValue()
			}
		}
	}
	return count, oldest
}

// A gate that could not be opened is closed, and a job that is not decided about yet waits too.
func TestGateMetrics(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), evenkeel.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	e := &Evaluator{
		Namespace: "system", Requests: networkcheckpolicy.NewCheckRequests(), Use: nodeuse.New("system", clocktesting.NewFakePassiveClock(noon)),
		Clock: clocktesting.NewFakePassiveClock(noon), Client: fake.NewClientBuilder().WithScheme(scheme).Build(), name: "jobgate-of-a-test",
	}
	// There is no policy: each gate opens at once.
	waiter := func(minutes int, err error) Waiter {
		name := fmt.Sprint(minutes)
		return Waiter{
			Key: name, Subject: types.UID(name), Job: gate.Job{Profile: "default", Since: noon.Add(time.Duration(-minutes) * time.Minute), Pods: []*corev1.PodSpec{{}}},
			Apply: func(context.Context, gate.Decision, bool) error { return err },
		}
	}
	early := waiter(5, nil)
	early.NotBefore = noon.Add(time.Second)
	for name, test := range map[string]struct {
		waiting []Waiter
		count   float64
		minutes int // that the oldest has waited
	}{
		"one opens":          {[]Waiter{waiter(30, nil)}, 0, 0},
		"one cannot":         {[]Waiter{waiter(30, nil), waiter(20, errors.New("no")), waiter(10, ErrStale)}, 2, 20},
		"one is not decided": {[]Waiter{early, waiter(30, nil)}, 1, 5},
		"none waits":         {nil, 0, 0},
	} {
		if _, err := e.Evaluate(t.Context(), test.waiting); (err != nil) != (name == "one cannot") {
			t.Errorf("%s: %v", name, err)
		}
		want := 0.0
		if test.minutes > 0 {
			want = float64(noon.Add(time.Duration(-test.minutes) * time.Minute).Unix())
		}
		if count, oldest := gatedMetrics(t, e.name); count != test.count || oldest != want {
			t.Errorf("%s: %v jobs wait, the first since %v, want %v since %v", name, count, oldest, test.count, want)
		}
	}
}

func TestGateJobFromObjects(t *testing.T) {
	early, late := &corev1.Pod{}, &corev1.Pod{}
	early.CreationTimestamp, late.CreationTimestamp = metav1.NewTime(noon), metav1.NewTime(noon.Add(time.Hour))
	late.Labels = map[string]string{evenkeel.ProfileKey: "default"}
	if job := FromPods([]*corev1.Pod{late, early}); !job.Since.Equal(noon) || len(job.Pods) != 2 || job.Profile != "default" || job.OptOut {
		t.Errorf("%+v", job)
	}
	early.Annotations = map[string]string{evenkeel.GateKey: evenkeel.GateDisabled}
	if job := FromPods([]*corev1.Pod{late, early}); !job.OptOut {
		t.Errorf("a pod that is opted out: %+v", job)
	}
	job := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "batch/v1", "kind": "Job", "spec": map[string]any{"parallelism": int64(3), "template": map[string]any{
		"spec": map[string]any{"nodeSelector": map[string]any{"pool": "a"}},
	}}}}
	job.SetAnnotations(map[string]string{evenkeel.ProfileKey: "fast"})
	job.SetCreationTimestamp(metav1.NewTime(noon))
	if waits, err := FromJob(job); err != nil || waits.Profile != "fast" || !waits.Since.Equal(noon) || len(waits.Pods) != 1 || waits.Pods[0].NodeSelector["pool"] != "a" {
		t.Errorf("%+v %v", waits, err)
	}
	if err := unstructured.SetNestedField(job.Object, "all of them", "spec", "template", "spec", "nodeSelector"); err != nil {
		t.Fatal(err)
	}
	if _, err := FromJob(job); err == nil {
		t.Error("a selector that is none is no error")
	}
}
