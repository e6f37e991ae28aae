package events

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
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
	q := NewQueue(c)
	event := func(i int) *corev1.Event {
		about := corev1.ObjectReference{Kind: "Job", Namespace: "n", Name: "j", UID: types.UID(fmt.Sprint(i))}
		return New(about, corev1.EventTypeWarning, "R", "m", time.Unix(0, 0))
	}
	for i := range maxQueued {
		if dropped := q.Add(event(i)); dropped > 0 {
			t.Fatalf("Event %d is dropped", i)
		}
	}
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
