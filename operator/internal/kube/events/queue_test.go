package events

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

// Whoever creates more objects than Events can be written about waits for nothing, and what was queued is written.
func TestEventQueueIsBounded(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	created := 0
	c := fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.CreateOption) error {
			if created++; created == maxQueued {
				defer stop()
			}
			if created == 1 {
				return fmt.Errorf("an API server that fails once")
			}
			return c.Create(ctx, object, options...)
		},
	}).Build()
	now := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	q := NewQueue(c, now)
	event := func(i int) *corev1.Event {
		about := corev1.ObjectReference{Kind: "Job", Namespace: "n", Name: "j", UID: types.UID(fmt.Sprint(i))}
		return New(about, corev1.EventTypeWarning, "R", "m", time.Unix(0, 0))
	}
	for i := range maxQueued {
		now.SetTime(now.Now().Add(time.Second * 2))
		if dropped := q.Add(event(i)); dropped > 0 {
			t.Fatalf("Event %d is dropped", i)
		}
	}
	now.SetTime(now.Now().Add(time.Minute))
	if dropped := q.Add(event(-1), event(-2)); dropped != 2 {
		t.Errorf("%d of 2 Events are dropped", dropped)
	}
	if err := q.Start(ctx); err != nil {
		t.Fatal(err)
	}
	var list corev1.EventList
	if err := c.List(t.Context(), &list); err != nil || len(list.Items) != maxQueued-1 {
		t.Errorf("%d Events, %v; want all of %d but the one that failed", len(list.Items), err, maxQueued)
	}
}

// Whoever makes up objects fills neither the API server's database nor the share of other namespaces.
func TestEventQueueIsPaced(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	q := NewQueue(fake.NewClientBuilder().Build(), now)
	flood := func(namespaces, each int) (queued int) {
		for n := range namespaces {
			for i := range each {
				about := corev1.ObjectReference{Kind: "Job", Namespace: fmt.Sprint("n", n), Name: "j", UID: types.UID(fmt.Sprint(i))}
				queued += 1 - q.Add(New(about, corev1.EventTypeWarning, "R", "m", now.Now()))
			}
		}
		for range queued {
			<-q.waiting
		}
		return queued
	}
	if got := flood(1, 10_000); got != namespaceBurst {
		t.Errorf("%d Events of one namespace, want %d", got, namespaceBurst)
	}
	if got := flood(2, 10); got != 10 {
		t.Errorf("%d Events beside a namespace that has spent its own, want 10", got)
	}
	now.SetTime(now.Now().Add(10 * time.Second))
	if got, want := flood(1, 10_000), int(10*namespaceRate); got != want {
		t.Errorf("%d Events of one namespace in 10 seconds, want %d", got, want)
	}
	now.SetTime(now.Now().Add(time.Hour))
	if got := flood(3*maxNamespaces, 3); got != totalBurst {
		t.Errorf("%d Events of many namespaces, want %d", got, totalBurst)
	}
	if len(q.namespaces) > maxNamespaces {
		t.Errorf("the rates of %d namespaces are kept", len(q.namespaces))
	}
}
