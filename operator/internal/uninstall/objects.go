package uninstall

import (
	"context"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/kube/sweep"
)

const (
	instanceLabel  = "app.kubernetes.io/instance"
	componentLabel = "app.kubernetes.io/component"
	chartLabel     = "helm.sh/chart"
	chartPrefix    = "evenkeel-"
	// podTimeout bounds the wait for a pod of the operator to end, its grace period included.
	podTimeout = 2 * time.Minute
)

// Kinds that the chart installs. Those that are deleted first would gate jobs and mark nodes again.
var (
	activeKinds = []schema.GroupVersionKind{
		{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "MutatingWebhookConfiguration"},
		{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "ValidatingWebhookConfiguration"},
		{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "MutatingAdmissionPolicyBinding"},
		{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "MutatingAdmissionPolicy"},
		{Group: "apps", Version: "v1", Kind: "Deployment"},
	}
	bindingKinds = []schema.GroupVersionKind{{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "ValidatingAdmissionPolicyBinding"}}
	passiveKinds = []schema.GroupVersionKind{
		{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "ValidatingAdmissionPolicy"},
		{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "ClusterRoleBinding"},
		{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "ClusterRole"},
		{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "RoleBinding"},
		{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "Role"},
		{Group: "monitoring.coreos.com", Version: "v1", Kind: "ServiceMonitor"},
		{Group: "monitoring.coreos.com", Version: "v1", Kind: "PrometheusRule"},
		{Group: "networking.k8s.io", Version: "v1", Kind: "NetworkPolicy"},
		{Group: "policy", Version: "v1", Kind: "PodDisruptionBudget"},
		{Group: "scheduling.k8s.io", Version: "v1", Kind: "PriorityClass"},
		{Group: "batch", Version: "v1", Kind: "Job"},
		{Group: "coordination.k8s.io", Version: "v1", Kind: "Lease"},
		{Version: "v1", Kind: "Service"},
		{Version: "v1", Kind: "ConfigMap"},
		{Version: "v1", Kind: "Secret"},
		{Version: "v1", Kind: "ServiceAccount"},
	}
	definitionKinds = []schema.GroupVersionKind{definitionKind}
)

// A Release is an installation of the chart.
type Release struct{ Name, Namespace string }

// Gone is an error while a controller is installed in the namespace, or in any if it is empty, and nobody deletes it: it would gate jobs
// and mark nodes again.
func Gone(ctx context.Context, c client.Client, namespace string) error {
	var installed []string
	var deployments appsv1.DeploymentList
	err := sweep.Pages(ctx, c, &deployments, func() error {
		for _, d := range deployments.Items {
			if d.DeletionTimestamp == nil && strings.HasPrefix(d.Labels[chartLabel], chartPrefix) {
				installed = append(installed, d.Namespace+"/"+d.Name)
			}
		}
		return nil
	}, client.InNamespace(namespace), client.MatchingLabels{componentLabel: "controller"})
	if err != nil {
		return fmt.Errorf("list Deployments: %w", err)
	}
	if len(installed) > 0 {
		return fmt.Errorf("the controller stays, as nobody deletes the Deployment %s", strings.Join(installed, ", "))
	}
	return nil
}

// Stop are the steps after which nothing of the release works any more: nothing gates jobs or marks nodes again.
func (r Release) Stop(c client.Client) []Step {
	return []Step{
		{"delete the webhooks, the mutating policies and the deployments", func(ctx context.Context) ([]sweep.Item, error) { return r.listObjects(ctx, c, activeKinds) }},
		{"end the operator's pods", func(ctx context.Context) ([]sweep.Item, error) { return r.listPods(ctx, c) }},
		// Without the mutating policies one of these would refuse every annotated pod. The others guard accounts that nobody uses now.
		{"delete the bindings of the validating policies", func(ctx context.Context) ([]sweep.Item, error) { return r.listObjects(ctx, c, bindingKinds) }},
	}
}

// Checks is the step that ends checks.
func (r Release) Checks(c client.Client) Step {
	return Step{"delete checks that have not ended", func(ctx context.Context) ([]sweep.Item, error) { return r.listChecks(ctx, c) }}
}

// Delete is the step that deletes the other objects of the release, without the CRDs.
func (r Release) Delete(c client.Client) Step {
	return Step{"delete the other objects of the release", func(ctx context.Context) ([]sweep.Item, error) { return r.listObjects(ctx, c, passiveKinds) }}
}

