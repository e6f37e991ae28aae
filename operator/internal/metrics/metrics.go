// Package metrics defines the Prometheus metrics of the control plane: counters, which controllers and webhooks increment, and
// collectors, which read the state of nodes, policies and the webhook's certificate when they are scraped. Every series is bounded:
// labels have no names that users choose, apart from nodes, pools and policies.
package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
)

// Results of webhooks and controllers for a pod or a job.
const (
	Injected     = "injected"
	Skipped      = "skipped"
	Refused      = "refused"
	NotInjected  = "not_injected"
	AvoidedNodes = "avoided_nodes"
	PluginLoaded = "plugin_loaded"
	PluginFailed = "plugin_failed"
	NotReported  = "not_reported"
)

// Results of a datagram that the plugin, or somebody in its name, sent to the controller.
const (
	ReportRecorded   = "recorded"
	ReportRepeated   = "repeated"
	ReportRefused    = "refused"
	ReportUnknown    = "unknown_pod"
	ReportUnreadable = "unreadable"
	ReportDropped    = "dropped"
	ReportFailed     = "failed"
)

// Results of sending an event to NVSentinel.
const (
	EventSent   = "sent"
	EventFailed = "failed"
)

var (
	checks = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_checks_total", Help: "NetworkChecks that have ended, by verdict.",
	}, []string{"verdict"})
	checkSeconds = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "evenkeel_check_duration_seconds", Help: "Duration of NetworkChecks, from the selection of the nodes to the verdict.",
		Buckets: []float64{5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200},
	})
	runs = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_check_runs_total", Help: "Runs of the benchmark that have ended, by stage and outcome.",
	}, []string{"stage", "outcome"})
	pods = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_pods_total", Help: "Pods of annotated jobs: injected; skipped, if something of the user's was left unchanged; refused; not_injected, if the webhook did not see them. Of those that report: plugin_loaded, if NCCL has started the plugin; plugin_failed, if the plugin refused to start; not_reported, if it said nothing in time.",
	}, []string{"result"})
	jobs = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_jobs_total", Help: "Annotated jobs: injected, if a profile was pinned to them; refused; skipped, if a controller made them and nothing was pinned; avoided_nodes, if their pods avoid nodes that failed a check.",
	}, []string{"result"})
	gatedJobs = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "evenkeel_gated_jobs", Help: "Jobs whose gate is closed, by the controller that opens it.",
	}, []string{"controller"})
	gatedSince = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "evenkeel_gated_job_oldest_timestamp_seconds", Help: "Time since which that one of them waits that has waited the longest; absent if none does.",
	}, []string{"controller"})
	suspected = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_suspects_total", Help: "What running jobs said that they wait for, by class: late, a process; link, a card of a node; path, what is between two nodes. Each is counted when it begins.",
	}, []string{"class"})
	decided = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_suspicions_decided_total", Help: "Suspicions of jobs about a node's network that a check decided after the job: Fail confirms one, Pass clears it.",
	}, []string{"verdict"})
	reports = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_reports_total", Help: "Datagrams of the plugin: recorded; repeated, if what they say is recorded or waits to be; refused, if they came from another address than the pod's; unknown_pod, if no injected pod has their UID; unreadable; dropped, if too many waited; failed, if the API server did not take one.",
	}, []string{"result"})
	sentinelEvents = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_nvsentinel_events_total", Help: "Health events for NVSentinel: sent, or failed, if its platform connector did not accept one. It is sent again.",
	}, []string{"result"})
)

func init() {
	metrics.Registry.MustRegister(checks, checkSeconds, runs, pods, jobs, gatedJobs, gatedSince, suspected, decided, reports, sentinelEvents)
	// A series that starts with its first event hides that event from rate().
	for _, v := range []evenkeel.Verdict{evenkeel.VerdictPass, evenkeel.VerdictFail, evenkeel.VerdictInconclusive} {
		checks.WithLabelValues(string(v))
	}
	for _, stage := range []evenkeel.Stage{evenkeel.StageLocal, evenkeel.StageRDMA, evenkeel.StagePairs, evenkeel.StageRails, evenkeel.StageGang} {
		for _, outcome := range []pairing.Outcome{pairing.Measured, pairing.Broken, pairing.Fault} {
			runs.WithLabelValues(string(stage), string(outcome))
		}
	}
	for _, result := range []string{Injected, Skipped, Refused, NotInjected, PluginLoaded, PluginFailed, NotReported} {
		pods.WithLabelValues(result)
	}
	for _, result := range []string{Injected, Refused, Skipped, AvoidedNodes} {
		jobs.WithLabelValues(result)
	}
	for _, class := range []evenkeel.SuspectClass{evenkeel.SuspectLate, evenkeel.SuspectLink, evenkeel.SuspectPath} {
		suspected.WithLabelValues(string(class))
	}
	for _, v := range []evenkeel.Verdict{evenkeel.VerdictPass, evenkeel.VerdictFail} {
		decided.WithLabelValues(string(v))
	}
	for _, result := range []string{ReportRecorded, ReportRepeated, ReportRefused, ReportUnknown, ReportUnreadable, ReportDropped, ReportFailed} {
		reports.WithLabelValues(result)
	}
	for _, result := range []string{EventSent, EventFailed} {
		sentinelEvents.WithLabelValues(result)
	}
}

// CheckEnded counts a check and its duration; 0 if it never ran.
func CheckEnded(v evenkeel.Verdict, took time.Duration) {
	checks.WithLabelValues(string(v)).Inc()
	if took > 0 {
		checkSeconds.Observe(took.Seconds())
	}
}

// RunEnded counts a run of the benchmark.
func RunEnded(stage evenkeel.Stage, outcome pairing.Outcome) {
	runs.WithLabelValues(string(stage), string(outcome)).Inc()
}

// Pod counts a pod: Injected, Skipped, Refused, NotInjected, PluginLoaded, PluginFailed or NotReported.
func Pod(result string) { pods.WithLabelValues(result).Inc() }

// Job counts a job: Injected, Refused, Skipped or AvoidedNodes.
func Job(result string) { jobs.WithLabelValues(result).Inc() }

// Suspected counts what a job has begun to wait for.
func Suspected(class evenkeel.SuspectClass) { suspected.WithLabelValues(string(class)).Inc() }

// SuspicionDecided counts a job's suspicion that a check has decided.
func SuspicionDecided(v evenkeel.Verdict) { decided.WithLabelValues(string(v)).Inc() }

// Report counts a datagram to the receiver of the plugin's reports: ReportRecorded, ReportRepeated, ReportRefused, ReportUnknown,
// ReportUnreadable, ReportDropped or ReportFailed.
func Report(result string) { reports.WithLabelValues(result).Inc() }

// NVSentinelEvent counts an event for NVSentinel: EventSent or EventFailed.
func NVSentinelEvent(result string) { sentinelEvents.WithLabelValues(result).Inc() }

// Gated records how many jobs wait at a gate that the controller opens, and since when the first of them does.
func Gated(controller string, count int, since time.Time) {
	gatedJobs.WithLabelValues(controller).Set(float64(count))
	if count == 0 {
		gatedSince.DeleteLabelValues(controller)
		return
	}
	gatedSince.WithLabelValues(controller).Set(float64(since.Unix()))
}
