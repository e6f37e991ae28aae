package preflight

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/cli"
)

// A suspiciousJob is one that runs on nodes, with a pod on each.
type suspiciousJob struct {
	t    *testing.T
	pods []*corev1.Pod
}

// runJob makes a running job of that name.
func runJob(t *testing.T, name string, nodes ...string) suspiciousJob {
	t.Helper()
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name, UID: types.UID("uid-of-" + name)}}
	j := suspiciousJob{t: t}
	for i, node := range nodes {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: users, Name: fmt.Sprintf("%s-%d", name, i), Labels: map[string]string{evenkeel.ProfileKey: "default"},
			Annotations:     map[string]string{evenkeel.PluginStatusKey: evenkeel.PluginNotReported},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(job, batchv1.SchemeGroupVersion.WithKind("Job"))},
		}}
		pod.Spec.NodeName, pod.Spec.Containers = node, []corev1.Container{{Name: "c", Image: "c"}}
		if err := admin.Create(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		j.pods = append(j.pods, pod)
		t.Cleanup(func() {
			if err := admin.Delete(context.Background(), pod, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
				t.Error(err)
			}
		})
		j.is(i, corev1.PodRunning)
	}
	return j
}

func (j suspiciousJob) is(pod int, phase corev1.PodPhase) {
	j.t.Helper()
	patch := fmt.Sprintf(`{"status": {"phase": %q}}`, phase)
	if err := admin.Status().Patch(j.t.Context(), j.pods[pod].DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		j.t.Fatal(err)
	}
}

// suspects lets the first pod say, at the time, that the job waits for the card of another one's node; negative: for nobody.
func (j suspiciousJob) suspects(now time.Time, pod int) {
	j.t.Helper()
	value := []byte("null")
	if pod >= 0 {
		at := now.UTC().Format(time.RFC3339)
		text := fmt.Sprintf(`{"since": %q, "recorded": %q, "at": %q, "ranks": 4, "text": "4 of 4 ranks wait", "suspects": [{"class": "link", "host": %q, "pod": %q, "confidence": 0.87}]}`,
			at, at, at, j.pods[pod].Spec.NodeName, j.pods[pod].UID)
		value = fmt.Appendf(nil, "%q", text)
	}
	patch := fmt.Appendf(nil, `{"metadata": {"annotations": {"evenkeel.dev/suspects": %s}}}`, value)
	if err := admin.Patch(j.t.Context(), j.pods[0].DeepCopy(), client.RawPatch(types.MergePatchType, patch)); err != nil {
		j.t.Fatal(err)
	}
}

// suspicionsOf describes the suspicions of a node: the job, the class and the confidence, and what became of them.
func suspicionsOf(ctx context.Context, node string) (string, error) {
	state := &evenkeel.NodeNetworkHealth{}
	err := admin.Get(ctx, client.ObjectKey{Name: node}, state)
	var all []string
	for _, s := range state.Status.Suspicions {
		text := fmt.Sprintf("%s %s/%s %s %d%%", s.Job.Kind, s.Job.Namespace, s.Job.Name, s.Class, *s.ConfidencePercent)
		if s.WithdrawnTime != nil {
			text += " withdrawn"
		}
		if s.JobEndTime != nil {
			text += " ended"
		}
		all = append(all, text)
	}
	return strings.Join(all, ", "), client.IgnoreNotFound(err)
}

func isSuspected(t *testing.T, node, want string) {
	t.Helper()
	var got string
	defer func() {
		if t.Failed() {
			t.Logf("the suspicions of %s, last seen: %q", node, got)
		}
	}()
	eventually(t, fmt.Sprintf("node %s has the suspicions %q", node, want), func(ctx context.Context) (_ bool, err error) {
		got, err = suspicionsOf(ctx, node)
		return got == want, err
	})
}

// hasEvent waits until the node has an Event of the reason.
func hasEvent(t *testing.T, node, reason string) {
	t.Helper()
	eventually(t, fmt.Sprintf("node %s has an Event %s", node, reason), func(ctx context.Context) (bool, error) {
		var list corev1.EventList
		err := admin.List(ctx, &list, client.InNamespace(metav1.NamespaceDefault))
		for _, e := range list.Items {
			if e.InvolvedObject.Name == node && e.Reason == reason {
				return true, err
			}
		}
		return false, err
	})
}

func suspicionChecks(t *testing.T, p *evenkeel.NetworkCheckPolicy) (names []string) {
	t.Helper()
	for _, check := range policyChecks(t, p) {
		if check.Labels[evenkeel.TriggerKey] == "suspicion" {
			names = append(names, check.Name)
		}
	}
	return names
}

