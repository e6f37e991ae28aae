package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/pluginstatus"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

func whyCommand(c *connection) *cobra.Command {
	return &cobra.Command{
		Use:   "why [KIND/]JOB",
		Short: "What a job got from Evenkeel, what was left unchanged, what it waits for, and which call hangs",
		Long: `Prints what a job got from Evenkeel, what was left unchanged, and what it waits for.

Where its containers have EVENKEEL_FLIGHT_RECORDER, it also says which collective call of the Python package hangs, and which rank
never called it. It runs a shell in these containers for that, or reads their logs if they have ended. Both need your own rights to
pods/exec and pods/log.`,
		Example: `  kubectl evenkeel why pytorchjob/llama -n ml
  kubectl evenkeel why llama                    # jobs of that name, of any kind
  kubectl evenkeel why raycluster/llama         # whose pods ask for a profile themselves`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cluster, err := c.client()
			if err != nil {
				return err
			}
			access, err := c.pods()
			if err != nil {
				return err
			}
			namespace, err := c.jobs()
			if err != nil {
				return err
			}
			jobs, err := findJobs(cmd.Context(), cluster, namespace, args[0])
			if err != nil {
				return err
			}
			for i := range jobs {
				if i > 0 {
					fmt.Fprintln(cmd.OutOrStdout())
				}
				if err := explainJob(cmd.Context(), cluster, access, &jobs[i], cmd.OutOrStdout(), time.Now()); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

// findJobs returns the jobs of that name, of all kinds that Evenkeel supports and the cluster serves.
func findJobs(ctx context.Context, cluster client.Client, namespace, argument string) ([]unstructured.Unstructured, error) {
	kind, name, found := strings.Cut(argument, "/")
	if !found {
		kind, name = "", argument
	}
	if name == "" {
		return nil, fmt.Errorf("%q: want a job's name, or its kind and name, such as pytorchjob/llama", argument)
	}
	var jobs []unstructured.Unstructured
	var known, served []string
	for _, group := range workload.Kinds() {
		known = append(known, strings.ToLower(group.Kind))
		if kind != "" && !strings.EqualFold(strings.TrimSuffix(kind, "s"), group.Kind) {
			continue
		}
		mapping, err := cluster.RESTMapper().RESTMapping(group)
		if meta.IsNoMatchError(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("discover kind %s: %w", group, err)
		}
		served = append(served, group.Kind)
		job := unstructured.Unstructured{}
		job.SetGroupVersionKind(mapping.GroupVersionKind)
		err = cluster.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &job)
		switch {
		case err == nil:
			jobs = append(jobs, job)
		case !apierrors.IsNotFound(err):
			return nil, fmt.Errorf("read the %s: %w", group.Kind, err)
		}
	}
	switch {
	case len(jobs) > 0:
		return jobs, nil
	case kind != "" && !slices.Contains(known, strings.ToLower(strings.TrimSuffix(kind, "s"))):
		return findOther(ctx, cluster, namespace, kind, name)
	case len(served) == 0:
		return nil, fmt.Errorf("the cluster does not serve %s", firstOf(kind, strings.Join(known, ", ")))
	}
	return nil, fmt.Errorf("namespace %s has no %s named %q", namespace, strings.Join(served, " or "), name)
}

// findOther returns the object of any other kind, whose pods may ask for a profile themselves.
func findOther(ctx context.Context, cluster client.Client, namespace, resource, name string) ([]unstructured.Unstructured, error) {
	kind, err := cluster.RESTMapper().KindFor(schema.ParseGroupResource(strings.ToLower(resource)).WithVersion(""))
	if meta.IsNoMatchError(err) {
		return nil, fmt.Errorf("the cluster has no kind %q", resource)
	}
	if err != nil {
		return nil, fmt.Errorf("discover kind %s: %w", resource, err)
	}
	object := unstructured.Unstructured{}
	object.SetGroupVersionKind(kind)
	if err := cluster.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &object); err != nil {
		return nil, fmt.Errorf("read the %s: %w", kind.Kind, err)
	}
	return []unstructured.Unstructured{object}, nil
}

// explainOther prints what the pods of an object have whose kind Evenkeel does not list.
func explainOther(ctx context.Context, cluster client.Client, access *podAccess, object *unstructured.Unstructured, out io.Writer, now time.Time) error {
	if object.GroupVersionKind().GroupKind() == kueueWorkload {
		return explainWorkload(ctx, cluster, object, out, now)
	}
	title := fmt.Sprintf("%s %s/%s", object.GetKind(), object.GetNamespace(), object.GetName())
	var pods []corev1.Pod
	var err error
	if object.GroupVersionKind() == corev1.SchemeGroupVersion.WithKind("Pod") {
		pods = make([]corev1.Pod, 1)
		err = runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &pods[0])
	} else {
		pods, err = podsOf(ctx, cluster, object)
	}
	if err != nil {
		return err
	}
	asks := func(pod corev1.Pod) bool { return pod.Labels[evenkeel.ProfileKey] != "" }
	if i := slices.IndexFunc(pods, asks); i >= 0 {
		fmt.Fprintf(out, "%s: profile %s, by the annotation of its pods\n", title, pods[i].Labels[evenkeel.ProfileKey])
	} else {
		fmt.Fprintf(out, "%s: no pod of it has the plugin. The annotation %s belongs on its pod template, and has an effect on new pods\n", title, evenkeel.ProfileKey)
	}
	if err := explainPods(pods, out); err != nil {
		return err
	}
	if err := explainRefusals(ctx, cluster, object, pods, out, now); err != nil {
		return err
	}
	if err := explainEnvironment(ctx, cluster, pods, out); err != nil {
		return err
	}
	if err := explainSuspects(pods, out, now); err != nil {
		return err
	}
	if err := explainCalls(ctx, access, pods, out); err != nil {
		return err
	}
	if err := explainWaits(ctx, cluster, object, pods, out, now); err != nil {
		return err
	}
	return explainEvents(ctx, cluster, object, out, now)
}

