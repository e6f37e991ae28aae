package suspicions

import (
	"context"
	"fmt"
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/nodenetworkhealth"
	"evenkeel.dev/evenkeel/operator/internal/preflight/health"
	"evenkeel.dev/evenkeel/operator/internal/suspects"
	"evenkeel.dev/evenkeel/operator/internal/text"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// pageSize is the number of pods that are read at a time.
const pageSize = 500

// unfinished selects the pods that have not terminated.
var unfinished = fields.ParseSelectorOrDie("status.phase!=Succeeded,status.phase!=Failed")

// The schema's limits of a job's names. Owner references have none, and whoever makes a pod writes them.
const maxUID, maxKind, maxName = 63, 63, 253

// suspected returns the names of the nodes whose NodeNetworkHealth has an open suspicion of the job, and one of these.
func (c *Reconciler) suspected(ctx context.Context, namespace string, job types.UID) (names []string, one evenkeel.SuspiciousJob, err error) {
	var list evenkeel.NodeNetworkHealthList
	if err := c.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, one, fmt.Errorf("list NodeNetworkHealths: %w", err)
	}
	for i := range list.Items {
		for _, s := range list.Items[i].Status.Suspicions {
			if s.Job.UID == string(job) && s.Job.Namespace == namespace && s.JobEndTime == nil {
				names, one = append(names, list.Items[i].Name), s.Job
				break
			}
		}
	}
	return names, one, nil
}

// ended reports whether all pods of the job have terminated. It first reads the few pods on the nodes from the API
// server's memory, because etcd would read all pods of the namespace to find them, every few seconds as long as the job
// runs. The memory may be a moment old, so etcd is asked last.
func (c *Reconciler) ended(ctx context.Context, job evenkeel.SuspiciousJob, nodes []string) (bool, error) {
	for _, node := range nodes {
		onNode := fields.AndSelectors(unfinished, fields.OneTermEqualSelector("spec.nodeName", node))
		pods, err := c.list(ctx, job, &client.ListOptions{FieldSelector: onNode, Raw: &metav1.ListOptions{ResourceVersion: "0"}})
		if err != nil || hasPodOf(pods, job) {
			return false, err
		}
	}
	for token := ""; ; {
		pods, err := c.list(ctx, job, &client.ListOptions{FieldSelector: unfinished, Limit: pageSize, Continue: token})
		if err != nil || hasPodOf(pods, job) {
			return false, err
		}
		if token = pods.Continue; token == "" {
			return true, nil
		}
	}
}

// list returns the selected pods of the job's namespace.
func (c *Reconciler) list(ctx context.Context, job evenkeel.SuspiciousJob, options *client.ListOptions) (*metav1.PartialObjectMetadataList, error) {
	pods := &metav1.PartialObjectMetadataList{}
	pods.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PodList"))
	options.Namespace = job.Namespace
	if err := c.live.List(ctx, pods, options); err != nil {
		return nil, fmt.Errorf("list the pods of %s %s: %w", job.Kind, job.Name, err)
	}
	return pods, nil
}

// hasPodOf reports whether one of the pods belongs to the job.
func hasPodOf(pods *metav1.PartialObjectMetadataList, job evenkeel.SuspiciousJob) bool {
	return slices.ContainsFunc(pods.Items, func(p metav1.PartialObjectMetadata) bool { return belongs(&p, job) })
}

// belongs reports whether the pod is one of the job's. Pods of some kinds know their job by its name only.
func belongs(pod metav1.Object, job evenkeel.SuspiciousJob) bool {
	if string(workload.JobOf(pod).UID) == job.UID {
		return true
	}
	gang := workload.GangOf(pod)
	return gang.UID == "" && gang.Kind == job.Kind && gang.Name == job.Name
}

// jobOf returns the pod's job in the recorded form.
func jobOf(pod metav1.Object) evenkeel.SuspiciousJob {
	gang := workload.GangOf(pod)
	return evenkeel.SuspiciousJob{Namespace: gang.Namespace, Kind: text.Clip(gang.Kind, maxKind), Name: text.Clip(gang.Name, maxName), UID: string(workload.JobOf(pod).UID)}
}

// record writes what is known of the job on one node. Again is set if it must be repeated soon.
func (c *Reconciler) record(ctx context.Context, name string, job health.JobView) (again bool, err error) {
	node := &corev1.Node{}
	if err := c.client.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	state, err := nodenetworkhealth.ForNode(ctx, c.client, node)
	if err != nil || state == nil {
		return state == nil, err
	}
	after, changed := health.Suspect(state.Status.Suspicions, job, c.Clock.Now())
	if !changed {
		return false, nil
	}
	state.Status.Suspicions = after
	if err := c.client.Status().Update(ctx, state); apierrors.IsConflict(err) {
		return true, nil // a check's result was written meanwhile
	} else if err != nil {
		return false, fmt.Errorf("write NodeNetworkHealth %s: %w", name, err)
	}
	return false, nil
}

// saysOf returns the job's report about the network of a node.
func saysOf(node string, accused []accusation, job evenkeel.SuspiciousJob, said *suspects.Standing) []evenkeel.Suspicion {
	var all []evenkeel.Suspicion
	for _, a := range accused {
		if a.node != node || a.class == evenkeel.SuspectLate {
			continue
		}
		s := evenkeel.Suspicion{Job: job, Class: a.class, Since: metav1.NewTime(said.Since), Message: said.Text}
		for i := range said.Suspects {
			if said.Suspects[i].Class == a.class {
				percent := int32(math.Round(100 * said.Suspects[i].Confidence))
				s.ConfidencePercent = &percent
				break
			}
		}
		all = append(all, s)
	}
	return all
}
