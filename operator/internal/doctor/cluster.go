package doctor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/version"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/jobgate/kueue"
	"evenkeel.dev/evenkeel/operator/internal/controller/networkprofile"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// oldest is the first version with what the chart needs; imageVolumes the first that mounts images as volumes by
// default.
var oldest, imageVolumes = version.MustParseGeneric("1.30.0"), version.MustParseGeneric("1.35.0")

func kubernetesVersion(given string) Finding {
	v, err := version.ParseGeneric(given)
	switch {
	case err != nil:
		return Finding{"kubernetes", Unknown, fmt.Sprintf("version %q is not one that can be compared", given), "use 1.30 or later"}
	case !v.AtLeast(oldest):
		return Finding{"kubernetes", Problem, given + " lacks ValidatingAdmissionPolicy and match conditions", "upgrade to 1.30 or later"}
	case !v.AtLeast(imageVolumes):
		return Finding{"kubernetes", OK, given + ": the plugin comes by an init container, as image volumes are on by default from 1.35", ""}
	}
	return Finding{"kubernetes", OK, given, ""}
}

// mutatingPolicies reports whether the API server can inject without a webhook.
func (d *Doctor) mutatingPolicies(context.Context, *state) ([]Finding, error) {
	_, err := d.Client.RESTMapper().RESTMapping(schema.GroupKind{Group: "admissionregistration.k8s.io", Kind: "MutatingAdmissionPolicy"}, "v1")
	switch {
	case meta.IsNoMatchError(err):
		return []Finding{{"policies", OK, "the cluster serves no MutatingAdmissionPolicy v1, which Kubernetes has from 1.36: injection.mode has to be Webhook", ""}}, nil
	case err != nil:
		return nil, fmt.Errorf("discover MutatingAdmissionPolicy: %w", err)
	}
	return []Finding{{"policies", OK, "the cluster serves MutatingAdmissionPolicy v1: Evenkeel can do without a webhook (injection.mode)", ""}}, nil
}

// runtimes reports which nodes can mount images, by container runtime.
func runtimes(nodes []corev1.Node) []Finding {
	able, unable := map[string][]string{}, map[string][]string{}
	for i := range nodes {
		info := nodes[i].Status.NodeInfo
		to, key := unable, fmt.Sprintf("kubelet %s, %s", info.KubeletVersion, info.ContainerRuntimeVersion)
		if networkprofile.MountsImages(&nodes[i]) {
			to = able
		}
		to[key] = append(to[key], nodes[i].Name)
	}
	var all []Finding
	for _, key := range slices.Sorted(maps.Keys(able)) {
		all = append(all, Finding{"runtime", OK, fmt.Sprintf("%s can mount images: %s (%s)", counted(len(able[key]), "node"), key, text.List(sorted(able[key]), maxNamed)), ""})
	}
	for _, key := range slices.Sorted(maps.Keys(unable)) {
		f := Finding{"runtime", OK, fmt.Sprintf("%s cannot mount images, so that delivery Auto uses an init container: %s (%s)", counted(len(unable[key]), "node"), key, text.List(sorted(unable[key]), maxNamed)), ""}
		if len(able) > 0 {
			f.Status, f.Do = Note, "image volumes everywhere take Kubernetes 1.35 with containerd 2.1 or CRI-O 1.31 on these nodes"
		}
		all = append(all, f)
	}
	return all
}

// processors reports where nodes have different processors. An image is built for one of them, unless it is a manifest
// list.
func processors(nodes []corev1.Node) []Finding {
	by := map[string][]string{}
	for _, node := range nodes {
		if kind := node.Status.NodeInfo.Architecture; kind != "" {
			by[kind] = append(by[kind], node.Name)
		}
	}
	if len(by) < 2 {
		return nil
	}
	var kinds []string
	for _, kind := range slices.Sorted(maps.Keys(by)) {
		kinds = append(kinds, fmt.Sprintf("%s with %s (%s)", counted(len(by[kind]), "node"), kind, text.List(sorted(by[kind]), maxNamed)))
	}
	return []Finding{{"processors", Note, strings.Join(kinds, "; ") + ". The API does not show for which of them an image is", "publish each image as a manifest list for all, or select nodes of one kind: docs/install.md#processors"}}
}

// profiles describes what the controller has found about each profile.
func profiles(list []evenkeel.NetworkProfile) []Finding {
	if len(list) == 0 {
		return []Finding{{"profiles", Problem, "there is no NetworkProfile, so that jobs have none to name", "set defaultProfile.spec.plugin.image with the chart, or create one"}}
	}
	var all []Finding
	for i := range list {
		p := &list[i]
		ready := meta.FindStatusCondition(p.Status.Conditions, evenkeel.ConditionReady)
		switch {
		case ready == nil || p.Status.ObservedGeneration != p.Generation:
			all = append(all, Finding{"profiles", Problem, p.Name + ": the controller has not looked at it", "see whether the Deployment of the controller is available"})
		case ready.Status != "True":
			all = append(all, Finding{"profiles", Problem, p.Name + ": " + ready.Message, "change the profile or these nodes"})
		default:
			all = append(all, Finding{"profiles", OK, p.Name + ": " + ready.Message, ""})
		}
		if c := meta.FindStatusCondition(p.Status.Conditions, evenkeel.ConditionImagesMatch); c != nil {
			switch c.Status {
			case metav1.ConditionFalse:
				all = append(all, Finding{"versions", Problem, p.Name + ": " + c.Message, "until then its jobs get no reduction servers"})
			case metav1.ConditionUnknown:
				all = append(all, Finding{"versions", Note, p.Name + ": " + c.Message, ""})
			case metav1.ConditionTrue:
				all = append(all, Finding{"versions", OK, p.Name + ": " + c.Message, ""})
			}
		}
		c := meta.FindStatusCondition(p.Status.Conditions, evenkeel.ConditionRDMA)
		if c == nil || c.Status == "True" {
			continue
		}
		switch {
		case p.Spec.Transport.Mode == evenkeel.TransportRDMA:
			all = append(all, Finding{"rdma", Problem, p.Name + " requires RDMA: " + c.Message, "docs/rdma.md"})
		case p.Status.RDMANodes != nil && *p.Status.RDMANodes > 0:
			all = append(all, Finding{"rdma", Note, p.Name + ": " + c.Message, ""})
		}
	}
	return all
}

