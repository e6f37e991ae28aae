package pluginreports

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/pluginstatus"
)

var start = time.Date(2026, 11, 23, 7, 0, 0, 0, time.UTC)

// podsOf makes pods that were created at the start; each value is their annotation.
func podsOf(values ...string) []metav1.PartialObjectMetadata {
	var pods []metav1.PartialObjectMetadata
	for i, value := range values {
		pod := metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("p%02d", i), CreationTimestamp: metav1.NewTime(start)}}
		if value != "" {
			pod.Annotations = map[string]string{evenkeel.PluginStatusKey: value}
		}
		pods = append(pods, pod)
	}
	return pods
}

func said(outcome pluginstatus.Outcome, after time.Duration) string {
	return pluginstatus.Status{Outcome: outcome, At: start.Add(after), Text: "the text"}.String()
}

func TestPluginReportsDecision(t *testing.T) {
	const silent = evenkeel.PluginNotReported
	times := DefaultTimes
	version := func(version string) string {
		return pluginstatus.Status{Outcome: pluginstatus.Loaded, At: start.Add(time.Minute), Text: version + ", devices: eth0 1000 Mb/s"}.String()
	}
	old, recent := version("version 0.1.0, protocol 6"), version("version 0.1.0, protocol 7")
	loaded, failed := said(pluginstatus.Loaded, time.Minute), said(pluginstatus.Failed, time.Minute)
	for name, test := range map[string]struct {
		pods     []string
		now      time.Duration
		again    time.Duration // zero: told now
		missing  []string
		severity string
		words    []string
	}{
		"all have it":                        {pods: []string{loaded, loaded}, now: time.Hour},
		"none is expected to say so":         {pods: []string{"", ""}, now: time.Hour},
		"the others are new":                 {pods: []string{loaded, silent}, now: 2 * time.Minute, again: time.Minute + times.AfterOthers},
		"one of them is late":                {pods: []string{loaded, silent}, now: 7 * time.Minute, missing: []string{"p01"}, severity: corev1.EventTypeWarning, words: []string{"1 of 2 pods have reported the plugin, but not p01", "NCCL did not load it"}},
		"nobody yet":                         {pods: []string{silent, silent}, now: 7 * time.Minute, again: times.First},
		"nobody at all is no proof":          {pods: []string{silent, silent}, now: time.Hour, missing: []string{"p00", "p01"}, severity: corev1.EventTypeNormal, words: []string{"0 of 2", "p00, p01", "NetworkPolicy"}},
		"the late one does not run":          {pods: []string{loaded, silent}, now: 7 * time.Minute},
		"failures are collected":             {pods: []string{loaded, failed}, now: time.Minute + time.Second, again: time.Minute + times.Quiet},
		"one refuses":                        {pods: []string{loaded, failed}, now: 2 * time.Minute, severity: corev1.EventTypeWarning, words: []string{"1 of 2 pods run without the plugin", "p01: the text"}},
		"one refuses, and silent ones later": {pods: []string{failed, silent}, now: 2 * time.Minute, severity: corev1.EventTypeWarning, words: []string{"1 of 2 pods run without"}},
		"one version on two devices":         {pods: []string{recent, strings.Replace(recent, "eth0", "eth1", 1)}, now: time.Hour},
		"two versions are collected":         {pods: []string{old, recent}, now: time.Minute + time.Second, again: time.Minute + times.Quiet},
		"two versions refuse each other":     {pods: []string{recent, old, recent}, now: time.Hour, severity: corev1.EventTypeWarning, words: []string{"version 0.1.0, protocol 7 in 2 pods, such as p00", "version 0.1.0, protocol 6 in 1 pods, such as p01", "one image"}},
		"two versions, and one refuses":      {pods: []string{recent, old, failed}, now: time.Hour, severity: corev1.EventTypeWarning, words: []string{"1 of 3 pods run without the plugin", "protocol 6"}},
		"a pod without the plugin's address": {pods: []string{loaded, ""}, now: time.Hour},
	} {
		f := decide(podsOf(test.pods...), times, start.Add(test.now))
		if want := start.Add(test.again); test.again != 0 && !f.again.Equal(want) || test.again == 0 && !f.again.IsZero() {
			t.Errorf("%s: again at %s, want %s", name, f.again, want)
			continue
		}
		if test.again != 0 {
			continue
		}
		_, severity, message := f.describe(test.missing)
		if severity != test.severity {
			t.Errorf("%s: %q %q", name, severity, message)
		}
		for _, word := range test.words {
			if !strings.Contains(message, word) {
				t.Errorf("%s: %q lacks %q", name, message, word)
			}
		}
	}
}

// TestPluginReportsManyPods has a job whose plugin fails everywhere: the Event stays short.
func TestPluginReportsManyPods(t *testing.T) {
	values := make([]string, 5000)
	for i := range values {
		values[i] = said(pluginstatus.Failed, time.Minute)
	}
	_, _, message := decide(podsOf(values...), DefaultTimes, start.Add(time.Hour)).describe(nil)
	if !strings.Contains(message, "5000 of 5000") || !strings.Contains(message, "and 4995 more") || len(message) > 500 {
		t.Errorf("%d bytes: %q", len(message), message)
	}
}
