package networkcheck

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/log"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/kube/statusapply"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/jobs"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// Limits of a status. The API server enforces them.
const (
	maxFindings = 64
	maxFabrics  = 16
	maxPools    = 8
	maxNetworks = 8
	maxMessage  = 300 // with it, the largest status has less than 64 KiB, without failedNodes
	maxSummary  = 1024
	maxBadNodes = 512
	// maxFailedNodes is the schema's limit of status.failedNodes.
	maxFailedNodes = 1000
	reasonEnded    = "Ended"
	reasonRunning  = "Running"
	// reasonNotWritten: the report could not be written, such as for want of quota.
	reasonNotWritten = "ReportNotWritten"
	progressStep     = 10 // percent; limits the number of status writes
)

// Quantity converts a bandwidth: whole megabytes per second, in the largest unit without a loss.
func Quantity(gigabytes float64) *resource.Quantity {
	if !(gigabytes > 0) || gigabytes > 1e9 {
		return nil
	}
	mega := int64(math.Round(gigabytes * 1e3))
	if mega == 0 {
		return resource.NewQuantity(int64(gigabytes*1e9), resource.DecimalSI)
	}
	return resource.NewScaledQuantity(mega, resource.Mega)
}

// updateProgress writes the progress of a check to its status.
func (c *Reconciler) updateProgress(ctx context.Context, check jobs.Check, record *preflight.Record, d preflight.Decision) error {
	status := check.Object.Status.DeepCopy()
	started, nodes := metav1.NewTime(record.Started), int32(len(record.Nodes))
	status.StartTime, status.Launcher, status.Runner, status.ReportName, status.Summary.Nodes = &started, record.Launcher, check.Options.Runner.Type, check.ReportName(), &nodes
	round := ""
	status.Round = nil
	if d.Stage == evenkeel.StagePairs {
		status.Round = ptr.To(int32(d.Round))
		round = fmt.Sprintf(" round %d", d.Round)
	}
	done := d.Total - len(d.Pending)
	progress := fmt.Sprintf("%s%s: %d%% of %d runs", d.Stage, round, 100*done/max(1, d.Total)/progressStep*progressStep, d.Total)
	if progress != status.Progress {
		status.Progress, status.Stage, status.Runs, status.RunsDone = progress, d.Stage, ptr.To(int32(d.Total)), ptr.To(int32(done))
	}
	status.ObservedGeneration = check.Object.Generation
	setCondition(status, check.Object, evenkeel.ConditionComplete, metav1.ConditionFalse, reasonRunning, status.Progress, c.Clock.Now())
	return statusapply.Apply(ctx, c.client, fieldOwner, check.Object, &check.Object.Status, status)
}

// endProgress leaves nothing in the status that only a running check has.
func endProgress(status *evenkeel.NetworkCheckStatus, object *evenkeel.NetworkCheck) {
	status.Progress, status.Stage, status.Round, status.Runs, status.RunsDone = "ended", "", nil, nil, nil
	status.ObservedGeneration = object.Generation
}

// setNotRunnable ends a check that cannot be run, with an inconclusive verdict.
func (c *Reconciler) setNotRunnable(ctx context.Context, object *evenkeel.NetworkCheck, reason, message string) error {
	status := object.Status.DeepCopy()
	now := metav1.NewTime(c.Clock.Now().Truncate(time.Second))
	endProgress(status, object)
	status.Verdict, status.Message, status.CompletionTime = evenkeel.VerdictInconclusive, text.Clip(message, maxSummary), &now
	setCondition(status, object, evenkeel.ConditionComplete, metav1.ConditionTrue, reason, message, c.Clock.Now())
	setCondition(status, object, evenkeel.ConditionPassed, metav1.ConditionUnknown, reason, message, c.Clock.Now())
	return c.setFinalStatus(ctx, object, status)
}