// What a job says of a node is checked when all its pods have terminated, and not before. The check confirms it.
func TestSuspicionIsConfirmedAfterTheJob(t *testing.T) {
	var slow atomic.Bool
	f := newFleet(t, func(nodes []string) ending {
		if slow.Load() {
			return links(map[string]float64{"guilty-2": 0.1})(nodes)
		}
		return links(nil)(nodes)
	})
	nodes := newNodes(t, "guilty", 5)
	now := &clock{}
	start(t, f, now, now)
	p := newPolicy(t, "guilty", nil)
	for _, name := range nodes {
		carries(t, name, "True Proven|healthy|")
	}
	waitPolicy(t, p, "no check runs", func() bool { return p.Status.RunningCheck == "" })
	slow.Store(true)
	job := runJob(t, "guilty", nodes[:4]...)
	job.suspects(now.Now(), 2)
	isSuspected(t, "guilty-2", "Job "+users+"/guilty link 87%")
	hasEvent(t, "guilty-2", "EvenkeelNodeSuspected")
	plugin(t, kubeconfig(t), cli.ExitPass, "check why guilty-2", "suspected by Job "+users+"/guilty since", "4 of 4 ranks wait; the job runs, and when it has ended a check decides")
	// The rank on the node ends first: the job runs on.
	job.is(2, corev1.PodSucceeded)
	job.is(0, corev1.PodSucceeded)
	job.is(1, corev1.PodFailed)
	now.advance(time.Minute)
	touch(t, p, "a minute later")
	waitPolicy(t, p, "the policy was looked at", func() bool { return p.Status.RunningCheck == "" })
	if got, err := suspicionsOf(t.Context(), "guilty-2"); err != nil || strings.Contains(got, "ended") {
		t.Errorf("a pod of the job runs, and the suspicion is %q, %v", got, err)
	}
	if names := suspicionChecks(t, p); len(names) > 0 {
		t.Errorf("a pod of the job runs, and %v was made", names)
	}
	carries(t, "guilty-2", "True Proven|healthy|")
	job.is(3, corev1.PodSucceeded)
	carries(t, "guilty-2", "False TooSlow|unhealthy|")
	isSuspected(t, "guilty-2", "")
	if names := suspicionChecks(t, p); len(names) != 1 {
		t.Errorf("the checks are %v", names)
	}
	for _, name := range []string{"guilty-0", "guilty-1", "guilty-3", "guilty-4"} {
		carries(t, name, "True Proven|healthy|")
	}
}

// A node that passes is cleared. While it is suspected it counts as unproven, where the policy says so.
func TestSuspicionIsClearedByAPass(t *testing.T) {
	f := newFleet(t, links(nil))
	nodes := newNodes(t, "cleared", 4)
	now := &clock{}
	stop := start(t, f, now, now)
	p := newPolicy(t, "cleared", func(s *evenkeel.NetworkCheckPolicySpec) { s.OnSuspicion.Avoid = evenkeel.SwitchEnabled })
	for _, name := range nodes {
		carries(t, name, "True Proven|healthy|")
	}
	waitPolicy(t, p, "no check runs", func() bool { return p.Status.RunningCheck == "" })
	job := runJob(t, "cleared", nodes...)
	job.suspects(now.Now(), 1)
	carries(t, "cleared-1", "Unknown Suspected||")
	// The job takes it back, and says it again.
	job.suspects(now.Now(), -1)
	isSuspected(t, "cleared-1", "Job "+users+"/cleared link 87% withdrawn")
	carries(t, "cleared-1", "True Proven|healthy|")
	job.suspects(now.Now(), 1)
	carries(t, "cleared-1", "Unknown Suspected||")
	// Another controller takes over, and does not hear of the job's end from the pods.
	stop()
	for i := range nodes {
		job.is(i, corev1.PodSucceeded)
	}
	start(t, f, now, now)
	hasEvent(t, "cleared-1", "EvenkeelSuspicionCleared")
	isSuspected(t, "cleared-1", "")
	carries(t, "cleared-1", "True Proven|healthy|")
	if names := suspicionChecks(t, p); len(names) != 1 {
		t.Errorf("the checks are %v", names)
	}
}

// A suspicion lasts as long as its job. What is asked of the API server meanwhile, it answers from its memory.
func TestSuspicionIsWatchedFromMemory(t *testing.T) {
	asked := recordReads(t)
	f := newFleet(t, links(nil))
	nodes := newNodes(t, "memory", 4)
	now := &clock{}
	start(t, f, now, now)
	newPolicy(t, "memory", nil)
	for _, name := range nodes {
		carries(t, name, "True Proven|healthy|")
	}
	job := runJob(t, "memory", nodes...)
	job.suspects(now.Now(), 1)
	isSuspected(t, "memory-1", "Job "+users+"/memory link 87%")
	var lists []*url.URL
	eventually(t, "the pods of the node are looked at again and again", func(context.Context) (bool, error) {
		lists = asked.of(func(u *url.URL) bool {
			return u.Path == "/api/v1/namespaces/"+users+"/pods" && strings.Contains(u.Query().Get("fieldSelector"), "spec.nodeName=memory-1")
		})
		return len(lists) >= 3, nil
	})
	for _, u := range lists {
		if u.Query().Get("resourceVersion") != "0" || u.Query().Has("limit") {
			t.Errorf("etcd is asked: %s", u.RawQuery)
		}
	}
}
