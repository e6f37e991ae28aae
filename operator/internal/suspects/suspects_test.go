package suspects

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// sent is a datagram as the plugin sends it.
const sent = `{"collector":"1f","seq":7,"ranks":8,"window_s":8.0,"outcome":"suspect",` +
	`"text":"7 of 8 ranks wait for 62 % of the time for card eth1 of n3, sending","suspects":[{"class":"link","rank":5,"host":"n3","pod":"1b2f-0",` +
	`"device":"eth1","direction":"send","share":0.62,"for_s":41.5,"waiting":7,"confidence":0.9,"evidence":"4.0 times"}]}`

func datagram(json string) []byte { return []byte("evenkeel-verdict 1\n1b2f-1\n" + json + "\n") }

func TestSuspectsFormat(t *testing.T) {
	uid, r, err := Parse(datagram(sent))
	if err != nil {
		t.Fatal(err)
	}
	s := r.Suspects[0]
	if uid != "1b2f-1" || r.Ranks != 8 || !strings.HasPrefix(r.Text, "7 of 8") || s.Class != evenkeel.SuspectLink || s.Host != "n3" || *s.Rank != 5 || s.Pod != "1b2f-0" || s.Device != "eth1" || s.ForSeconds != 41.5 || s.Confidence != 0.9 {
		t.Errorf("%q %+v", uid, r)
	}
	if _, r, err := Parse(datagram(`{"ranks":8,"window_s":8,"outcome":"quiet","text":"","suspects":[]}`)); err != nil || len(r.Suspects) != 0 {
		t.Errorf("it is over: %+v, %v", r, err)
	}
	with := func(old, replacement string) []byte {
		if !strings.Contains(sent, old) {
			t.Fatalf("no %s", old)
		}
		return datagram(strings.Replace(sent, old, replacement, 1))
	}
	for name, bad := range map[string][]byte{
		"nothing":              nil,
		"another version":      []byte("evenkeel-verdict 2\nuid\n{}\n"),
		"another report":       []byte("evenkeel-report 1\nuid\nLoaded\nx\n"),
		"no end":               []byte("evenkeel-verdict 1\nuid\n{}"),
		"a line more":          []byte("evenkeel-verdict 1\nuid\n{}\n\n"),
		"no pod":               []byte("evenkeel-verdict 1\n\n{}\n"),
		"not a UID":            []byte("evenkeel-verdict 1\nuid/x\n{}\n"),
		"too long a UID":       []byte("evenkeel-verdict 1\n" + strings.Repeat("u", 64) + "\n{}\n"),
		"no JSON":              datagram("x"),
		"too much JSON":        datagram(`{"text":"` + strings.Repeat(" ", 900) + `"}`),
		"not printable":        datagram("{\"text\":\"\x1b[2J\"}"),
		"escaped control":      datagram(`{"text":"\u001b[2J"}`),
		"a list":               datagram("[]"),
		"deep":                 datagram(strings.Repeat("[", 899)),
		"many ranks":           with(`"ranks":8`, `"ranks":99999999`),
		"negative ranks":       with(`"ranks":8`, `"ranks":-1`),
		"half a rank":          with(`"ranks":8`, `"ranks":1.5`),
		"no text":              with("7 of 8 ranks wait for 62 % of the time for card eth1 of n3, sending", ""),
		"too long a text":      with("7 of 8", strings.Repeat("7", 301)),
		"another class":        with(`"link"`, `"disk"`),
		"another direction":    with(`"send"`, `"up"`),
		"no host":              with(`"n3"`, `""`),
		"a host with a space":  with(`"n3"`, `"n 3"`),
		"a long host":          with(`"n3"`, `"`+strings.Repeat("n", 64)+`"`),
		"a pod with a slash":   with(`"1b2f-0"`, `"../x"`),
		"a long device":        with(`"eth1"`, `"`+strings.Repeat("e", 64)+`"`),
		"negative time":        with("41.5", "-1"),
		"endless time":         with("41.5", "1e300"),
		"an infinite time":     with("41.5", "1e999"),
		"sure beyond doubt":    with(`"confidence":0.9`, `"confidence":1.1`),
		"a rank that is a map": with(`"rank":5`, `"rank":{}`),
		"a negative rank":      with(`"rank":5`, `"rank":-5`),
		"a peer of no name":    with(`"share"`, `"peer":{"host":""},"share"`),
		"three suspects":       datagram(`{"text":"x","suspects":[{"class":"late","host":"a"},{"class":"late","host":"b"},{"class":"late","host":"c"}]}`),
		"not even letters":     []byte("evenkeel-verdict 1\n\xff\xfe\n{}\n"),
	} {
		if _, r, err := Parse(bad); err == nil {
			t.Errorf("%s: accepted: %+v", name, r)
		}
	}
}

// FuzzSuspects: whatever is accepted can be kept in the annotation and read from there.
func FuzzSuspects(f *testing.F) {
	f.Add(datagram(sent))
	f.Add(datagram(`{"text":"x","suspects":[{"class":"path","host":"a","peer":{"host":"b"}}]}`))
	f.Fuzz(func(t *testing.T, datagram []byte) {
		uid, r, err := Parse(datagram)
		if err != nil {
			return
		}
		if uid == "" || strings.ContainsFunc(r.Text+r.Key(), func(c rune) bool { return c != '\n' && (c < ' ' || c > '~') }) {
			t.Errorf("%q %+v", uid, r)
		}
		now := time.Unix(1790000000, 0)
		value, write := Next(&corev1.Pod{}, r, now)
		kept := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{evenkeel.SuspectsKey: value}}}
		if s, ok := Of(kept, now); ok != (len(r.Suspects) > 0) || ok != write || ok && s.Key() != r.Key() {
			t.Errorf("%q is read as %+v, %t", value, s, ok)
		}
	})
}

