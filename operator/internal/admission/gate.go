package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// gateJob gates a job that has to wait until its nodes are proven. Jobs of Kueue wait for an AdmissionCheck instead. A job
// that its user suspended stays the user's to start; where the gate is mandatory, it is gated all the same.
func (w workloadPinner) gateJob(ctx context.Context, job *unstructured.Unstructured, profile string) error {
	if err := dropCopiedGate(job); err != nil {
		return err
	}
	suspended, can := workload.Suspended(job)
	asked := job.GetAnnotations()[evenkeel.GateKey]
	wanted, err := gateWanted(ctx, w.cached, profile, asked, gateCase{queued: workload.Queued(job), suspended: suspended})
	if err != nil || !wanted {
		return err
	}
	if can {
		value := evenkeel.GatedValue
		if suspended {
			value = evenkeel.GatedSuspendedValue
		}
		return closeGate(job, value)
	}
	templates, err := workload.Templates(job)
	if err != nil {
		return refusal{err}
	}
	for _, t := range templates {
		if err := t.Add(map[string]string{evenkeel.GatedKey: evenkeel.GatedValue}, map[string]string{evenkeel.TemplateKey: t.Path}); err != nil {
			return refusal{err}
		}
	}
	return nil
}

// A gateCase is what matters of a job or pod for whether it is gated.
type gateCase struct {
	// queued: Kueue decides when it starts.
	queued bool
	// suspended: its user starts it.
	suspended bool
}

// gateWanted reports whether a job or pod of the profile has to wait until its nodes are proven. Asked is its annotation.
func gateWanted(ctx context.Context, reader client.Reader, profile, asked string, is gateCase) (bool, error) {
	var policies evenkeel.NetworkCheckPolicyList
	if err := reader.List(ctx, &policies); err != nil {
		return false, fmt.Errorf("list NetworkCheckPolicies: %w", err)
	}
	mandatory := gate.Mandatory(policies.Items, profile)
	switch asked {
	case "", evenkeel.GateEnabled:
	case evenkeel.GateDisabled:
		if mandatory != nil && !is.queued {
			return false, refusal{fmt.Errorf("annotation %s: %s is not allowed: NetworkCheckPolicy %s gates every job of the profile (spec.gate.optOut: %s)",
				evenkeel.GateKey, asked, mandatory.Name, evenkeel.GateOptOutForbidden)}
		}
		return false, nil
	default:
		return false, refusal{fmt.Errorf("annotation %s is %q: %s or %s", evenkeel.GateKey, asked, evenkeel.GateEnabled, evenkeel.GateDisabled)}
	}
	return !is.queued && (!is.suspended || mandatory != nil) && gate.Required(policies.Items, profile), nil
}

// dropCopiedGate removes what is left of the gate of another job, if the job was copied from one: it has a gate of its own.
func dropCopiedGate(job *unstructured.Unstructured) error {
	unstructured.RemoveNestedField(job.Object, "metadata", "annotations", evenkeel.OpenedTemplatesKey)
	value, gated := job.GetLabels()[evenkeel.GatedKey]
	if !gated {
		return nil
	}
	labels := job.GetLabels()
	delete(labels, evenkeel.GatedKey)
	job.SetLabels(labels)
	if suspended, _ := workload.Suspended(job); !suspended || value == evenkeel.GatedSuspendedValue {
		return nil
	}
	if workload.Queued(job) {
		// Kueue starts it. Evenkeel may have suspended this very job a moment ago, before another webhook put it into the queue.
		return nil
	}
	// Evenkeel suspended the other one, and not its user.
	if err := workload.Suspend(job, false); err != nil {
		return refusal{err}
	}
	return nil
}

func closeGate(job *unstructured.Unstructured, value string) error {
	labels := maps.Clone(job.GetLabels())
	if labels == nil {
		labels = map[string]string{}
	}
	labels[evenkeel.GatedKey] = value
	job.SetLabels(labels)
	if err := workload.Suspend(job, true); err != nil {
		return refusal{err}
	}
	return nil
}

// keepGate keeps the gate of a job closed that an update would open by accident, as GitOps does when it makes a job again what it
// is in Git. It reports whether it did. Whoever wants the job to start says so with the annotation evenkeel.dev/gate. The updates
// of Evenkeel's own accounts do not come here.
func (w workloadPinner) keepGate(ctx context.Context, job *unstructured.Unstructured, req admission.Request) (response admission.Response, kept bool) {
	before := &unstructured.Unstructured{}
	if err := json.Unmarshal(req.OldObject.Raw, &before.Object); err != nil {
		return admission.Response{}, false // an update goes on in any case
	}
	was := before.GetLabels()[evenkeel.GatedKey]
	profile := before.GetAnnotations()[evenkeel.ProfileKey]
	if waited, _ := workload.Suspended(before); was == "" || profile == "" || !waited || workload.Queued(job) || job.GetDeletionTimestamp() != nil {
		return admission.Response{}, false
	}
	suspended, _ := workload.Suspended(job)
	if suspended && job.GetLabels()[evenkeel.GatedKey] != "" && job.GetAnnotations()[evenkeel.ProfileKey] == profile {
		return admission.Response{}, false
	}
	var policies evenkeel.NetworkCheckPolicyList
	if err := w.cached.List(ctx, &policies); err != nil {
		return admission.Response{}, false
	}
	mandatory := gate.Mandatory(policies.Items, profile)
	gates := func(p evenkeel.NetworkCheckPolicy) bool { return gate.AppliesTo(&p, profile) }
	if mandatory == nil && job.GetAnnotations()[evenkeel.GateKey] == evenkeel.GateDisabled || !slices.ContainsFunc(policies.Items, gates) {
		return admission.Response{}, false
	}
	if !suspended {
		was = evenkeel.GatedValue // it is to start when its gate opens
	}
	annotations := maps.Clone(job.GetAnnotations())
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[evenkeel.ProfileKey] = profile
	job.SetAnnotations(annotations)
	if err := closeGate(job, was); err != nil {
		return admission.Response{}, false
	}
	mutated, err := json.Marshal(job.Object)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, fmt.Errorf("encode the %s: %w", req.Kind.Kind, err)), true
	}
	how := fmt.Sprintf("to start it now, set its annotation %s to %s", evenkeel.GateKey, evenkeel.GateDisabled)
	if mandatory != nil {
		how = fmt.Sprintf("NetworkCheckPolicy %s makes its gate mandatory", mandatory.Name)
	}
	return admission.PatchResponseFromRaw(req.Object.Raw, mutated).
		WithWarnings(fmt.Sprintf("the job stays suspended and starts when its nodes are proven (kubectl evenkeel why); %s", how)), true
}
