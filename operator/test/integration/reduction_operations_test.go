package integration

import (
	"context"
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// TestReductionObjectsAreMadeAgain deletes what servers need. Without its NetworkPolicy, a server would be open to every pod.
func TestReductionObjectsAreMadeAgain(t *testing.T) {
	ns := newNamespace(t, nil)
	newProfile(t, "remade", evenkeel.NetworkProfileSpec{Plugin: evenkeel.PluginSpec{Image: image}})
	job, _ := reducing(t, "PyTorchJob", ns, "remade", "2")
	pods := startServers(t, waitService(t, job, "has a status", is(evenkeel.ReasonStarting)))
	service := waitService(t, job, "is complete", is(evenkeel.ReasonAllReady))
	again := func(object client.Object) {
		t.Helper()
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(service), object); err != nil {
			t.Fatal(err)
		}
		before := object.GetUID()
		if err := admin.Delete(t.Context(), object); err != nil {
			t.Fatal(err)
		}
		eventually(t, fmt.Sprintf("there is another %T", object), func(ctx context.Context) (bool, error) {
			err := admin.Get(ctx, client.ObjectKeyFromObject(service), object)
			return err == nil && object.GetUID() != before, client.IgnoreNotFound(err)
		})
	}
	again(&networkingv1.NetworkPolicy{})
	again(&policyv1.PodDisruptionBudget{})
	again(&corev1.Service{})
	again(&appsv1.StatefulSet{})

	policy := part[networkingv1.NetworkPolicy](t, service)
	policy.Spec.Ingress = nil
	if err := admin.Update(t.Context(), policy); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the NetworkPolicy lets the job's pods in again", func(context.Context) (bool, error) {
		return len(part[networkingv1.NetworkPolicy](t, service).Spec.Ingress) == 2, nil
	})

	// A server that starts again needs the key, and so does a restarted job.
	if err := admin.Delete(t.Context(), part[corev1.Secret](t, service)); err != nil {
		t.Fatal(err)
	}
	setReady(t, pods[1], corev1.ConditionFalse)
	eventually(t, "there is another key", func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKeyFromObject(service), &corev1.Secret{})
		return err == nil, client.IgnoreNotFound(err)
	})
	eventually(t, "an Event says so", hasEvent(ns, job, "EvenkeelReductionKeyReplaced", "restart the job"))
}

// TestReductionServersOfCordonedNodes: a drain waits for the job, or for as long as the profile says. Not everybody who drains nodes
// cordons them.
func TestReductionServersOfCordonedNodes(t *testing.T) {
	const cordoned, disrupted, clean = `{"spec": {"unschedulable": true}}`, `{"spec": {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}}`, `{"spec": {"unschedulable": false, "taints": []}}`
	for name, test := range map[string]struct {
		after int32
		drain string
	}{"drained-never": {-1, cordoned}, "drained-later": {1, cordoned}, "drained-by-karpenter": {1, disrupted}} {
		after := test.after
		t.Run(name, func(t *testing.T) {
			newProfile(t, name, evenkeel.NetworkProfileSpec{
				Plugin: evenkeel.PluginSpec{Image: image},
				Reduction: evenkeel.ReductionSpec{Server: evenkeel.ReductionServerSpec{EvictAfterSeconds: func() *int32 {
					if after < 0 {
						return nil
					}
					return &after
				}()}},
			})
			newNode(t, name, "v1.36.3", "containerd://2.1.4", nil)
			ns := newNamespace(t, nil)
			job, _ := reducing(t, "PyTorchJob", ns, name, "1")
			service := waitService(t, job, "has a status", is(evenkeel.ReasonStarting))
			set := part[appsv1.StatefulSet](t, service)
			pod := &corev1.Pod{ObjectMeta: *set.Spec.Template.ObjectMeta.DeepCopy(), Spec: *set.Spec.Template.Spec.DeepCopy()}
			pod.Namespace, pod.Name, pod.Spec.NodeName = ns, service.Name+"-0", name
			createPod(t, pod)
			setReady(t, pod, corev1.ConditionTrue)
			waitService(t, job, "is complete", is(evenkeel.ReasonAllReady))
			budget := func() string { return part[policyv1.PodDisruptionBudget](t, service).Spec.MaxUnavailable.String() }
			if before := budget(); before != "0" {
				t.Errorf("the budget is %s", before)
			}

			change := func(patch string) {
				t.Helper()
				node := &corev1.Node{}
				node.Name = name
				if err := admin.Patch(t.Context(), node, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
					t.Fatal(err)
				}
			}
			draining := func(s *evenkeel.ReductionService) bool {
				return meta.IsStatusConditionTrue(s.Status.Conditions, evenkeel.ConditionDraining)
			}
			change(test.drain)
			waitService(t, job, "is being drained", draining)
			eventually(t, "the job's Event names the node", hasEvent(ns, job, "EvenkeelReductionNodeDraining", name))
			if after < 0 {
				if now := budget(); now != "0" {
					t.Errorf("the budget is %s while the job runs", now)
				}
			} else {
				eventually(t, "the server may be evicted", func(context.Context) (bool, error) { return budget() == "100%", nil })
			}
			change(clean)
			waitService(t, job, "is not drained any more", func(s *evenkeel.ReductionService) bool { return !draining(s) })
			eventually(t, "the server is protected again", func(context.Context) (bool, error) { return budget() == "0", nil })
			end(t, job)
			if err := admin.Delete(t.Context(), pod); err != nil && !apierrors.IsNotFound(err) {
				t.Fatal(err)
			}
		})
	}
}

// TestReductionServersOfHostNetwork: no selector of pods matches ranks in the network of their nodes, so that a policy of such selectors
// would shut them out of their own servers.
func TestReductionServersOfHostNetwork(t *testing.T) {
	ns := newNamespace(t, nil)
	job, templates := newJob("PyTorchJob", ns, "default")
	job.SetAnnotations(map[string]string{evenkeel.ProfileKey: "default", evenkeel.ReductionKey: "1"})
	for _, path := range templates {
		if err := unstructured.SetNestedField(job.Object, true, append(append([]string{}, path...), "spec", "hostNetwork")...); err != nil {
			t.Fatal(err)
		}
	}
	createJob(t, job)
	service := waitService(t, job, "has a status", is(evenkeel.ReasonStarting))
	policy := part[networkingv1.NetworkPolicy](t, service).Spec
	for _, rule := range policy.Ingress {
		if len(rule.From) > 0 {
			t.Errorf("port %s is open to %+v only", rule.Ports[0].Port, rule.From)
		}
	}
	if len(policy.Ingress) == 0 || len(policy.Egress) != 1 || len(policy.Egress[0].To) > 0 {
		t.Errorf("the policy is %+v", policy)
	}
	end(t, job)
}
