package health

import (
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// maxSuspicionAge is how long a suspicion is kept after its job if no check decides it, as on nodes without a policy.
const maxSuspicionAge = 7 * 24 * time.Hour

// A JobView is what is known of a job that suspects nodes.
type JobView struct {
	Namespace, UID string
	// Said is its current report about the node, once for each class. It is empty if there is no current report.
	Said []evenkeel.Suspicion
	// Ended is set when all its pods have terminated.
	Ended bool
}

// Suspect returns the suspicions as they are after what is known of one job. New reports of an ended job are
// ignored, as its check may be over. Without room, a new suspicion replaces only a withdrawn one, because the job of
// any other would write it again. Changed is false if nothing changes.
func Suspect(before []evenkeel.Suspicion, job JobView, now time.Time) (after []evenkeel.Suspicion, changed bool) {
	at := metav1.NewTime(now).Rfc3339Copy()
	open := func(s evenkeel.Suspicion) bool {
		return s.Job.UID == job.UID && s.Job.Namespace == job.Namespace && s.JobEndTime == nil
	}
	for _, s := range before {
		if s.JobEndTime != nil && now.Sub(s.JobEndTime.Time) > maxSuspicionAge {
			changed = true
			continue
		}
		if open(s) {
			said := slices.ContainsFunc(job.Said, func(n evenkeel.Suspicion) bool { return n.Class == s.Class })
			switch {
			case job.Ended:
				s.JobEndTime, changed = &at, true
			case said && s.WithdrawnTime != nil:
				s.WithdrawnTime, changed = nil, true
			case !said && s.WithdrawnTime == nil:
				s.WithdrawnTime, changed = &at, true
			}
		}
		after = append(after, s)
	}
	if job.Ended {
		return after, changed
	}
	for _, n := range job.Said {
		if slices.ContainsFunc(after, func(s evenkeel.Suspicion) bool { return open(s) && s.Class == n.Class }) {
			continue
		}
		if len(after) >= evenkeel.MaxSuspicions {
			at := lastWithdrawn(after)
			if at < 0 {
				continue
			}
			after = slices.Delete(after, at, at+1)
		}
		after, changed = slices.Insert(after, 0, n), true
	}
	return after, changed
}

// lastWithdrawn returns the index of the oldest suspicion that was withdrawn and waits for no check, or a negative
// number if there is none.
func lastWithdrawn(all []evenkeel.Suspicion) int {
	for i, s := range slices.Backward(all) {
		if s.WithdrawnTime != nil && s.JobEndTime == nil {
			return i
		}
	}
	return -1
}

// dropDecided returns the suspicions that a conclusive result leaves open, because their jobs ended after it or have
// not ended.
func dropDecided(all []evenkeel.Suspicion, result metav1.Time) []evenkeel.Suspicion {
	return slices.DeleteFunc(all, func(s evenkeel.Suspicion) bool { return s.JobEndTime != nil && !result.Before(s.JobEndTime) })
}

// SuspicionDue returns since when a check may decide a suspicion of the node: since the end of the last job that had
// one. It is zero if there is nothing to decide.
func SuspicionDue(status *evenkeel.NodeNetworkHealthStatus) time.Time {
	var since time.Time
	for i := range status.Suspicions {
		if end := status.Suspicions[i].JobEndTime; end != nil && end.After(since) {
			since = end.Time
		}
	}
	return since
}

// standing returns the first suspicion that was not withdrawn, or nil if there is none.
func standing(status *evenkeel.NodeNetworkHealthStatus) *evenkeel.Suspicion {
	at := slices.IndexFunc(status.Suspicions, func(s evenkeel.Suspicion) bool { return s.WithdrawnTime == nil })
	if at < 0 {
		return nil
	}
	return &status.Suspicions[at]
}
