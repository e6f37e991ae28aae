package admission

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
)

// siblingOf is a pod of an owner in the namespace team, as the webhook made it from a profile whose variable G has the value.
func siblingOf(owner, name, value string, waits bool) *metav1.PartialObjectMetadata {
	r := inject.Resolve(profile("default", func(s *evenkeel.NetworkProfileSpec) {
		s.Environment = []evenkeel.EnvironmentVariable{{Name: "G", Value: value}}
	}), "")
	pod := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID(name), Labels: r.Labels(), Annotations: r.Annotations()}}
	pod.Labels[evenkeel.OwnerKey] = owner
	if waits {
		pod.Labels[evenkeel.GatedKey] = evenkeel.GatedValue
	}
	return pod
}

func TestSiblingsFollowPods(t *testing.T) {
	s := NewSiblings()
	expect := func(when, owner, value string, started bool) {
		t.Helper()
		key := ownerKey{"team", types.UID(owner)}
		got, found, err := s.gotFrom(t.Context(), "default", key)
		if err != nil || found != (value != "") || got.Environment["G"] != value {
			t.Errorf("%s: pods of %s got %v, want %q, %v", when, owner, got.Environment, value, err)
		}
		if has, err := s.hasStarted(t.Context(), key); has != started || err != nil {
			t.Errorf("%s: %s has started: %t, %v", when, owner, has, err)
		}
	}
	if err := s.Ready(nil); err == nil {
		t.Error("it is ready before the pods are listed")
	}
	// As the reflector does it: the first list is reduced on its way.
	store := cache.NewStore(cache.DeletionHandlingMetaNamespaceKeyFunc, cache.WithTransformer(s.Transformer()))
	forged := siblingOf("c", "c-0", "x", false)
	forged.Annotations = nil
	for _, pod := range []any{siblingOf("a", "a-0", "old", false), siblingOf("a", "a-1", "old", true), siblingOf("b", "b-0", "new", true), forged} {
		if err := store.Add(pod); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Replace(store.List(), "1"); err != nil || s.Ready(nil) != nil {
		t.Fatalf("%v, ready: %v", err, s.Ready(nil))
	}
	expect("listed", "a", "old", true)
	expect("listed", "b", "new", false)
	expect("listed, forged", "c", "", true)
	expect("listed", "d", "", false)
	if _, found, err := s.gotFrom(t.Context(), "another", ownerKey{"team", "a"}); found || err != nil {
		t.Errorf("pods of another profile: %t, %v", found, err)
	}
	if _, found, err := s.gotFrom(t.Context(), "default", ownerKey{"others", "a"}); found || err != nil {
		t.Errorf("pods of another namespace: %t, %v", found, err)
	}
	elsewhere := siblingOf("d", "d-0", "old", false)
	elsewhere.Namespace = "others"
	if err := s.Add(elsewhere); err != nil {
		t.Fatal(err)
	}
	expect("a pod of the same label in another namespace", "d", "", false)
	if err := s.Delete(siblingOf("a", "a-0", "old", false)); err != nil {
		t.Fatal(err)
	}
	expect("the pod that did not wait is gone", "a", "old", false)
	for what, change := range map[string]func(any) error{"delete": s.Delete, "another owner": s.Update} {
		if err := s.Replace([]any{siblingOf("a", "a-0", "old", false)}, "2"); err != nil {
			t.Fatal(err)
		}
		expect(what, "a", "old", true)
		if err := change(siblingOf("z", "a-0", "old", false)); err != nil {
			t.Fatal(err)
		}
		expect(what, "a", "", false)
	}
	if err := errors.Join(s.Replace(nil, "3"), s.Add(siblingOf("b", "b-0", "new", true))); err != nil {
		t.Fatal(err)
	}
	expect("gated", "b", "new", false)
	if err := s.Update(siblingOf("b", "b-0", "new", false)); err != nil {
		t.Fatal(err)
	}
	expect("its gate has opened", "b", "new", true)
	if len(s.pods) != 1 || len(s.owners) != 1 {
		t.Errorf("%d pods of %d owners are kept", len(s.pods), len(s.owners))
	}
}

// A hundred thousand pods of one job are not kept a hundred thousand times.
func TestSiblingsKeepWhatPodsGotOnce(t *testing.T) {
	s := NewSiblings()
	for i := range 100 {
		if err := s.Add(siblingOf("a", fmt.Sprint("a-", i), "same", false)); err != nil {
			t.Fatal(err)
		}
	}
	first := s.pods["a-0"].got
	for name, pod := range s.pods {
		if pod.got == nil || pod.got != first {
			t.Fatalf("%s has %p of its own, not %p", name, pod.got, first)
		}
	}
}

// The webhook asks the API server for no pods, whether or not it knows the owner: that would take as long as the namespace has pods.
func TestAnnotatedPodNeedsNoList(t *testing.T) {
	base := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(profile("default", nil)).Build()
	reader := interceptor.NewClient(base, interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
		switch list.(type) {
		case *evenkeel.NetworkCheckPolicyList, *corev1.LimitRangeList: // of which the cache has few
			return c.List(ctx, list, options...)
		}
		return fmt.Errorf("a list of %T", list)
	}})
	siblings := NewSiblings()
	if err := siblings.Replace([]any{siblingOf("known", "known-0", "old", false)}, "1"); err != nil {
		t.Fatal(err)
	}
	injector := &annotatedPodInjector{cached: reader, live: reader, siblings: siblings, reports: func() string { return "" }, known: map[ownerKey]inject.Resolved{}}
	for owner, want := range map[string]string{"known": "old", "first": ""} {
		yes := true
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{evenkeel.ProfileKey: "default"}, OwnerReferences: []metav1.OwnerReference{{APIVersion: "example.com/v1", Kind: "Task", Name: "t", UID: types.UID(owner), Controller: &yes}}}}
		pod.Spec.Containers = []corev1.Container{{Name: "c"}}
		ctx := admission.NewContextWithRequest(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Namespace: "team"}})
		if err := injector.Default(ctx, pod); err != nil {
			t.Fatalf("%s: %v", owner, err)
		}
		value := ""
		for _, v := range pod.Spec.Containers[0].Env {
			if v.Name == "G" {
				value = v.Value
			}
		}
		if value != want || pod.Labels[evenkeel.OwnerKey] != owner || pod.Annotations[evenkeel.InjectedKey] == "" {
			t.Errorf("%s: %q, labels %v, annotations %v", owner, value, pod.Labels, pod.Annotations)
		}
	}
}

