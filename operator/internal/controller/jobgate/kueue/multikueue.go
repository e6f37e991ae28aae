package kueue

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
)

// dispatchedBy returns the AdmissionCheck by which MultiKueue sends the workload to another cluster; nil: there is
// none.
func (w pendingCheck) dispatchedBy(dispatching map[string]*unstructured.Unstructured) *unstructured.Unstructured {
	for _, c := range w.status.AdmissionChecks {
		if by := dispatching[c.Name]; by != nil {
			return by
		}
	}
	return nil
}

// admitElsewhere answers for a workload that MultiKueue sends to another cluster by the AdmissionCheck. Its pods use no
// node of this one, and MultiKueue does not send it before all other checks are ready.
func (c *Reconciler) admitElsewhere(ctx context.Context, w pendingCheck, by *unstructured.Unstructured) error {
	where := "one of its worker clusters"
	if clusters, err := c.workers(ctx, by); err != nil {
		log.FromContext(ctx).Info("the answer does not name the worker clusters", "AdmissionCheck", by.GetName(), "reason",
			err.Error())
	} else if len(clusters) > 0 {
		where = strings.Join(clusters, " or ")
	}
	message := fmt.Sprintf(
		"its pods run in another cluster, to which MultiKueue sends it by the AdmissionCheck %s: %s, whose ClusterQueues have its nodes proven",
		by.GetName(), where)
	return c.admit(ctx, w, message)
}

// admit answers for a workload that waits for no node.
func (c *Reconciler) admit(ctx context.Context, w pendingCheck, message string) error {
	err := c.updateState(ctx, w, gate.Decision{Action: gate.Open, Reason: gate.ReasonNothingToCheck, Message: message},
		true)
	if errors.Is(err, jobgate.ErrStale) {
		return nil // the change is another event
	}
	return err
}

// workers returns the names of the clusters that MultiKueue may choose from by the AdmissionCheck.
func (c *Reconciler) workers(ctx context.Context, by *unstructured.Unstructured) ([]string, error) {
	var check checkSpec
	if err := decodeField(by, "spec", &check); err != nil || check.Parameters == nil {
		return nil, err
	}
	config := &unstructured.Unstructured{}
	config.SetGroupVersionKind(by.GroupVersionKind().GroupVersion().WithKind("MultiKueueConfig"))
	if err := c.Client.Get(ctx, client.ObjectKey{Name: check.Parameters.Name}, config); err != nil {
		return nil, fmt.Errorf("read MultiKueueConfig %s: %w", check.Parameters.Name, err)
	}
	clusters, _, err := unstructured.NestedStringSlice(config.Object, "spec", "clusters")
	if err != nil {
		return nil, fmt.Errorf("MultiKueueConfig %s: %w", config.GetName(), err)
	}
	return clusters, nil
}
