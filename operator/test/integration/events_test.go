package integration

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// TestEventsCount writes Events with the controller's permissions.
func TestEventsCount(t *testing.T) {
	ns := newNamespace(t, nil)
	controller, err := client.New(apiserver.As(config, systemNamespace, "evenkeel-controller"), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	about := corev1.ObjectReference{APIVersion: "batch/v1", Kind: "Job", Namespace: ns, Name: "train", UID: "0"}
	first := time.Now().Add(-time.Hour).Truncate(time.Second)
	write := func(reason string, at time.Time) {
		t.Helper()
		if err := events.Write(t.Context(), controller, events.New(about, corev1.EventTypeWarning, reason, "it happened", at)); err != nil {
			t.Fatal(err)
		}
	}
	is := func(what string, count int, first, last time.Time) {
		t.Helper()
		var list corev1.EventList
		if err := admin.List(t.Context(), &list, client.InNamespace(ns)); err != nil {
			t.Fatal(err)
		}
		if len(list.Items) != 1 {
			t.Fatalf("%s: %d Events", what, len(list.Items))
		}
		if e := list.Items[0]; int(e.Count) != count || !e.FirstTimestamp.Time.Equal(first) || !e.LastTimestamp.Time.Equal(last) {
			t.Errorf("%s: %d times, from %s to %s; want %d, from %s to %s", what, e.Count, e.FirstTimestamp, e.LastTimestamp, count, first, last)
		}
	}
	write("EvenkeelTest", first)
	is("once", 1, first, first)
	write("EvenkeelTest", first)
	is("a reconciliation repeats it", 1, first, first)
	write("EvenkeelTest", first.Add(-time.Minute))
	is("a restart repeats an earlier time", 1, first, first)
	second := first.Add(10 * time.Minute)
	write("EvenkeelTest", second)
	is("it happens again", 2, first, second)
	for i := range 50 {
		write("EvenkeelTest", second.Add(time.Duration(i)*time.Second))
	}
	is("many times within a minute", 2, first, second)
	third := second.Add(time.Minute)
	write("EvenkeelTest", third)
	is("and later", 3, first, third)

	// Of what it wrote, the controller may change nothing else, and of others' Events nothing.
	var own corev1.EventList
	if err := admin.List(t.Context(), &own, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	foreign := events.New(about, corev1.EventTypeNormal, "Scheduled", "by another", first)
	foreign.Source.Component = "default-scheduler"
	if err := admin.Create(t.Context(), foreign); err != nil {
		t.Fatal(err)
	}
	for patch, to := range map[string]*corev1.Event{
		`{"message": "all is well"}`:                            &own.Items[0],
		`{"involvedObject": {"name": "another"}}`:               &own.Items[0],
		`{"source": {"component": "kubelet"}}`:                  &own.Items[0],
		`{"metadata": {"labels": {"a": "b"}}}`:                  &own.Items[0],
		`{"count": 9, "lastTimestamp": "2026-11-23T00:00:00Z"}`: foreign,
	} {
		err := controller.Patch(t.Context(), to.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch)))
		if err == nil || !strings.Contains(err.Error(), "Evenkeel") {
			t.Errorf("the controller may write %s: %v", patch, err)
		}
	}
}
