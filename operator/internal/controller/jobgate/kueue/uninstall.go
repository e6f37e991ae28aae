package kueue

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/operator/internal/kube/sweep"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

const (
	kindQueue = "ClusterQueue"

	reasonUninstalled  = "Uninstalled"
	messageUninstalled = "Evenkeel was uninstalled: workloads do not wait"
)

// ListPending lists the checks of ours that workloads wait for. To remove one is to answer that it is ready, as if no policy
// existed. The client reads without a cache.
func ListPending(ctx context.Context, c client.Client, now clock.PassiveClock) ([]sweep.Item, error) {
	checks, err := listOurs(ctx, c)
	if err != nil || len(checks) == 0 {
		return nil, err
	}
	ours := map[string]string{}
	for i := range checks {
		ours[checks[i].GetName()] = ""
	}
	var items []sweep.Item
	err = eachObject(ctx, c, kindWorkload, func(workload *unstructured.Unstructured) error {
		pending, err := pendingChecks(workload, ours)
		for _, w := range pending {
			items = append(items, sweep.Item{
				Name: fmt.Sprintf("check %s of Kueue's workload %s/%s", w.check, workload.GetNamespace(), workload.GetName()),
				Remove: func(ctx context.Context) error {
					_, err := writeState(ctx, c, w, stateReady, messageUninstalled, nil, now.Now())
					return err
				},
			})
		}
		return err
	})
	return items, err
}

// ListActive lists our AdmissionChecks that are active. To remove one is to say on it that nobody decides it any more, so that
// Kueue says the same on each ClusterQueue that names it.
func ListActive(ctx context.Context, c client.Client, now clock.PassiveClock) ([]sweep.Item, error) {
	checks, err := listOurs(ctx, c)
	if err != nil {
		return nil, err
	}
	var items []sweep.Item
	for i := range checks {
		check := &checks[i]
		want := metav1.Condition{
			Type: "Active", Status: metav1.ConditionFalse, ObservedGeneration: check.GetGeneration(), Reason: reasonUninstalled,
			Message: "Evenkeel was uninstalled: remove this check from the ClusterQueues that name it",
		}
		var status struct {
			Conditions []metav1.Condition `json:"conditions"`
		}
		if err := decodeField(check, "status", &status); err != nil {
			return nil, err
		}
		if is := meta.FindStatusCondition(status.Conditions, want.Type); is != nil && is.Reason == want.Reason && is.ObservedGeneration == want.ObservedGeneration {
			continue
		}
		items = append(items, sweep.Item{Name: "AdmissionCheck " + check.GetName(), Remove: func(ctx context.Context) error {
			return setActive(ctx, c, check, want, now.Now())
		}})
	}
	return items, nil
}

// ListQueues lists the ClusterQueues that name one of our AdmissionChecks: without Evenkeel they would admit nothing. To remove
// one is to remove these names from it.
func ListQueues(ctx context.Context, c client.Client) ([]sweep.Item, error) {
	checks, err := listOurs(ctx, c)
	if err != nil || len(checks) == 0 {
		return nil, err
	}
	ours := map[string]bool{}
	for i := range checks {
		ours[checks[i].GetName()] = true
	}
	var items []sweep.Item
	err = eachObject(ctx, c, kindQueue, func(queue *unstructured.Unstructured) error {
		without, removed := withoutChecks(queue, ours)
		if len(removed) == 0 {
			return nil
		}
		before := queue.DeepCopy()
		items = append(items, sweep.Item{
			Name: fmt.Sprintf("ClusterQueue %s, which names %s", queue.GetName(), strings.Join(removed, ", ")),
			Remove: func(ctx context.Context) error {
				err := c.Patch(ctx, without, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
				return ignoreChanged(err)
			},
		})
		return nil
	})
	return items, err
}

// UnprovenQueues returns the names of the ClusterQueues that name none of our AdmissionChecks: they admit jobs whose nodes nobody has
// proven. Those of MultiKueue admit none to nodes of this cluster. The client reads without a cache.
func UnprovenQueues(ctx context.Context, c client.Client) ([]string, error) {
	answered := map[string]bool{}
	err := eachObject(ctx, c, kindCheck, func(check *unstructured.Unstructured) error {
		if isOf(check, ControllerName) || isOf(check, workload.MultiKueueController) {
			answered[check.GetName()] = true
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var unproven []string
	err = eachObject(ctx, c, kindQueue, func(queue *unstructured.Unstructured) error {
		if _, named := withoutChecks(queue, answered); len(named) == 0 {
			unproven = append(unproven, queue.GetName())
		}
		return nil
	})
	return unproven, err
}

// withoutChecks returns the ClusterQueue without the checks, and the names that it had. Version v1beta1 has a second list.
func withoutChecks(queue *unstructured.Unstructured, ours map[string]bool) (without *unstructured.Unstructured, removed []string) {
	without = queue.DeepCopy()
	had := map[string]bool{}
	for _, path := range [][]string{{"spec", "admissionChecksStrategy", "admissionChecks"}, {"spec", "admissionChecks"}} {
		list, found, _ := unstructured.NestedSlice(without.Object, path...) // what is no list names nothing
		if !found {
			continue
		}
		left := slices.DeleteFunc(list, func(item any) bool {
			name, _ := item.(string)
			if rule, ok := item.(map[string]any); ok {
				name, _ = rule["name"].(string)
			}
			if ours[name] {
				had[name] = true
			}
			return ours[name]
		})
		if len(left) == 0 {
			unstructured.RemoveNestedField(without.Object, path[:2]...) // a strategy without checks is invalid
		} else if err := unstructured.SetNestedSlice(without.Object, left, path...); err != nil {
			continue // it was read from there
		}
	}
	return without, slices.Sorted(maps.Keys(had))
}

// listOurs lists the AdmissionChecks that Evenkeel decides; none, where there is no Kueue.
func listOurs(ctx context.Context, c client.Client) ([]unstructured.Unstructured, error) {
	var ours []unstructured.Unstructured
	err := eachObject(ctx, c, kindCheck, func(check *unstructured.Unstructured) error {
		if _, _, is := parseParameters(check); is {
			ours = append(ours, *check)
		}
		return nil
	})
	return ours, err
}

// eachObject visits all objects of a kind of Kueue's, page by page.
func eachObject(ctx context.Context, c client.Client, kind string, visit func(*unstructured.Unstructured) error) error {
	mapping, err := c.RESTMapper().RESTMapping(schema.GroupKind{Group: group, Kind: kind})
	if meta.IsNoMatchError(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("discover Kueue's kind %s: %w", kind, err)
	}
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(mapping.GroupVersionKind.GroupVersion().WithKind(kind + "List"))
	err = sweep.Pages(ctx, c, list, func() error {
		for i := range list.Items {
			if err := visit(&list.Items[i]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list Kueue's %ss: %w", kind, err)
	}
	return nil
}
