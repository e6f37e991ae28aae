// Package suspects defines what the ranks of a running job report about whom it waits for: the datagram of the plugin,
// and the pod's annotation that keeps it.
package suspects

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	header = "evenkeel-verdict 1\n"
	// maxJSON is the limit of the plugin's JSON, in bytes.
	maxJSON     = 900
	maxUID      = 63
	maxName     = 63
	maxText     = 300
	maxEvidence = 160
	maxSuspects = 2
	maxRanks    = 1 << 24
	// maxAge bounds how long something is said to have been so.
	maxAge = 30 * 24 * time.Hour
)

const (
	// refreshInterval is how often the annotation is written while the same suspects stand.
	refreshInterval = time.Minute
	// Lifetime is how long a report counts that is not repeated. The process that sends it may end without another word.
	Lifetime = 3 * time.Minute
)

// A Place is a process of the job, and perhaps its card.
type Place struct {
	Rank *int64 `json:"rank,omitempty"`
	// Host is the name of the node, of which the plugin sends 63 bytes.
	Host string `json:"host"`
	// Pod is the pod's UID; empty: the process did not know it.
	Pod    string `json:"pod,omitempty"`
	Device string `json:"device,omitempty"`
}

// A Suspect is whom or what the ranks wait for.
type Suspect struct {
	Class evenkeel.SuspectClass `json:"class"`
	Place
	Direction string `json:"direction,omitempty"`
	// Peer is the other end, of a path.
	Peer *Place `json:"peer,omitempty"`
	// ForSeconds is how long it has been so.
	ForSeconds float64 `json:"for_s"`
	Confidence float64 `json:"confidence"`
	Evidence   string  `json:"evidence,omitempty"`
}

// A Report comes from the rank that has collected the views of all.
type Report struct {
	// Collector names the process.
	Collector string    `json:"collector,omitempty"`
	Ranks     int64     `json:"ranks"`
	Text      string    `json:"text"`
	Suspects  []Suspect `json:"suspects"`
}

// Standing is the value of the annotation [evenkeel.SuspectsKey]: a report that has not been withdrawn.
type Standing struct {
	// Since is since when the same are suspected. Recorded is when the controller heard of it, and At when it last did.
	Since    time.Time `json:"since"`
	Recorded time.Time `json:"recorded"`
	At       time.Time `json:"at"`
	Report
}

// IsReport reports whether the datagram says that it is one of these.
func IsReport(datagram []byte) bool { return bytes.HasPrefix(datagram, []byte(header)) }

// Parse reads a datagram of the plugin. Anybody may have sent it.
func Parse(datagram []byte) (uid string, r Report, err error) {
	rest, found := bytes.CutPrefix(datagram, []byte(header))
	lines := strings.Split(string(rest), "\n")
	if !found || len(lines) != 3 || lines[2] != "" {
		return "", Report{}, errors.New("not a report of this version")
	}
	if lines[0] == "" || !isUID(lines[0]) {
		return "", Report{}, errors.New("not a pod's UID")
	}
	if len(lines[1]) > maxJSON || !isPrintable(lines[1], maxJSON) {
		return "", Report{}, errors.New("the JSON is too long, or not printable")
	}
	if err := json.Unmarshal([]byte(lines[1]), &r); err != nil {
		return "", Report{}, fmt.Errorf("the JSON: %w", err)
	}
	if err := r.validate(); err != nil {
		return "", Report{}, err
	}
	for i := range r.Suspects {
		r.Suspects[i].Evidence = "" // the sentence has the figures that matter
	}
	return lines[0], r, nil
}

// Of returns what the pod's rank says; false: nothing that still counts. Whoever may change the pod may have written
// it.
func Of(pod metav1.Object, now time.Time) (*Standing, bool) {
	s, ok := recorded(pod, now)
	if !ok || now.Sub(s.At) >= Lifetime {
		return nil, false
	}
	return s, true
}

// recorded returns the annotation's content, however old it is. The times come from a controller whose clock may be a
// little ahead.
func recorded(pod metav1.Object, now time.Time) (*Standing, bool) {
	value := pod.GetAnnotations()[evenkeel.SuspectsKey]
	s := &Standing{}
	if value == "" || len(value) > 2*maxJSON || json.Unmarshal([]byte(value), s) != nil || s.validate() != nil || len(s.Suspects) == 0 {
		return nil, false
	}
	if s.Since.Year() < 2000 || s.Recorded.Before(s.Since) || s.At.Before(s.Recorded) || s.At.After(now.Add(time.Minute)) {
		return nil, false
	}
	return s, true
}

// Next returns the annotation's value after a report about the pod, or empty to remove it. Write is false where it
// stays as it is, so that reports which repeat themselves cost the API server little.
func Next(pod metav1.Object, r Report, now time.Time) (value string, write bool) {
	before, had := recorded(pod, now)
	if had && before.Collector != r.Collector && now.Sub(before.At) < 2*refreshInterval && r.Ranks <= before.Ranks {
		// The processes of a pod may be in jobs of their own, each of which has a collector. The one that sees most is heard.
		return "", false
	}
	if len(r.Suspects) == 0 {
		return "", pod.GetAnnotations()[evenkeel.SuspectsKey] != ""
	}
	now = now.UTC().Truncate(time.Second)
	next := Standing{Recorded: now, At: now, Report: r}
	next.Since = now.Add(-time.Duration(r.Suspects[0].ForSeconds * float64(time.Second))).Truncate(time.Second)
	if created := pod.GetCreationTimestamp(); next.Since.Before(created.Time) {
		next.Since = created.UTC()
	}
	// What was said before its lifetime ended is another time.
	if had && before.Key() == r.Key() && now.Sub(before.At) < Lifetime {
		if now.Sub(before.At) < refreshInterval {
			return "", false
		}
		next.Since, next.Recorded = before.Since, before.Recorded
	}
	text, err := json.Marshal(next)
	return string(text), err == nil
}

