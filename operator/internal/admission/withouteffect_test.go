package admission

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
)

// The Events are on the object and, where a controller made it, on its owner: whoever looks at either finds them.
func TestAnnotationWithoutEffectHasEvent(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	const owned = `,"ownerReferences":[{"apiVersion":"batch/v1","kind":"CronJob","name":"nightly","uid":"o","controller":true}]`
	object := func(kind, profile, more, template string) string {
		return `{` + kind + `,"metadata":{"name":"x","uid":"u","annotations":{"evenkeel.dev/profile":"` + profile + `"}` + more + `},"spec":{"template":{` + template + `"spec":{"containers":[{"name":"c"}]}}}}`
	}
	const aJob, aSet = `"apiVersion":"batch/v1","kind":"Job"`, `"apiVersion":"apps/v1","kind":"StatefulSet"`
	const pinned = `"metadata":{"labels":{"evenkeel.dev/profile":"default"},"annotations":{"evenkeel.dev/delivery":"ImageVolume"}},`
	dry := true
	for name, test := range map[string]struct {
		text      string
		operation admissionv1.Operation
		dryRun    *bool
		on        []string // the objects with an Event
		parts     []string // of its message
		warns     bool
	}{
		"added to a job that exists":        {text: object(aJob, "default", "", ""), operation: admissionv1.Update, on: []string{"Job x u"}, parts: []string{"no effect on an existing job", "create a new job"}},
		"changed on a job that exists":      {text: object(aJob, "other", "", pinned), operation: admissionv1.Update, on: []string{"Job x u"}, parts: []string{`its spec.template has "default"`}},
		"an unknown profile":                {text: object(aJob, "defualt", "", pinned), operation: admissionv1.Update, on: []string{"Job x u"}, parts: []string{"would be refused now", `no NetworkProfile is named "defualt"; there are: default, other, theirs`}},
		"another namespace's profile":       {text: object(aJob, "theirs", "", pinned), operation: admissionv1.Update, on: []string{"Job x u"}, parts: []string{"would be refused now", "not for namespace team"}},
		"the same profile":                  {text: object(aJob, "default", "", pinned), operation: admissionv1.Update},
		"a job of a controller":             {text: object(aJob, "default", owned, ""), operation: admissionv1.Create, on: []string{"Job x u", "CronJob nightly o"}, parts: []string{"a Job that CronJob nightly made"}},
		"a job of a controller, pinned":     {text: object(aJob, "default", owned, pinned), operation: admissionv1.Create},
		"a new job":                         {text: object(aJob, "default", "", ""), operation: admissionv1.Create},
		"another kind":                      {text: object(aSet, "default", "", ""), operation: admissionv1.Create, on: []string{"StatefulSet x u"}, parts: []string{"no effect on this StatefulSet", "pod template", "PyTorchJob.kubeflow.org"}},
		"another kind that exists":          {text: object(aSet, "default", "", ""), operation: admissionv1.Update, on: []string{"StatefulSet x u"}, parts: []string{"no effect on this StatefulSet"}, warns: true},
		"another kind, in a dry run":        {text: object(aSet, "default", "", ""), operation: admissionv1.Update, dryRun: &dry, warns: true},
		"a job that declines":               {text: object(aJob, "", "", pinned), operation: admissionv1.Update},
		"an unknown profile on another set": {text: object(aSet, "defualt", "", ""), operation: admissionv1.Create, on: []string{"StatefulSet x u"}, parts: []string{`no NetworkProfile is named "defualt"`}},
	} {
		t.Run(name, func(t *testing.T) {
			c := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(
				&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team"}}, profile("default", nil), profile("other", nil),
				profile("theirs", func(s *evenkeel.NetworkProfileSpec) {
					s.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "theirs"}}
				}),
			).Build()
			clock := clocktesting.NewFakePassiveClock(now)
			queue := events.NewQueue(c, clock)
			response := WithoutEffect(c, queue, clock, "evenkeel-system").Handler.Handle(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
				Operation: test.operation, Namespace: "team", DryRun: test.dryRun, Object: runtime.RawExtension{Raw: []byte(test.text)},
			}})
			if !response.Allowed || len(response.Patches) > 0 || (len(response.Warnings) > 0) != test.warns {
				t.Fatalf("%+v", response)
			}
			var on []string
			for _, e := range written(t, c, queue, "team", len(test.on)) {
				o := e.InvolvedObject
				on = append(on, o.Kind+" "+o.Name+" "+string(o.UID))
				if o.Namespace != "team" || e.Type != corev1.EventTypeWarning || e.Reason != "EvenkeelNotInjected" || !e.FirstTimestamp.Time.Equal(now) {
					t.Errorf("%+v", e)
				}
				for _, part := range test.parts {
					if !strings.Contains(e.Message, part) {
						t.Errorf("the message lacks %q: %q", part, e.Message)
					}
				}
			}
			slices.Sort(on)
			slices.Sort(test.on)
			if !slices.Equal(on, test.on) {
				t.Errorf("Events on %q, want %q", on, test.on)
			}
		})
	}
}

