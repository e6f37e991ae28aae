package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// maxRefusals is the maximum number of Events printed: a JobSet may have a thousand Jobs.
	maxRefusals = 5
	// maxRefused is the maximum number of objects whose owners are read, each of which is a request.
	maxRefused = 100
)

// explainRefusals prints why the API server refuses pods of the object, in its own words: quotas, LimitRanges, pod standards, webhooks.
// It tells controllers, which write it in Events about the object or about others that belong to it. What happened before the latest
// pod came is over.
func explainRefusals(ctx context.Context, cluster client.Client, object *unstructured.Unstructured, pods []corev1.Pod, out io.Writer, now time.Time) error {
	var list corev1.EventList
	if err := cluster.List(ctx, &list, client.InNamespace(object.GetNamespace()), client.MatchingFields{"type": corev1.EventTypeWarning}); err != nil {
		return fmt.Errorf("list Events: %w", err)
	}
	var latest time.Time
	for i := range pods {
		if created := pods[i].CreationTimestamp.Time; created.After(latest) {
			latest = created
		}
	}
	candidates := slices.DeleteFunc(list.Items, func(e corev1.Event) bool { return !refusesPods(&e) || lastSeen(&e).Time.Before(latest) })
	slices.SortStableFunc(candidates, func(a, b corev1.Event) int { return lastSeen(&b).Compare(lastSeen(&a).Time) })
	t := ownerTree{cluster: cluster, namespace: object.GetNamespace(), members: map[types.UID]bool{object.GetUID(): true}}
	var refusals []corev1.Event
	for i := range candidates {
		if len(refusals) > maxRefusals || len(t.members) > maxRefused {
			break
		}
		o := &candidates[i].InvolvedObject
		mine, err := t.contains(ctx, &metav1.OwnerReference{APIVersion: o.APIVersion, Kind: o.Kind, Name: o.Name, UID: o.UID}, maxOwners)
		if err != nil {
			return err
		}
		if mine {
			refusals = append(refusals, candidates[i])
		}
	}
	if len(refusals) == 0 {
		return nil
	}
	fmt.Fprintln(out, "\nThe API server refuses its pods")
	var rows [][]string
	for i := range refusals[:min(len(refusals), maxRefusals)] {
		e := &refusals[i]
		rows = append(rows, []string{eventTime(e, now), e.InvolvedObject.Kind + " " + e.InvolvedObject.Name, e.Message})
	}
	if len(refusals) > maxRefusals {
		rows = append(rows, []string{"", "", "and more: kubectl get events -n " + object.GetNamespace()})
	}
	return table(out, "  ", rows)
}

// refusesPods reports whether a controller says in the Event that the API server refused what it tried to create. Each kind's controller
// has a reason of its own, and all repeat the API server's words.
func refusesPods(e *corev1.Event) bool {
	if e.InvolvedObject.Kind == "Pod" {
		return false
	}
	return strings.HasPrefix(e.Reason, "FailedCreate") || strings.HasPrefix(e.Reason, "FailedToCreate") ||
		strings.Contains(e.Message, " is forbidden: ") || strings.Contains(e.Message, " denied the request")
}

// eventTime says when the Event happened last, and how often.
func eventTime(e *corev1.Event, now time.Time) string {
	when := age(lastSeen(e), now) + " ago"
	if e.Count > 1 {
		when += fmt.Sprintf(" (x%d over %s)", e.Count, age(e.FirstTimestamp, now))
	}
	return when
}
