package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// provisioningRequest is the kind by which Kueue asks an autoscaler for nodes.
var provisioningRequest = schema.GroupKind{Group: "autoscaling.x-k8s.io", Kind: "ProvisioningRequest"}

// requestedNodes says which ProvisioningRequests of Kueue's workload an autoscaler has yet to fulfil.
func requestedNodes(ctx context.Context, cluster client.Client, workload *unstructured.Unstructured) ([]string, error) {
	mapping, err := cluster.RESTMapper().RESTMapping(provisioningRequest)
	if meta.IsNoMatchError(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("discover kind %s: %w", provisioningRequest, err)
	}
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(mapping.GroupVersionKind)
	err = cluster.List(ctx, list, client.InNamespace(workload.GetNamespace()))
	switch {
	case apierrors.IsForbidden(err):
		return nil, nil // Kueue's AdmissionCheck says that it waits
	case err != nil:
		return nil, fmt.Errorf("list ProvisioningRequests: %w", err)
	}
	var waits []string
	for i := range list.Items {
		request := &list.Items[i]
		if !slices.ContainsFunc(request.GetOwnerReferences(), func(o metav1.OwnerReference) bool { return o.UID == workload.GetUID() }) {
			continue
		}
		message, ended := "", false
		conditions, _, _ := unstructured.NestedSlice(request.Object, "status", "conditions") // a new one has none
		for _, item := range conditions {
			c, _ := item.(map[string]any)
			switch kind := c["type"]; {
			case (kind == "Provisioned" || kind == "Failed") && c["status"] == "True":
				ended = true
			case kind == "Provisioned", kind == "Accepted" && message == "":
				message, _ = c["message"].(string)
			}
		}
		if ended {
			continue
		}
		class, _, _ := unstructured.NestedString(request.Object, "spec", "provisioningClassName")
		text := fmt.Sprintf("it waits for nodes, and not for a check of them: ProvisioningRequest %s (%s) asks an autoscaler for them: %s", request.GetName(), class, message)
		waits = append(waits, strings.TrimSuffix(text, ": "))
	}
	return waits, nil
}

// autoscalerReasons are the reasons of Events on a pod by which the cluster-autoscaler and Karpenter say that they bring a node for it
// (true), or that they do not.
var autoscalerReasons = map[string]bool{"TriggeredScaleUp": true, "Nominated": true, "NotTriggerScaleUp": false}

// nodeOnItsWay is what an autoscaler said last about a node for the pod; empty: nothing.
func nodeOnItsWay(ctx context.Context, cluster client.Client, pod *corev1.Pod, now time.Time) (string, error) {
	var events corev1.EventList
	err := cluster.List(ctx, &events, client.InNamespace(pod.Namespace), client.MatchingFields{"involvedObject.uid": string(pod.UID)})
	switch {
	case apierrors.IsForbidden(err):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("list Events: %w", err)
	}
	var last *corev1.Event
	for i := range events.Items {
		e := &events.Items[i]
		if _, is := autoscalerReasons[e.Reason]; is && (last == nil || lastSeen(last).Time.Before(lastSeen(e).Time)) {
			last = e
		}
	}
	if last == nil {
		return "", nil
	}
	who := firstOf(last.Source.Component, last.ReportingController, "an autoscaler")
	text := fmt.Sprintf("no node comes for it, said %s", who)
	if autoscalerReasons[last.Reason] {
		text = fmt.Sprintf("a node is on its way, said %s", who)
	}
	if when := age(lastSeen(last), now); when != "" {
		text += " " + when + " ago"
	}
	return text + ": " + last.Message, nil
}

// lastSeen is when the Event happened last. Those of the newer API have other fields for it.
func lastSeen(e *corev1.Event) metav1.Time {
	switch {
	case !e.LastTimestamp.IsZero():
		return e.LastTimestamp
	case e.Series != nil:
		return metav1.Time{Time: e.Series.LastObservedTime.Time}
	}
	return metav1.Time{Time: e.EventTime.Time}
}
