// Package pluginstatus defines what the plugin reports about the process that loaded it: the datagram, and the pod's
// annotation that keeps it.
package pluginstatus

import (
	"errors"
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// An Outcome reports whether NCCL uses the plugin in a pod.
type Outcome string

const (
	// NotReported: the plugin has not said anything. NCCL may use it all the same.
	NotReported Outcome = evenkeel.PluginNotReported
	// Loaded: NCCL has started it.
	Loaded Outcome = "Loaded"
	// Failed: NCCL has loaded the library, which refused to start.
	Failed Outcome = "Failed"
)

const (
	// MaxReport is the maximum length of a datagram in bytes.
	MaxReport = 1024
	header    = "evenkeel-report 1"
	maxUID    = 63
	maxText   = 400
)

// Status is the value of the annotation [evenkeel.PluginStatusKey].
type Status struct {
	Outcome Outcome
	// At is when it was reported.
	At time.Time
	// Text is the plugin's version and devices, or the reason of its failure.
	Text string
}

// Of returns the status of a pod. Known is false where no report is expected.
func Of(pod metav1.Object) (s Status, known bool) {
	words := strings.SplitN(pod.GetAnnotations()[evenkeel.PluginStatusKey], " ", 3)
	s.Outcome = Outcome(words[0])
	switch {
	case s.Outcome == NotReported:
		return s, true
	case (s.Outcome == Loaded || s.Outcome == Failed) && len(words) == 3:
		at, err := time.Parse(time.RFC3339, words[1])
		s.At, s.Text = at, words[2]
		return s, err == nil
	}
	return Status{}, false
}

// Version is the plugin's version and its protocol's version, as in "version 0.1.0, protocol 7". It is empty if
// unknown. Plugins of one job refuse each other if they have different protocols.
func (s Status) Version() string {
	version, _, found := strings.Cut(s.Text, ", devices: ")
	if s.Outcome != Loaded || !found || !strings.HasPrefix(version, "version ") {
		return ""
	}
	version, _, _ = strings.Cut(version, ", encryption ")
	return version
}

// Encrypts reports whether the plugin said that it encrypts. Versions that cannot say nothing about it.
func (s Status) Encrypts() bool {
	before, _, found := strings.Cut(s.Text, ", devices: ")
	return s.Outcome == Loaded && found && strings.Contains(before, ", encryption required")
}

// String is the annotation's value.
func (s Status) String() string {
	return fmt.Sprintf("%s %s %s", s.Outcome, s.At.UTC().Format(time.RFC3339), s.Text)
}

// ParseReport reads a datagram of the plugin. Anybody may have sent it.
func ParseReport(datagram []byte) (uid string, outcome Outcome, text string, err error) {
	lines := strings.Split(string(datagram), "\n")
	if len(lines) != 5 || lines[0] != header || lines[4] != "" {
		return "", "", "", errors.New("not a report of this version")
	}
	uid, outcome, text = lines[1], Outcome(lines[2]), lines[3]
	valid := func(text string, most int, allowed func(rune) bool) bool {
		return len(text) <= most && strings.IndexFunc(text, func(c rune) bool { return !allowed(c) }) < 0
	}
	switch {
	case uid == "" || !valid(uid, maxUID, func(c rune) bool {
		return c == '-' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
	}):
		return "", "", "", errors.New("not a pod's UID")
	case outcome != Loaded && outcome != Failed:
		return "", "", "", errors.New("neither Loaded nor Failed")
	case !valid(text, maxText, func(c rune) bool { return c >= ' ' && c <= '~' }):
		return "", "", "", errors.New("the text is too long, or not printable")
	}
	return uid, outcome, text, nil
}
