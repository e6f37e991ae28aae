package injectionevents

import (
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/kube/slim/slimtest"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

func pod(name string, annotations map[string]string) *metav1.PartialObjectMetadata {
	controller := true
	return &metav1.PartialObjectMetadata{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "team", Name: name, UID: types.UID("uid of " + name), CreationTimestamp: metav1.Now(),
			Labels: map[string]string{evenkeel.ProfileKey: "default"}, Annotations: annotations,
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "kubeflow.org/v1", Kind: "PyTorchJob", Name: "train", UID: "job", Controller: &controller}},
		},
	}
}

func TestInjectionEvents(t *testing.T) {
	injected := map[string]string{evenkeel.InjectedKey: "abc"}
	if events := PodEvents(pod("quiet", injected)); events != nil {
		t.Errorf("nothing was left alone, and yet: %v", events)
	}
	for _, test := range []struct {
		name, severity, reason, message string
		annotations                     map[string]string
	}{
		{"skipped", corev1.EventTypeNormal, ReasonSkipped, "NCCL_NET_PLUGIN", map[string]string{evenkeel.InjectedKey: "abc", evenkeel.SkippedKey: "container a: sets NCCL_NET_PLUGIN itself"}},
		{"shut out", corev1.EventTypeWarning, ReasonSkipped, "so NCCL does not use the plugin", map[string]string{evenkeel.InjectedKey: "abc", evenkeel.SkippedKey: "container a: sets NCCL_NET itself, so NCCL does not use the plugin"}},
		{"not injected", corev1.EventTypeWarning, ReasonNotInjected, "evenkeel.dev/profile=default", nil},
		{"very long", corev1.EventTypeNormal, ReasonSkipped, "...", map[string]string{evenkeel.InjectedKey: "abc", evenkeel.SkippedKey: strings.Repeat("x", 5000)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			events := PodEvents(pod(strings.Repeat("p", 253), test.annotations))
			if len(events) != 2 || events[0].InvolvedObject.Kind != "Pod" || events[1].InvolvedObject.Name != "train" {
				t.Fatalf("want one Event on the pod and one on the job: %+v", events)
			}
			for _, e := range events {
				if e.Type != test.severity || e.Reason != test.reason || !strings.Contains(e.Message, test.message) {
					t.Errorf("%s %s %q", e.Type, e.Reason, e.Message)
				}
				if problems := validation.IsDNS1123Subdomain(e.Name); len(problems) > 0 || len(e.Message) > 1024 {
					t.Errorf("the API server would refuse it: name %q %v, message of %d", e.Name, problems, len(e.Message))
				}
			}
		})
	}
}

// TestInjectionEventsRDMAUnused has a job of two pods: it is told once.
func TestInjectionEventsRDMAUnused(t *testing.T) {
	names := map[string]bool{}
	for _, name := range []string{"one", "two"} {
		for _, e := range PodEvents(pod(name, map[string]string{evenkeel.InjectedKey: "abc", evenkeel.RDMAUnusedKey: "1 of 5 nodes offer rdma/a; jobs use TCP"})) {
			if e.Reason != ReasonRDMAUnused || e.Type != corev1.EventTypeWarning || e.InvolvedObject.Name != "train" || !strings.Contains(e.Message, "default: 1 of 5") {
				t.Errorf("%+v", e)
			}
			names[e.Name] = true
		}
	}
	if len(names) != 1 {
		t.Errorf("%d Events, want 1", len(names))
	}
}

func TestInjectionEventsTunerUnset(t *testing.T) {
	all := PodEvents(pod("one", map[string]string{evenkeel.InjectedKey: "abc", evenkeel.TunerUnsetKey: "1 of 8 nodes count"}))
	if len(all) != 1 || all[0].Reason != ReasonTunerUnset || all[0].Type != corev1.EventTypeNormal || all[0].InvolvedObject.Name != "train" || !strings.HasSuffix(all[0].Message, "1 of 8 nodes count") {
		t.Errorf("%+v", all)
	}
}

