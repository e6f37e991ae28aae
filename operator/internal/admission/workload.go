package admission

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/reduction"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// Workloads is the webhook for annotated jobs. It resolves the profile once, when the job is created, and writes what
// it found on the job's pod templates, the names of its reduction servers with it; and it holds the job where a policy
// wants its nodes proven first. Both readers serve NetworkProfiles, NetworkCheckPolicies and Namespaces: cached without
// delay, live as they are this moment. Reduction says whether the controller can make reduction servers.
func Workloads(cached, live client.Reader, reduction bool) *admission.Webhook {
	return &admission.Webhook{Handler: workloadPinner{cached, live, reduction}}
}

type workloadPinner struct {
	cached, live client.Reader
	reduction    bool
}

// refusal is an error whose text is for the user; any other error is ours.
type refusal struct{ error }

func (w workloadPinner) Handle(ctx context.Context, req admission.Request) admission.Response {
	job := &unstructured.Unstructured{}
	if err := json.Unmarshal(req.Object.Raw, &job.Object); err != nil {
		return admission.Errored(http.StatusBadRequest, fmt.Errorf("decode the %s: %w", req.Kind.Kind, err))
	}
	name, asked := job.GetAnnotations()[evenkeel.ProfileKey], job.GetAnnotations()[evenkeel.ReductionKey]
	if name == "" && asked == "" || !workload.Known(job.GroupVersionKind().GroupKind()) || workload.Controlled(job) {
		return admission.Allowed("")
	}
	if req.Operation == admissionv1.Update {
		return late(job, name, req.OldObject.Raw)
	}
	if name == "" {
		metrics.Job(metrics.Refused)
		return admission.Denied(fmt.Sprintf("annotation %s: %s needs a profile: add the annotation %s", evenkeel.ReductionKey, asked, evenkeel.ProfileKey))
	}
	warnings, err := w.pin(ctx, job, name, req)
	if err == nil {
		err = w.hold(ctx, job, name)
	}
	if err != nil {
		if errors.As(err, &refusal{}) {
			metrics.Job(metrics.Refused)
			return admission.Denied(err.Error())
		}
		return admission.Errored(http.StatusInternalServerError, err)
	}
	mutated, err := json.Marshal(job.Object)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, fmt.Errorf("encode the %s: %w", req.Kind.Kind, err))
	}
	metrics.Job(metrics.Injected)
	return admission.PatchResponseFromRaw(req.Object.Raw, mutated).WithWarnings(warnings...)
}

// late answers an update: a job keeps what it was created with, and hears so if it asks for something else.
func late(job *unstructured.Unstructured, name string, old []byte) admission.Response {
	var before metav1.PartialObjectMetadata
	if err := json.Unmarshal(old, &before); err == nil && before.Annotations[evenkeel.ReductionKey] != job.GetAnnotations()[evenkeel.ReductionKey] {
		return admission.Allowed("").WithWarnings(fmt.Sprintf("annotation %s: a job keeps the servers that it was created with: create the job anew", evenkeel.ReductionKey))
	}
	if name == "" {
		return admission.Allowed("")
	}
	templates, err := workload.Templates(job)
	if err != nil {
		return admission.Allowed("") // the API server's own validation says it better
	}
	for _, t := range templates {
		if has := t.Label(evenkeel.ProfileKey); has != name {
			return admission.Allowed("").WithWarnings(fmt.Sprintf(
				"annotation %s: %s has no effect on a job that exists (its %s has %q): create the job anew with it", evenkeel.ProfileKey, name, t.Path, has))
		}
	}
	return admission.Allowed("")
}

