package networkcheck

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/preflight"
	"evenkeel.dev/evenkeel/operator/internal/preflight/jobs"
	"evenkeel.dev/evenkeel/operator/internal/preflight/pairing"
)

// runJob is a run's Job or MPIJob.
type runJob struct {
	client.Object
	ended, suspended bool
	// failure is the reason and message of its controller; empty if it succeeded.
	failure string
}

// listJobs returns the check's Jobs or MPIJobs by name. It leaves out the Jobs of a deleted check of the same name.
func (c *Reconciler) listJobs(ctx context.Context, check jobs.Check, launcher evenkeel.Launcher) (map[string]runJob, error) {
	found := map[string]runJob{}
	options := []client.ListOption{client.InNamespace(check.Object.Namespace), client.MatchingLabels{evenkeel.CheckKey: check.Object.Name}}
	add := func(object client.Object, ended, suspended bool, why string) {
		if owner := metav1.GetControllerOf(object); owner != nil && owner.UID == check.Object.UID {
			found[object.GetName()] = runJob{object, ended, suspended, why}
		}
	}
	if launcher == evenkeel.LauncherMPIJob {
		list, err := c.listMPIJobs(ctx, options...)
		switch {
		case isUnserved(err): // the mpi-operator was removed, and its jobs with it
			return found, nil
		case err != nil:
			return nil, fmt.Errorf("list MPIJobs: %w", err)
		}
		for i := range list {
			ended, why := mpiJobEnded(&list[i])
			suspended, _, _ := unstructured.NestedBool(list[i].Object, "spec", "runPolicy", "suspend") // what is no bool suspends nothing
			add(&list[i], ended, suspended, why)
		}
		return found, nil
	}
	var list batchv1.JobList
	if err := c.client.List(ctx, &list, options...); err != nil {
		return nil, fmt.Errorf("list Jobs: %w", err)
	}
	for i := range list.Items {
		ended, why := jobEnded(&list.Items[i])
		suspend := list.Items[i].Spec.Suspend
		add(&list.Items[i], ended, suspend != nil && *suspend, why)
	}
	return found, nil
}

// listMPIJobs reads live: a cache would need a watch of a kind that the cluster may lack, for a few objects of one
// check.
func (c *Reconciler) listMPIJobs(ctx context.Context, options ...client.ListOption) ([]unstructured.Unstructured, error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(jobs.MPIJobKind.GroupVersion().WithKind(jobs.MPIJobKind.Kind + "List"))
	err := c.live.List(ctx, list, options...)
	return list.Items, err
}

func jobEnded(j *batchv1.Job) (ended bool, why string) {
	for _, c := range j.Status.Conditions {
		if c.Status != corev1.ConditionTrue {
			continue
		}
		switch c.Type {
		case batchv1.JobComplete:
			return true, ""
		case batchv1.JobFailed:
			return true, joinReason(c.Reason, c.Message)
		}
	}
	return false, ""
}

func mpiJobEnded(j *unstructured.Unstructured) (ended bool, why string) {
	conditions, _, _ := unstructured.NestedSlice(j.Object, "status", "conditions") // what is not a list has no conditions
	for _, item := range conditions {
		condition, _ := item.(map[string]any)
		text := func(key string) string { s, _ := condition[key].(string); return s }
		if text("status") != "True" {
			continue
		}
		switch text("type") {
		case "Succeeded":
			return true, ""
		case "Failed":
			return true, joinReason(text("reason"), text("message"))
		}
	}
	return false, ""
}

// createRun starts the run. If it exists already, the cache was behind.
func (c *Reconciler) createRun(ctx context.Context, check jobs.Check, launcher evenkeel.Launcher, w preflight.PlannedRun) error {
	var accelerators corev1.ResourceList
	if check.Options.BusyNodes == evenkeel.BusyNodesSkip {
		nodes := make([]*corev1.Node, len(w.Nodes))
		for i, name := range w.Nodes {
			nodes[i] = &corev1.Node{}
			// The result of a run on a deleted node says that it is.
			if err := c.client.Get(ctx, client.ObjectKey{Name: name}, nodes[i]); client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("read node %s: %w", name, err)
			}
		}
		accelerators = accelerator.Offered(nodes...)
	}
	var object client.Object
	var err error
	if launcher == evenkeel.LauncherMPIJob {
		object, err = check.MPIJob(w, accelerators)
	} else {
		object, err = check.Job(w, accelerators)
	}
	if err != nil {
		return err
	}
	if err := c.client.Create(ctx, object); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create run %s: %w", object.GetName(), err)
	}
	return nil
}

