// Package nvsentinel tells NVSentinel which nodes a check has failed, and when they are cleared, with what was
// measured.
package nvsentinel

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/nvsentinel"
)

// ToldKey is the annotation on a NodeNetworkHealth of which NVSentinel has a fault that is not cleared. Its value is
// the time at which the fault was found. So a new process repeats nothing, and forgets nothing.
const ToldKey = "evenkeel.dev/nvsentinel-told"

// What was not accepted is sent again after these times.
const (
	firstRetry = time.Second
	lastRetry  = time.Minute
)

// Bridge sends an event when a node gets the label for failed nodes, and another when it loses it. The policy's
// maxUnhealthyPercent bounds the label, and so the nodes that NVSentinel takes away.
type Bridge struct {
	Connector nvsentinel.Connector
	Strategy  nvsentinel.Strategy
	Clock     clock.PassiveClock

	client client.Client
}

// SetupWithManager starts the bridge with the manager.
func (b *Bridge) SetupWithManager(mgr manager.Manager) error {
	b.client = mgr.GetClient()
	return builder.ControllerManagedBy(mgr).Named("nvsentinel").
		For(&evenkeel.NodeNetworkHealth{}).
		WatchesMetadata(&corev1.Node{}, &handler.EnqueueRequestForObject{}, builder.WithPredicates(predicate.LabelChangedPredicate{})).
		WithOptions(controller.Options{RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetry, lastRetry)}).
		Complete(b)
}

// Reconcile reports one node's changes to NVSentinel.
func (b *Bridge) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	state := &evenkeel.NodeNetworkHealth{}
	if err := b.client.Get(ctx, request.NamespacedName, state); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	node := &metav1.PartialObjectMetadata{}
	node.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	if err := b.client.Get(ctx, request.NamespacedName, node); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err) // NVSentinel forgets deleted nodes itself
	}
	event := decide(node, state)
	if event == nil {
		return reconcile.Result{}, nil
	}
	event.Time, event.Strategy = b.Clock.Now(), b.Strategy
	told := foundAt(state)
	key := keyOf(state, told, event.Healthy)
	if event.Healthy {
		key, told = keyOf(state, state.Annotations[ToldKey], true), ""
	}
	if err := b.Connector.Send(ctx, key, *event); err != nil {
		metrics.NVSentinelEvent(metrics.EventFailed)
		return reconcile.Result{}, err
	}
	metrics.NVSentinelEvent(metrics.EventSent)
	if err := b.remember(ctx, state, told); client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("remember what NVSentinel was told of node %s: %w", state.Name, err)
	}
	return reconcile.Result{}, nil
}

// remember writes the annotation, or removes it if the text is empty.
func (b *Bridge) remember(ctx context.Context, state *evenkeel.NodeNetworkHealth, told string) error {
	value := any(told)
	if told == "" {
		value = nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": state.UID, "annotations": map[string]any{ToldKey: value}}})
	if err != nil {
		return err
	}
	return b.client.Patch(ctx, &evenkeel.NodeNetworkHealth{ObjectMeta: metav1.ObjectMeta{Name: state.Name}}, client.RawPatch(types.MergePatchType, patch))
}

// keyOf is the same for each attempt to send one event.
func keyOf(state *evenkeel.NodeNetworkHealth, found string, healthy bool) string {
	sum := sha256.Sum256([]byte(string(state.UID) + " " + found + " " + strconv.FormatBool(healthy)))
	return hex.EncodeToString(sum[:])
}

// foundAt is when the fault was found.
func foundAt(state *evenkeel.NodeNetworkHealth) string {
	if t := state.Status.ObservedTime; t != nil {
		return t.UTC().Format(time.RFC3339)
	}
	return "unknown"
}

// decide returns the event about the node, or nil. The label may be ahead of the results or behind them, for a moment:
// a fault needs both.
func decide(node *metav1.PartialObjectMetadata, state *evenkeel.NodeNetworkHealth) *nvsentinel.Event {
	if len(state.OwnerReferences) == 0 || state.OwnerReferences[0].UID != node.UID {
		return nil // it is about an earlier node of this name
	}
	told, labeled := state.Annotations[ToldKey] != "", node.Labels[evenkeel.HealthKey] == evenkeel.UnhealthyValue
	s := &state.Status
	event := &nvsentinel.Event{Check: nvsentinel.CheckName, Node: node.Name, Details: details(s)}
	switch {
	case !told && labeled && s.Health == evenkeel.HealthUnhealthy:
		event.Fatal, event.Action, event.ErrorCode = true, nvsentinel.ActionContactSupport, nvsentinel.ErrorCode
		event.Message = evidence(s)
	case told && !labeled && s.Health == evenkeel.HealthUnhealthy:
		event.Healthy = true
		event.Message = "no longer marked: no NetworkCheckPolicy selects the node, or too many others failed; at last " + evidence(s)
	case told && !labeled:
		event.Healthy, event.Message = true, evidence(s)
	default:
		return nil
	}
	return event
}

// evidence is what was measured, with whom.
func evidence(s *evenkeel.NodeNetworkHealthStatus) string { return s.Reason + ": " + s.Message }

func details(s *evenkeel.NodeNetworkHealthStatus) []nvsentinel.Detail {
	details := []nvsentinel.Detail{{Name: "evenkeel.reason", Value: s.Reason}}
	// Inconclusive results change nothing.
	decisive := func(r evenkeel.HealthResult) bool { return r.Verdict != evenkeel.VerdictInconclusive }
	if i := slices.IndexFunc(s.History, decisive); i >= 0 {
		details = append(details, nvsentinel.Detail{Name: "evenkeel.check", Value: s.History[i].Check})
	}
	if s.ObservedTime != nil {
		details = append(details, nvsentinel.Detail{Name: "evenkeel.observedTime", Value: s.ObservedTime.UTC().Format(time.RFC3339)})
	}
	if s.BusBandwidth != nil {
		details = append(details, nvsentinel.Detail{Name: "evenkeel.busBandwidthBytesPerSecond", Value: strconv.FormatInt(s.BusBandwidth.Value(), 10)})
	}
	if m := s.Baseline.MedianBusBandwidth; m != nil {
		details = append(details, nvsentinel.Detail{Name: "evenkeel.usualBusBandwidthBytesPerSecond", Value: strconv.FormatInt(m.Value(), 10)})
	}
	return details
}