func setCondition(status *evenkeel.NetworkCheckStatus, object *evenkeel.NetworkCheck, kind string, value metav1.ConditionStatus, reason, message string, now time.Time) {
	condition := metav1.Condition{Type: kind, Status: value, Reason: reason, Message: text.Clip(message, maxSummary), ObservedGeneration: object.Generation}
	if !meta.IsStatusConditionPresentAndEqual(status.Conditions, kind, value) {
		condition.LastTransitionTime = metav1.NewTime(now.Truncate(time.Second))
	}
	meta.SetStatusCondition(&status.Conditions, condition)
}

// finalStatus returns the status of a check that has ended.
func finalStatus(object *evenkeel.NetworkCheck, record *preflight.Record, d preflight.Decision) *evenkeel.NetworkCheckStatus {
	status := object.Status.DeepCopy()
	now := record.Finished
	started, ended := metav1.NewTime(record.Started), metav1.NewTime(now)
	endProgress(status, object)
	runner := object.Spec.Runner
	record.SetRunner(&runner)
	status.StartTime, status.CompletionTime, status.Launcher, status.Runner = &started, &ended, record.Launcher, runner.Type
	status.Verdict = d.Verdict

	nodes := slices.Clone(d.Nodes)
	slices.SortStableFunc(nodes, func(a, b preflight.NodeResult) int {
		return evenkeel.WorstFirst(a.Verdict, b.Verdict)
	})
	counts := map[evenkeel.Verdict]int32{}
	var failed []string
	status.Findings = nil
	for _, n := range nodes {
		counts[n.Verdict]++
		if n.Verdict == evenkeel.VerdictFail {
			failed = append(failed, n.Name)
		}
		if n.Verdict != evenkeel.VerdictPass && len(status.Findings) < maxFindings {
			status.Findings = append(status.Findings, evenkeel.NodeFinding{
				Name: n.Name, Verdict: n.Verdict, Stage: n.Stage, Reason: n.Reason, Message: text.Clip(n.Message, maxMessage), BusBandwidth: Quantity(n.BusBW),
			})
		}
	}
	total, runs := int32(len(nodes)), int32(len(record.Runs))
	passed, bad, unclear := counts[evenkeel.VerdictPass], counts[evenkeel.VerdictFail], counts[evenkeel.VerdictInconclusive]
	status.Summary = evenkeel.CheckSummary{Nodes: &total, Passed: &passed, Failed: &bad, Inconclusive: &unclear, Runs: &runs, MedianBusBandwidth: Quantity(d.Median)}
	status.BadNodes = text.List(failed, maxBadNodes)
	status.FailedNodes = slices.Sorted(slices.Values(failed))
	status.FailedNodes = status.FailedNodes[:min(len(failed), maxFailedNodes)]

	fabrics := slices.Clone(d.Fabrics)
	slices.SortStableFunc(fabrics, func(a, b preflight.FabricResult) int { return evenkeel.WorstFirst(a.Verdict, b.Verdict) })
	status.Fabrics = nil
	for _, f := range fabrics[:min(len(fabrics), maxFabrics)] {
		pools := slices.Clone(f.Pools)
		status.Fabrics = append(status.Fabrics, evenkeel.FabricFinding{
			Pools: pools[:min(len(pools), maxPools)], Verdict: f.Verdict, Reason: f.Reason, Message: text.Clip(f.Message, maxMessage), MinBusBandwidth: Quantity(f.MinBusBW),
		})
	}
	status.Networks = nil
	for _, n := range record.Networks[:min(len(record.Networks), maxNetworks)] {
		loaded := evenkeel.LoadedNetwork{Name: text.Clip(n.Name, 64), SHA256: text.Clip(n.SHA256, 64), Transport: text.Clip(n.Transport, 16)}
		if n.Version > 0 {
			api := int32(n.Version)
			loaded.API = &api
		}
		status.Networks = append(status.Networks, loaded)
	}
	status.Message = text.Clip(summaryMessage(d, failed, fabrics), maxSummary)
	value := map[evenkeel.Verdict]metav1.ConditionStatus{evenkeel.VerdictPass: metav1.ConditionTrue, evenkeel.VerdictFail: metav1.ConditionFalse, evenkeel.VerdictInconclusive: metav1.ConditionUnknown}[d.Verdict]
	reason := string(d.Verdict)
	if len(status.Findings) > 0 {
		reason = status.Findings[0].Reason
	}
	if len(status.Fabrics) > 0 && status.Fabrics[0].Verdict == evenkeel.VerdictFail {
		reason = status.Fabrics[0].Reason
	}
	setCondition(status, object, evenkeel.ConditionComplete, metav1.ConditionTrue, reasonEnded, status.Message, now)
	setCondition(status, object, evenkeel.ConditionPassed, value, reason, status.Message, now)
	return status
}

