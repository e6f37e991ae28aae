package inject

import (
	"strconv"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// Variables of the plugin's tuner.
const (
	TunerBandwidthEnv = "EVENKEEL_TUNER_BANDWIDTH"
	TunerLatencyEnv   = "EVENKEEL_TUNER_LATENCY"
)

// AddTuner gives a new job of the kind what checks measured, where its profile wants that; see [evenkeel.TunerSpec]. Variables that the
// profile sets stay. Where the job gets nothing, TunerUnset says why.
func (r *Resolved) AddTuner(profile *evenkeel.NetworkProfile, kind schema.GroupKind) {
	if !r.wantsTuner(profile) {
		return
	}
	measured := profile.Status.Tuner
	switch {
	case kind == schema.GroupKind{Group: "kubeflow.org", Kind: "MPIJob"}:
		r.TunerUnset = "processes that mpirun starts over ssh lack the variables of their pods: have mpirun pass " + TunerBandwidthEnv + " and " + TunerLatencyEnv
	case profile.Status.ObservedGeneration != profile.Generation:
		r.TunerUnset = "the profile's nodes have not been observed yet"
	case measured.BandwidthMbps == nil || measured.LatencyMicroseconds == nil:
		r.TunerUnset = "the profile's nodes have not been observed yet"
		if c := meta.FindStatusCondition(profile.Status.Conditions, evenkeel.ConditionTuner); c != nil && c.Status != metav1.ConditionTrue {
			r.TunerUnset = c.Message
		}
	default:
		r.setDefault(TunerBandwidthEnv, *measured.BandwidthMbps)
		r.setDefault(TunerLatencyEnv, *measured.LatencyMicroseconds)
	}
}

// OmitTuner says why pods that ask for the profile themselves do not get what checks measured.
func (r *Resolved) OmitTuner(profile *evenkeel.NetworkProfile) {
	if r.wantsTuner(profile) {
		r.TunerUnset = "pods that ask for the profile themselves have no job to keep the values: set " + TunerBandwidthEnv + " and " + TunerLatencyEnv + " in spec.environment"
	}
}

// wantsTuner reports whether something of what checks measured is wanted.
func (r *Resolved) wantsTuner(profile *evenkeel.NetworkProfile) bool {
	return profile.Spec.Tuner.Source == evenkeel.TunerPreflight && (r.Environment[TunerBandwidthEnv] == "" || r.Environment[TunerLatencyEnv] == "")
}

func (r *Resolved) setDefault(name string, value int32) {
	if _, set := r.Environment[name]; !set {
		r.Environment[name] = strconv.Itoa(int(value))
	}
}