// pin resolves the profile and writes it on every pod template. Warnings are for the user of a job that is let through.
func (w workloadPinner) pin(ctx context.Context, job *unstructured.Unstructured, name string, req admission.Request) (warnings []string, err error) {
	profile, err := lookUp(ctx, w.cached, name, req.Namespace)
	if errors.As(err, &refusal{}) || apierrors.IsNotFound(err) {
		// Nobody is refused for a cache that has yet to see what was applied a moment ago, perhaps together with the job.
		profile, err = lookUp(ctx, w.live, name, req.Namespace)
	}
	if err != nil {
		return nil, err
	}
	templates, err := workload.Templates(job)
	if err != nil {
		return nil, refusal{err}
	}
	resolved := inject.Resolve(profile, job.GetAnnotations()[evenkeel.ContainersKey])
	if resolved.Reduction, err = w.reduce(job, templates, profile, req); err != nil {
		return nil, refusal{err}
	}
	if resolved.Reduction != nil && resolved.Environment[inject.JobEnv] == "" {
		// A name that the API server makes up is not known yet; that of the servers begins as it will.
		resolved.Environment[inject.JobEnv] = inject.JobName(req.Namespace, cmp.Or(job.GetName(), resolved.Reduction.Service))
	}
	if warnings, err = checkRDMA(profile, resolved.RDMA); err != nil {
		return nil, refusal{err}
	}
	onGPUs := slices.ContainsFunc(templates, wantsGPU)
	for _, t := range templates {
		// What a job that was copied from another brings along is the other's.
		for _, key := range inject.Keys() {
			t.Remove(key)
		}
		// A master may have containers that a worker lacks: each template gets the chosen names that it has.
		here := resolved
		here.Containers = nil
		if onGPUs && !wantsGPU(t) && len(resolved.Containers) == 0 {
			here.RDMA = nil // a launcher, say, which may run where there is no device
		}
		for _, c := range resolved.Containers {
			if slices.Contains(t.Containers(), c) {
				here.Containers = append(here.Containers, c)
			}
		}
		if len(resolved.Containers) > 0 && len(here.Containers) == 0 {
			return nil, refusal{fmt.Errorf("annotation %s: %s names no container of %s, which has %s",
				evenkeel.ContainersKey, strings.Join(resolved.Containers, ","), t.Path, strings.Join(t.Containers(), ", "))}
		}
		if err := t.Add(here.Labels(), here.Annotations()); err != nil {
			return nil, refusal{err}
		}
		if here.RDMA != nil {
			if err := t.AddResources(func(spec *corev1.PodSpec) error { return inject.Devices(spec, here) }); err != nil {
				return nil, refusal{err}
			}
		}
		if workload.Queued(job) {
			// Kueue may choose the nodes, and goes by the template.
			if err := t.ChangeAffinity(keepOff); err != nil {
				return nil, refusal{err}
			}
		}
	}
	return warnings, nil
}

// checkRDMA refuses a profile that asks for nothing but RDMA and has no device to give. One whose device no node offers now
// gives a warning, since nodes may come.
func checkRDMA(profile *evenkeel.NetworkProfile, device *inject.RDMA) (warnings []string, err error) {
	if profile.Spec.Transport.Mode != evenkeel.TransportRDMA {
		return nil, nil
	}
	known := profile.Status.ObservedGeneration == profile.Generation
	if device == nil {
		why := "its nodes have yet to be looked at: try again"
		if c := meta.FindStatusCondition(profile.Status.Conditions, evenkeel.ConditionRDMA); known && c != nil {
			why = c.Message
		}
		return nil, fmt.Errorf("NetworkProfile %s asks for RDMA and nothing else, and has no device to give: %s", profile.Name, why)
	}
	if nodes := profile.Status.RDMANodes; known && nodes != nil && *nodes == 0 {
		warnings = append(warnings, fmt.Sprintf("NetworkProfile %s: no node offers %s now; the job's pods wait for one that does", profile.Name, device.Resource))
	}
	return warnings, nil
}

// wantsGPU reports whether the template's pods use GPUs. One that cannot be read has the API server's own validation ahead.
func wantsGPU(t workload.Template) bool {
	spec, err := t.PodSpec()
	return err == nil && inject.WantsGPU(spec)
}

// reduce decides which reduction servers the job gets, and labels it with their name, by which the controller finds it.
func (w workloadPinner) reduce(job *unstructured.Unstructured, templates []workload.Template, profile *evenkeel.NetworkProfile, req admission.Request) (*inject.Reduction, error) {
	workers := 0
	for _, t := range templates {
		workers += t.Pods
	}
	asked := job.GetAnnotations()[evenkeel.ReductionKey]
	servers, err := reduction.Servers(asked, profile, workers)
	if err != nil {
		return nil, err
	}
	jobLabels := job.GetLabels()
	delete(jobLabels, evenkeel.ReductionClientKey)
	if servers > 0 && !w.reduction {
		if asked != "" {
			return nil, fmt.Errorf("annotation %s: %s, but Evenkeel was installed without an image for reduction servers (chart value reduction.image)", evenkeel.ReductionKey, asked)
		}
		servers = 0 // a profile may have more than an installation can do
	}
	if servers == 0 {
		job.SetLabels(jobLabels)
		return nil, nil
	}
	name := job.GetName()
	if name == "" {
		name = job.GetGenerateName()
	}
	service := reduction.Name(name, req.UID)
	if jobLabels == nil {
		jobLabels = map[string]string{}
	}
	jobLabels[evenkeel.ReductionClientKey] = service
	job.SetLabels(jobLabels)
	return &inject.Reduction{Service: service, Servers: reduction.Endpoints(service, req.Namespace, servers)}, nil
}

