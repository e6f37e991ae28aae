package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"evenkeel.dev/evenkeel/operator/internal/flightrecord"
	"evenkeel.dev/evenkeel/operator/internal/inject"
)

// rankRecord is the record of a rank of two, which is in an operation for a minute, or has completed it.
func rankRecord(t testing.TB, rank int, operation string, number int64, state string) string {
	t.Helper()
	now := time.Now()
	call := flightrecord.Call{Group: "a", Kind: "collective", Number: number, Operation: operation, State: state, CreatedNS: now.Add(-time.Minute).UnixNano()}
	if state == "failed" {
		call.Failure = "all_reduce: rank 1 is lost"
	}
	data, err := json.Marshal(flightrecord.Record{
		Version: flightrecord.Version, Rank: rank, TimeNS: now.UnixNano(), Calls: []flightrecord.Call{call},
		Groups: []flightrecord.Group{{ID: "a", Name: "default_pg", Rank: rank, Ranks: []int{0, 1}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// runAsk runs the script in a folder, as in a container.
func runAsk(t *testing.T, folder, seconds string) string {
	t.Helper()
	printed, err := exec.CommandContext(t.Context(), "sh", "-c", askScript, "sh", folder, seconds).Output()
	if err != nil {
		var exit *exec.ExitError
		errors.As(err, &exit)
		t.Fatalf("%v: %s", err, exit.Stderr)
	}
	return string(printed)
}

func TestWhyCallsAsksForRecords(t *testing.T) {
	if printed := runAsk(t, filepath.Join(t.TempDir(), "absent"), "0"); printed != "" {
		t.Errorf("of no folder: %q", printed)
	}
	folder := t.TempDir()
	if printed := runAsk(t, folder, "0"); printed != "" {
		t.Errorf("of an empty folder: %q", printed)
	}
	request := filepath.Join(folder, ".evenkeel-request")
	if _, err := os.Stat(request); err == nil {
		t.Error("it asks where nobody is")
	}
	write := func(rank int, text string, at time.Time) {
		t.Helper()
		path := filepath.Join(folder, fmt.Sprintf(".evenkeel-record-%d.json", rank))
		if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o600), os.Chtimes(path+".new", at, at), os.Rename(path+".new", path)); err != nil {
			t.Fatal(err)
		}
	}
	old, future := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	write(0, "{old}", old)
	write(1, "{new}", future)
	if printed, want := runAsk(t, folder, "0"), "stale {old}\nfresh {new}\n"; printed != want {
		t.Errorf("it prints %q, want %q", printed, want)
	}
	// A process that answers while the script waits.
	first, err := os.Stat(request)
	if err != nil {
		t.Fatal(err)
	}
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		for t.Context().Err() == nil {
			if asked, err := os.Stat(request); err == nil && !asked.ModTime().Equal(first.ModTime()) {
				write(0, "{answer}", future)
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	if printed, want := runAsk(t, folder, "60"), "fresh {answer}\nfresh {new}\n"; printed != want {
		t.Errorf("it prints %q, want %q", printed, want)
	}
	<-answered
}

func TestWhyCallsReadsRecords(t *testing.T) {
	started, failed := rankRecord(t, 0, "all_reduce", 3, "started"), rankRecord(t, 0, "all_reduce", 3, "failed")
	for name, test := range map[string]struct {
		text    string
		records int
		silent  []int
		problem string
	}{
		"nothing":                        {},
		"a fresh record":                 {text: "fresh " + started + "\n", records: 1},
		"a stale record":                 {text: "stale " + started + "\n", silent: []int{0}},
		"a stale record of a failure":    {text: "stale " + failed + "\n", records: 1},
		"a log":                          {text: "step 1\nevenkeel: wrote the flight recorder to /x: why\nevenkeel: flight record: " + failed + "\nTraceback\n", records: 1},
		"a log with a rank in front":     {text: "[rank0]: evenkeel: flight record: " + failed + "\n", records: 1},
		"a log that speaks of records":   {text: "a fresh {start}\nevenkeel: flight record: none\n"},
		"a record that is cut":           {text: "fresh " + started[:50] + "\n", problem: "a record of it cannot be read: it is no JSON of a flight record"},
		"a record that is something":     {text: "fresh {}\n", problem: "a record of it cannot be read: version is 0"},
		"a line that is longer than any": {text: "fresh {" + strings.Repeat("x", flightrecord.MaxRecord+8192), problem: "read the records: "},
	} {
		t.Run(name, func(t *testing.T) {
			a := answer{}
			before := []string{fresh, stale}
			if strings.Contains(name, "log") {
				before = []string{recordLine}
			}
			err := a.read(strings.NewReader(test.text), before...)
			if (err != nil) != (test.problem != "") || err != nil && !strings.Contains(err.Error(), test.problem) {
				t.Errorf("error %v, want %q", err, test.problem)
			}
			if len(a.records) != test.records || !slices.Equal(a.silent, test.silent) {
				t.Errorf("%d records, want %d; silent %v, want %v", len(a.records), test.records, a.silent, test.silent)
			}
		})
	}
}

func TestWhyCallsSaysWhatIsMissing(t *testing.T) {
	of := func(pod, text string) answer {
		t.Helper()
		a := answer{pod: pod}
		if err := a.read(strings.NewReader(text), fresh, stale); err != nil {
			t.Fatal(err)
		}
		return a
	}
	waits := "fresh " + rankRecord(t, 0, "all_reduce", 3, "started")
	for name, test := range map[string]struct {
		answers []answer
		want    []string
	}{
		"nobody":               {},
		"pods without records": {answers: []answer{{pod: "a"}, {pod: "b"}}},
		"nothing hangs": {
			answers: []answer{of("a", "fresh "+rankRecord(t, 0, "all_reduce", 3, "completed")), of("b", "fresh "+rankRecord(t, 1, "all_reduce", 3, "completed"))},
			want:    []string{"none of them hangs on the 2 ranks that answered"},
		},
		"a rank never called it": {
			answers: []answer{of("a", waits), of("b", "fresh "+rankRecord(t, 1, "barrier", 2, "completed"))},
			want:    []string{"group default_pg: rank 1 never called all_reduce #3, in which rank 0 waits for 1m0s; the last call of rank 1 was barrier #2"},
		},
		"a rank without a record": {
			answers: []answer{of("a", waits), {pod: "b"}},
			want: []string{
				"group default_pg: rank 0 is in all_reduce #3 for 1m0s, and rank 1 has no record of it",
				"no record of rank 1: the process has ended, or was not found",
			},
		},
		"a rank that does not answer": {
			answers: []answer{of("a", waits), of("b", "stale "+rankRecord(t, 1, "barrier", 0, "completed"))},
			want: []string{
				"group default_pg: rank 0 is in all_reduce #3 for 1m0s, and rank 1 has no record of it",
				"no answer of rank 1 within 5 s: the process has ended, or is stuck outside of Python",
			},
		},
		"pods that refuse": {
			answers: []answer{{pod: "a", problem: "forbidden"}, {pod: "a", problem: "forbidden"}, {pod: "b", problem: "forbidden"}},
			want:    []string{"a, b: forbidden"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := callLines(test.answers); !slices.Equal(got, test.want) {
				t.Errorf("says\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(test.want, "\n"))
			}
		})
	}
}

func TestWhyCallsFindsTheFolder(t *testing.T) {
	from := &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{Key: inject.RecorderEnv}}
	value := func(v string) corev1.EnvVar { return corev1.EnvVar{Name: inject.RecorderEnv, Value: v} }
	for name, test := range map[string]struct {
		env  []corev1.EnvVar
		want string
	}{
		"none":              {},
		"empty":             {[]corev1.EnvVar{value("")}, ""},
		"injected":          {[]corev1.EnvVar{value("/var/run/evenkeel/rank_")}, "/var/run/evenkeel"},
		"a folder":          {[]corev1.EnvVar{value("/traces/")}, "/traces"},
		"a name":            {[]corev1.EnvVar{value("rank_")}, "."},
		"injected, envFrom": {[]corev1.EnvVar{value("/traces/x"), {Name: inject.RecorderEnv, ValueFrom: from}}, "/traces"},
		"the last one":      {[]corev1.EnvVar{value("/a/x"), value("/b/x")}, "/b"},
	} {
		if got := recorderFolder(&corev1.Container{Env: test.env}); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
