package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/controller/injectionevents"
	"evenkeel.dev/evenkeel/operator/internal/kube/events"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// WithoutEffect is the webhook for objects on which the annotation of a profile has no effect. It allows all of them,
// and queues an Event about each: whoever made the object did not see the warning, where that was a controller or
// GitOps. It validates rather than mutates, since only then a new object has its UID, which an Event needs. Cached
// serves NetworkProfiles and Namespaces. Own is the namespace of the installation.
//
// The callers are not authenticated: what an API server would not send gets no Event, and the queue limits the others.
func WithoutEffect(cached client.Reader, queue *events.Queue, now clock.PassiveClock, own string) *admission.Webhook {
	return &admission.Webhook{Handler: withoutEffect{cached, queue, now, own, rate.NewLimiter(rate.Every(complaintInterval), 1)}}
}

// complaintInterval is how often the log says that Events are dropped.
const complaintInterval = time.Minute

type withoutEffect struct {
	cached     client.Reader
	queue      *events.Queue
	clock      clock.PassiveClock
	own        string
	complaints *rate.Limiter
}

func (w withoutEffect) Handle(ctx context.Context, req admission.Request) admission.Response {
	object := &unstructured.Unstructured{}
	if err := json.Unmarshal(req.Object.Raw, &object.Object); err != nil {
		return admission.Errored(http.StatusBadRequest, fmt.Errorf("decode the %s: %w", req.Kind.Kind, err))
	}
	name := object.GetAnnotations()[evenkeel.ProfileKey]
	if name == "" {
		return admission.Allowed("")
	}
	about := []corev1.ObjectReference{{
		APIVersion: object.GetAPIVersion(), Kind: object.GetKind(), Namespace: req.Namespace, Name: object.GetName(), UID: object.GetUID(),
	}}
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		name = "INVALID" // it is quoted in the Event
	}
	known, owner := workload.Known(object.GroupVersionKind().GroupKind()), workload.Owner(object)
	var why string
	switch {
	case known && owner != nil:
		why = ownedWithoutEffect(object, owner)
		about = append(about, corev1.ObjectReference{APIVersion: owner.APIVersion, Kind: owner.Kind, Namespace: req.Namespace, Name: owner.Name, UID: owner.UID})
	case known && req.Operation == admissionv1.Update:
		why = changedWithoutEffect(object, name)
	case !known:
		why = kindWithoutEffect(object)
	}
	if why == "" {
		return admission.Allowed("")
	}
	response := admission.Allowed("")
	if !known && req.Operation == admissionv1.Update {
		response = response.WithWarnings(why) // of all others, somebody else warns
	}
	if req.DryRun != nil && *req.DryRun {
		return response
	}
	if req.Namespace == metav1.NamespaceSystem || req.Namespace == w.own || slices.ContainsFunc(about, func(o corev1.ObjectReference) bool { return !plausible(o) }) {
		return response
	}
	// It would be refused where the advice is followed.
	if _, err := getProfile(ctx, w.cached, name, req.Namespace); errors.As(err, &refusal{}) {
		why += ". That would be refused now: " + err.Error()
	}
	var all []*corev1.Event
	for _, object := range about {
		all = append(all, events.New(object, corev1.EventTypeWarning, injectionevents.ReasonNotInjected, why, w.clock.Now()))
	}
	if dropped := w.queue.Add(all...); dropped > 0 && w.complaints.AllowN(w.clock.Now(), 1) {
		log.FromContext(ctx).Info("Events are dropped, as there are too many; this is said once a minute", "kind", req.Kind.Kind, "namespace", req.Namespace, "name", object.GetName())
	}
	return response
}

// maxUID is the maximum length of a UID. Those of API servers have 36 characters, and owner references have no limit.
const maxUID = 63

// plausible reports whether the reference is one that an API server may send. The Event names the object, so that free
// text in its place would be a caller's own words.
func plausible(o corev1.ObjectReference) bool {
	version, err := schema.ParseGroupVersion(o.APIVersion)
	return err == nil && (version.Group == "" || len(validation.IsDNS1123Subdomain(version.Group)) == 0) &&
		len(validation.IsDNS1035Label(version.Version)) == 0 && len(validation.IsDNS1035Label(strings.ToLower(o.Kind))) == 0 &&
		len(validation.IsDNS1123Label(o.Namespace)) == 0 && len(validation.IsDNS1123Subdomain(o.Name)) == 0 && len(o.UID) <= maxUID
}

// ownedWithoutEffect explains why the annotation has no effect on a job that a controller made; empty: its templates
// have the profile of the owner. An invalid template is left to the API server's validation.
func ownedWithoutEffect(job *unstructured.Unstructured, owner *metav1.OwnerReference) string {
	templates, err := workload.Templates(job)
	if err != nil {
		return ""
	}
	if len(templates) > 0 && !slices.ContainsFunc(templates, func(t workload.Template) bool { return !pinned(t) }) {
		return ""
	}
	return fmt.Sprintf("annotation %s has no effect on a %s that %s %s made: its pods run without the plugin. Only objects without an owner are injected, of the kinds %s",
		evenkeel.ProfileKey, job.GetKind(), owner.Kind, owner.Name, kindNames())
}

// pinned reports whether the template has a profile.
func pinned(t workload.Template) bool {
	return t.Label(evenkeel.ProfileKey) != "" && t.Annotations()[evenkeel.DeliveryKey] != ""
}

// changedWithoutEffect explains why the annotation has no effect on a job that exists; empty: it has that profile. An
// invalid template is left to the API server's validation.
func changedWithoutEffect(job *unstructured.Unstructured, name string) string {
	templates, err := workload.Templates(job)
	if err != nil || name == "" {
		return ""
	}
	for _, t := range templates {
		if has := t.Label(evenkeel.ProfileKey); has != name {
			return fmt.Sprintf("annotation %s: %s has no effect on an existing job (its %s has %q): create a new job with it", evenkeel.ProfileKey, name, t.Path, has)
		}
	}
	return ""
}

// kindWithoutEffect explains why the annotation has no effect on an object of a kind that Evenkeel does not know.
func kindWithoutEffect(object *unstructured.Unstructured) string {
	return fmt.Sprintf("annotation %s has no effect on this %s: its pods run without the plugin. Put it on the pod template instead, or on the metadata of one of %s",
		evenkeel.ProfileKey, object.GetKind(), kindNames())
}

// kindNames lists the kinds on whose metadata the annotation has an effect.
func kindNames() string {
	var kinds []string
	for _, k := range workload.Kinds() {
		kinds = append(kinds, k.String())
	}
	return strings.Join(kinds, ", ")
}
