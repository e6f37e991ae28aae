package pluginreports

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"evenkeel.dev/evenkeel/operator/internal/pluginstatus"
)

// Reasons of the Events.
const (
	ReasonPluginFailed      = "EvenkeelPluginFailed"
	ReasonPluginNotReported = "EvenkeelPluginNotReported"
	ReasonPluginVersions    = "EvenkeelPluginVersionsDiffer"
)

const (
	// maxNamed is the maximum number of pods named in an Event.
	maxNamed = 5
	// maxVersions is the maximum number of versions named in an Event.
	maxVersions = 3
)

// Times are how long pods may take to report. Processes of a job start NCCL together, but when they do depends on the
// program.
type Times struct {
	// AfterOthers is for pods of a job of which others have reported.
	AfterOthers time.Duration
	// First is for the first one of a job, from the start of its containers.
	First time.Duration
	// Quiet is how long no pod has reported before failures and versions are told, all in one Event.
	Quiet time.Duration
}

// DefaultTimes are the controller's times.
var DefaultTimes = Times{AfterOthers: 5 * time.Minute, First: 30 * time.Minute, Quiet: 10 * time.Second}

// findings are what is known of the pods of a job.
type findings struct {
	// again is when to look again; zero: now is the time to tell.
	again time.Time
	// reported is the number of pods whose plugin has reported, and expected the number of pods whose plugin may report.
	reported, expected int
	failed             []metav1.PartialObjectMetadata
	silent             []metav1.PartialObjectMetadata
	// grace is how long silent pods may run.
	grace time.Duration
	// versions are the versions of the plugin that pods have reported.
	versions []version
}

// A version of the plugin, with the number of pods that have it and the name of one.
type version struct {
	text    string
	pods    int
	example string
}

// decide sorts the pods of a job by what the plugin in them has said.
func decide(pods []metav1.PartialObjectMetadata, times Times, now time.Time) findings {
	f := findings{grace: times.First}
	var first, last time.Time
	slices.SortFunc(pods, func(a, b metav1.PartialObjectMetadata) int { return strings.Compare(a.Name, b.Name) })
	oldest := now
	for _, pod := range pods {
		s, expected := pluginstatus.Of(&pod)
		if !expected || pod.DeletionTimestamp != nil {
			continue
		}
		f.expected++
		if pod.CreationTimestamp.Time.Before(oldest) {
			oldest = pod.CreationTimestamp.Time
		}
		switch s.Outcome {
		case pluginstatus.NotReported:
			f.silent = append(f.silent, pod)
			continue
		case pluginstatus.Failed:
			f.failed = append(f.failed, pod)
		case pluginstatus.Loaded:
			f.addVersion(s.Version(), pod.Name)
		}
		f.reported++
		if first.IsZero() || s.At.Before(first) {
			first = s.At
		}
		if s.At.After(last) {
			last = s.At
		}
	}
	due := oldest.Add(times.First)
	if f.reported > 0 {
		f.grace = times.AfterOthers
		due = first.Add(times.AfterOthers)
	}
	switch {
	case (len(f.failed) > 0 || len(f.versions) > 1) && now.Before(last.Add(times.Quiet)):
		f.again = last.Add(times.Quiet)
	case len(f.failed) == 0 && len(f.silent) > 0 && now.Before(due):
		f.again = due
	}
	if now.Before(due) {
		f.silent = nil // not yet
	}
	return f
}

// addVersion counts a pod. More versions than are told are not kept.
func (f *findings) addVersion(text, pod string) {
	at := slices.IndexFunc(f.versions, func(v version) bool { return v.text == text })
	switch {
	case text == "":
	case at >= 0:
		f.versions[at].pods++
	case len(f.versions) < maxVersions:
		f.versions = append(f.versions, version{text, 1, pod})
	}
}

// describe returns the Event of the job; no message: there is nothing to tell. Missing are the silent pods that should
// have reported by now.
func (f findings) describe(missing []string) (reason, severity, message string) {
	var parts []string
	if len(f.failed) > 0 {
		reason, severity = ReasonPluginFailed, corev1.EventTypeWarning
		var names []string
		for _, pod := range f.failed {
			names = append(names, pod.Name)
		}
		s, _ := pluginstatus.Of(&f.failed[0])
		parts = append(parts, fmt.Sprintf("%d of %d pods run without the plugin, which refused to start: %s (%s: %s)", len(f.failed), f.expected, named(names), names[0], s.Text))
	}
	if len(f.versions) > 1 {
		if reason == "" {
			reason, severity = ReasonPluginVersions, corev1.EventTypeWarning
		}
		var known []string
		for _, v := range f.versions {
			known = append(known, fmt.Sprintf("%s in %d pods, such as %s", v.text, v.pods, v.example))
		}
		parts = append(parts, "different versions of the plugin run, and those of different protocols refuse each other: "+strings.Join(known, "; ")+". Give all pods of the job one image or one profile")
	}
	if len(missing) > 0 {
		if reason == "" {
			reason, severity = ReasonPluginNotReported, corev1.EventTypeWarning
		}
		why := "NCCL did not load it there, or did not start"
		if f.reported == 0 {
			why = "NCCL has not loaded it or has not started, or a NetworkPolicy keeps the reports from Evenkeel's controller, or the network changes their address (metric evenkeel_reports_total)"
			severity = corev1.EventTypeNormal
		}
		rest := ""
		if unread := len(f.silent) - maxRead; unread > 0 {
			rest = fmt.Sprintf(" (and up to %d more)", unread)
		}
		parts = append(parts, fmt.Sprintf("%d of %d pods have reported the plugin, but not %s%s: %s. NCCL_DEBUG=INFO says what NCCL uses, and kubectl evenkeel why whether a ConfigMap names another network", f.reported, f.expected, named(missing), rest, why))
	}
	return reason, severity, strings.Join(parts, "; ")
}

// named lists some of the names.
func named(names []string) string {
	text := strings.Join(names[:min(len(names), maxNamed)], ", ")
	if more := len(names) - maxNamed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}