func TestInjectionEventsAreIdempotent(t *testing.T) {
	skipped := map[string]string{evenkeel.InjectedKey: "abc", evenkeel.SkippedKey: "container a: sets X itself"}
	objects := fake.NewClientBuilder().WithIndex(&corev1.Node{}, unhealthyIndex, unhealthy).WithObjects(pod("one", skipped), pod("two", skipped)).Build()
	c := &Reconciler{clock: clock.RealClock{}, client: objects, live: objects, reported: map[types.UID]string{}}
	for range 2 { // the second round is a restart of the controller
		for _, name := range []string{"one", "two", "deleted"} {
			if _, err := c.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Namespace: "team", Name: name}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	var events corev1.EventList
	if err := c.client.List(t.Context(), &events); err != nil {
		t.Fatal(err)
	}
	about := map[string]int{}
	for _, e := range events.Items {
		about[e.InvolvedObject.Kind+" "+e.InvolvedObject.Name]++
	}
	for _, object := range []string{"Pod one", "Pod two", "PyTorchJob train"} {
		if about[object] != 1 {
			t.Errorf("%d Events on %s, want 1", about[object], object)
		}
	}
}

func TestInjectionEventsNodesAvoided(t *testing.T) {
	bad := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n3", Labels: map[string]string{evenkeel.HealthKey: evenkeel.UnhealthyValue}}}
	bad.Status.Conditions = []corev1.NodeCondition{{Type: evenkeel.ConditionNodeHealthy, Status: corev1.ConditionFalse, Reason: "TooSlow"}}
	now := time.Now()
	whole := func(name string, made time.Time) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: pod(name, map[string]string{evenkeel.InjectedKey: "abc"}).ObjectMeta}
		p.CreationTimestamp = metav1.NewTime(made)
		inject.AvoidUnhealthyNodes(p)
		return p
	}
	c := &Reconciler{clock: clocktesting.NewFakePassiveClock(now), reported: map[types.UID]string{}}
	c.client = fake.NewClientBuilder().WithIndex(&corev1.Node{}, unhealthyIndex, unhealthy).WithObjects(bad, whole("one", now), whole("two", now), whole("old", now.Add(-time.Hour))).Build()
	c.live = c.client
	reconciled := func(names ...string) []corev1.Event {
		t.Helper()
		for _, name := range names {
			if _, err := c.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Namespace: "team", Name: name}}); err != nil {
				t.Fatal(err)
			}
		}
		var events corev1.EventList
		if err := c.client.List(t.Context(), &events); err != nil {
			t.Fatal(err)
		}
		return events.Items
	}
	if events := reconciled("old"); len(events) != 0 {
		t.Errorf("old news: %+v", events)
	}
	events := reconciled("one", "two")
	if len(events) != 1 || events[0].Reason != ReasonNodesAvoided || events[0].InvolvedObject.Name != "train" || !strings.Contains(events[0].Message, "n3 (TooSlow)") {
		t.Errorf("%+v", events)
	}
}

// A hundred thousand pods are kept in memory, and what is not read of them is not kept. To read more of them means to add it here.
func TestPodsInMemoryHaveTheseFieldsOnly(t *testing.T) {
	whole := &metav1.PartialObjectMetadata{}
	slimtest.Fill(whole)
	whole.Labels = slimtest.Texts(append(workload.SameJobLabels(), evenkeel.ProfileKey)...)
	whole.Annotations = slimtest.Texts(evenkeel.InjectedKey, evenkeel.SkippedKey, evenkeel.RDMAUnusedKey, evenkeel.TunerUnsetKey, evenkeel.PluginStatusKey, evenkeel.SuspectsKey)
	if all := slimtest.Fields(whole); !slices.Contains(all, "ManagedFields[].Manager") {
		t.Fatalf("fields are not set: %q", all)
	}
	got, err := slimmer()(whole.DeepCopy())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{
		"APIVersion", "Annotations[evenkeel.dev/injected]", "Annotations[evenkeel.dev/plugin-status]", "Annotations[evenkeel.dev/rdma-unused]", "Annotations[evenkeel.dev/skipped]", "Annotations[evenkeel.dev/suspects]", "Annotations[evenkeel.dev/tuner-unset]",
		"CreationTimestamp", "DeletionTimestamp", "Kind", "Labels[evenkeel.dev/profile]", "Labels[jobset.sigs.k8s.io/jobset-name]", "Labels[jobset.sigs.k8s.io/jobset-uid]", "Labels[leaderworkerset.sigs.k8s.io/name]", "Name", "Namespace",
		"OwnerReferences[].APIVersion", "OwnerReferences[].Controller", "OwnerReferences[].Kind", "OwnerReferences[].Name", "OwnerReferences[].UID", "ResourceVersion", "UID",
	}, slimtest.Fields(got)); diff != "" {
		t.Errorf("fields that are kept (-want +got):\n%s", diff)
	}
	if want, is := workload.JobOf(whole), workload.JobOf(got.(*metav1.PartialObjectMetadata)); is != want || want.Kind != "JobSet" || !workload.SameJob(whole, got.(*metav1.PartialObjectMetadata)) {
		t.Errorf("the job is %+v, want %+v", is, want)
	}
}

