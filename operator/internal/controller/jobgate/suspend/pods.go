package suspend

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate"
)

const (
	// podDelay is how long changes of gated pods are collected: each evaluation is over all of them.
	podDelay = 100 * time.Millisecond
	// settleDelay is how long the number of a gang's waiting pods has to stand still until the gang counts as whole.
	// Controllers make the pods of a job one after the other, those of its children at different times.
	settleDelay = 3 * time.Second
	// maxSettle is when a gang counts as whole in any case, from when it was first seen.
	maxSettle = 30 * time.Second
	// maxProblems is the number of errors that are reported when gates of pods are opened.
	maxProblems = 8
)

// listGatedPods returns the pods with the scheduling gate that wait, a gang for each job. Pods that a job makes later,
// such as the replacement of one that was evicted, do not wait: the rest of the job runs already.
func (c *Reconciler) listGatedPods(ctx context.Context) ([]gatedJob, error) {
	var list corev1.PodList
	// They are read only; what is patched is copied before.
	if err := c.WaitingCache.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list gated pods: %w", err)
	}
	pods := make([]*corev1.Pod, len(list.Items))
	for i := range list.Items {
		pods[i] = &list.Items[i]
	}
	gangs := jobgate.Gangs(pods)
	all := []error{c.readGangs(ctx, gangs)}
	now := c.Clock.Now()
	var found []gatedJob
	var late []*corev1.Pod
	for _, waiting := range gangs {
		g := c.gangs[waiting.Key()]
		if g == nil { // what it has opened cannot be read now
			g = &gang{about: waiting.Job, alone: true}
		}
		pods := slices.DeleteFunc(waiting.Pods, func(pod *corev1.Pod) bool {
			if g.isLate(pod) {
				late = append(late, pod)
				return true
			}
			return false
		})
		if len(pods) == 0 {
			continue
		}
		found = append(found, gatedJob{key: waiting.Key(), about: g.about, job: jobgate.FromPods(pods), notBefore: g.wholeAt(len(pods), now, c.Delays.Of(settleDelay)), open: func(ctx context.Context) error {
			err := c.recordOpened(ctx, g, pods)
			g.started = true
			return errors.Join(err, c.openPods(ctx, pods))
		}})
	}
	return found, errors.Join(append(all, c.openPods(ctx, late))...)
}

// A gang is what is known of the gated pods of one job.
type gang struct {
	// about is the job, with its UID.
	about corev1.ObjectReference
	// alone: there is one pod, which belongs to nothing.
	alone bool
	// opened holds the pod templates whose gates were opened. started is true if a pod that asked for its profile itself
	// does not wait.
	opened  []string
	started bool

	// pods is the number of pods when it was last seen, since when there are so many, and first is when it was first seen.
	pods         int
	since, first time.Time
}

// isLate reports whether others like the pod have been let go: it does not wait.
func (g *gang) isLate(pod *corev1.Pod) bool {
	if template := pod.Annotations[evenkeel.TemplateKey]; template != "" {
		return slices.Contains(g.opened, template)
	}
	return g.started
}

// wholeAt returns when the gang counts as whole, if no more pods come until then. So many wait now.
func (g *gang) wholeAt(pods int, now time.Time, settle time.Duration) time.Time {
	if g.alone {
		return time.Time{}
	}
	if g.first.IsZero() {
		g.first = now
	}
	if pods != g.pods {
		g.pods, g.since = pods, now
	}
	whole, latest := g.since.Add(settle), g.first.Add(maxSettle)
	if latest.Before(whole) {
		return latest
	}
	return whole
}

// readGangs reads the gangs that are not cached yet, and drops the ones that no longer wait.
func (c *Reconciler) readGangs(ctx context.Context, gangs []jobgate.Gang) error {
	known := c.gangs
	c.gangs = make(map[string]*gang, len(gangs))
	read := make([]*gang, len(gangs))
	problems := make([]error, len(gangs))
	var requests errgroup.Group
	requests.SetLimit(jobgate.MaxRequests)
	for i, g := range gangs {
		if read[i] = known[g.Key()]; read[i] != nil {
			continue
		}
		requests.Go(func() error {
			read[i], problems[i] = c.readGang(ctx, g)
			return nil
		})
	}
	_ = requests.Wait() // each has its problem
	for i, g := range gangs {
		if read[i] != nil {
			c.gangs[g.Key()] = read[i]
		}
	}
	return first(problems)
}

// openPods opens the gates of pods, a few at a time.
func (c *Reconciler) openPods(ctx context.Context, pods []*corev1.Pod) error {
	problems := make([]error, len(pods))
	var requests errgroup.Group
	requests.SetLimit(jobgate.MaxRequests)
	for i, pod := range pods {
		if err := c.pace.Wait(ctx); err != nil {
			problems[i] = fmt.Errorf("the gates of %d pods are opened next time: %w", len(pods)-i, err)
			break
		}
		requests.Go(func() error {
			c.slots <- struct{}{}
			defer func() { <-c.slots }()
			problems[i] = openPod(ctx, c.Client, pod)
			return nil
		})
	}
	_ = requests.Wait() // each has its problem
	return first(problems)
}

// first joins the first of the errors: thousands of pods may have the same.
func first(problems []error) error {
	problems = slices.DeleteFunc(problems, func(err error) bool { return err == nil })
	if more := len(problems) - maxProblems; more > 0 {
		problems = append(problems[:maxProblems], fmt.Errorf("and %d more errors", more))
	}
	return errors.Join(problems...)
}
