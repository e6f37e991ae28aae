package admission

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/accelerator"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/jobkey"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	access "evenkeel.dev/evenkeel/operator/internal/profile"
	"evenkeel.dev/evenkeel/operator/internal/reduction"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// Workloads is the webhook for annotated jobs. It resolves the profile once, when the job is created, and writes what
// it found on the job's pod templates, the names of its reduction servers with it. It gates the job where a policy
// wants its nodes proven first. Both readers serve NetworkProfiles, NetworkCheckPolicies and Namespaces: cached is
// fast, and serves LimitRanges too; live is current. ReductionImage is the installation's image of reduction servers,
// or empty if it has none.
func Workloads(cached, live client.Reader, reductionImage string) *admission.Webhook {
	return &admission.Webhook{Handler: workloadPinner{cached, live, reductionImage}}
}

type workloadPinner struct {
	cached, live client.Reader
	// reductionImage is the installation's image of reduction servers, or empty if it has none.
	reductionImage string
}

// A refusal is an error whose text is for the user. Any other error is internal.
type refusal struct{ error }

func (w workloadPinner) Handle(ctx context.Context, req admission.Request) admission.Response {
	job := &unstructured.Unstructured{}
	if err := json.Unmarshal(req.Object.Raw, &job.Object); err != nil {
		return admission.Errored(http.StatusBadRequest, fmt.Errorf("decode the %s: %w", req.Kind.Kind, err))
	}
	if req.Operation == admissionv1.Update {
		return w.handleUpdate(ctx, job, req)
	}
	defaulted, err := w.addDefaultProfile(ctx, job, req)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, err)
	}
	name, asked := job.GetAnnotations()[evenkeel.ProfileKey], job.GetAnnotations()[evenkeel.ReductionKey]
	if name == "" && asked == "" || !workload.Known(job.GroupVersionKind().GroupKind()) {
		return admission.Allowed("")
	}
	if owner := workload.Owner(job); owner != nil {
		return handleOwned(job, owner)
	}
	if name == "" {
		metrics.Job(metrics.Refused)
		return admission.Denied(fmt.Sprintf("annotation %s: %s needs a profile: add the annotation %s", evenkeel.ReductionKey, asked, evenkeel.ProfileKey))
	}
	warnings, err := w.pinProfile(ctx, job, name, req)
	if defaulted {
		warnings = append(warnings, fmt.Sprintf("the namespace's label %s gives the job NetworkProfile %s; the annotation %s: \"\" declines", evenkeel.DefaultProfileKey, name, evenkeel.ProfileKey))
	}
	if err == nil {
		err = w.gateJob(ctx, job, name)
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

// addDefaultProfile annotates a new job that uses GPUs and names no profile with its namespace's default profile, if
// there is one. Without GPUs there is no NCCL, and nothing to wait for.
func (w workloadPinner) addDefaultProfile(ctx context.Context, job *unstructured.Unstructured, req admission.Request) (added bool, err error) {
	if _, says := job.GetAnnotations()[evenkeel.ProfileKey]; says || workload.Owner(job) != nil {
		return false, nil
	}
	templates, err := workload.Templates(job)
	if err != nil || !slices.ContainsFunc(templates, wantsGPU) {
		return false, nil // the API server's own validation reports an invalid template better
	}
	namespace := &metav1.PartialObjectMetadata{}
	namespace.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	if err := w.cached.Get(ctx, client.ObjectKey{Name: req.Namespace}, namespace); err != nil {
		return false, client.IgnoreNotFound(err) // a namespace that is not known yet has no default
	}
	name := namespace.Labels[evenkeel.DefaultProfileKey]
	if name == "" {
		return false, nil
	}
	annotations := job.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[evenkeel.ProfileKey] = name
	job.SetAnnotations(annotations)
	return true, nil
}

// handleOwned answers for a job that a controller made. It stays as it is, since its owner is the one to annotate.
// Where the owner is of a kind that Evenkeel does not know, nothing was pinned: a warning says so, and a metric counts
// it.
func handleOwned(job *unstructured.Unstructured, owner *metav1.OwnerReference) admission.Response {
	why := ownedWithoutEffect(job, owner)
	if why == "" {
		return admission.Allowed("")
	}
	metrics.Job(metrics.Skipped)
	return admission.Allowed("").WithWarnings(why)
}

// handleUpdate answers an update. A job keeps what it was created with, and its gate. Nothing keeps an update from
// being made.
func (w workloadPinner) handleUpdate(ctx context.Context, job *unstructured.Unstructured, req admission.Request) admission.Response {
	restored, err := restoreTemplates(job, req.OldObject.Raw)
	if err != nil {
		log.FromContext(ctx).Info("the update may take the plugin from the job", "kind", job.GetKind(), "namespace", req.Namespace, "name", job.GetName(), "reason", err.Error())
	}
	if response, kept := w.keepGate(ctx, job, req); kept {
		return response
	}
	warnings := warnOfUpdate(job, req.OldObject.Raw)
	if !restored {
		return admission.Allowed("").WithWarnings(warnings...)
	}
	mutated, err := json.Marshal(job.Object)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, fmt.Errorf("encode the %s: %w", req.Kind.Kind, err))
	}
	return admission.PatchResponseFromRaw(req.Object.Raw, mutated).WithWarnings(warnings...)
}

