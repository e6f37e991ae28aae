package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
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

// TestAnnotationWithoutEffectHasEvent: an object whose annotation has no effect says so itself, as its user may have seen no warning.
func TestAnnotationWithoutEffectHasEvent(t *testing.T) {
	ns := newNamespace(t, nil)
	asks := map[string]string{evenkeel.ProfileKey: "default"}
	user, heard := newUser(t)
	create := func(object client.Object) {
		t.Helper()
		if err := user.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	annotate := func(object client.Object, profile string) {
		t.Helper()
		heard.take()
		patch := fmt.Sprintf(`{"metadata": {"annotations": {%q: %q}}}`, evenkeel.ProfileKey, profile)
		if err := user.Patch(t.Context(), object, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
			t.Fatal(err)
		}
		if text := strings.Join(heard.take(), "\n"); !strings.Contains(text, "has no effect") {
			t.Errorf("%T: the warnings are %q", object, text)
		}
	}
	set := func(name string, own, template map[string]string) *appsv1.StatefulSet {
		pod := plainPod(ns)
		s := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Annotations: own}}
		s.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}}
		s.Spec.Template = corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "x"}, Annotations: template}, Spec: pod.Spec}
		return s
	}
	// About these there is nothing to say. What is queued first is written first.
	quiet := []client.Object{set("by-template", asks, asks), set("plain", nil, nil)}
	injected, _ := newJob("Job", ns, "default")
	injected.SetName("injected")
	quiet = append(quiet, injected)
	for _, object := range quiet {
		create(object)
	}
	if err := user.Patch(t.Context(), injected, client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"annotations": {"other": "x"}}}`))); err != nil {
		t.Fatal(err)
	}

	want := map[client.Object][]string{}
	for _, kind := range []string{"PyTorchJob", "Job"} {
		job, _ := newJob(kind, ns, "")
		create(job)
		annotate(job, "default")
		want[job] = []string{"has no effect on an existing job", "create a new job"}
	}
	changed, _ := newJob("Job", ns, "default")
	changed.SetName("changed")
	create(changed)
	annotate(changed, "defualt")
	want[changed] = []string{`has "default"`, `no NetworkProfile is named "defualt"; there are: default`}
	annotated := set("annotated", asks, nil)
	create(annotated)
	want[annotated] = []string{"has no effect on this StatefulSet", "Put it on the pod template"}
	later := set("later", nil, nil)
	create(later)
	annotate(later, "default")
	want[later] = []string{"has no effect on this StatefulSet"}
	cron := &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "nightly"}}
	cron.Spec.Schedule = "0 0 * * *"
	cron.Spec.JobTemplate.Spec.Template.Spec = plainPod(ns).Spec
	cron.Spec.JobTemplate.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	create(cron)
	made, _ := newJob("Job", ns, "default")
	made.SetName("nightly-1")
	made.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(cron, batchv1.SchemeGroupVersion.WithKind("CronJob"))})
	create(made)
	want[made] = []string{"has no effect on a Job that CronJob nightly made"}
	want[cron] = want[made]

	for object, parts := range want {
		eventually(t, fmt.Sprintf("%T %s has its Event", object, object.GetName()), func(context.Context) (bool, error) {
			return said(t, object, "EvenkeelNotInjected") != "", nil
		})
		for _, part := range parts {
			if text := said(t, object, "EvenkeelNotInjected"); !strings.Contains(text, part) {
				t.Errorf("%T %s: the Event lacks %q: %q", object, object.GetName(), part, text)
			}
		}
	}
	for _, object := range quiet {
		if text := said(t, object, "EvenkeelNotInjected"); text != "" {
			t.Errorf("%T %s: %q", object, object.GetName(), text)
		}
	}
	// Of Events, the webhook may write its own only.
	webhook, err := client.New(apiserver.As(config, systemNamespace, "evenkeel-webhook"), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	about := corev1.ObjectReference{APIVersion: "batch/v1", Kind: "Job", Namespace: ns, Name: "train", UID: "0"}
	refused(t, webhook.Create(t.Context(), events.New(about, corev1.EventTypeWarning, "Killing", "m", time.Now()), client.DryRunAll), "Evenkeel may write Events of its own name")
}