// explainJob prints the state of the job, its pods and their Events.
func explainJob(ctx context.Context, cluster client.Client, access *podAccess, job *unstructured.Unstructured, out io.Writer, now time.Time) error {
	if !workload.Known(job.GroupVersionKind().GroupKind()) {
		return explainOther(ctx, cluster, access, job, out, now)
	}
	profile := job.GetAnnotations()[evenkeel.ProfileKey]
	title := fmt.Sprintf("%s %s/%s", job.GetKind(), job.GetNamespace(), job.GetName())
	if profile == "" {
		_, err := fmt.Fprintf(out, "%s: Evenkeel ignores it, as it has no annotation %s. Add it to the manifest and create the job again.\n", title, evenkeel.ProfileKey)
		return err
	}
	fmt.Fprintf(out, "%s: profile %s\n", title, profile)
	if err := explainTemplates(job, out); err != nil {
		return err
	}
	pods, err := podsOf(ctx, cluster, job)
	if err != nil {
		return err
	}
	if err := explainPods(pods, out); err != nil {
		return err
	}
	if err := explainRefusals(ctx, cluster, job, pods, out, now); err != nil {
		return err
	}
	if err := explainEnvironment(ctx, cluster, pods, out); err != nil {
		return err
	}
	if err := explainSuspects(pods, out, now); err != nil {
		return err
	}
	if err := explainCalls(ctx, access, pods, out); err != nil {
		return err
	}
	if err := explainPlace(ctx, cluster, job, out); err != nil {
		return err
	}
	if err := explainWaits(ctx, cluster, job, pods, out, now); err != nil {
		return err
	}
	bad, err := unhealthyNodes(ctx, cluster)
	if err != nil {
		return err
	}
	if len(bad) > 0 {
		fmt.Fprintf(out, "\nIts pods avoid\n  %s\n", strings.Join(bad, "\n  "))
	}
	return explainEvents(ctx, cluster, job, out, now)
}

// explainWaits prints what prevents the object or its pods from running.
func explainWaits(ctx context.Context, cluster client.Client, object *unstructured.Unstructured, pods []corev1.Pod, out io.Writer, now time.Time) error {
	waits, err := waitReasons(ctx, cluster, object, pods, now)
	if err != nil || len(waits) == 0 {
		return err
	}
	_, err = fmt.Fprintf(out, "\nIt waits\n  %s\n", strings.Join(waits, "\n  "))
	return err
}

// explainTemplates prints what was pinned when the job was created. Equal templates are printed once.
func explainTemplates(job *unstructured.Unstructured, out io.Writer) error {
	templates, err := workload.Templates(job)
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, t := range templates {
		if t.Label(evenkeel.ProfileKey) == "" && t.Annotations()[evenkeel.ProfileKey] != "" {
			fmt.Fprintf(out, "  %s asks for %s: each pod gets it as it is when the pod is created\n", t.Path, t.Annotations()[evenkeel.ProfileKey])
			continue
		}
		if t.Label(evenkeel.ProfileKey) == "" {
			fmt.Fprintf(out, "  %s does not have it: the webhook did not see the job when it was created; create the job again\n", t.Path)
			continue
		}
		r, err := inject.FromPod(t.Labels(), t.Annotations())
		if err != nil {
			return fmt.Errorf("%s: %w", t.Path, err)
		}
		text := fmt.Sprintf("  plugin   %s\n  delivery %s, in %s", firstOf(r.Image, "the training image's own"), r.Delivery, r.Path)
		if len(r.Environment) > 0 {
			text += "\n  settings"
			for _, name := range r.Variables() {
				text += fmt.Sprintf(" %s=%s", name, r.Environment[name])
			}
		}
		if r.Encrypted() {
			text += "\n  encryption required: processes and pods that would send in clear are refused"
		}
		if secret := r.KeySecret(); secret != "" {
			by := "made by Evenkeel"
			if r.JobKey != nil && !r.JobKey.Made {
				by = "brought by the job's user"
			}
			text += fmt.Sprintf("\n  key      Secret %s, %s", secret, by)
		}
		if r.Reduction != nil {
			text += "\n  reduction servers " + strings.Join(r.Reduction.Servers, ", ")
		}
		if r.RDMA != nil {
			text += fmt.Sprintf("\n  device   %s, %d for each container", r.RDMA.Resource, r.RDMA.Count)
		}
		if !seen[text] {
			fmt.Fprintln(out, text)
		}
		seen[text] = true
	}
	return nil
}

