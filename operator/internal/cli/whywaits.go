package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
	"evenkeel.dev/evenkeel/operator/internal/nodeuse"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// maxWaits is the maximum number of reasons printed: a job may have a thousand pods.
const maxWaits = 10

// waitReasons says what prevents the job or its pods from running.
func waitReasons(ctx context.Context, cluster client.Client, job *unstructured.Unstructured, pods []corev1.Pod, now time.Time) ([]string, error) {
	waits, err := suspendReasons(ctx, cluster, job, now)
	if err != nil {
		return nil, err
	}
	gated, err := gateReasons(ctx, cluster, job.GetNamespace(), gatedPods(pods), now)
	if err != nil {
		return nil, err
	}
	waits = append(waits, gated...)
	for i := range pods {
		pod := &pods[i]
		for _, g := range pod.Spec.SchedulingGates {
			if g.Name != evenkeel.SchedulingGate {
				waits = append(waits, fmt.Sprintf("pod %s has the scheduling gate %s", pod.Name, g.Name))
			}
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
				text := fmt.Sprintf("pod %s fits on no node: %s", pod.Name, strings.TrimSuffix(c.Message, "."))
				if len(waits) < maxWaits { // each is a request
					coming, err := nodeOnItsWay(ctx, cluster, pod, now)
					if err != nil {
						return nil, err
					}
					text = strings.TrimSuffix(text+"; "+coming, "; ")
				}
				waits = append(waits, text)
			}
		}
	}
	if more := len(waits) - maxWaits; more > 0 {
		waits = append(waits[:maxWaits], fmt.Sprintf("and %d more", more))
	}
	return waits, nil
}

// gateReasons says of the pods with Evenkeel's scheduling gate since when they have it, what opens it, and until when they wait.
func gateReasons(ctx context.Context, cluster client.Client, namespace string, pods []*corev1.Pod, now time.Time) ([]string, error) {
	if len(pods) == 0 {
		return nil, nil
	}
	mine := map[types.UID]bool{}
	for _, pod := range pods {
		mine[pod.UID] = true
	}
	// They start with others of the same job, which may not be asked about.
	var list corev1.PodList
	if err := cluster.List(ctx, &list, client.InNamespace(namespace), client.HasLabels{evenkeel.GatedKey}); err != nil {
		return nil, fmt.Errorf("list gated pods: %w", err)
	}
	for _, pod := range gatedPods(list.Items) {
		if !mine[pod.UID] {
			pods = append(pods, pod)
		}
	}
	var reasons []string
	for _, gang := range jobgate.Gangs(pods) {
		asked := 0
		for _, pod := range gang.Pods {
			if mine[pod.UID] {
				asked++
			}
		}
		if asked == 0 {
			continue
		}
		if len(reasons) == maxWaits { // each is a decision over all nodes
			return append(reasons, "and more, of other owners"), nil
		}
		job := jobgate.FromPods(gang.Pods)
		text := fmt.Sprintf("%d of its pods have the scheduling gate %s since %s", asked, evenkeel.SchedulingGate, formatTime(job.Since, now))
		if others := len(gang.Pods) - asked; others > 0 {
			text += fmt.Sprintf(", with %d others of %s %s", others, gang.Job.Kind, gang.Job.Name)
		}
		until, err := gateStatus(ctx, cluster, job, now)
		switch {
		case apierrors.IsForbidden(err):
			until = fmt.Sprintf("you may not read what opens it: %v", err)
		case err != nil:
			return nil, err
		default:
			how, err := openNow(ctx, cluster, job.Profile, gang.Pods[0])
			if err != nil {
				return nil, err
			}
			until += how
		}
		reasons = append(reasons, text+": "+until)
	}
	return reasons, nil
}

// openNow says how to open the gate of the pod and the others of its job at once.
func openNow(ctx context.Context, cluster client.Client, profile string, pod *corev1.Pod) (string, error) {
	var policies evenkeel.NetworkCheckPolicyList
	if err := cluster.List(ctx, &policies); err != nil {
		return "", fmt.Errorf("list NetworkCheckPolicies: %w", err)
	}
	if mandatory := gate.Mandatory(policies.Items, profile); mandatory != nil {
		return fmt.Sprintf(". NetworkCheckPolicy %s makes the gate mandatory", mandatory.Name), nil
	}
	return fmt.Sprintf(". To start without waiting: kubectl annotate pod %s -n %s %s=%s", pod.Name, pod.Namespace, evenkeel.GateKey, evenkeel.GateDisabled), nil
}

// suspendReasons says who suspended the job, and until when. It returns nothing for a job that is not suspended.
func suspendReasons(ctx context.Context, cluster client.Client, job *unstructured.Unstructured, now time.Time) ([]string, error) {
	suspended, _ := workload.Suspended(job)
	switch {
	case !suspended:
		return nil, nil
	case workload.Queued(job):
		return kueueReasons(ctx, cluster, job)
	case job.GetLabels()[evenkeel.GatedKey] == "":
		return []string{"it is suspended, but not by Evenkeel: to start it, set its suspend to false"}, nil
	}
	gated, err := jobgate.FromJob(job)
	if err != nil {
		return nil, err
	}
	until, err := gateStatus(ctx, cluster, gated, now)
	if err != nil {
		return nil, err
	}
	return []string{"Evenkeel suspended it: " + until}, nil
}

// gateStatus says what a gated job waits for, by the decision that the controller makes.
func gateStatus(ctx context.Context, cluster client.Client, job gate.Job, now time.Time) (string, error) {
	use, err := nodeuse.Read(ctx, cluster, "") // in all namespaces: the one of the checks is not known here
	if err != nil {
		return "", err
	}
	snapshot, err := jobgate.NewSnapshot(ctx, cluster, "", use, now)
	if err != nil {
		return "", err
	}
	d := snapshot.Decide(job)
	switch {
	case !d.Waits():
		return "it is about to start: " + d.Message, nil
	case d.Until.IsZero():
		return d.Message + "; its policy lets it wait without a limit", nil
	}
	return fmt.Sprintf("%s; it starts in any case at %s (in %s)", d.Message, d.Until.UTC().Format("15:04:05 UTC"), duration.HumanDuration(d.Until.Sub(now))), nil
}