// DeleteDefinitions is the step that deletes the CRDs, and with them everything of Evenkeel's kinds.
func (r Release) DeleteDefinitions(c client.Client) Step {
	return Step{"delete the CRDs", func(ctx context.Context) ([]sweep.Item, error) { return r.listObjects(ctx, c, definitionKinds) }}
}

// listObjects lists the release's objects of the kinds. To remove one is to delete it.
func (r Release) listObjects(ctx context.Context, c client.Client, kinds []schema.GroupVersionKind) ([]sweep.Item, error) {
	var items []sweep.Item
	for _, kind := range kinds {
		mapping, err := c.RESTMapper().RESTMapping(kind.GroupKind(), kind.Version)
		if meta.IsNoMatchError(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("discover %s: %w", kind.Kind, err)
		}
		options := []client.ListOption{client.MatchingLabels{instanceLabel: r.Name}}
		if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
			options = append(options, client.InNamespace(r.Namespace))
		}
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		err = sweep.Pages(ctx, c, list, func() error {
			for i := range list.Items {
				object := &list.Items[i]
				object.SetGroupVersionKind(kind)
				if strings.HasPrefix(object.Labels[chartLabel], chartPrefix) {
					items = append(items, deletion(c, object, kind.Kind))
				}
			}
			return nil
		}, options...)
		if err != nil {
			return nil, fmt.Errorf("list %ss: %w", kind.Kind, err)
		}
	}
	return items, nil
}

// listChecks lists the checks that have not ended. Their jobs would run on.
func (r Release) listChecks(ctx context.Context, c client.Client) ([]sweep.Item, error) {
	var items []sweep.Item
	var checks evenkeel.NetworkCheckList
	err := sweep.Pages(ctx, c, &checks, func() error {
		for _, check := range checks.Items {
			if !meta.IsStatusConditionTrue(check.Status.Conditions, evenkeel.ConditionComplete) && check.DeletionTimestamp == nil {
				items = append(items, deletion(c, &check, "NetworkCheck"))
			}
		}
		return nil
	}, client.InNamespace(r.Namespace))
	if err != nil && !meta.IsNoMatchError(err) && !apierrors.IsNotFound(err) { // the CRDs are gone
		return nil, fmt.Errorf("list NetworkChecks: %w", err)
	}
	return items, nil
}

// listPods lists the release's own pods. To remove one is to delete it and to wait until it has ended.
func (r Release) listPods(ctx context.Context, c client.Client) ([]sweep.Item, error) {
	var items []sweep.Item
	var pods corev1.PodList
	err := sweep.Pages(ctx, c, &pods, func() error {
		for _, pod := range pods.Items {
			if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
				continue // such as those of the chart's hook
			}
			item := deletion(c, &pod, "pod")
			remove := item.Remove
			item.Remove = func(ctx context.Context) error {
				if err := remove(ctx); err != nil {
					return err
				}
				return wait.PollUntilContextTimeout(ctx, time.Second, podTimeout, true, func(ctx context.Context) (bool, error) {
					now := &corev1.Pod{}
					err := c.Get(ctx, client.ObjectKeyFromObject(&pod), now)
					return apierrors.IsNotFound(err) || err == nil && now.UID != pod.UID, client.IgnoreNotFound(err)
				})
			}
			items = append(items, item)
		}
		return nil
	}, client.InNamespace(r.Namespace), client.MatchingLabels{instanceLabel: r.Name})
	if err != nil {
		return nil, fmt.Errorf("list the operator's pods: %w", err)
	}
	return items, nil
}

// deletion is the item of an object that is deleted, and what it owns in the background.
func deletion(c client.Client, object client.Object, kind string) sweep.Item {
	uid := object.GetUID()
	return sweep.Item{
		Name: kind + " " + strings.TrimPrefix(client.ObjectKeyFromObject(object).String(), "/"),
		Remove: func(ctx context.Context) error {
			err := c.Delete(ctx, object, client.Preconditions{UID: &uid}, client.PropagationPolicy(metav1.DeletePropagationBackground))
			if apierrors.IsConflict(err) { // another object of that name
				return nil
			}
			return client.IgnoreNotFound(err)
		},
	}
}
