package reductionservice

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func TestNotReadyReason(t *testing.T) {
	now := metav1.Now()
	for want, pod := range map[string]*corev1.Pod{
		"its pod has no node: no room":   {Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "no room"}}}},
		"its pod on node n is not ready": {Spec: corev1.PodSpec{NodeName: "n"}},
		"its container on node n ended with status 137 (OOMKilled)": {Spec: corev1.PodSpec{NodeName: "n"}, Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{
			{LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, Reason: "OOMKilled"}}},
		}}},
		"its container waits: ErrImagePull: not found": {Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{
			{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "not found"}}},
		}}},
		"its pod on node n is being removed: taint": {ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}, Spec: corev1.PodSpec{NodeName: "n"}, Status: corev1.PodStatus{
			Conditions: []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Message: "taint"}},
		}},
	} {
		if got := notReadyReason(pod); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// The states of a service, and the Events about them.
func TestObserveStatus(t *testing.T) {
	two, now := int32(2), time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	service := &evenkeel.ReductionService{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "s", Generation: 1}, Spec: evenkeel.ReductionServiceSpec{Replicas: &two}}
	pod := func(name string, status corev1.ConditionStatus) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}}}
	}
	both := []corev1.Pod{pod("s-0", "True"), pod("s-1", "True")}
	ended := map[string]any{"status": map[string]any{"conditions": []any{map[string]any{"type": "Complete", "status": "True"}}}}
	suspended := map[string]any{"apiVersion": "batch/v1", "kind": "Job", "spec": map[string]any{"suspend": true}}
	for _, step := range []struct {
		name   string
		pods   []corev1.Pod
		job    map[string]any
		reason string
		lost   []string
		news   []string // parts of the Events
	}{
		{"no pods yet", nil, nil, evenkeel.ReasonStarting, nil, nil},
		{"one is slow", both[:1], nil, evenkeel.ReasonStarting, nil, nil},
		{"both", both, nil, evenkeel.ReasonAllReady, nil, []string{"all 2 reduction servers"}},
		{"both still", both, nil, evenkeel.ReasonAllReady, nil, nil},
		{"another's pod", append(slices.Clone(both), pod("s-2", "False")), nil, evenkeel.ReasonAllReady, nil, nil},
		{"one lost", []corev1.Pod{both[0], pod("s-1", "False")}, nil, evenkeel.ReasonServerLost, []string{"s-1"}, []string{"s-1 was lost at 2026-01-02T03:04:05Z"}},
		{"still lost", both[:1], nil, evenkeel.ReasonServerLost, []string{"s-1"}, nil},
		{"the other one too", nil, nil, evenkeel.ReasonServerLost, []string{"s-0", "s-1"}, []string{"s-0 was lost"}},
		{"one is back", both[:1], nil, evenkeel.ReasonServerLost, []string{"s-1"}, nil},
		{"back", both, nil, evenkeel.ReasonAllReady, nil, nil},
		{"suspended", both[:1], suspended, evenkeel.ReasonJobSuspended, nil, nil},
		{"resumed", nil, nil, evenkeel.ReasonStarting, nil, nil},
		{"complete", both, nil, evenkeel.ReasonAllReady, nil, []string{"all 2 reduction servers"}},
		{"ended", both[:1], ended, evenkeel.ReasonJobFinished, nil, nil},
	} {
		status, news := observeStatus(service, &unstructured.Unstructured{Object: step.job}, step.pods, nil, now)
		c := meta.FindStatusCondition(status.Conditions, evenkeel.ConditionAvailable)
		if c.Reason != step.reason || (c.Status == metav1.ConditionTrue) != (step.reason == evenkeel.ReasonAllReady) || !slices.Equal(status.LostServers, step.lost) {
			t.Errorf("%s: %s (%s), lost %v; want %s, %v", step.name, c.Reason, c.Message, status.LostServers, step.reason, step.lost)
		}
		if len(news) != len(step.news) {
			t.Errorf("%s: the Events are %v, want %q", step.name, news, step.news)
		}
		for i := range min(len(news), len(step.news)) {
			if !strings.Contains(news[i].message, step.news[i]) {
				t.Errorf("%s: the Events are %q, want %q", step.name, news[i].message, step.news[i])
			}
		}
		service.Status = *status
	}
	if e := service.Status.Endpoints; !slices.Equal(e, []string{"s-0.s.team.svc:7470", "s-1.s.team.svc:7470"}) {
		t.Errorf("endpoints %v", e)
	}
}

func TestStatusMessagesAreBounded(t *testing.T) {
	many := int32(evenkeel.MaxReductionServers)
	service := &evenkeel.ReductionService{ObjectMeta: metav1.ObjectMeta{Name: strings.Repeat("x", 52)}, Spec: evenkeel.ReductionServiceSpec{Replicas: &many}}
	status, _ := observeStatus(service, &unstructured.Unstructured{}, nil, nil, time.Now())
	if got := len(status.Conditions[0].Message); got > maxMessage {
		t.Errorf("a message of %d bytes", got)
	}
}
