package networkprofile

import (
	"fmt"
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
)

// Reasons of the condition Tuner.
const (
	ReasonMeasured       = "Measured"
	ReasonTooFewMeasured = "TooFewMeasured"
)

const (
	// minMeasuredNodes is the smallest number of nodes that are a network.
	minMeasuredNodes = 2
	// maxMbps is what the plugin accepts at most.
	maxMbps = 10_000_000
)

// observeTuner sets the bandwidth and latency that new jobs get, by the rules of [evenkeel.TunerSpec]. Healths are by node.
func observeTuner(profile *evenkeel.NetworkProfile, nodes []*corev1.Node, healths map[string]*evenkeel.NodeNetworkHealthStatus, status *evenkeel.NetworkProfileStatus) {
	if profile.Spec.Tuner.Source != evenkeel.TunerPreflight {
		meta.RemoveStatusCondition(&status.Conditions, evenkeel.ConditionTuner)
		return
	}
	nodes = usableNodes(nodes)
	var bandwidths, latencies []float64
	var unproven, unmeasured, several int
	for _, node := range nodes {
		health := healths[node.Name]
		switch {
		case health == nil || health.Health != evenkeel.HealthHealthy || node.Labels[evenkeel.HealthKey] != evenkeel.HealthyValue:
			unproven++
		case health.Measured.ProfileName != profile.Name || health.BusBandwidth == nil || health.Measured.LatencyMicroseconds == nil:
			unmeasured++
		case health.Measured.Devices != nil && *health.Measured.Devices > 1:
			several++
		default:
			bandwidths = append(bandwidths, health.BusBandwidth.AsApproximateFloat64()*8/1e6)
			latencies = append(latencies, float64(*health.Measured.LatencyMicroseconds))
		}
	}
	value, reason, message := metav1.ConditionFalse, ReasonTooFewMeasured, ""
	if need := max(minMeasuredNodes, (len(nodes)+1)/2); len(bandwidths) < need {
		message = fmt.Sprintf("%d of %d nodes count, and %d have to: %d are not proven, the latest pass of %d measured no latency with this profile, and %d have several network devices, of which a check measures one; jobs leave the choice to NCCL",
			len(bandwidths), len(nodes), need, unproven, unmeasured, several)
	} else {
		status.Tuner = evenkeel.TunerStatus{BandwidthMbps: whole(lowerQuartile(bandwidths), maxMbps), LatencyMicroseconds: whole(pairing.Median(latencies), 1_000_000)}
		if given := profile.Status.Tuner; near(given.BandwidthMbps, status.Tuner.BandwidthMbps) && near(given.LatencyMicroseconds, status.Tuner.LatencyMicroseconds) {
			status.Tuner = given
		}
		value, reason = metav1.ConditionTrue, ReasonMeasured
		message = fmt.Sprintf("jobs get %d Mb/s and %d us, measured on %d of %d nodes", *status.Tuner.BandwidthMbps, *status.Tuner.LatencyMicroseconds, len(bandwidths), len(nodes))
	}
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: evenkeel.ConditionTuner, Status: value, Reason: reason, Message: message, ObservedGeneration: profile.Generation,
	})
}

// lowerQuartile is one of the values, the least of up to four.
func lowerQuartile(values []float64) float64 {
	return slices.Sorted(slices.Values(values))[(len(values)-1)/4]
}

// whole rounds to a number from 1 to most.
func whole(value, most float64) *int32 {
	rounded := int32(max(1, min(most, math.Round(value))))
	return &rounded
}

// near reports whether a value is within a fifth of the one that jobs get.
func near(given, value *int32) bool {
	return given != nil && 5*math.Abs(float64(*value)-float64(*given)) <= float64(*given)
}