// Key is the same for reports about the same suspects, whatever the figures.
func (r Report) Key() string {
	keys := make([]string, 0, len(r.Suspects))
	for i := range r.Suspects {
		keys = append(keys, r.Suspects[i].Key()+"\n")
	}
	slices.Sort(keys)
	return strings.Join(keys, "")
}

// Key names the suspect. Of a late process that is its rank. Of a card, any rank of the host may be named, and the
// direction may change.
func (s *Suspect) Key() string {
	switch {
	case s.Class == evenkeel.SuspectLate && s.Rank != nil:
		return fmt.Sprintf("%s %s rank %d", s.Class, s.Host, *s.Rank)
	case s.Class == evenkeel.SuspectPath && s.Peer != nil:
		return fmt.Sprintf("%s %s %s", s.Class, s.Host, s.Peer.Host)
	case s.Class == evenkeel.SuspectLink:
		return fmt.Sprintf("%s %s %s", s.Class, s.Host, s.Device)
	}
	return fmt.Sprintf("%s %s", s.Class, s.Host)
}

// Words name the suspect, as in "link, card eth0 of n3".
func (s *Suspect) Words() string {
	at := func(p Place) string {
		switch {
		case s.Class == evenkeel.SuspectLate && p.Rank != nil:
			return fmt.Sprintf("rank %d on %s", *p.Rank, p.Host)
		case s.Class == evenkeel.SuspectLate:
			return "a process on " + p.Host
		case p.Device != "":
			return fmt.Sprintf("card %s of %s", p.Device, p.Host)
		}
		return p.Host
	}
	words := string(s.Class) + ", " + at(s.Place)
	if s.Class == evenkeel.SuspectPath && s.Peer != nil {
		words += " to " + at(*s.Peer)
	}
	return words
}

// Places are where the suspect may be: a path has two ends.
func (s *Suspect) Places() []Place {
	if s.Class == evenkeel.SuspectPath && s.Peer != nil {
		return []Place{s.Place, *s.Peer}
	}
	return []Place{s.Place}
}

func (r *Report) validate() error {
	switch {
	case r.Ranks < 0 || r.Ranks > maxRanks:
		return fmt.Errorf("%d ranks", r.Ranks)
	case !isPrintable(r.Collector, maxName):
		return errors.New("the collector's name is too long, or not printable")
	case !isPrintable(r.Text, maxText):
		return errors.New("the text is too long, or not printable")
	case len(r.Suspects) > maxSuspects:
		return fmt.Errorf("%d suspects", len(r.Suspects))
	case len(r.Suspects) > 0 && r.Text == "":
		return errors.New("no text")
	}
	for i := range r.Suspects {
		if err := r.Suspects[i].validate(); err != nil {
			return fmt.Errorf("suspect %d: %w", i, err)
		}
	}
	return nil
}

func (s *Suspect) validate() error {
	switch s.Class {
	case evenkeel.SuspectLate, evenkeel.SuspectLink, evenkeel.SuspectPath:
	default:
		return errors.New("its class is none of late, link and path")
	}
	switch s.Direction {
	case "", "send", "receive", "both":
	default:
		return errors.New("its direction is none of send, receive and both")
	}
	for _, number := range []struct{ value, most float64 }{{s.ForSeconds, maxAge.Seconds()}, {s.Confidence, 1}} {
		if math.IsNaN(number.value) || number.value < 0 || number.value > number.most {
			return fmt.Errorf("%g is not between 0 and %g", number.value, number.most)
		}
	}
	if !isPrintable(s.Evidence, maxEvidence) {
		return errors.New("its evidence is too long, or not printable")
	}
	if err := s.Place.validate(); err != nil {
		return err
	}
	if s.Peer != nil {
		return s.Peer.validate()
	}
	return nil
}

func (p *Place) validate() error {
	switch {
	case p.Rank != nil && (*p.Rank < 0 || *p.Rank > maxRanks):
		return fmt.Errorf("rank %d", *p.Rank)
	case p.Host == "" || len(p.Host) > maxName || strings.IndexFunc(p.Host, func(c rune) bool { return !isAlphanumeric(c) && !strings.ContainsRune("-._", c) }) >= 0:
		return errors.New("not a host's name")
	case !isUID(p.Pod):
		return errors.New("not a pod's UID")
	case !isPrintable(p.Device, maxName):
		return errors.New("not a device's name")
	}
	return nil
}

func isUID(text string) bool {
	return len(text) <= maxUID && strings.IndexFunc(text, func(c rune) bool { return c != '-' && !isAlphanumeric(c) }) < 0
}

func isAlphanumeric(c rune) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

func isPrintable(text string, most int) bool {
	return len(text) <= most && strings.IndexFunc(text, func(c rune) bool { return c < ' ' || c > '~' }) < 0
}
