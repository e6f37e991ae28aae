package reductionservice

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/nodedrain"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// observeDrain sets the condition Draining while servers run on nodes that are drained. Its time is when the first of them was seen, from
// which evictAfterSeconds counts.
func observeDrain(service *evenkeel.ReductionService, pods []corev1.Pod, nodes []corev1.Node, status *evenkeel.ReductionServiceStatus, now time.Time) []pendingEvent {
	drained := map[string]bool{}
	for i := range nodes {
		drained[nodes[i].Name] = nodedrain.Of(&nodes[i])
	}
	var on []string
	for _, p := range pods {
		if drained[p.Spec.NodeName] && !slices.Contains(on, p.Spec.NodeName) {
			on = append(on, p.Spec.NodeName)
		}
	}
	if len(on) == 0 {
		meta.RemoveStatusCondition(&status.Conditions, evenkeel.ConditionDraining)
		return nil
	}
	slices.Sort(on)
	since := now.Truncate(time.Second)
	before := meta.FindStatusCondition(service.Status.Conditions, evenkeel.ConditionDraining)
	if before != nil {
		since = before.LastTransitionTime.Time
	}
	what := "they are not evicted while the job runs"
	if after := service.Spec.Server.EvictAfterSeconds; after != nil {
		what = "they may be evicted from " + since.Add(time.Duration(*after)*time.Second).UTC().Format(time.RFC3339) + " on, and the job's operations then fail"
	}
	message := fmt.Sprintf("nodes of reduction servers are cordoned or drained: %s; %s", text.List(on, 200), what)
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: evenkeel.ConditionDraining, Status: metav1.ConditionTrue, Reason: evenkeel.ReasonNodesCordoned, Message: message,
		ObservedGeneration: service.Generation, LastTransitionTime: metav1.NewTime(since),
	})
	if before != nil {
		return nil
	}
	return []pendingEvent{{corev1.EventTypeWarning, ReasonDraining, message, since}}
}

// evictableAt reports whether servers may be evicted now, and otherwise how long it is until then; 0: not before something changes.
func evictableAt(service *evenkeel.ReductionService, status *evenkeel.ReductionServiceStatus, now time.Time) (evictable bool, in time.Duration) {
	draining, after := meta.FindStatusCondition(status.Conditions, evenkeel.ConditionDraining), service.Spec.Server.EvictAfterSeconds
	if draining == nil || after == nil {
		return false, 0
	}
	in = max(0, draining.LastTransitionTime.Add(time.Duration(*after)*time.Second).Sub(now))
	return in == 0, in
}