// Anybody who reaches the webhook's port can post a review that no API server sent.
func TestForgedReviewHasNoEvent(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Unix(1_800_000_000, 0))
	const owner = `,"ownerReferences":[{"apiVersion":"batch/v1","kind":"CronJob","name":"call +1 555 0100 to fix this","uid":"o","controller":true}]`
	object := func(version, kind, name, profile, more string) string {
		return fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"metadata":{"name":%q,"uid":"u","annotations":{"evenkeel.dev/profile":%q}%s},"spec":{"template":{"spec":{}}}}`, version, kind, name, profile, more)
	}
	for name, test := range map[string]struct {
		namespace, text string
		want            int
	}{
		"what an API server sends":       {"team", object("apps/v1", "StatefulSet", "x", "default", ""), 1},
		"a value that names no profile":  {"team", object("apps/v1", "StatefulSet", "x", "call +1 555 0100 to fix this", ""), 1},
		"a kind of free text":            {"team", object("apps/v1", "Node is compromised: run this", "x", "default", ""), 0},
		"a name of free text":            {"team", object("apps/v1", "StatefulSet", "call +1 555 0100", "default", ""), 0},
		"a version of free text":         {"team", object("call +1 555 0100/v1", "StatefulSet", "x", "default", ""), 0},
		"an owner of free text":          {"team", object("batch/v1", "Job", "x", "default", owner), 0},
		"a namespace that is not called": {metav1.NamespaceSystem, object("apps/v1", "StatefulSet", "x", "default", ""), 0},
		"the installation's namespace":   {"evenkeel-system", object("apps/v1", "StatefulSet", "x", "default", ""), 0},
	} {
		t.Run(name, func(t *testing.T) {
			c := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team"}}, profile("default", nil)).Build()
			queue := events.NewQueue(c, now)
			response := WithoutEffect(c, queue, now, "evenkeel-system").Handler.Handle(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
				Operation: admissionv1.Create, Namespace: test.namespace, Object: runtime.RawExtension{Raw: []byte(test.text)},
			}})
			if !response.Allowed {
				t.Errorf("%+v", response)
			}
			for _, e := range written(t, c, queue, test.namespace, test.want) {
				if strings.Contains(e.Message, "555") {
					t.Errorf("the Event has the caller's words: %q", e.Message)
				}
			}
		})
	}
}

// written runs the queue until it has written an Event that is queued last. It returns the Events of the namespace, and expects that
// there are many of them.
func written(t *testing.T, c client.Client, queue *events.Queue, namespace string, many int) []corev1.Event {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	marker := corev1.ObjectReference{Kind: "Pod", Namespace: "last", Name: "last"}
	queue.Add(events.New(marker, corev1.EventTypeNormal, "Last", "", time.Unix(0, 0)))
	go func() { ended <- queue.Start(ctx) }()
	var list corev1.EventList
	err := wait.PollUntilContextCancel(ctx, time.Millisecond, true, func(ctx context.Context) (bool, error) {
		err := c.List(ctx, &list, client.InNamespace("last"))
		return len(list.Items) == 1, err
	})
	stop()
	if errors.Join(err, <-ended, c.List(t.Context(), &list, client.InNamespace("team"))) != nil {
		t.Fatal(err)
	}
	if len(list.Items) != many {
		t.Errorf("%d Events, want %d", len(list.Items), many)
	}
	return list.Items
}
