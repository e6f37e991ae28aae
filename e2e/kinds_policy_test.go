//go:build e2e && kinds

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Without a webhook, by the API server's own policies, on real kubelets: pods wait until their nodes are proven, find
// the plugin, and a job of two nodes runs over it.
func TestKindsByPolicyWithoutWebhook(t *testing.T) {
	ctx := testContext(t)
	t.Cleanup(func() {
		if err := cluster.InstallChart(context.Background()); err != nil {
			t.Errorf("back to the webhook: %v", err)
		}
	})
	if err := cluster.InstallChart(ctx, "--set", "injection.mode=MutatingAdmissionPolicy"); err != nil {
		t.Fatal(err)
	}
	hooks := &unstructured.Unstructured{}
	hooks.SetGroupVersionKind(schema.GroupVersionKind{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "MutatingWebhookConfiguration"})
	if err := cluster.Client.Get(ctx, client.ObjectKey{Name: "evenkeel"}, hooks); !apierrors.IsNotFound(err) {
		t.Fatalf("there is a webhook: %v", err)
	}
	gatePolicy(ctx, t, "policy")
	asked := func(namespace string) *corev1.Pod {
		pod := plainPod(namespace, nil)
		pod.Annotations = map[string]string{evenkeel.ProfileKey: "default"}
		return pod
	}
	eventually(ctx, t, "the policies are in force", func(ctx context.Context) (bool, error) {
		pod := asked("default")
		err := cluster.Client.Create(ctx, pod, client.DryRunAll)
		return err == nil && pod.Annotations[evenkeel.InjectedKey] != "" && len(pod.Spec.SchedulingGates) == 1, nil
	})

	ns := newNamespace(t)
	describe(t, ns)
	trainingJob{profile: "default", script: allreduce}.create(ctx, t, ns)
	kinds := map[string]int{"Job": 2, "JobSet": 2, "StatefulSet": 2, "Pod": 1}
	namespaces := map[string]string{}
	for kind := range kinds {
		namespaces[kind] = newNamespace(t)
		describe(t, namespaces[kind])
		for _, object := range jobKinds[kind].objects(t, namespaces[kind]) {
			if err := cluster.Client.Create(ctx, object); err != nil {
				t.Fatalf("%s: %v", kind, err)
			}
		}
	}
	if end := waitJob(ctx, t, ns, "Succeeded", "Failed"); end != "Succeeded" {
		t.Fatalf("the job %s", end)
	}
	if out := logs(ctx, ns, "train-master-0"); !strings.Contains(out, "# Network: Evenkeel") || !strings.Contains(out, "# Out of bounds values : 0 OK") {
		t.Errorf("the master said %s", out)
	}
	for kind, want := range kinds {
		eventually(ctx, t, fmt.Sprintf("%d pods of the %s have found the plugin", want, kind), func(ctx context.Context) (bool, error) {
			pods, err := injectedPods(ctx, namespaces[kind])
			found := 0
			for _, p := range pods {
				if p.Spec.NodeName != "" && strings.Contains(said(ctx, &p), "the plugin is here") {
					found++
				}
			}
			return found >= want, err
		})
	}
	var events corev1.EventList
	if err := cluster.Client.List(ctx, &events, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
		return e.Reason == "EvenkeelNetworkProven" || e.Reason == "EvenkeelNothingToCheck"
	}) {
		t.Errorf("no Event says that the job's pods waited: %v", events.Items)
	}
}