// lookUp returns the profile, if there is one and the namespace may use it.
func lookUp(ctx context.Context, reader client.Reader, name, namespace string) (*evenkeel.NetworkProfile, error) {
	profile := &evenkeel.NetworkProfile{}
	switch err := reader.Get(ctx, client.ObjectKey{Name: name}, profile); {
	case apierrors.IsNotFound(err):
		return nil, unknown(ctx, reader, name)
	case err != nil:
		return nil, fmt.Errorf("read NetworkProfile %s: %w", name, err)
	}
	return profile, allowed(ctx, reader, profile, namespace)
}

// hold closes the gate of a job that has to wait until its nodes are proven. Kueue's jobs have Kueue's own gate, and one
// that its user suspended is the user's to start.
func (w workloadPinner) hold(ctx context.Context, job *unstructured.Unstructured, profile string) error {
	switch mode := job.GetAnnotations()[evenkeel.PreflightKey]; mode {
	case "", evenkeel.PreflightGate:
	case evenkeel.PreflightOff:
		return nil
	default:
		return refusal{fmt.Errorf("annotation %s is %q: %s or %s", evenkeel.PreflightKey, mode, evenkeel.PreflightGate, evenkeel.PreflightOff)}
	}
	suspended, can := workload.Suspended(job)
	if suspended || workload.Queued(job) {
		return nil
	}
	var policies evenkeel.NetworkCheckPolicyList
	if err := w.cached.List(ctx, &policies); err != nil {
		return fmt.Errorf("list NetworkCheckPolicies: %w", err)
	}
	if !gate.Needed(policies.Items, profile) {
		return nil
	}
	closed := map[string]string{evenkeel.GateKey: evenkeel.GateClosed}
	if can {
		labels := job.GetLabels()
		if labels == nil {
			labels = map[string]string{}
		}
		maps.Copy(labels, closed)
		job.SetLabels(labels)
		if err := workload.Suspend(job, true); err != nil {
			return refusal{err}
		}
		return nil
	}
	templates, err := workload.Templates(job)
	if err != nil {
		return refusal{err}
	}
	for _, t := range templates {
		if err := t.Add(closed, nil); err != nil {
			return refusal{err}
		}
	}
	return nil
}

func keepOff(affinity *corev1.Affinity) *corev1.Affinity {
	pod := &corev1.Pod{Spec: corev1.PodSpec{Affinity: affinity}}
	inject.KeepOff(pod)
	return pod.Spec.Affinity
}

// unknown is the refusal of a profile that is not there: it says which are.
func unknown(ctx context.Context, reader client.Reader, name string) error {
	var list evenkeel.NetworkProfileList
	if err := reader.List(ctx, &list); err != nil {
		return fmt.Errorf("list NetworkProfiles: %w", err)
	}
	var names []string
	for _, p := range list.Items {
		names = append(names, p.Name)
	}
	slices.Sort(names)
	there := "none exist: create a NetworkProfile first"
	if len(names) > 0 {
		there = "there are: " + strings.Join(names, ", ")
	}
	return refusal{fmt.Errorf("annotation %s: no NetworkProfile is named %q; %s", evenkeel.ProfileKey, name, there)}
}

// allowed refuses namespaces that the profile does not select.
func allowed(ctx context.Context, reader client.Reader, profile *evenkeel.NetworkProfile, namespace string) error {
	if profile.Spec.NamespaceSelector == nil {
		return nil
	}
	selector, err := metav1.LabelSelectorAsSelector(profile.Spec.NamespaceSelector)
	if err != nil {
		return refusal{fmt.Errorf("NetworkProfile %s: namespaceSelector: %w", profile.Name, err)}
	}
	if selector.Empty() {
		return nil
	}
	ns := &metav1.PartialObjectMetadata{}
	ns.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	if err := reader.Get(ctx, client.ObjectKey{Name: namespace}, ns); err != nil {
		return fmt.Errorf("read namespace %s: %w", namespace, err)
	}
	if !selector.Matches(labels.Set(ns.Labels)) {
		return refusal{fmt.Errorf("annotation %s: NetworkProfile %s is not for namespace %s: its namespaceSelector asks for %s", evenkeel.ProfileKey, profile.Name, namespace, selector)}
	}
	return nil
}