// Pods of one owner may have different containers, as a Ray cluster's head and workers do. Which of them get the plugin is each pod's own
// matter, and nothing comes from another namespace: whoever makes a pod there writes any owner on it.
func TestAnnotatedPodNamesItsOwnContainers(t *testing.T) {
	reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(profile("default", nil)).Build()
	siblings := NewSiblings()
	if err := siblings.Replace(nil, "1"); err != nil {
		t.Fatal(err)
	}
	injector := &annotatedPodInjector{cached: reader, live: reader, siblings: siblings, reports: func() string { return "" }, known: map[ownerKey]inject.Resolved{}}
	yes := true
	for _, test := range []struct{ namespace, container, names string }{
		{"other", "theirs", "theirs"}, {"team", "ray-head", "ray-head"}, {"team", "ray-worker", "ray-worker"}, {"team", "sidecar", ""},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{evenkeel.ProfileKey: "default"}, OwnerReferences: []metav1.OwnerReference{{APIVersion: "ray.io/v1", Kind: "RayCluster", Name: "ray", UID: "ray", Controller: &yes}}}}
		if test.names != "" {
			pod.Annotations[evenkeel.ContainersKey] = test.names
		}
		pod.Spec.Containers = []corev1.Container{{Name: test.container}}
		ctx := admission.NewContextWithRequest(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Namespace: test.namespace}})
		if err := injector.Default(ctx, pod); err != nil {
			t.Errorf("a pod of %s: %v", test.container, err)
			continue
		}
		if got := pod.Annotations[evenkeel.ContainersKey]; got != test.names {
			t.Errorf("a pod of %s names %q, want %q", test.container, got, test.names)
		}
		if err := siblings.Add(&metav1.PartialObjectMetadata{ObjectMeta: pod.ObjectMeta}); err != nil {
			t.Fatal(err)
		}
	}
	if len(injector.known) != 2 {
		t.Errorf("%d owners are known, want one in each namespace", len(injector.known))
	}
}

// Callers are not authenticated, and owner references of any length are valid: what is remembered of an owner is bounded.
func TestAnnotatedPodRemembersNoOwnerOfMegabytes(t *testing.T) {
	reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(profile("default", nil)).Build()
	siblings := NewSiblings()
	if err := siblings.Replace(nil, "1"); err != nil {
		t.Fatal(err)
	}
	injector := &annotatedPodInjector{cached: reader, live: reader, siblings: siblings, reports: func() string { return "" }, known: map[ownerKey]inject.Resolved{}}
	long := strings.Repeat("x", 1<<20)
	for _, key := range []ownerKey{{"team", types.UID(long)}, {long, "owner"}, {"team", "owner"}} {
		if _, err := injector.resolve(t.Context(), "default", key); err != nil {
			t.Fatal(err)
		}
	}
	if len(injector.known) != 1 {
		t.Errorf("%d owners are remembered, want the one whose names an API server may send", len(injector.known))
	}
}
