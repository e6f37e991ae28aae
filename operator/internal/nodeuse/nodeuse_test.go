package nodeuse

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	clocktesting "k8s.io/utils/clock/testing"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func pod(name, node, gpus string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid of " + name)}, Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{}}}}
	if gpus != "" {
		list := corev1.ResourceList{"nvidia.com/gpu": resource.MustParse(gpus)}
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: list, Limits: list}
	}
	return p
}

// transformed goes the way of the first list: a store of the reflector has the pods as the tracker reduces them.
func transformed(t *testing.T, tracker *Tracker, pods ...*corev1.Pod) []any {
	t.Helper()
	store := cache.NewStore(cache.DeletionHandlingMetaNamespaceKeyFunc, cache.WithTransformer(tracker.Transformer()))
	for _, p := range pods {
		if err := store.Add(p); err != nil {
			t.Fatal(err)
		}
	}
	return store.List()
}

func TestNodeUseFollowsPods(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	tracker := New("system", clocktesting.NewFakePassiveClock(now))
	expect := func(node, user string, gpus int64) {
		t.Helper()
		if u, n := tracker.User(node), tracker.Used(node)["nvidia.com/gpu"]; u != user || n != gpus {
			t.Errorf("%s is used by %q with %d GPUs, want %q with %d", node, u, n, user, gpus)
		}
	}
	check := pod("check", "a", "8")
	check.Namespace, check.Labels = "system", map[string]string{evenkeel.CheckKey: "c"}
	all := []*corev1.Pod{pod("one", "a", "4"), pod("two", "a", "2"), pod("plain", "b", ""), pod("other", "b", ""), check, pod("three", "c", "8")}
	if err := tracker.Replace(transformed(t, tracker, all...), "1"); err != nil {
		t.Fatal(err)
	}
	expect("a", "team/one", 6)
	expect("b", "", 0)
	expect("c", "team/three", 8)
	if err := tracker.Delete(pod("one", "a", "4")); err != nil {
		t.Fatal(err)
	}
	expect("a", "team/two", 2)
	if err := tracker.Replace(transformed(t, tracker, pod("four", "a", "1"), pod("plain", "b", "")), "2"); err != nil {
		t.Fatal(err)
	}
	expect("a", "team/four", 1)
	expect("c", "", 0)
	if left := tracker.Left("c"); !left.Equal(now) {
		t.Errorf("c was left at %s", left)
	}
}

// A hundred thousand pods go by when the controller starts: pods that use nothing are not kept, and equal requests are kept once.
func TestNodeUseKeepsLittleOfPods(t *testing.T) {
	tracker := New("system", clocktesting.NewFakePassiveClock(time.Now()))
	var pods []*corev1.Pod
	for i := range 4 {
		pods = append(pods, pod(fmt.Sprint("plain-", i), "n", ""), pod(fmt.Sprint("gpu-", i), "n", "8"))
	}
	var requests []count
	for _, kept := range transformed(t, tracker, pods...) {
		u, ok := kept.(*use)
		switch {
		case !ok:
			t.Fatalf("%T is kept", kept)
		case u == noUse:
		case requests == nil:
			requests = u.accelerators
		case &u.accelerators[0] != &requests[0]:
			t.Errorf("%v is kept again for %s", u.accelerators, u.name)
		}
	}
	if len(requests) != 1 || requests[0].count != 8 {
		t.Errorf("%v is kept of the requests", requests)
	}
}
