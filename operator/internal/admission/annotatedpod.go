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
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/metrics"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// maxRemembered is the number of owners whose profile is remembered. When there are more, all are forgotten, and looked up again.
const maxRemembered = 4096

// AnnotatedPods is the webhook for pods whose own annotation asks for a profile: those of owners of kinds that Evenkeel does not
// list, which the annotation on a pod template reaches. All pods of an owner get the profile as it was when the first was created:
// the others copy it from a pod that lives. Both readers serve NetworkProfiles and Namespaces, cached serves NetworkCheckPolicies
// and live pods too.
func AnnotatedPods(scheme *runtime.Scheme, cached, live client.Reader, reports func() string) *admission.Webhook {
	return admission.WithDefaulter[*corev1.Pod](scheme, &annotatedPodInjector{cached: cached, live: live, reports: reports, known: map[types.UID]inject.Resolved{}, started: map[types.UID]bool{}})
}

type annotatedPodInjector struct {
	cached, live client.Reader
	reports      func() string

	mu sync.Mutex
	// known has the profiles of owners, as they were resolved.
	known map[types.UID]inject.Resolved
	// started has owners that had a pod which did not wait.
	started map[types.UID]bool
}

// Default pins the profile to the pod and injects it. An error refuses the pod; its text is for the user.
func (a *annotatedPodInjector) Default(ctx context.Context, pod *corev1.Pod) error {
	name := pod.Annotations[evenkeel.ProfileKey]
	if name == "" || pod.Labels[evenkeel.ProfileKey] != "" { // declined, or the other webhook's
		return nil
	}
	request, err := admission.RequestFromContext(ctx)
	if err != nil {
		return fmt.Errorf("admission request: %w", err)
	}
	owner := workload.JobOf(pod).UID
	if metav1.GetControllerOfNoCopy(pod) == nil {
		owner = "" // the pod itself
	}
	resolved, err := a.resolve(ctx, name, request.Namespace, owner, pod.Annotations[evenkeel.ContainersKey])
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
	maps.Copy(pod.Labels, resolved.Labels())
	maps.Copy(pod.Annotations, resolved.Annotations())
	if owner != "" {
		pod.Labels[evenkeel.OwnerKey] = string(owner)
	}
	// Its owner is of any kind, and may have no field that suspends it, so that each of its pods waits.
	delete(pod.Labels, evenkeel.GatedKey)
	gated, err := gateWanted(ctx, a.cached, name, pod.Annotations[evenkeel.GateKey], gateCase{queued: workload.QueuedPod(pod)})
	if err != nil || gated {
		late, listErr := a.hasStarted(ctx, request.Namespace, owner)
		if listErr != nil {
			err = listErr
		} else if late {
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
func (a *annotatedPodInjector) resolve(ctx context.Context, name, namespace string, owner types.UID, containers string) (inject.Resolved, error) {
	a.mu.Lock()
	known, ok := a.known[owner]
	a.mu.Unlock()
	if ok && known.Profile == name {
		return known, nil
	}
	resolved, found, err := a.ofSibling(ctx, name, namespace, owner)
	if err != nil {
		return resolved, err
	}
	if !found {
		profile, err := getProfile(ctx, a.cached, name, namespace)
		if errors.As(err, &refusal{}) || apierrors.IsNotFound(err) {
			profile, err = getProfile(ctx, a.live, name, namespace) // the cache may be behind
		}
		if err != nil {
			return resolved, err
		}
		resolved = inject.Resolve(profile, containers)
		if _, err := checkRDMA(profile, resolved.RDMA); err != nil {
			return resolved, err
		}
	}
	if owner != "" {
		a.mu.Lock()
		defer a.mu.Unlock()
		if len(a.known) >= maxRemembered {
			clear(a.known)
		}
		a.known[owner] = resolved
	}
	return resolved, nil
}

// ofSibling returns what another pod of the owner has.
func (a *annotatedPodInjector) ofSibling(ctx context.Context, name, namespace string, owner types.UID) (resolved inject.Resolved, found bool, err error) {
	if owner == "" {
		return resolved, false, nil
	}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PodList"))
	if err := a.live.List(ctx, list, client.InNamespace(namespace), client.Limit(1), client.MatchingLabels{evenkeel.OwnerKey: string(owner), evenkeel.ProfileKey: name}); err != nil {
		return resolved, false, fmt.Errorf("list pods of the same owner: %w", err)
	}
	if len(list.Items) == 0 {
		return resolved, false, nil
	}
	resolved, err = inject.FromPod(map[string]string{evenkeel.ProfileKey: name}, list.Items[0].Annotations)
	return resolved, err == nil, err
}

// hasStarted reports whether the owner has a pod that does not wait: its gate was opened, or it never had one. Its other pods do not
// wait then, since the first may hold accelerators while it waits for them.
func (a *annotatedPodInjector) hasStarted(ctx context.Context, namespace string, owner types.UID) (bool, error) {
	if owner == "" {
		return false, nil
	}
	a.mu.Lock()
	started := a.started[owner]
	a.mu.Unlock()
	if started {
		return true, nil
	}
	selector, err := labels.Parse(fmt.Sprintf("%s=%s,!%s", evenkeel.OwnerKey, owner, evenkeel.GatedKey))
	if err != nil {
		return false, fmt.Errorf("select pods of owner %s: %w", owner, err)
	}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PodList"))
	// Of the API server's memory: a large owner makes thousands of pods at once, and each asks.
	fromMemory := &client.ListOptions{Namespace: namespace, LabelSelector: selector, Raw: &metav1.ListOptions{ResourceVersion: "0"}}
	if err := a.live.List(ctx, list, fromMemory); err != nil {
		return false, fmt.Errorf("list pods of the same owner: %w", err)
	}
	if len(list.Items) == 0 {
		return false, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.started) >= maxRemembered {
		clear(a.started)
	}
	a.started[owner] = true
	return true, nil
}
