package admission

import (
	"context"
	"encoding/json"
	"fmt"

	jsonpatch "github.com/evanphx/json-patch/v5"
	admissionv1 "k8s.io/api/admission/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// WarnWithoutKueue adds a warning to the answers of the webhook of jobs. Jobs in a queue of Kueue have no gate, as an AdmissionCheck
// proves their nodes. In a cluster without Kueue nobody does, and whoever left the label in a template is told. Cached serves
// NetworkCheckPolicies, and the other client the API server's list of groups.
func WarnWithoutKueue(jobs *admission.Webhook, cached client.Reader, groups rest.Interface) *admission.Webhook {
	return &admission.Webhook{Handler: queueWarner{jobs.Handler, cached, groups}}
}

type queueWarner struct {
	jobs   admission.Handler
	cached client.Reader
	groups rest.Interface
}

func (q queueWarner) Handle(ctx context.Context, req admission.Request) admission.Response {
	response := q.jobs.Handle(ctx, req)
	if !response.Allowed || req.Operation != admissionv1.Create {
		return response
	}
	warning, err := q.warning(ctx, req.Object.Raw, response)
	switch {
	case err != nil:
		log.FromContext(ctx).Info("nobody is told whether the job's nodes are proven", "reason", err.Error())
	case warning != "":
		response = response.WithWarnings(warning)
	}
	return response
}

// warning says that nobody proves the nodes of the job; empty: somebody does, or nobody has to.
func (q queueWarner) warning(ctx context.Context, raw []byte, response admission.Response) (string, error) {
	var job metav1.PartialObjectMetadata
	if err := json.Unmarshal(raw, &job); err != nil || !workload.Queued(&job) {
		return "", err
	}
	// The namespace may have given it a profile.
	patch, err := json.Marshal(response.Patches)
	if err != nil {
		return "", fmt.Errorf("encode the patch: %w", err)
	}
	changes, err := jsonpatch.DecodePatch(patch)
	if err != nil {
		return "", fmt.Errorf("decode the patch: %w", err)
	}
	if raw, err = changes.Apply(raw); err != nil {
		return "", fmt.Errorf("apply the patch: %w", err)
	}
	if err := json.Unmarshal(raw, &job); err != nil {
		return "", fmt.Errorf("decode the job: %w", err)
	}
	profile := job.Annotations[evenkeel.ProfileKey]
	var policies evenkeel.NetworkCheckPolicyList
	if err := q.cached.List(ctx, &policies); err != nil {
		return "", fmt.Errorf("list NetworkCheckPolicies: %w", err)
	}
	declined := job.Annotations[evenkeel.GateKey] == evenkeel.GateDisabled && gate.Mandatory(policies.Items, profile) == nil
	if profile == "" || declined || !gate.Required(policies.Items, profile) {
		return "", nil
	}
	ctx, cancel := context.WithTimeout(ctx, maxLookup)
	defer cancel()
	err = q.groups.Get().AbsPath("/apis/" + workload.KueueGroup).Do(ctx).Error()
	if apierrors.IsNotFound(err) {
		return fmt.Sprintf("label %s: %s: the cluster has no Kueue, so that nobody proves the job's nodes: without the label Evenkeel does", workload.QueueKey, workload.Queue(&job)), nil
	}
	if err != nil {
		return "", fmt.Errorf("ask whether there is Kueue: %w", err)
	}
	return "", nil
}
