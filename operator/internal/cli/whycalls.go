package cli

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"evenkeel.dev/evenkeel/operator/internal/flightrecord"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

const (
	// callsTimeout bounds the look into all pods, and podTimeout that into one.
	callsTimeout, podTimeout = 2 * time.Minute, 20 * time.Second
	// maxAsked is how many pods are asked at once.
	maxAsked = 64
	// answerSeconds is how long the processes of a pod have for new records. They look every second whether somebody asks.
	answerSeconds = "5"
	// maxPodRecords bounds the records of a pod, in bytes.
	maxPodRecords = 64 << 20
	// logLines are the last lines of a log in which records are looked for: traces of errors follow them.
	logLines = 5000
	// recordLine begins the line of a log with a record, and fresh and stale those of askScript.
	recordLine   = "evenkeel: flight record: "
	fresh, stale = "fresh ", "stale "
)

// askScript asks the processes that write to a folder for new records. It prints a line for each record, which says
// whether the record is as new as the question, and nothing where there is no record. Its arguments are the folder,
// and how many seconds to wait at most.
const askScript = `cd -- "$1" 2>/dev/null || exit 0
seconds=$2
set -- .evenkeel-record-*.json
[ -e "$1" ] || exit 0
rm -f .evenkeel-request
echo asked >.evenkeel-request || exit 1
while :; do
  waiting=
  for record; do
    if [ .evenkeel-request -nt "$record" ]; then waiting=yes; fi
  done
  [ -n "$waiting" ] && [ "$seconds" -gt 0 ] || break
  seconds=$((seconds - 1))
  sleep 1
done
for record; do
  if [ .evenkeel-request -nt "$record" ]; then printf 'stale '; else printf 'fresh '; fi
  head -c 4194305 "$record"
  echo
done`

// An answer is what a container told.
type answer struct {
	pod     string
	records []*flightrecord.Record
	// silent are ranks whose record is older than the question, and has no failure.
	silent []int
	// problem says why there is no answer, or not a whole one; empty: there is.
	problem string
}

// explainCalls prints which collective call of the Python package hangs, and which rank the others wait for. It asks
// running processes for their records, and reads the logs of ended ones. It prints nothing for a job without records.
func explainCalls(ctx context.Context, access *podAccess, pods []corev1.Pod, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, callsTimeout)
	defer cancel()
	type place struct {
		pod       *corev1.Pod
		container *corev1.Container
		folder    string
	}
	var places []place
	for i := range pods {
		for j := range pods[i].Spec.Containers {
			if c := &pods[i].Spec.Containers[j]; recorderFolder(c) != "" {
				places = append(places, place{&pods[i], c, recorderFolder(c)})
			}
		}
	}
	answers := make([]answer, len(places))
	var asked errgroup.Group
	asked.SetLimit(maxAsked)
	for i, p := range places {
		asked.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, podTimeout)
			defer cancel()
			answers[i] = ask(ctx, access, p.pod, p.container.Name, p.folder)
			return nil
		})
	}
	if err := asked.Wait(); err != nil {
		return err
	}
	lines := callLines(answers)
	if len(lines) == 0 {
		return nil
	}
	_, err := fmt.Fprintf(out, "\nCalls\n  %s\n", strings.Join(lines, "\n  "))
	return err
}

// recorderFolder is where the processes of a container write their records; empty: they write none, or it is not known where.
func recorderFolder(c *corev1.Container) string {
	folder := ""
	for _, e := range c.Env {
		// What follows from a ConfigMap or Secret wins, where there is such an entry.
		if e.Name == inject.RecorderEnv && e.ValueFrom == nil {
			folder = ""
			if e.Value != "" {
				folder = path.Dir(e.Value + "0")
			}
		}
	}
	return folder
}

// ask gets the records of a container.
func ask(ctx context.Context, access *podAccess, pod *corev1.Pod, container, folder string) answer {
	a := answer{pod: pod.Name}
	at := slices.IndexFunc(pod.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.Name == container })
	if at < 0 {
		return a // it has not begun
	}
	status := &pod.Status.ContainerStatuses[at]
	var err error
	right := "pods/exec"
	switch {
	case status.State.Running != nil:
		var printed []byte
		if printed, err = access.exec(ctx, pod, container, maxPodRecords, "sh", "-c", askScript, "sh", folder, answerSeconds); err == nil {
			err = a.read(bytes.NewReader(printed), fresh, stale)
		}
	case status.State.Terminated != nil, status.LastTerminationState.Terminated != nil:
		right = "pods/log"
		err = access.log(ctx, pod, container, status.State.Terminated == nil, logLines, func(log io.Reader) error { return a.read(log, recordLine) })
	}
	switch {
	case err != nil && (apierrors.IsForbidden(err) || strings.Contains(err.Error(), `cannot create resource "pods/exec"`)):
		// Where a connection would be upgraded, there is only the API server's text. It has the pod's name, and all pods have the same
		// problem.
		a.problem = "you have no right to " + right + " there"
	case err != nil:
		a.problem = text.Clip(oneLine(err), 300)
	}
	return a
}

// read finds the records in lines of text: those behind one of these words.
func (a *answer) read(from io.Reader, before ...string) error {
	lines := bufio.NewScanner(io.LimitReader(from, maxPodRecords))
	lines.Buffer(nil, flightrecord.MaxRecord+4096)
	for lines.Scan() {
		data, isStale := "", false
		for _, start := range before {
			if _, after, found := strings.Cut(lines.Text(), start); found && strings.HasPrefix(after, "{") {
				data, isStale = after, start == stale
				break
			}
		}
		if data == "" {
			continue
		}
		switch record, err := flightrecord.Parse([]byte(data)); {
		case err != nil:
			return fmt.Errorf("a record of it cannot be read: %w", err)
		case isStale && !record.Failed():
			a.silent = append(a.silent, record.Rank)
		default:
			a.records = append(a.records, record)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read the records: %w", err)
	}
	return nil
}

// callLines are what there is to say about the answers.
func callLines(answers []answer) []string {
	var records []*flightrecord.Record
	silent, problems := map[int]bool{}, map[string][]string{}
	for _, a := range answers {
		records = append(records, a.records...)
		for _, rank := range a.silent {
			silent[rank] = true
		}
		if a.problem != "" && !slices.Contains(problems[a.problem], a.pod) {
			problems[a.problem] = append(problems[a.problem], a.pod)
		}
	}
	answered := map[int]bool{}
	for _, r := range records {
		answered[r.Rank] = true
		delete(silent, r.Rank)
	}
	lines, missing := flightrecord.Explain(records)
	if len(lines) == 0 && len(answered) > 0 {
		lines = []string{fmt.Sprintf("none of them hangs on the %d ranks that answered", len(answered))}
	}
	missing = slices.DeleteFunc(missing, func(rank int) bool { return silent[rank] })
	if len(missing) > 0 {
		lines = append(lines, "no record of "+flightrecord.Names(missing)+": the process has ended, or was not found")
	}
	if len(silent) > 0 {
		lines = append(lines, "no answer of "+flightrecord.Names(slices.Sorted(maps.Keys(silent)))+" within "+answerSeconds+" s: the process has ended, or is stuck outside of Python")
	}
	for _, problem := range slices.Sorted(maps.Keys(problems)) {
		lines = append(lines, text.List(problems[problem], 120)+": "+problem)
	}
	return lines
}
