package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// setMeasured writes the result of a check of the node, which passed so long ago.
func setMeasured(t *testing.T, name, profile string, megabytes int, latency int32, ago time.Duration) {
	t.Helper()
	node, state := &corev1.Node{}, &evenkeel.NodeNetworkHealth{}
	if err := admin.Get(t.Context(), client.ObjectKey{Name: name}, node); err != nil {
		t.Fatal(err)
	}
	switch err := admin.Get(t.Context(), client.ObjectKey{Name: name}, state); {
	case client.IgnoreNotFound(err) != nil:
		t.Fatal(err)
	case err != nil:
		state = &evenkeel.NodeNetworkHealth{ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: name, UID: node.UID}}}}
		if err := admin.Create(t.Context(), state); err != nil {
			t.Fatal(err)
		}
		remove(t, state)
	}
	bandwidth, at := resource.MustParse(fmt.Sprintf("%dM", megabytes)), metav1.NewTime(time.Now().Add(-ago).Truncate(time.Second))
	state.Status = evenkeel.NodeNetworkHealthStatus{Health: evenkeel.HealthHealthy, ObservedTime: &at, BusBandwidth: &bandwidth, Measured: evenkeel.MeasuredNetwork{ProfileName: profile, LatencyMicroseconds: &latency}}
	if err := admin.Status().Update(t.Context(), state); err != nil {
		t.Fatal(err)
	}
}

func tunerIs(bandwidth, latency int32, message string) func(*evenkeel.NetworkProfile) bool {
	return func(p *evenkeel.NetworkProfile) bool {
		c, got := meta.FindStatusCondition(p.Status.Conditions, evenkeel.ConditionTuner), p.Status.Tuner
		if c == nil || !strings.Contains(c.Message, message) {
			return false
		}
		if bandwidth == 0 {
			return got.BandwidthMbps == nil && got.LatencyMicroseconds == nil && c.Status == metav1.ConditionFalse
		}
		return got.BandwidthMbps != nil && *got.BandwidthMbps == bandwidth && got.LatencyMicroseconds != nil && *got.LatencyMicroseconds == latency && c.Status == metav1.ConditionTrue
	}
}

// webhookGives waits until the webhook has seen the profile's status: new jobs get the value then.
func webhookGives(t *testing.T, ns, profile, bandwidth string) {
	t.Helper()
	eventually(t, "new jobs get "+bandwidth, func(ctx context.Context) (bool, error) {
		job, _ := newJob("Job", ns, profile)
		job.SetName("probe")
		err := dryRun(ctx, job)
		return err == nil && strings.Contains(asJSON(t, job.Object), fmt.Sprintf(`EVENKEEL_TUNER_BANDWIDTH\":\"%s\"`, bandwidth)), err
	})
}

func tunerOf(pod *corev1.Pod) string {
	c := &pod.Spec.Containers[0]
	return variable(c, "EVENKEEL_TUNER_BANDWIDTH") + " " + variable(c, "EVENKEEL_TUNER_LATENCY")
}

func TestTunerGetsWhatChecksMeasured(t *testing.T) {
	_, pool, ns := newGate(t, "tuner", nil)
	profile := newProfile(t, "tuner", evenkeel.NetworkProfileSpec{
		NodeSelector: &metav1.LabelSelector{MatchLabels: pool}, Tuner: evenkeel.TunerSpec{Source: evenkeel.TunerPreflight},
	})
	waitProfile(t, profile.Name, tunerIs(0, 0, "0 of 2 nodes count"))

	// A job that was created before anything was measured gets nothing, and is told.
	user, warned := newUser(t)
	early, templates := newJob("Job", ns, profile.Name)
	early.SetName("early")
	if err := user.Create(t.Context(), early); err != nil {
		t.Fatal(err)
	}
	if text := strings.Join(warned.take(), "\n"); !strings.Contains(text, "no measurements for NCCL's algorithms: 0 of 2 nodes count") {
		t.Errorf("the user is told %q", text)
	}
	if got := tunerOf(createPod(t, podOf(t, early, templates[0]))); got != " " {
		t.Errorf("a job before any measurement gets %q", got)
	}
	eventually(t, "an Event says why", hasEvent(ns, early, "EvenkeelTunerUnset", "0 of 2 nodes count"))

	setMeasured(t, "tuner-0", profile.Name, 1000, 30, time.Minute)
	setMeasured(t, "tuner-1", profile.Name, 1200, 32, time.Minute)
	waitProfile(t, profile.Name, tunerIs(8000, 31, "measured on 2 of 2 nodes"))
	webhookGives(t, ns, profile.Name, "8000")
	job, templates := newJob("PyTorchJob", ns, profile.Name)
	createJob(t, job)
	for _, path := range templates {
		if got := tunerOf(createPod(t, podOf(t, job, path))); got != "8000 31" {
			t.Errorf("%v: %q", path, got)
		}
	}

	// What is measured later is for new jobs only.
	setMeasured(t, "tuner-0", profile.Name, 500, 30, time.Minute)
	waitProfile(t, profile.Name, tunerIs(4000, 31, "measured on 2 of 2 nodes"))
	webhookGives(t, ns, profile.Name, "4000")
	if got := tunerOf(createPod(t, podOf(t, job, templates[1]))); got != "8000 31" {
		t.Errorf("a later pod of the job gets %q", got)
	}
	if got := tunerOf(createPod(t, podOf(t, early, []string{"spec", "template"}))); got != " " {
		t.Errorf("a later pod of the first job gets %q", got)
	}

	// The policy counts a pass for a day.
	setMeasured(t, "tuner-0", profile.Name, 500, 30, 48*time.Hour)
	waitProfile(t, profile.Name, tunerIs(0, 0, "1 of 2 nodes count, and 2 have to: 1 are not proven"))
}

func TestTunerSourceIsChecked(t *testing.T) {
	profile := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: "tuner-source"}, Spec: evenkeel.NetworkProfileSpec{Plugin: evenkeel.PluginSpec{Image: image}}}
	profile.Spec.Tuner.Source = "Guess"
	refused(t, dryRun(t.Context(), profile), "spec.tuner.source", "None", "Preflight")
}
