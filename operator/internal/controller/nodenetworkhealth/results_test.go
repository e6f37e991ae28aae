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
	failed := &corev1.Event{Type: corev1.EventTypeWarning}
	storm[4000] = failed
	if got := boundEvents(storm); len(got) != maxNodeEvents || got[0] != failed || got[len(got)-1] == nil {
		t.Errorf("%d Events, want %d, the one about a failed node first", len(got), maxNodeEvents)
	}
	if got := boundEvents([]*corev1.Event{nil, {}, nil}); len(got) != 1 || got[0] == nil {
		t.Errorf("%v, want one Event", got)
	}
}
