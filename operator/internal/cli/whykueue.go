package cli

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// Kueue's kind, and its label with the UID of the job.
var (
	kueueWorkload = schema.GroupKind{Group: workload.KueueGroup, Kind: "Workload"}
	kueueJobLabel = "kueue.x-k8s.io/job-uid"
)

// kueueWorkloads returns the workloads of the job; served is false if the cluster has no Kueue.
func kueueWorkloads(ctx context.Context, cluster client.Client,
	job *unstructured.Unstructured) (workloads []unstructured.Unstructured, served bool, err error) {
	mapping, err := cluster.RESTMapper().RESTMapping(kueueWorkload)
	if meta.IsNoMatchError(err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("discover kind %s: %w", kueueWorkload, err)
	}
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(mapping.GroupVersionKind)
	if err := cluster.List(ctx, list, client.InNamespace(job.GetNamespace()),
		client.MatchingLabels{kueueJobLabel: string(job.GetUID())}); err != nil {
		return nil, true, fmt.Errorf("list Kueue's workloads: %w", err)
	}
	return list.Items, true, nil
}

// kueueReasons says why Kueue has not started the job.
func kueueReasons(ctx context.Context, cluster client.Client, job *unstructured.Unstructured) ([]string, error) {
	queue := workload.Queue(job)
	workloads, served, err := kueueWorkloads(ctx, cluster, job)
	if err != nil {
		return nil, err
	}
	if !served {
		return []string{fmt.Sprintf("it is in the Kueue queue %s, but the cluster has no Kueue", queue)}, nil
	}
	var waits []string
	for i := range workloads {
		reasons, err := workloadReasons(ctx, cluster, queue, &workloads[i])
		if err != nil {
			return nil, err
		}
		waits = append(waits, reasons...)
	}
	if len(waits) == 0 {
		waits = []string{fmt.Sprintf("Kueue's queue %s has yet to start it", queue)}
	}
	return waits, nil
}

// workloadReasons says why Kueue has not admitted the workload.
func workloadReasons(ctx context.Context, cluster client.Client, queue string,
	of *unstructured.Unstructured) ([]string, error) {
	waits, err := requestedNodes(ctx, cluster, of)
	if err != nil {
		return nil, err
	}
	conditions, _, _ := unstructured.NestedSlice(of.Object, "status", "conditions") // a new one has none
	for _, item := range conditions {
		if c, _ := item.(map[string]any); c["type"] == "QuotaReserved" && c["status"] != "True" {
			waits = append(waits, fmt.Sprintf("Kueue's queue %s has no quota for it yet: %v", queue, c["message"]))
		}
	}
	checks, _, _ := unstructured.NestedSlice(of.Object, "status", "admissionChecks")
	for _, item := range checks {
		if c, _ := item.(map[string]any); c["state"] != "Ready" {
			waits = append(waits, strings.TrimSuffix(fmt.Sprintf("Kueue's admission check %v is %v: %v", c["name"], c["state"],
				c["message"]), ": "))
		}
	}
	return waits, nil
}

// explainWorkload prints what a workload of Kueue waits for. In a worker cluster of MultiKueue it is there before its
// job, which Kueue makes when the workload is admitted.
func explainWorkload(ctx context.Context, cluster client.Client, of *unstructured.Unstructured, out io.Writer,
	now time.Time) error {
	queue, _, _ := unstructured.NestedString(of.Object, "spec", "queueName")
	fmt.Fprintf(out, "Workload %s/%s: of Kueue, in its queue %s\n", of.GetNamespace(), of.GetName(), queue)
	waits, err := workloadReasons(ctx, cluster, queue, of)
	if err != nil {
		return err
	}
	if len(waits) > 0 {
		fmt.Fprintf(out, "\nIt waits\n  %s\n", strings.Join(waits, "\n  "))
	}
	return explainEvents(ctx, cluster, of, out, now)
}

// explainPlace prints where MultiKueue runs the job, if not in this cluster.
func explainPlace(ctx context.Context, cluster client.Client, job *unstructured.Unstructured, out io.Writer) error {
	if !workload.RunsElsewhere(job) {
		return nil
	}
	workloads, _, err := kueueWorkloads(ctx, cluster, job)
	if apierrors.IsForbidden(err) {
		_, err = fmt.Fprintf(out, "\nMultiKueue runs it in another cluster. You may not read in which: %v\n", err)
		return err
	}
	if err != nil {
		return err
	}
	name, nominated, of := "", []string(nil), ""
	for i := range workloads {
		at, _, _ := unstructured.NestedString(workloads[i].Object, "status",
			"clusterName") // not there before it is admitted
		if at != "" {
			name = at
		}
		if to, _, _ := unstructured.NestedStringSlice(workloads[i].Object, "status", "nominatedClusterNames"); len(to) > 0 {
			nominated, of = to, workloads[i].GetName()
		}
	}
	switch {
	case name != "":
		_, err = fmt.Fprintf(out, "\nIt runs in the cluster %s, by MultiKueue. There: kubectl evenkeel why %s/%s -n %s\n",
			name, strings.ToLower(job.GetKind()), job.GetName(), job.GetNamespace())
	case len(nominated) > 0:
		_, err = fmt.Fprintf(out,
			"\nMultiKueue has sent it to the clusters %s: it runs in the first that admits it. Kueue does not send back what it waits for there; there, this says it: kubectl evenkeel why workload.%s/%s -n %s\n",
			strings.Join(nominated, " and "), workload.KueueGroup, of, job.GetNamespace())
	default:
		_, err = fmt.Fprint(out, "\nMultiKueue runs it in another cluster, and has not sent it to one yet\n")
	}
	return err
}
