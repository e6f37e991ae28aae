package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/text"
)

// constraints reports whether OpenShift's SecurityContextConstraints decide about pods.
func (d *Doctor) constraints(_ context.Context, s *state) ([]Finding, error) {
	_, err := d.Client.RESTMapper().RESTMapping(schema.GroupKind{Group: "security.openshift.io", Kind: "SecurityContextConstraints"})
	switch {
	case meta.IsNoMatchError(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("discover SecurityContextConstraints: %w", err)
	}
	all := []Finding{{"security", Note, "OpenShift's SecurityContextConstraints give pods their users", "install with --set podSecurityContext=null"}}
	if s.installed {
		all[0].Status, all[0].Do = OK, ""
	}
	for _, name := range lockingProfiles(s.profiles) {
		all = append(all, Finding{"security", Note, fmt.Sprintf("profile %s adds the capability IPC_LOCK, which SecurityContextConstraints have to allow", name),
			"let an SCC with it be used by the service accounts of these jobs, or raise the runtime's memory limit and set memoryLock: RuntimeDefault (docs/rdma.md)"})
	}
	return all, nil
}

// lockingProfiles are those whose jobs may get the capability IPC_LOCK.
func lockingProfiles(profiles []evenkeel.NetworkProfile) (names []string) {
	for i := range profiles {
		if locks(&profiles[i]) {
			names = append(names, profiles[i].Name)
		}
	}
	return names
}

func locks(p *evenkeel.NetworkProfile) bool {
	return !inject.WithoutRDMA(p.Spec.Transport) && p.Spec.Transport.RDMA.MemoryLock == evenkeel.MemoryLockCapability
}

// enforceKey is the label of Pod Security Admission.
const enforceKey = "pod-security.kubernetes.io/enforce"

// podSecurity reports where Pod Security Admission limits pods, and whether that is too little for a profile. What the
// API server enforces elsewhere by its own configuration is not in the API.
func (d *Doctor) podSecurity(ctx context.Context, s *state) ([]Finding, error) {
	levels := map[string][]string{}
	var limited []metav1.ObjectMeta
	page := &metav1.PartialObjectMetadataList{}
	page.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NamespaceList"))
	err := d.pages(ctx, page, func() error {
		for _, ns := range page.Items {
			if level := ns.Labels[enforceKey]; level != "privileged" {
				levels[level] = append(levels[level], ns.Name)
				limited = append(limited, metav1.ObjectMeta{Name: ns.Name, Labels: ns.Labels})
			}
		}
		page.Items = nil
		return nil
	}, client.HasLabels{enforceKey})
	if err != nil {
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	var all []Finding
	for _, level := range slices.Sorted(maps.Keys(levels)) {
		all = append(all, Finding{"security", OK, fmt.Sprintf("%s with pod standard %s, which all fits that Evenkeel adds but memoryLock: Capability: %s",
			counted(len(levels[level]), "namespace"), level, text.List(sorted(levels[level]), maxNamed)), ""})
	}
	used := map[[2]string]bool{}
	for i := range s.pods {
		used[[2]string{s.pods[i].Namespace, s.pods[i].Labels[evenkeel.ProfileKey]}] = true
	}
	for i := range s.profiles {
		p := &s.profiles[i]
		selector, err := metav1.LabelSelectorAsSelector(p.Spec.NamespaceSelector)
		if !locks(p) || err != nil {
			continue // what a selector lacks, the check of profiles says
		}
		if p.Spec.NamespaceSelector == nil {
			selector = labels.Everything()
		}
		status, refusing := Note, []string(nil)
		for _, ns := range limited {
			if !selector.Matches(labels.Set(ns.Labels)) {
				continue
			}
			refusing = append(refusing, ns.Name)
			if used[[2]string{ns.Name, p.Name}] {
				status = Problem
			}
		}
		if len(refusing) > 0 {
			all = append(all, Finding{"security", status, fmt.Sprintf("%s may use profile %s, but Pod Security rejects its capability IPC_LOCK there: %s", counted(len(refusing), "namespace"), p.Name, text.List(sorted(refusing), maxNamed)),
				"raise the memory limit of the container runtime and set memoryLock: RuntimeDefault (docs/rdma.md)"})
		}
	}
	return all, nil
}