// warnOfUpdate describes what the update asks for and the job does not get.
func warnOfUpdate(job *unstructured.Unstructured, old []byte) (warnings []string) {
	name, asked := job.GetAnnotations()[evenkeel.ProfileKey], job.GetAnnotations()[evenkeel.ReductionKey]
	if name == "" && asked == "" || !workload.Known(job.GroupVersionKind().GroupKind()) || workload.Owner(job) != nil {
		return nil
	}
	var before metav1.PartialObjectMetadata
	known := json.Unmarshal(old, &before) == nil
	for _, kept := range []struct{ key, what string }{{evenkeel.ReductionKey, "servers"}, {evenkeel.JobKeyKey, "key"}} {
		if known && before.Annotations[kept.key] != job.GetAnnotations()[kept.key] {
			return []string{fmt.Sprintf("annotation %s: a job keeps the %s that it was created with: create a new job", kept.key, kept.what)}
		}
	}
	if why := changedWithoutEffect(job, name); why != "" {
		return []string{why}
	}
	return nil
}

// pinProfile resolves the profile and writes it on every pod template. Warnings are for the user of an admitted job.
func (w workloadPinner) pinProfile(ctx context.Context, job *unstructured.Unstructured, name string, req admission.Request) (warnings []string, err error) {
	profile, err := getProfile(ctx, w.cached, name, req.Namespace)
	if errors.As(err, &refusal{}) || apierrors.IsNotFound(err) {
		// The cache may be behind: the profile may have been applied together with the job.
		profile, err = getProfile(ctx, w.live, name, req.Namespace)
	}
	if err != nil {
		return nil, err
	}
	templates, err := workload.Templates(job)
	if err != nil {
		return nil, refusal{err}
	}
	resolved := inject.Resolve(profile, job.GetAnnotations()[evenkeel.ContainersKey])
	if err := fitLimitRanges(ctx, w.cached, req.Namespace, &resolved); err != nil {
		return nil, err
	}
	resolved.AddTuner(profile, job.GroupVersionKind().GroupKind())
	var noServers string
	if resolved.Reduction, noServers, err = w.assignServers(job, templates, profile, resolved.Image, req); err != nil {
		return nil, refusal{err}
	}
	if resolved.JobKey, err = assignKey(job, resolved, req); err != nil {
		return nil, refusal{err}
	}
	if resolved.Reduction != nil && resolved.Environment[inject.JobEnv] == "" {
		// A generated name is not known yet. The name of the servers begins with the same prefix.
		resolved.Environment[inject.JobEnv] = inject.JobName(req.Namespace, cmp.Or(job.GetName(), resolved.Reduction.Service))
	}
	if !workload.RunsElsewhere(job) { // this cluster need not have the device
		if warnings, err = checkRDMA(profile, resolved.RDMA); err != nil {
			return nil, refusal{err}
		}
	}
	if noServers != "" {
		warnings = append(warnings, "no reduction servers: "+noServers)
	}
	unused := rdmaUnused(profile, resolved.RDMA)
	if unused != "" {
		warnings = append(warnings, fmt.Sprintf("NetworkProfile %s: %s", profile.Name, unused))
	}
	if options := resolved.MPIRunOptions(job); options != "" {
		warnings = append(warnings, "ranks that mpirun starts over ssh lack the variables of their pods, and so the plugin: have mpirun pass them: "+options)
	}
	if resolved.TunerUnset != "" {
		warnings = append(warnings, fmt.Sprintf("NetworkProfile %s gives the job no measurements for NCCL's algorithms: %s", profile.Name, resolved.TunerUnset))
	}
	onGPUs := slices.ContainsFunc(templates, wantsGPU)
	for _, t := range templates {
		// A job that was copied from another one must not keep the other's values.
		for _, key := range inject.Keys() {
			t.Remove(key)
		}
		// A master may have containers that a worker lacks: each template gets the chosen names that it contains.
		here := resolved
		here.Containers = nil
		if onGPUs && !wantsGPU(t) && len(resolved.Containers) == 0 {
			here.RDMA = nil // such as a launcher, which may run on a node without the device
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
		annotations := here.Annotations()
		if unused != "" {
			annotations[evenkeel.RDMAUnusedKey] = unused
		}
		if err := t.Add(here.Labels(), annotations); err != nil {
			return nil, refusal{err}
		}
		if here.RDMA != nil && !workload.Copied(job) { // its pods get the device when they are made
			if err := t.AddResources(func(spec *corev1.PodSpec) error { return inject.AddDevices(spec, t.Annotations(), here) }); err != nil {
				return nil, refusal{err}
			}
		}
		if workload.Queued(job) {
			// Kueue may choose the nodes, and reads the template.
			if err := t.ChangeAffinity(avoidUnhealthyNodes); err != nil {
				return nil, refusal{err}
			}
		}
	}
	return warnings, nil
}

// checkRDMA refuses a profile that requires RDMA and has no device to assign. If no node offers the device now, it
// warns: such nodes may join later.
func checkRDMA(profile *evenkeel.NetworkProfile, device *inject.RDMA) (warnings []string, err error) {
	if profile.Spec.Transport.Mode != evenkeel.TransportRDMA {
		return nil, nil
	}
	known := profile.Status.ObservedGeneration == profile.Generation
	if device == nil {
		why := "its nodes have not been observed yet: try again"
		if c := meta.FindStatusCondition(profile.Status.Conditions, evenkeel.ConditionRDMA); known && c != nil {
			why = c.Message
		}
		return nil, fmt.Errorf("NetworkProfile %s requires RDMA and has no device to assign: %s", profile.Name, why)
	}
	if nodes := profile.Status.RDMANodes; known && nodes != nil && *nodes == 0 {
		warnings = append(warnings, fmt.Sprintf("NetworkProfile %s: no node offers %s now; the job's pods wait for one that does", profile.Name, device.Resource))
	}
	return warnings, nil
}

// rdmaUnused explains why a job gets TCP although some nodes offer an RDMA device, or is empty if it does not. NCCL's
// own transport, which the plugin replaces, might have used it.
func rdmaUnused(profile *evenkeel.NetworkProfile, device *inject.RDMA) string {
	status := &profile.Status
	if profile.Spec.Transport.Mode == evenkeel.TransportTCP || device != nil || status.ObservedGeneration != profile.Generation || status.RDMANodes == nil || *status.RDMANodes == 0 {
		return ""
	}
	if c := meta.FindStatusCondition(status.Conditions, evenkeel.ConditionRDMA); c != nil {
		return c.Message
	}
	return ""
}

// wantsGPU reports whether the template's pods use GPUs. An invalid template is left to the API server's validation.
func wantsGPU(t workload.Template) bool {
	spec, err := t.PodSpec()
	return err == nil && accelerator.RequestedBy(spec)
}

// assignServers decides which reduction servers the job gets. It labels the job with their name, by which the
// controller finds the job. It refuses a job that asks for servers that it cannot have; for one that its profile gives
// some, why says the reason.
func (w workloadPinner) assignServers(job *unstructured.Unstructured, templates []workload.Template, profile *evenkeel.NetworkProfile, plugin string, req admission.Request) (assigned *inject.Reduction, why string, err error) {
	workers := 0
	for _, t := range templates {
		workers += t.Pods
	}
	asked := job.GetAnnotations()[evenkeel.ReductionKey]
	servers, err := reduction.Servers(asked, profile, workers)
	if err != nil {
		return nil, "", err
	}
	jobLabels := job.GetLabels()
	delete(jobLabels, evenkeel.ReductionClientKey)
	if servers > 0 {
		if why = w.noServers(profile, plugin); why != "" && asked != "" {
			return nil, "", fmt.Errorf("annotation %s: %s, but %s", evenkeel.ReductionKey, asked, why)
		}
	}
	if servers == 0 || why != "" {
		job.SetLabels(jobLabels)
		return nil, why, nil
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
	return &inject.Reduction{Service: service, Servers: reduction.Endpoints(service, req.Namespace, servers)}, "", nil
}

// assignKey decides where the job's key is. It labels a job whose key Evenkeel makes with the name of the Secret, by
// which the controller finds the job.
func assignKey(job *unstructured.Unstructured, resolved inject.Resolved, req admission.Request) (*inject.JobKey, error) {
	jobLabels := job.GetLabels()
	delete(jobLabels, evenkeel.JobKeyKey) // of another job, from which it was copied
	job.SetLabels(jobLabels)
	users, err := inject.UsersKey(job.GetAnnotations()[evenkeel.JobKeyKey])
	if err != nil || users != nil || !resolved.Encrypted() || resolved.Reduction != nil { // the servers have one
		return users, err
	}
	made := &inject.JobKey{Secret: jobkey.Name(cmp.Or(job.GetName(), job.GetGenerateName()), req.UID), Made: true}
	if jobLabels == nil {
		jobLabels = map[string]string{}
	}
	jobLabels[evenkeel.JobKeyKey] = made.Secret
	job.SetLabels(jobLabels)
	return made, nil
}

// noServers explains why jobs of the profile can have no reduction servers, or is empty if they can.
func (w workloadPinner) noServers(profile *evenkeel.NetworkProfile, plugin string) string {
	if w.reductionImage == "" {
		return "Evenkeel was installed without an image for reduction servers (chart value reduction.image)"
	}
	if status, _, message := reduction.CompareImages(plugin, cmp.Or(profile.Spec.Reduction.Image, w.reductionImage)); status == metav1.ConditionFalse {
		return "NetworkProfile " + profile.Name + ": " + message
	}
	return ""
}

// getProfile returns the profile, if it exists and the namespace may use it.
func getProfile(ctx context.Context, reader client.Reader, name, namespace string) (*evenkeel.NetworkProfile, error) {
	profile := &evenkeel.NetworkProfile{}
	switch err := reader.Get(ctx, client.ObjectKey{Name: name}, profile); {
	case apierrors.IsNotFound(err):
		return nil, unknownProfile(ctx, reader, name)
	case err != nil:
		return nil, fmt.Errorf("read NetworkProfile %s: %w", name, err)
	}
	return profile, checkNamespace(ctx, reader, profile, namespace)
}

func avoidUnhealthyNodes(affinity *corev1.Affinity) *corev1.Affinity {
	pod := &corev1.Pod{Spec: corev1.PodSpec{Affinity: affinity}}
	inject.AvoidUnhealthyNodes(pod)
	return pod.Spec.Affinity
}

// unknownProfile returns the refusal of a profile that does not exist. It lists the existing ones.
func unknownProfile(ctx context.Context, reader client.Reader, name string) error {
	var list evenkeel.NetworkProfileList
	if err := reader.List(ctx, &list); err != nil {
		return fmt.Errorf("list NetworkProfiles: %w", err)
	}
	var names []string
	for _, p := range list.Items {
		names = append(names, p.Name)
	}
	slices.Sort(names)
	existing := "none exist: create a NetworkProfile first"
	if len(names) > 0 {
		existing = "there are: " + strings.Join(names, ", ")
	}
	return refusal{fmt.Errorf("annotation %s: no NetworkProfile is named %q; %s", evenkeel.ProfileKey, name, existing)}
}

// checkNamespace refuses namespaces that the profile does not select.
func checkNamespace(ctx context.Context, reader client.Reader, profile *evenkeel.NetworkProfile, namespace string) error {
	why, err := access.Refusal(ctx, reader, profile, namespace)
	if err == nil && why != "" {
		err = refusal{fmt.Errorf("annotation %s: %s", evenkeel.ProfileKey, why)}
	}
	return err
}
