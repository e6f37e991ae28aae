package nodenetworkhealth

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/jobs"
	"evenkeel.dev/evenkeel/operator/internal/preflight/report"
)

// TestNodeGetsNoResultOfAnEarlierOne has nodes of which only the name was checked.
func TestNodeGetsNoResultOfAnEarlierOne(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, evenkeel.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	started := time.Unix(1000, 0)
	for name, test := range map[string]struct {
		checked types.UID
		created time.Time
		want    bool
	}{
		"the node itself":                 {"a", started.Add(-time.Hour), true},
		"another":                         {"b", started.Add(time.Minute), false},
		"the node, in an earlier version": {"", started.Add(-time.Hour), true},
		"another, in an earlier version":  {"", started.Add(time.Minute), false},
	} {
		t.Run(name, func(t *testing.T) {
			ended := metav1.NewTime(started.Add(time.Hour))
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-17", UID: "a", CreationTimestamp: metav1.NewTime(test.created)}}
			check := &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: "evenkeel", Name: "nightly", UID: "c"}}
			check.Status.CompletionTime, check.Status.ReportName = &ended, "report"
			c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(node, check).WithStatusSubresource(&evenkeel.NodeNetworkHealth{}).Build()
			record := &preflight.Record{Started: started, Nodes: []preflight.Node{{Name: "gpu-17", UID: test.checked, Verdict: evenkeel.VerdictFail, Reason: "NoGPU", Message: "m"}}}
			if _, err := report.Create(t.Context(), c, c, jobs.Check{Object: check}.Meta("report"), record); err != nil {
				t.Fatal(err)
			}
			r := &ResultRecorder{client: c, live: c}
			if _, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(check)}); err != nil {
				t.Fatal(err)
			}
			state := &evenkeel.NodeNetworkHealth{}
			err := c.Get(t.Context(), client.ObjectKey{Name: "gpu-17"}, state)
			if client.IgnoreNotFound(err) != nil {
				t.Fatal(err)
			}
			if got := !apierrors.IsNotFound(err) && state.Status.Health == evenkeel.HealthUnhealthy; got != test.want {
				t.Errorf("the node got the result: %t, want %t", got, test.want)
			}
		})
	}
}

func TestNodeEventsOfOneCheckAreBounded(t *testing.T) {
	storm := make([]*corev1.Event, 5000)
	for i := range storm {
		if i%2 == 0 { // the health of the others did not change
			storm[i] = &corev1.Event{}
		}
	}
	failed := &corev1.Event{Type: corev1.EventTypeWarning}
	storm[4000] = failed
	if got := boundEvents(storm); len(got) != maxNodeEvents || got[0] != failed || got[len(got)-1] == nil {
		t.Errorf("%d Events, want %d, the one about a failed node first", len(got), maxNodeEvents)
	}
	if got := boundEvents([]*corev1.Event{nil, {}, nil}); len(got) != 1 || got[0] == nil {
		t.Errorf("%v, want one Event", got)
	}
}
