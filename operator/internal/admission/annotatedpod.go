package admission

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// maxRemembered is the number of owners whose profile is remembered. When there are more, all are forgotten, and looked
// up again.
const maxRemembered = 4096

// AnnotatedPods is the webhook for pods whose own annotation asks for a profile, because their owner is of a kind that
// Evenkeel does not list, which the annotation on a pod template reaches. All pods of an owner get the profile as it
// was when the first was created: the others copy it from a pod that lives. The names of containers are each pod's own.
// Both readers serve NetworkProfiles and Namespaces, cached serves NetworkCheckPolicies and LimitRanges too.
func AnnotatedPods(scheme *runtime.Scheme, cached, live client.Reader, siblings *Siblings, reports func() string) *admission.Webhook {
	return admission.WithDefaulter[*corev1.Pod](scheme, &annotatedPodInjector{cached: cached, live: live, siblings: siblings, reports: reports, known: map[ownerKey]inject.Resolved{}})
}

type annotatedPodInjector struct {
	cached, live client.Reader
	siblings     *Siblings
	reports      func() string

	mu sync.Mutex
	// known holds the resolved profiles of owners. The cache may not show a new pod yet.
	known map[ownerKey]inject.Resolved
}

// Default pins the profile to the pod and injects it. An error refuses the pod; its text is for the user.
func (a *annotatedPodInjector) Default(ctx context.Context, pod *corev1.Pod) error {
	name := pod.Annotations[evenkeel.ProfileKey]
	if name == "" { // declined
		return nil
	}
	if pod.Labels[evenkeel.ProfileKey] != "" { // pinned before: a webhook that came later may have taken something of it
		return injectPod(pod, a.reports())
	}
	request, err := admission.RequestFromContext(ctx)
	if err != nil {
		return fmt.Errorf("admission request: %w", err)
	}
	owner := workload.JobOf(pod).UID
	if metav1.GetControllerOfNoCopy(pod) == nil {
		owner = "" // the pod itself
	}
	resolved, err := a.resolve(ctx, name, ownerKey{request.Namespace, owner})
	resolved.Containers = inject.SplitNames(pod.Annotations[evenkeel.ContainersKey])
	if err == nil {
		resolved.JobKey, err = inject.UsersKey(pod.Annotations[evenkeel.JobKeyKey])
	}
	if err != nil {
		metrics.Pod(metrics.Refused)
		return err
	}
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	for _, key := range inject.Keys() { // a copied pod must not keep another's values
		delete(pod.Annotations, key)
	}
	delete(pod.Labels, evenkeel.JobKeyKey)
	maps.Copy(pod.Labels, resolved.Labels())
	maps.Copy(pod.Annotations, resolved.Annotations())
	if owner != "" {
		pod.Labels[evenkeel.OwnerKey] = string(owner)
	}
	// Its owner is of any kind, and may have no field that suspends it, so that each of its pods waits.
	delete(pod.Labels, evenkeel.GatedKey)
	gated, err := gateWanted(ctx, a.cached, name, pod.Annotations[evenkeel.GateKey], gateCase{queued: workload.QueuedPod(pod)})
	if err != nil || gated {
		// Its other pods do not wait if one does not, since that may hold accelerators while it waits for them.
		late, waitErr := a.siblings.hasStarted(ctx, ownerKey{request.Namespace, owner})
		if waitErr != nil {
			err = waitErr
		} else if late && owner != "" {
			gated, err = false, nil
		}
	}
	if err != nil {
		metrics.Pod(metrics.Refused)
		return err
	}
	if gated && pod.Spec.NodeName == "" {
		pod.Labels[evenkeel.GatedKey] = evenkeel.GatedValue
	}
	return injectPod(pod, a.reports())
}

// resolve returns the profile for pods of the owner.
func (a *annotatedPodInjector) resolve(ctx context.Context, name string, key ownerKey) (inject.Resolved, error) {
	a.mu.Lock()
	known, ok := a.known[key]
	a.mu.Unlock()
	if ok && known.Profile == name {
		return known, nil
	}
	var resolved inject.Resolved
	var found bool
	if key.owner != "" {
		var err error
		if resolved, found, err = a.siblings.gotFrom(ctx, name, key); err != nil {
			return resolved, err
		}
	}
	if !found {
		profile, err := getProfile(ctx, a.cached, name, key.namespace)
		if errors.As(err, &refusal{}) || apierrors.IsNotFound(err) {
			profile, err = getProfile(ctx, a.live, name, key.namespace) // the cache may be behind
		}
		if err != nil {
			return resolved, err
		}
		resolved = inject.Resolve(profile, "")
		if err := fitLimitRanges(ctx, a.cached, key.namespace, &resolved); err != nil {
			return resolved, err
		}
		resolved.OmitTuner(profile)
		if _, err := checkRDMA(profile, resolved.RDMA); err != nil {
			return resolved, err
		}
	}
	// A caller who is no API server may send names of megabytes.
	if key.owner != "" && len(key.owner) <= maxUID && len(key.namespace) <= validation.DNS1123LabelMaxLength {
		a.mu.Lock()
		defer a.mu.Unlock()
		if len(a.known) >= maxRemembered {
			clear(a.known)
		}
		a.known[key] = resolved
	}
	return resolved, nil
}
