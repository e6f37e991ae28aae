package admission

import (
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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/gate"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// Workloads is the webhook for annotated jobs. It resolves the profile once, when the job is created, and writes what
// it found on the job's pod templates; and it holds the job where a policy wants its nodes proven first. Both readers
// serve NetworkProfiles, NetworkCheckPolicies and Namespaces: cached without delay, live as they are this moment.
func Workloads(cached, live client.Reader) *admission.Webhook {
	return &admission.Webhook{Handler: workloadPinner{cached, live}}
}

type workloadPinner struct{ cached, live client.Reader }

// refusal is an error whose text is for the user; any other error is ours.
type refusal struct{ error }

func (w workloadPinner) Handle(ctx context.Context, req admission.Request) admission.Response {
	job := &unstructured.Unstructured{}
	if err := json.Unmarshal(req.Object.Raw, &job.Object); err != nil {
		return admission.Errored(http.StatusBadRequest, fmt.Errorf("decode the %s: %w", req.Kind.Kind, err))
	}
	name := job.GetAnnotations()[evenkeel.ProfileKey]
	if name == "" || !workload.Known(job.GroupVersionKind().GroupKind()) || workload.Controlled(job) {
		return admission.Allowed("")
	}
	if req.Operation == admissionv1.Update {
		return late(job, name)
	}
	err := w.pin(ctx, job, name, req.Namespace)
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
	return admission.PatchResponseFromRaw(req.Object.Raw, mutated)
}

// late answers an update: a job keeps what it was created with, and hears so if it asks for something else.
func late(job *unstructured.Unstructured, name string) admission.Response {
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

// pin resolves the profile and writes it on every pod template.
func (w workloadPinner) pin(ctx context.Context, job *unstructured.Unstructured, name, namespace string) error {
	profile, err := lookUp(ctx, w.cached, name, namespace)
	if errors.As(err, &refusal{}) || apierrors.IsNotFound(err) {
		// Nobody is refused for a cache that has yet to see what was applied a moment ago, perhaps together with the job.
		profile, err = lookUp(ctx, w.live, name, namespace)
	}
	if err != nil {
		return err
	}
	templates, err := workload.Templates(job)
	if err != nil {
		return refusal{err}
	}
	resolved := inject.Resolve(profile, job.GetAnnotations()[evenkeel.ContainersKey])
	for _, t := range templates {
		// A master may have containers that a worker lacks: each template gets the chosen names that it has.
		here := resolved
		here.Containers = nil
		for _, c := range resolved.Containers {
			if slices.Contains(t.Containers(), c) {
				here.Containers = append(here.Containers, c)
			}
		}
		if len(resolved.Containers) > 0 && len(here.Containers) == 0 {
			return refusal{fmt.Errorf("annotation %s: %s names no container of %s, which has %s",
				evenkeel.ContainersKey, strings.Join(resolved.Containers, ","), t.Path, strings.Join(t.Containers(), ", "))}
		}
		if err := t.Add(map[string]string{evenkeel.ProfileKey: name}, here.Annotations()); err != nil {
			return refusal{err}
		}
		if workload.Queued(job) {
			// Kueue may choose the nodes, and goes by the template.
			if err := t.ChangeAffinity(keepOff); err != nil {
				return refusal{err}
			}
		}
	}
	return nil
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