func TestSuspectsAnnotation(t *testing.T) {
	start := time.Date(2026, 11, 25, 10, 0, 0, 0, time.UTC)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(start.Add(-time.Hour)), Annotations: map[string]string{}}}
	_, link, err := Parse(datagram(sent))
	if err != nil {
		t.Fatal(err)
	}
	other := link
	other.Suspects = []Suspect{link.Suspects[0]}
	other.Suspects[0].Host = "n4"
	louder := link
	louder.Suspects = []Suspect{link.Suspects[0]}
	louder.Suspects[0].Direction, louder.Suspects[0].Confidence, louder.Text = "both", 1, "8 of 8 ranks wait"
	over := Report{Collector: link.Collector, Ranks: 8}
	smaller, larger := other, other
	smaller.Collector, smaller.Ranks = "another", 2
	larger.Collector, larger.Ranks, larger.Text = "a third", 16, "15 of 16 ranks wait"
	both := func(order ...int) Report {
		r, two := larger, []Suspect{link.Suspects[0], other.Suspects[0]}
		r.Suspects = nil
		for _, at := range order {
			two[at].ForSeconds = 41.5
			r.Suspects = append(r.Suspects, two[at])
		}
		return r
	}
	for _, step := range []struct {
		what  string
		at    time.Duration
		said  Report
		write bool
		since time.Duration // of what stands after it; negative for before the start
		text  string
	}{
		{"nothing is over", 0, over, false, 0, ""},
		{"it is new", 0, link, true, -41500 * time.Millisecond, link.Text},
		{"it is repeated", 10 * time.Second, louder, false, -41500 * time.Millisecond, link.Text},
		{"a minute later", time.Minute, louder, true, -41500 * time.Millisecond, louder.Text},
		{"another node", 70 * time.Second, other, true, 28500 * time.Millisecond, other.Text},
		{"it is over", 80 * time.Second, over, true, 0, ""},
		{"it is over again", 81 * time.Second, over, false, 0, ""},
		{"it comes again", 90 * time.Second, link, true, 48500 * time.Millisecond, link.Text},
		{"after silence", 10 * time.Minute, link, true, 10*time.Minute - 41500*time.Millisecond, link.Text},
		{"another job of the pod's processes", 10*time.Minute + 5*time.Second, smaller, false, 10*time.Minute - 41500*time.Millisecond, link.Text},
		{"it is over for that one", 10*time.Minute + 6*time.Second, Report{Collector: smaller.Collector, Ranks: 2}, false, 10*time.Minute - 41500*time.Millisecond, link.Text},
		{"a larger job", 10*time.Minute + 7*time.Second, larger, true, 10*time.Minute + 7*time.Second - 41500*time.Millisecond, larger.Text},
		{"two of which the order changes", 10*time.Minute + 8*time.Second, both(0, 1), true, 10*time.Minute + 8*time.Second - 41500*time.Millisecond, larger.Text},
		{"the other way round", 10*time.Minute + 9*time.Second, both(1, 0), false, 10*time.Minute + 8*time.Second - 41500*time.Millisecond, larger.Text},
	} {
		now := start.Add(step.at)
		value, write := Next(pod, step.said, now)
		if write != step.write {
			t.Errorf("%s: written: %t", step.what, write)
		}
		if write {
			pod.Annotations[evenkeel.SuspectsKey] = value
		}
		s, ok := Of(pod, now)
		if ok != (step.text != "") {
			t.Errorf("%s: stands: %t", step.what, ok)
		} else if want := start.Add(step.since).Truncate(time.Second); ok && (!s.Since.Equal(want) || s.Text != step.text) {
			t.Errorf("%s: since %s, want %s: %s", step.what, s.Since, want, s.Text)
		}
	}
	if _, ok := Of(pod, start.Add(10*time.Minute+8*time.Second+Lifetime)); ok {
		t.Error("it stands although nobody repeats it")
	}
	young := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(start)}}
	value, _ := Next(young, link, start.Add(time.Second))
	var s Standing
	if err := json.Unmarshal([]byte(value), &s); err != nil || !s.Since.Equal(start) {
		t.Errorf("it has been so for longer than the pod exists: %s, %v", value, err)
	}
	times := func(since, recorded, at time.Time) string {
		text, err := json.Marshal(Standing{Since: since, Recorded: recorded, At: at, Report: link})
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	pod.Annotations[evenkeel.SuspectsKey] = times(start, start, start)
	if _, ok := Of(pod, start); !ok {
		t.Error("what is recorded now is not believed")
	}
	later := start.Add(time.Hour)
	for _, value := range []string{times(start, start, later), times(later, start, start), times(start, later, start), times(time.Time{}, start, start), "", "x", "{}", `{"suspects":[{"class":"link","host":"n 3"}],"text":"x"}`, `{"text":"` + strings.Repeat("x", 2000) + `"}`} {
		pod.Annotations[evenkeel.SuspectsKey] = value
		if _, ok := Of(pod, start); ok {
			t.Errorf("%q is believed", value)
		}
	}
}
