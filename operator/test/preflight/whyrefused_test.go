package preflight

import (
	"context"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/cli"
)

// TestKubectlPluginWhyPodsAreRefused has the Events that controllers write when the API server refuses the pods of a job.
func TestKubectlPluginWhyPodsAreRefused(t *testing.T) {
	const (
		limit  = `Error creating: pods "sized-" is forbidden: minimum memory usage per Container is 128Mi, but request is 64Mi`
		quota  = `create Pod web-0 in StatefulSet web failed error: pods "web-0" is forbidden: exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4`
		denied = `worker pod created failed: admission webhook "policy.example.com" denied the request: no root`
	)
	config := kubeconfig(t)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "refused-"}}
	if err := admin.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	job := func(name string, owner *batchv1.Job) *batchv1.Job {
		t.Helper()
		j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: name, Annotations: map[string]string{evenkeel.ProfileKey: "default"}}}
		if owner != nil {
			j.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(owner, batchv1.SchemeGroupVersion.WithKind("Job"))}
		}
		j.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "c"}}}
		if err := admin.Create(t.Context(), j); err != nil {
			t.Fatal(err)
		}
		return j
	}
	happened := time.Now().Add(-30 * time.Minute)
	event := func(about *batchv1.Job, reason, message string, count int32, at time.Time) {
		t.Helper()
		e := &corev1.Event{
			ObjectMeta:     metav1.ObjectMeta{Namespace: ns.Name, GenerateName: about.Name + "."},
			InvolvedObject: corev1.ObjectReference{APIVersion: "batch/v1", Kind: "Job", Namespace: ns.Name, Name: about.Name, UID: about.UID}, Type: corev1.EventTypeWarning,
			Reason: reason, Message: message, Count: count, Source: corev1.EventSource{Component: "job-controller"},
			FirstTimestamp: metav1.NewTime(at.Add(-time.Minute)), LastTimestamp: metav1.NewTime(at),
		}
		if err := admin.Create(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	why := func(name string, words ...string) string {
		t.Helper()
		return plugin(t, config, cli.ExitPass, "why job/"+name+" -n "+ns.Name, words...)
	}
	silent := func(name, word string) {
		t.Helper()
		if out := why(name); strings.Contains(out, word) {
			t.Errorf("%s: it says %q:\n%s", name, word, out)
		}
	}

	sized := job("sized", nil)
	if out := why("sized", "It has no pods."); strings.Contains(out, "refuses") {
		t.Errorf("nothing was refused:\n%s", out)
	}
	event(sized, "FailedCreate", limit, 7, happened)
	why("sized", "The API server refuses its pods\n", "30m ago (x7 over 31m)", "Job sized", limit)

	set := job("set", nil) // of objects like a JobSet's
	event(job("set-worker-0", set), "FailedCreate", quota, 1, happened)
	event(set, "MPIJobFailed", denied, 1, happened)
	event(set, "JobRestarted", "restarted once", 1, happened)
	why("set", "30m ago", "Job set-worker-0", quota, "Job set", denied)
	silent("set", "restarted once")
	silent("set", limit)

	// A pod that came later says that the reason has gone.
	mended := job("mended", nil)
	event(mended, "FailedCreate", limit, 1, happened)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: ns.Name, Name: "mended-0", OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(mended, batchv1.SchemeGroupVersion.WithKind("Job"))},
	}, Spec: mended.Spec.Template.Spec}
	if err := admin.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	silent("mended", limit)
	event(mended, "FailedCreate", quota, 1, time.Now().Add(time.Minute))
	why("mended", quota, "mended-0")

	// A StatefulSet's own Events are about an object of another kind.
	statefulSet := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": map[string]any{"name": "web", "namespace": ns.Name},
		"spec": map[string]any{"serviceName": "web", "selector": map[string]any{"matchLabels": map[string]any{"app": "web"}}, "template": map[string]any{
			"metadata": map[string]any{"labels": map[string]any{"app": "web"}},
			"spec":     map[string]any{"containers": []any{map[string]any{"name": "c", "image": "c"}}},
		}},
	}}
	if err := admin.Create(t.Context(), statefulSet); err != nil {
		t.Fatal(err)
	}
	e := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: ns.Name, GenerateName: "web."},
		InvolvedObject: corev1.ObjectReference{APIVersion: "apps/v1", Kind: "StatefulSet", Namespace: ns.Name, Name: "web", UID: statefulSet.GetUID()},
		Type:           corev1.EventTypeWarning, Reason: "FailedCreate", Message: quota, LastTimestamp: metav1.NewTime(happened), FirstTimestamp: metav1.NewTime(happened),
	}
	if err := admin.Create(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	plugin(t, config, cli.ExitPass, "why statefulset/web -n "+ns.Name, "The API server refuses its pods\n", quota)
	t.Cleanup(func() {
		ctx := context.Background()
		for _, object := range []client.Object{&batchv1.Job{}, &corev1.Pod{}} {
			if err := admin.DeleteAllOf(ctx, object, client.InNamespace(ns.Name), client.GracePeriodSeconds(0), client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
				t.Error(err)
			}
		}
	})
}