// deleteObjects deletes objects, and the pods of Jobs with them.
func (c *Reconciler) deleteObjects(ctx context.Context, objects ...client.Object) error {
	problems := make([]error, len(objects))
	var requests errgroup.Group
	requests.SetLimit(concurrentRequests)
	for i, object := range objects {
		if object.GetDeletionTimestamp() != nil {
			continue
		}
		requests.Go(func() error {
			err := c.client.Delete(ctx, object, client.PropagationPolicy(metav1.DeletePropagationBackground))
			if client.IgnoreNotFound(err) != nil {
				problems[i] = fmt.Errorf("delete %s: %w", object.GetName(), err)
			}
			return nil
		})
	}
	_ = requests.Wait() // each has its problem
	return errors.Join(problems...)
}

// listPods returns the pods of the check's runs, by the run's name. It reads from the API server, since the cache does
// not have these pods.
func (c *Reconciler) listPods(ctx context.Context, check jobs.Check) (map[string][]corev1.Pod, error) {
	var list corev1.PodList
	if err := c.live.List(ctx, &list, client.InNamespace(check.Object.Namespace), client.MatchingLabels{evenkeel.CheckKey: check.Object.Name}); err != nil {
		return nil, fmt.Errorf("list the pods of NetworkCheck %s: %w", check.Object.Name, err)
	}
	runs := map[string][]corev1.Pod{}
	for _, p := range list.Items {
		runs[p.Labels[evenkeel.RunKey]] = append(runs[p.Labels[evenkeel.RunKey]], p)
	}
	return runs, nil
}

// inUse returns the measurement of a run of whose nodes some were used by others since then; nil if none was. Without a
// time, only those that use them now count.
func (c *Reconciler) inUse(check jobs.Check, w preflight.PlannedRun, since time.Time) *preflight.Measurement {
	if check.Options.BusyNodes != evenkeel.BusyNodesSkip {
		return nil
	}
	var m *preflight.Measurement
	for _, name := range w.Nodes {
		user := c.Use.User(name)
		if !since.IsZero() {
			user = c.Use.UserSince(name, since)
		}
		if user == "" {
			continue
		}
		if m == nil {
			m = &preflight.Measurement{Outcome: pairing.Fault, Detail: inUseMessage(name, user)}
		}
		m.InUse = append(m.InUse, name)
	}
	return m
}

// readResult returns the result of the run; nil if there is none yet.
func (c *Reconciler) readResult(ctx context.Context, check jobs.Check, record *preflight.Record, w preflight.PlannedRun, j runJob, pods []corev1.Pod) (*preflight.Measurement, error) {
	for _, name := range w.Nodes {
		node := &corev1.Node{}
		err := c.client.Get(ctx, client.ObjectKey{Name: name}, node)
		selected := slices.IndexFunc(record.Nodes, func(n preflight.Node) bool { return n.Name == name })
		switch {
		case apierrors.IsNotFound(err), err == nil && selected >= 0 && record.Replaced(&record.Nodes[selected], node):
			m := faultMeasurement(fmt.Sprintf("node %s was deleted", name))
			return &m, nil
		case err != nil:
			return nil, fmt.Errorf("read node %s: %w", name, err)
		}
	}
	limit := time.Duration(*check.Options.RunTimeoutSeconds) * time.Second
	late := !c.Clock.Now().Before(j.GetCreationTimestamp().Add(limit))
	var m preflight.Measurement
	if used := c.inUse(check, w, j.GetCreationTimestamp().Time); used != nil {
		return used, nil
	}
	switch why, from := blockingReason(pods), resultPod(pods); {
	case why != "":
		m = faultMeasurement(why)
	case j.ended && (from == nil || rankPods(pods) < len(w.Nodes)):
		// Whoever took a node may have ended a rank, and the others' logs blame the network.
		m = faultMeasurement("a pod of the run is gone; " + joinReason("the run ended", j.failure))
	case j.ended:
		log, err := c.Logs.Tail(ctx, from.Namespace, from.Name)
		switch {
		case err == nil:
			m = parseMeasurement(log, check.Options)
		case late:
			m = faultMeasurement(err.Error())
		default:
			return nil, err
		}
	case late:
		m = faultMeasurement(fmt.Sprintf("it did not end within %s: %s", limit, pendingReason(j, pods, len(w.Nodes))))
	default:
		return nil, nil
	}
	return &m, nil
}
