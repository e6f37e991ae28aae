package preflight

import (
	"context"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/cli"
	"evenkeel.dev/evenkeel/operator/internal/inject"
)

// TestKubectlPluginWhyEnvFrom has a job whose variables are in a ConfigMap and a Secret.
func TestKubectlPluginWhyEnvFrom(t *testing.T) {
	config := kubeconfig(t)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "variables-"}}
	if err := admin.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	settings := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: "nccl"}, Data: map[string]string{"NCCL_NET": "gIB", "EVENKEEL_FLOWS": "2", "HF_HOME": "/cache"}}
	keys := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: "keys"}, StringData: map[string]string{"NCCL_NET": "hidden", "EVENKEEL_FLOWS": "hidden"}}
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: "llama", Annotations: map[string]string{evenkeel.ProfileKey: "default"}}}
	resolved := inject.Resolved{Profile: "default", Image: pluginName, Delivery: evenkeel.DeliveryImageVolume, Path: "/plugin", Conflict: evenkeel.ConflictKeep,
		Environment: map[string]string{"EVENKEEL_FLOWS": "4"}}
	job.Spec.Template.Labels, job.Spec.Template.Annotations = resolved.Labels(), resolved.Annotations()
	from := func(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }
	job.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "main", Image: "c", EnvFrom: []corev1.EnvFromSource{
		{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: from("nccl")}}, {SecretRef: &corev1.SecretEnvSource{LocalObjectReference: from("keys")}},
		{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: from("absent")}},
	}}}}
	for _, object := range []client.Object{settings, keys, job} {
		if err := admin.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: ns.Name, Name: "llama-0", Labels: resolved.Labels(), Annotations: resolved.Annotations(),
		OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(job, batchv1.SchemeGroupVersion.WithKind("Job"))},
	}, Spec: job.Spec.Template.Spec}
	if err := inject.Apply(pod, resolved, ""); err != nil {
		t.Fatal(err)
	}
	if err := admin.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, object := range []client.Object{pod, job} {
			if err := admin.Delete(context.Background(), object, client.GracePeriodSeconds(0), client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
				t.Error(err)
			}
		}
	})
	out := plugin(t, config, cli.ExitPass, "why llama -n "+ns.Name, "Variables\n  container main: ConfigMap nccl sets EVENKEEL_FLOWS, which stay\n", "container main: NCCL_NET=gIB of ConfigMap nccl keeps NCCL from using the plugin")
	if strings.Contains(out, "hidden") || strings.Contains(out, "HF_HOME") {
		t.Errorf("it says what is in a Secret, or nobody's business:\n%s", out)
	}
}