// kueue reports whether Kueue is there, whether Evenkeel's AdmissionChecks admit anything, which jobs they miss, and
// whether Kueue lets the Jobs of checks run.
func (d *Doctor) kueue(ctx context.Context, s *state) ([]Finding, error) {
	mapping, err := d.Client.RESTMapper().RESTMapping(schema.GroupKind{Group: "kueue.x-k8s.io", Kind: "AdmissionCheck"})
	if meta.IsNoMatchError(err) {
		return []Finding{{"kueue", OK, "Kueue is not installed: jobs are gated by their own suspend field", ""}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("discover Kueue: %w", err)
	}
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(mapping.GroupVersionKind)
	all := []Finding{{"kueue", OK, "Kueue is installed (" + mapping.GroupVersionKind.Version + ")", ""}}
	if err := d.Client.List(ctx, list); err != nil {
		return all, fmt.Errorf("list AdmissionChecks: %w", err)
	}
	for _, check := range list.Items {
		if by, _, _ := unstructured.NestedString(check.Object, "spec", "controllerName"); by != kueue.ControllerName {
			continue
		}
		active, why := false, "its controller has not looked at it"
		conditions, _, _ := unstructured.NestedSlice(check.Object, "status", "conditions") // a new one has none
		for _, item := range conditions {
			if c, _ := item.(map[string]any); c["type"] == "Active" {
				active, why = c["status"] == "True", fmt.Sprint(c["message"])
			}
		}
		f := Finding{"kueue", OK, "AdmissionCheck " + check.GetName() + " is active", ""}
		if !active {
			f = Finding{"kueue", Problem, "AdmissionCheck " + check.GetName() + " is not active, so that its queues admit nothing: " + why, "see whether the controller runs"}
		}
		all = append(all, f)
	}
	if !s.installed {
		return all, nil
	}
	all = append(all, d.suspended(ctx)...)
	unproven, err := d.unprovenQueues(ctx)
	return append(all, unproven...), err
}

// unprovenQueues reports which jobs a policy would gate if they were not in a queue of Kueue, where nothing proves
// their nodes.
func (d *Doctor) unprovenQueues(ctx context.Context) ([]Finding, error) {
	var policies evenkeel.NetworkCheckPolicyList
	if err := d.Client.List(ctx, &policies); err != nil {
		return nil, fmt.Errorf("list NetworkCheckPolicies: %w", err)
	}
	i := slices.IndexFunc(policies.Items, func(p evenkeel.NetworkCheckPolicy) bool { return p.Spec.Triggers.JobStart == evenkeel.SwitchEnabled })
	if i < 0 {
		return nil, nil
	}
	queues, err := kueue.UnprovenQueues(ctx, d.Client)
	if err != nil || len(queues) == 0 {
		return nil, err
	}
	return []Finding{{"kueue", Note, fmt.Sprintf("without an AdmissionCheck of Evenkeel nobody proves the nodes of jobs in %s: %s. NetworkCheckPolicy %s gates jobs, but none in queues of Kueue",
		counted(len(queues), "ClusterQueue"), text.List(sorted(queues), maxNamed), policies.Items[i].Name), "name one in spec.admissionChecksStrategy: docs/preflight.md#with-kueue"}}, nil
}

// suspended creates, in a dry run, a Job in the namespace of checks. Kueue suspends it if it manages jobs without a
// queue name there.
func (d *Doctor) suspended(ctx context.Context) []Finding {
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{GenerateName: "evenkeel-doctor-", Namespace: d.Namespace}}
	job.Spec.Template.Spec = restrictedPod()
	job.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	if err := d.Client.Create(ctx, job, client.DryRunAll); err != nil {
		return []Finding{{"kueue", Unknown, "whether Jobs of checks are suspended could not be tried: " + err.Error(), "run it as somebody who may create Jobs in the namespace " + d.Namespace}}
	}
	if job.Spec.Suspend == nil || !*job.Spec.Suspend {
		return nil
	}
	return []Finding{{"kueue", Problem, "new Jobs in the namespace " + d.Namespace + " are suspended, so that no check ends and the chart cannot be uninstalled: Kueue does that with manageJobsWithoutQueueName",
		"let Kueue's managedJobsNamespaceSelector exclude the namespace"}}
}

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func sorted[T cmp.Ordered](list []T) []T {
	slices.Sort(list)
	return list
}