func explainPods(pods []corev1.Pod, out io.Writer) error {
	if len(pods) == 0 {
		_, err := fmt.Fprintln(out, "\nIt has no pods.")
		return err
	}
	fmt.Fprintln(out)
	rows := [][]string{{"POD", "NODE", "PHASE", "EVENKEEL"}}
	for i := range pods {
		pod := &pods[i]
		outcome := "injected"
		switch skipped := pod.Annotations[evenkeel.SkippedKey]; {
		case pod.Annotations[evenkeel.InjectedKey] == "" && pod.Labels[evenkeel.ProfileKey] == "":
			outcome = "not injected: it asks for no profile"
		case pod.Annotations[evenkeel.InjectedKey] == "":
			outcome = "not injected: neither webhook nor policy saw it; it runs without the plugin"
		case skipped != "":
			outcome = "injected, but left unchanged: " + skipped
		}
		switch status, expected := pluginstatus.Of(pod); {
		case !expected:
		case status.Outcome == pluginstatus.Loaded:
			outcome += "; NCCL uses it: " + status.Text
			if requiresEncryption(pod) && !status.Encrypts() {
				outcome += "; it sends in clear, although its profile requires encryption: this version of the plugin cannot encrypt"
			}
		case status.Outcome == pluginstatus.Failed:
			outcome += "; the plugin refused to start, so NCCL does without: " + status.Text
		case pod.Status.Phase == corev1.PodRunning:
			outcome += "; not reported yet that NCCL uses it"
		}
		rows = append(rows, []string{pod.Name, pod.Spec.NodeName, string(pod.Status.Phase), outcome})
	}
	return table(out, "", rows)
}

// requiresEncryption reports whether a container of the pod was told to encrypt.
func requiresEncryption(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool {
		return slices.Contains(c.Env, corev1.EnvVar{Name: inject.EncryptionEnv, Value: inject.EncryptionRequired})
	})
}

// unhealthyNodes lists the nodes that jobs avoid by their label, and why they have it.
func unhealthyNodes(ctx context.Context, cluster client.Client) ([]string, error) {
	var nodes corev1.NodeList
	if err := cluster.List(ctx, &nodes, client.MatchingLabels{evenkeel.HealthKey: evenkeel.UnhealthyValue}); err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	var bad []string
	for i := range nodes.Items {
		node := &nodes.Items[i]
		text := node.Name
		for _, c := range node.Status.Conditions {
			if c.Type == evenkeel.ConditionNodeHealthy {
				text += ": " + c.Reason + ", " + c.Message
			}
		}
		bad = append(bad, text)
	}
	const most = 10
	if more := len(bad) - most; more > 0 {
		bad = append(bad[:most], fmt.Sprintf("and %d more: kubectl get nodes -l %s=%s", more, evenkeel.HealthKey, evenkeel.UnhealthyValue))
	}
	return bad, nil
}

// explainEvents prints Evenkeel's Events about the job.
func explainEvents(ctx context.Context, cluster client.Client, job *unstructured.Unstructured, out io.Writer, now time.Time) error {
	var events corev1.EventList
	if err := cluster.List(ctx, &events, client.InNamespace(job.GetNamespace()), client.MatchingFields{"involvedObject.uid": string(job.GetUID())}); err != nil {
		return fmt.Errorf("list Events: %w", err)
	}
	ours := slices.DeleteFunc(events.Items, func(e corev1.Event) bool {
		return !strings.HasPrefix(e.Source.Component, "evenkeel") && !strings.HasPrefix(e.ReportingController, "evenkeel")
	})
	if len(ours) == 0 {
		return nil
	}
	slices.SortFunc(ours, func(a, b corev1.Event) int { return a.LastTimestamp.Compare(b.LastTimestamp.Time) })
	fmt.Fprintln(out, "\nEvents")
	var rows [][]string
	for _, e := range ours {
		rows = append(rows, []string{eventTime(&e, now), e.Reason, e.Message})
	}
	return table(out, "  ", rows)
}
