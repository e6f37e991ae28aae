package admission

import (
	"encoding/json"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
)

func tunedProfile(bandwidth, latency int32) *evenkeel.NetworkProfile {
	p := profile("default", func(s *evenkeel.NetworkProfileSpec) { s.Tuner.Source = evenkeel.TunerPreflight })
	p.Status.Tuner = evenkeel.TunerStatus{BandwidthMbps: &bandwidth, LatencyMicroseconds: &latency}
	return p
}

// podFrom is the pod that the webhooks make of the job's template.
func podFrom(t *testing.T, object *unstructured.Unstructured, own ...corev1.EnvVar) *corev1.Pod {
	t.Helper()
	content, _, err := unstructured.NestedMap(object.Object, "spec", "pytorchReplicaSpecs", "Worker", "template")
	if err != nil {
		t.Fatal(err)
	}
	var template corev1.PodTemplateSpec
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(content, &template); err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: template.ObjectMeta, Spec: template.Spec}
	pod.Spec.Containers[0].Env = own
	return injected(t, Pods(newScheme(t), nil, func() string { return "" }), pod)
}

func injected(t *testing.T, webhook *admission.Webhook, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	text, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	response := webhook.Handler.Handle(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Operation: admissionv1.Create, Namespace: "team", Object: runtime.RawExtension{Raw: text}}})
	if !response.Allowed {
		t.Fatalf("%+v", response.Result)
	}
	after := &corev1.Pod{}
	if err := json.Unmarshal(patched(t, text, response), after); err != nil {
		t.Fatal(err)
	}
	return after
}

// tuner is what a container has of the two variables.
func tuner(pod *corev1.Pod) string {
	var all []string
	for _, e := range pod.Spec.Containers[0].Env {
		if e.Name == inject.TunerBandwidthEnv || e.Name == inject.TunerLatencyEnv {
			all = append(all, e.Value)
		}
	}
	return strings.Join(all, " ")
}

// A job keeps what its first pod got, whatever was measured since: ranks that choose by other values wait for each other for ever.
func TestTunerIsPinnedToTheJob(t *testing.T) {
	before := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(tunedProfile(9400, 30)).Build()
	old := created(t, job{annotations: asks(), templates: masterAndWorker}, before, reductionImage)
	if got := tuner(podFrom(t, old)); got != "9400 30" {
		t.Errorf("the first pod gets %q", got)
	}
	since := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(tunedProfile(4700, 90)).Build()
	if got := tuner(podFrom(t, created(t, job{annotations: asks(), templates: masterAndWorker}, since, reductionImage))); got != "4700 90" {
		t.Errorf("a new job's pod gets %q", got)
	}
	if got := tuner(podFrom(t, old)); got != "9400 30" {
		t.Errorf("a later pod gets %q", got)
	}
}

func TestTunerOfTheUserStays(t *testing.T) {
	reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(tunedProfile(9400, 30)).Build()
	pod := podFrom(t, created(t, job{annotations: asks(), templates: masterAndWorker}, reader, reductionImage), corev1.EnvVar{Name: inject.TunerLatencyEnv, Value: "5"})
	if got := tuner(pod); got != "5 9400" || !strings.Contains(pod.Annotations[evenkeel.SkippedKey], "sets EVENKEEL_TUNER_LATENCY itself") {
		t.Errorf("%q, %v", got, pod.Annotations)
	}
}

func TestTunerUnsetIsSaid(t *testing.T) {
	few := tunedProfile(1, 1)
	few.Status.Tuner = evenkeel.TunerStatus{}
	few.Status.Conditions = []metav1.Condition{{Type: evenkeel.ConditionTuner, Status: metav1.ConditionFalse, Message: "1 of 8 nodes count"}}
	reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(few).Build()
	asked := job{annotations: asks(), templates: masterAndWorker}
	response := Workloads(reader, reader, reductionImage).Handler.Handle(t.Context(), asked.request(t, admissionv1.Create))
	if got := strings.Join(response.Warnings, "\n"); !strings.Contains(got, "no measurements for NCCL's algorithms: 1 of 8 nodes count") {
		t.Errorf("warned %q", got)
	}
	pod := podFrom(t, created(t, asked, reader, reductionImage))
	if got := tuner(pod); got != "" || pod.Annotations[evenkeel.TunerUnsetKey] != "1 of 8 nodes count" {
		t.Errorf("%q, %v", got, pod.Annotations)
	}
}

// Each of several webhooks decides about such pods, and they may not have seen the same status.
func TestTunerIsNotForPodsThatAskThemselves(t *testing.T) {
	reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(tunedProfile(9400, 30)).Build()
	yes := true
	siblings := NewSiblings()
	if err := siblings.Replace(nil, ""); err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: "llama-0", Annotations: asks(), OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "ray.io/v1", Kind: "RayCluster", Name: "llama", UID: "u", Controller: &yes},
		}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}},
	}
	after := injected(t, AnnotatedPods(newScheme(t), reader, reader, siblings, func() string { return "" }), pod)
	if got := tuner(after); got != "" || !strings.Contains(after.Annotations[evenkeel.TunerUnsetKey], "set EVENKEEL_TUNER_BANDWIDTH") {
		t.Errorf("%q, %v", got, after.Annotations)
	}
}