// summaryMessage says in one line whether the fabric passed, and which nodes did not.
func summaryMessage(d preflight.Decision, failed []string, fabrics []preflight.FabricResult) string {
	var parts []string
	for _, f := range fabrics {
		if f.Verdict == evenkeel.VerdictFail {
			parts = append(parts, joinReason("the fabric"+inPools(f.Pools)+" failed", f.Message))
		}
	}
	if len(failed) > 0 {
		at := slices.IndexFunc(d.Nodes, func(n preflight.NodeResult) bool { return n.Name == failed[0] })
		first := &d.Nodes[at]
		parts = append(parts, fmt.Sprintf("%d of %d nodes failed: %s; %s: %s", len(failed), len(d.Nodes), text.List(failed, 200), first.Name, first.Message))
	}
	unclear, example := 0, preflight.NodeResult{}
	for _, n := range d.Nodes {
		if n.Verdict == evenkeel.VerdictInconclusive {
			if unclear == 0 {
				example = n
			}
			unclear++
		}
	}
	if unclear > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d nodes are inconclusive, such as %s: %s", unclear, len(d.Nodes), example.Name, example.Message))
	}
	if len(parts) == 0 {
		return fmt.Sprintf("all %d nodes passed", len(d.Nodes))
	}
	return strings.Join(parts, "; ")
}

func inPools(pools []string) string {
	pools = slices.DeleteFunc(slices.Clone(pools), func(p string) bool { return p == "" })
	if len(pools) == 0 {
		return ""
	}
	return " of " + text.List(pools, 100)
}

// Reasons of the Events on a check.
const eventStarted = "EvenkeelCheckStarted"

var eventEnded = map[evenkeel.Verdict]string{
	evenkeel.VerdictPass: "EvenkeelCheckPassed", evenkeel.VerdictFail: "EvenkeelCheckFailed", evenkeel.VerdictInconclusive: "EvenkeelCheckInconclusive",
}

// setFinalStatus writes the status of a check that has ended, and records an Event.
func (c *Reconciler) setFinalStatus(ctx context.Context, object *evenkeel.NetworkCheck, status *evenkeel.NetworkCheckStatus) error {
	if err := statusapply.Apply(ctx, c.client, fieldOwner, object, &object.Status, status); err != nil {
		return err
	}
	var took time.Duration
	if status.StartTime != nil {
		took = status.CompletionTime.Sub(status.StartTime.Time)
	}
	metrics.CheckEnded(status.Verdict, took)
	severity := corev1.EventTypeWarning
	if status.Verdict == evenkeel.VerdictPass {
		severity = corev1.EventTypeNormal
	}
	c.recordEvent(ctx, object, severity, eventEnded[status.Verdict], status.Message)
	return nil
}

// recordEvent writes an Event on the check. A failure is only logged: the status has the same information.
func (c *Reconciler) recordEvent(ctx context.Context, object *evenkeel.NetworkCheck, severity, reason, message string) {
	about := corev1.ObjectReference{APIVersion: evenkeel.GroupVersion.String(), Kind: "NetworkCheck", Namespace: object.Namespace, Name: object.Name, UID: object.UID}
	if err := events.Write(ctx, c.client, events.New(about, severity, reason, message, c.Clock.Now())); err != nil {
		log.FromContext(ctx).Info("cannot write an Event", "reason", err.Error())
	}
}
