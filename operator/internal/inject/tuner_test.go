package inject

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func TestAddTuner(t *testing.T) {
	job, mpi := schema.GroupKind{Group: "batch", Kind: "Job"}, schema.GroupKind{Group: "kubeflow.org", Kind: "MPIJob"}
	set := func(name, value string) func(*evenkeel.NetworkProfile) {
		return func(p *evenkeel.NetworkProfile) {
			p.Spec.Environment = append(p.Spec.Environment, evenkeel.EnvironmentVariable{Name: name, Value: value})
		}
	}
	for _, test := range []struct {
		name               string
		kind               schema.GroupKind
		change             func(*evenkeel.NetworkProfile)
		bandwidth, latency string
		unset              string
	}{
		{"measured", job, nil, "9400", "30", ""},
		{"not wanted", job, func(p *evenkeel.NetworkProfile) { p.Spec.Tuner.Source = evenkeel.TunerNone }, "", "", ""},
		{"its own bandwidth", job, set(TunerBandwidthEnv, "100"), "100", "30", ""},
		{"both of its own", mpi, func(p *evenkeel.NetworkProfile) { set(TunerBandwidthEnv, "100")(p); set(TunerLatencyEnv, "5")(p) }, "100", "5", ""},
		{"too few nodes", job, func(p *evenkeel.NetworkProfile) {
			p.Status.Tuner = evenkeel.TunerStatus{}
			p.Status.Conditions = []metav1.Condition{{Type: evenkeel.ConditionTuner, Status: metav1.ConditionFalse, Message: "1 of 8 nodes count"}}
		}, "", "", "1 of 8 nodes count"},
		{"another specification", job, func(p *evenkeel.NetworkProfile) { p.Generation++ }, "", "", "not been observed yet"},
		{"over ssh", mpi, nil, "", "", "mpirun"},
	} {
		t.Run(test.name, func(t *testing.T) {
			bandwidth, latency := int32(9400), int32(30)
			p := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
			p.Spec.Plugin.Image, p.Spec.Tuner.Source = image, evenkeel.TunerPreflight
			p.Status.Tuner = evenkeel.TunerStatus{BandwidthMbps: &bandwidth, LatencyMicroseconds: &latency}
			if test.change != nil {
				test.change(p)
			}
			r := Resolve(p, "")
			if got := r.Environment[TunerBandwidthEnv]; got == "9400" {
				t.Error("checks get what was measured before")
			}
			r.AddTuner(p, test.kind)
			if r.Environment[TunerBandwidthEnv] != test.bandwidth || r.Environment[TunerLatencyEnv] != test.latency {
				t.Errorf("%v", r.Environment)
			}
			if (r.TunerUnset == "") != (test.unset == "") || !strings.Contains(r.TunerUnset, test.unset) {
				t.Errorf("unset: %q, want %q", r.TunerUnset, test.unset)
			}
			again, err := FromPod(r.Labels(), r.Annotations())
			if err != nil || again.TunerUnset != r.TunerUnset {
				t.Errorf("%q, %v", again.TunerUnset, err)
			}
		})
	}
}
