package admission

import (
	"context"
	"encoding/json"
	"errors"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// A pod that a LeaderWorkerSet or a Volcano Job makes after its gate was opened gets none. Where the webhook cannot find out, it does.
func TestGateIsLeftOutOfLatePods(t *testing.T) {
	const worker = "spec.leaderWorkerTemplate.workerTemplate"
	refused := func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
		return errors.New("the API server is busy")
	}
	silent := func(ctx context.Context, _ client.WithWatch, _ client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
		<-ctx.Done()
		return ctx.Err()
	}
	type get = func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error
	for name, test := range map[string]struct {
		opened string
		pod    func(*corev1.Pod)
		get    get
		gates  int
	}{
		"not opened yet":       {"", nil, nil, 1},
		"opened":               {"spec.leaderWorkerTemplate.leaderTemplate," + worker, nil, nil, 0},
		"another template was": {"spec.leaderWorkerTemplate.leaderTemplate", nil, nil, 1},
		"opened, at a second call": {worker, func(p *corev1.Pod) {
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: evenkeel.SchedulingGate}}
		}, nil, 0},
		"beside the gate of another":  {worker, func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "another"}} }, nil, 1},
		"of no job":                   {worker, func(p *corev1.Pod) { delete(p.Labels, "leaderworkerset.sigs.k8s.io/name") }, nil, 1},
		"of a job that is gone":       {worker, func(p *corev1.Pod) { p.Labels["leaderworkerset.sigs.k8s.io/name"] = "gone" }, nil, 1},
		"another job had the name":    {worker, func(p *corev1.Pod) { ofVolcano(p, "old") }, nil, 1},
		"of the job":                  {worker, func(p *corev1.Pod) { ofVolcano(p, "new") }, nil, 0},
		"the API server is busy":      {worker, nil, refused, 1},
		"the API server answers late": {worker, nil, silent, 1},
	} {
		t.Run(name, func(t *testing.T) {
			mark := map[string]string{evenkeel.OpenedTemplatesKey: test.opened}
			reader := fake.NewClientBuilder().WithScheme(newScheme(t)).WithObjects(
				running("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", mark), running("batch.volcano.sh/v1alpha1", "Job", mark),
			).WithInterceptorFuncs(interceptor.Funcs{Get: test.get}).Build()
			pod := &corev1.Pod{
				TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
				ObjectMeta: metav1.ObjectMeta{
					Name:   "llama-0-1",
					Labels: map[string]string{evenkeel.ProfileKey: "default", evenkeel.GatedKey: evenkeel.GatedValue, "leaderworkerset.sigs.k8s.io/name": "llama"},
					Annotations: map[string]string{
						evenkeel.TemplateKey: worker, evenkeel.PluginImageKey: image, evenkeel.DeliveryKey: "ImageVolume", evenkeel.PluginPathKey: "/plugin", evenkeel.ConflictPolicyKey: "Keep",
					},
				},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}},
			}
			if test.pod != nil {
				test.pod(pod)
			}
			text, err := json.Marshal(pod)
			if err != nil {
				t.Fatal(err)
			}
			request := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Operation: admissionv1.Create, Namespace: "ml", Object: runtime.RawExtension{Raw: text}}}
			response := Pods(newScheme(t), reader, func() string { return "" }).Handler.Handle(t.Context(), request)
			if !response.Allowed {
				t.Fatalf("%+v", response.Result)
			}
			var after corev1.Pod
			if err := json.Unmarshal(patched(t, text, response), &after); err != nil {
				t.Fatal(err)
			}
			ours := 0
			for _, g := range after.Spec.SchedulingGates {
				if g.Name == evenkeel.SchedulingGate {
					ours++
				}
			}
			if len(after.Spec.SchedulingGates) != test.gates || after.Annotations[evenkeel.InjectedKey] == "" || (after.Labels[evenkeel.GatedKey] != "") != (ours == 1) {
				t.Errorf("labels %v, gates %v", after.Labels, after.Spec.SchedulingGates)
			}
		})
	}
}

func running(apiVersion, kind string, annotations map[string]string) *unstructured.Unstructured {
	job := &unstructured.Unstructured{}
	job.SetAPIVersion(apiVersion)
	job.SetKind(kind)
	job.SetNamespace("ml")
	job.SetName("llama")
	job.SetUID("new")
	job.SetAnnotations(annotations)
	return job
}

// ofVolcano makes the pod one of the Volcano Job with the UID.
func ofVolcano(pod *corev1.Pod, uid string) {
	yes := true
	pod.Labels = map[string]string{evenkeel.ProfileKey: "default", evenkeel.GatedKey: evenkeel.GatedValue}
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "batch.volcano.sh/v1alpha1", Kind: "Job", Name: "llama", UID: types.UID(uid), Controller: &yes}}
}
