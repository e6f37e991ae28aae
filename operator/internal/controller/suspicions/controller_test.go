package suspicions

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/suspects"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// A scene is a controller beside a job, whose first pod says that the network of node gpu-2 is at fault.
type scene struct {
	*Reconciler
	t *testing.T
	// eventless: no Event can be written.
	eventless bool
}

// newScene has a job of two pods. The second is in the phase.
func newScene(t *testing.T, second corev1.PodPhase) *scene {
	t.Helper()
	kinds := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(kinds), evenkeel.AddToScheme(kinds)); err != nil {
		t.Fatal(err)
	}
	said, err := json.Marshal(suspects.Standing{Since: noon, Recorded: noon, At: noon, Report: suspects.Report{
		Ranks: 2, Text: "waits for gpu-2", Suspects: []suspects.Suspect{{Class: evenkeel.SuspectLink, Place: suspects.Place{Host: "gpu-2", Pod: "second"}, ForSeconds: 60, Confidence: 1}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	yes := true
	pod := func(name, node string, phase corev1.PodPhase) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name, UID: types.UID(name), OwnerReferences: []metav1.OwnerReference{{APIVersion: "batch/v1", Kind: "Job", Name: "train", UID: "train", Controller: &yes}}},
			Spec:       corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{Phase: phase},
		}
	}
	first := pod("first", "gpu-1", corev1.PodRunning)
	first.Annotations = map[string]string{evenkeel.SuspectsKey: string(said)}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-2", UID: "gpu-2"}}
	s := &scene{t: t}
	c := interceptor.NewClient(fake.NewClientBuilder().WithScheme(kinds).WithObjects(first, pod("second", "gpu-2", second), node).WithStatusSubresource(&evenkeel.NodeNetworkHealth{}).Build(), interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.CreateOption) error {
			if _, event := object.(*corev1.Event); event && s.eventless {
				return errors.New("the storage of Events is down")
			}
			return c.Create(ctx, object, options...)
		},
		// The fake client knows no fields of pods. All pods are selected.
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, _ ...client.ListOption) error {
			return c.List(ctx, list)
		},
	})
	s.Reconciler = &Reconciler{Clock: clocktesting.NewFakePassiveClock(noon), Poll: 10 * time.Second, client: c, live: c, told: map[types.NamespacedName]telling{}}
	return s
}

// suspicions looks after the job, and returns how many suspicions the node has, and when the job is looked at again.
func (s *scene) suspicions() (count int, again time.Duration) {
	s.t.Helper()
	result, err := s.Reconcile(s.t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Namespace: "ml", Name: "train"}})
	if err != nil {
		s.t.Fatal(err)
	}
	state := &evenkeel.NodeNetworkHealth{}
	if err := s.client.Get(s.t.Context(), client.ObjectKey{Name: "gpu-2"}, state); client.IgnoreNotFound(err) != nil {
		s.t.Fatal(err)
	}
	return len(state.Status.Suspicions), result.RequeueAfter
}

func (s *scene) events() int {
	s.t.Helper()
	var list corev1.EventList
	if err := s.client.List(s.t.Context(), &list); err != nil {
		s.t.Fatal(err)
	}
	return len(list.Items)
}

// Events may be kept elsewhere, or denied in a namespace: the suspicion is recorded all the same, and told later.
func TestSuspicionIsRecordedWithoutItsEvent(t *testing.T) {
	s := newScene(t, corev1.PodRunning)
	s.eventless = true
	if count, again := s.suspicions(); count != 1 || again != s.Poll {
		t.Errorf("%d suspicions; looked at again in %s", count, again)
	}
	s.eventless = false
	if count, _ := s.suspicions(); count != 1 || s.events() != 2 {
		t.Errorf("%d suspicions and %d Events, want one, and one each about job and node", count, s.events())
	}
}

// A job that has left a node says nothing about it: else it would hold the node as long as it runs.
func TestTerminatedPodsAccuseNoNode(t *testing.T) {
	for phase, want := range map[corev1.PodPhase]int{corev1.PodRunning: 1, corev1.PodSucceeded: 0, corev1.PodFailed: 0} {
		if count, _ := newScene(t, phase).suspicions(); count != want {
			t.Errorf("the pod there is %s: %d suspicions, want %d", phase, count, want)
		}
	}
}

// Pods that use no accelerators cost nothing, and fit on every node beside others' jobs: they accuse no node that has some.
func TestPodsWithoutAcceleratorsAccuseNoNodeThatHasSome(t *testing.T) {
	gpus, none := corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")}, corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("0")}
	for name, test := range map[string]struct {
		offers, requests corev1.ResourceList
		byName           bool
		want             int
	}{
		"neither has any":         {nil, nil, false, 1},
		"the node has some":       {gpus, nil, false, 0},
		"no device plugin runs":   {none, nil, false, 1}, // which leaves zero
		"the pod uses them":       {gpus, gpus, false, 1},
		"none, and no UID":        {gpus, nil, true, 0},
		"it uses them, no UID":    {gpus, gpus, true, 1},
		"neither has any, no UID": {nil, nil, true, 1},
	} {
		s := newScene(t, corev1.PodRunning)
		node, pod, first := &corev1.Node{}, &corev1.Pod{}, &corev1.Pod{}
		for key, object := range map[client.ObjectKey]client.Object{{Name: "gpu-2"}: node, {Namespace: "ml", Name: "second"}: pod, {Namespace: "ml", Name: "first"}: first} {
			if err := s.client.Get(t.Context(), key, object); err != nil {
				t.Fatal(err)
			}
		}
		node.Status.Allocatable = test.offers
		pod.Spec.Containers = []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Limits: test.requests}}}
		if test.byName {
			first.Annotations[evenkeel.SuspectsKey] = strings.Replace(first.Annotations[evenkeel.SuspectsKey], `"pod":"second"`, `"pod":""`, 1)
		}
		if err := errors.Join(s.client.Status().Update(t.Context(), node), s.client.Update(t.Context(), pod), s.client.Update(t.Context(), first)); err != nil {
			t.Fatal(err)
		}
		if count, _ := s.suspicions(); count != test.want {
			t.Errorf("%s: %d suspicions, want %d", name, count, test.want)
		}
	}
}