// A controller that starts sees all existing pods as new. Events of old ones were deleted, and are not made again.
func TestInjectionEventsOfOldPodsAreNotRepeated(t *testing.T) {
	now := time.Now()
	for age, want := range map[time.Duration]int{time.Minute: 2, 2 * maxPodAge: 2, 2 * time.Hour: 0} {
		p := pod("old", nil)
		p.CreationTimestamp = metav1.NewTime(now.Add(-age))
		c := fake.NewClientBuilder().WithIndex(&corev1.Node{}, unhealthyIndex, unhealthy).WithObjects(p).Build()
		r := &Reconciler{client: c, live: c, clock: clocktesting.NewFakePassiveClock(now), reported: map[types.UID]string{}}
		if _, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Namespace: "team", Name: "old"}}); err != nil {
			t.Fatal(err)
		}
		var events corev1.EventList
		if err := c.List(t.Context(), &events); err != nil || len(events.Items) != want {
			t.Errorf("a pod of %s has %d Events, %v; want %d", age, len(events.Items), err, want)
		}
		if concerns := r.concerns(p); concerns != (want > 0) {
			t.Errorf("a pod of %s is queued: %t; it has %d Events", age, concerns, want)
		}
		// With nothing to say, it is queued as long as avoided nodes are told.
		p.Annotations = map[string]string{evenkeel.InjectedKey: "abc"}
		if concerns := r.concerns(p); concerns != (age <= maxPodAge) {
			t.Errorf("a pod of %s without Events is queued: %t", age, concerns)
		}
	}
}

// A hundred thousand pods are kept in memory: those of a job share what they have in common.
func TestInjectionEventsShareLabelsOfPods(t *testing.T) {
	slim := slimmer()
	kept := func(name string, annotations map[string]string) *metav1.PartialObjectMetadata {
		object, err := slim(pod(name, annotations))
		if err != nil {
			t.Fatal(err)
		}
		return object.(*metav1.PartialObjectMetadata)
	}
	same := func(a, b map[string]string) bool { return reflect.ValueOf(a).Pointer() == reflect.ValueOf(b).Pointer() }
	a, b := kept("a", map[string]string{evenkeel.InjectedKey: "abc"}), kept("b", map[string]string{evenkeel.InjectedKey: "abc", "else": "1"})
	if !same(a.Labels, b.Labels) || !same(a.Annotations, b.Annotations) || &a.OwnerReferences[0] != &b.OwnerReferences[0] || b.Annotations[evenkeel.InjectedKey] != "abc" || len(b.Annotations) != 1 {
		t.Errorf("%v and %v are kept twice", a.ObjectMeta, b.ObjectMeta)
	}
	if c := kept("c", map[string]string{evenkeel.InjectedKey: "", evenkeel.SkippedKey: "abc"}); same(a.Annotations, c.Annotations) || c.Annotations[evenkeel.SkippedKey] != "abc" {
		t.Errorf("%v is kept as %v", c.Annotations, a.Annotations)
	}
	for i := range 10_000 { // more than are remembered
		if v := strconv.Itoa(i); kept("d", map[string]string{evenkeel.InjectedKey: v}).Annotations[evenkeel.InjectedKey] != v {
			t.Fatalf("%s is kept as something else", v)
		}
	}
}
