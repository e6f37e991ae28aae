package nodenetworkhealth

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestNodeEventsOfOneCheckAreBounded(t *testing.T) {
	storm := make([]*corev1.Event, 5000)
	for i := range storm {
		if i%2 == 0 { // the health of the others did not change
			storm[i] = &corev1.Event{}
		}
	}
	if got := boundEvents(storm); len(got) != maxNodeEvents || got[len(got)-1] == nil {
		t.Errorf("%d Events, want %d", len(got), maxNodeEvents)
	}
	if got := boundEvents([]*corev1.Event{nil, {}, nil}); len(got) != 1 || got[0] == nil {
		t.Errorf("%v, want one Event", got)
	}
}
