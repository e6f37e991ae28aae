package events

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

func TestEventNameIsContentHash(t *testing.T) {
	node := corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: "n1", UID: "1"}
	now := time.Unix(0, 0)
	first := New(node, corev1.EventTypeNormal, "R", "m", now)
	if again := New(node, corev1.EventTypeNormal, "R", "m", now.Add(time.Hour)); again.Name != first.Name {
		t.Error("the same thing is said twice")
	}
	other := node
	other.UID = "2"
	for what, e := range map[string]*corev1.Event{
		"object": New(other, corev1.EventTypeNormal, "R", "m", now), "reason": New(node, corev1.EventTypeNormal, "S", "m", now),
		"message": New(node, corev1.EventTypeNormal, "R", "n", now),
	} {
		if e.Name == first.Name {
			t.Errorf("another %s has the same name", what)
		}
	}
	if once, twice := Again(node, corev1.EventTypeNormal, "R", "m", now, now), Again(node, corev1.EventTypeNormal, "R", "m", now.Add(time.Second), now); once.Name == twice.Name || once.Name == first.Name {
		t.Errorf("what happens again has the names %q and %q", once.Name, twice.Name)
	}
	if first.Namespace != "default" || first.Source.Component != "evenkeel" {
		t.Errorf("%+v", first)
	}
	for _, name := range []string{strings.Repeat("n", 199) + ".tail", strings.Repeat("n", 199) + "-tail"} {
		if e := New(corev1.ObjectReference{Name: name}, corev1.EventTypeNormal, "R", "m", now); len(validation.IsDNS1123Subdomain(e.Name)) > 0 {
			t.Errorf("the API server would refuse %q", e.Name)
		}
	}
	long := New(corev1.ObjectReference{Namespace: "n", Name: strings.Repeat("n", 253)}, corev1.EventTypeNormal, "R", strings.Repeat("ä", 900), now)
	if len(long.Name) > 253 || len(long.Message) > 1024 || !utf8.ValidString(long.Message) || long.Namespace != "n" {
		t.Errorf("%d, %d", len(long.Name), len(long.Message))
	}
}
