package pluginstatus

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

func TestPluginReportFormat(t *testing.T) {
	uid, outcome, text, err := ParseReport([]byte("evenkeel-report 1\n1b2f-0\nFailed\nEVENKEEL_FLOWS=\"many\" is not valid\n"))
	if err != nil || uid != "1b2f-0" || outcome != Failed || text != `EVENKEEL_FLOWS="many" is not valid` {
		t.Errorf("%q %q %q %v", uid, outcome, text, err)
	}
	for name, bad := range map[string]string{
		"nothing":          "",
		"another format":   "evenkeel-report 2\nuid\nLoaded\nx\n",
		"a line less":      "evenkeel-report 1\nuid\nLoaded\n",
		"a line more":      "evenkeel-report 1\nuid\nLoaded\nx\ny\n",
		"no end":           "evenkeel-report 1\nuid\nLoaded\nx",
		"no pod":           "evenkeel-report 1\n\nLoaded\nx\n",
		"not a UID":        "evenkeel-report 1\nuid/../x\nLoaded\nx\n",
		"another outcome":  "evenkeel-report 1\nuid\nNotReported\nx\n",
		"control bytes":    "evenkeel-report 1\nuid\nLoaded\nx\x1b[2J\n",
		"too long a text":  "evenkeel-report 1\nuid\nLoaded\n" + strings.Repeat("x", 401) + "\n",
		"not even letters": "\xff\xfe",
	} {
		if _, _, _, err := ParseReport([]byte(bad)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestPluginStatusRoundTrip(t *testing.T) {
	want := Status{Outcome: Loaded, At: time.Date(2026, 11, 23, 7, 0, 0, 0, time.UTC), Text: "version 0.1.0, devices: eth0 25000 Mb/s"}
	pod := &corev1.Pod{}
	pod.Annotations = map[string]string{evenkeel.PluginStatusKey: want.String()}
	if got, known := Of(pod); !known || got != want {
		t.Errorf("%+v %t", got, known)
	}
	for value, known := range map[string]bool{"NotReported": true, "": false, "Loaded": false, "Loaded yesterday x": false, "Odd 2026-11-23T07:00:00Z x": false} {
		pod.Annotations[evenkeel.PluginStatusKey] = value
		if _, got := Of(pod); got != known {
			t.Errorf("%q: known %t, want %t", value, got, known)
		}
	}
}

func TestPluginStatusSaysWhetherItEncrypts(t *testing.T) {
	for text, want := range map[string]bool{
		"version 0.2.0, protocol 8, encryption required (TLS 1.3), devices: eth0":                                       true,
		"version 0.2.0, protocol 8, encryption required (TLS 1.3; RDMA in clear over a trusted network), devices: eth0": true,
		"version 0.2.0, protocol 8, encryption off, devices: eth0":                                                      false,
		"version 0.2.0, protocol 8, devices: eth0":                                                                      false,
		"version 0.2.0, protocol 8, devices: eth0, encryption required":                                                 false,
	} {
		s := Status{Outcome: Loaded, Text: text}
		if s.Encrypts() != want || s.Version() != "version 0.2.0, protocol 8" {
			t.Errorf("%s: %t, %q", text, s.Encrypts(), s.Version())
		}
	}
	if (Status{Outcome: Failed, Text: "version 0.2.0, protocol 8, encryption required, devices: eth0"}).Encrypts() {
		t.Error("a plugin that did not start")
	}
}

func FuzzPluginReport(f *testing.F) {
	f.Add([]byte("evenkeel-report 1\nuid\nLoaded\nx\n"))
	f.Fuzz(func(t *testing.T, datagram []byte) {
		uid, outcome, text, err := ParseReport(datagram)
		if err == nil && (uid == "" || outcome == NotReported || strings.ContainsAny(text, "\n\x00")) {
			t.Errorf("%q %q %q", uid, outcome, text)
		}
	})
}
