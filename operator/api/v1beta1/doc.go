// Package v1beta1 is the API group evenkeel.dev, version v1beta1: the kinds that users write. NodeNetworkHealth and
// ReductionService, which only Evenkeel writes, are of v1alpha1 alone.
//
// Objects are stored in v1alpha1. Every field has its counterpart there, so that a conversion loses nothing.
//
// +kubebuilder:object:generate=true
// +groupName=evenkeel.dev
package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

//go:generate go tool controller-gen object paths=.

// GroupVersion of every kind in this package.
var GroupVersion = schema.GroupVersion{Group: "evenkeel.dev", Version: "v1beta1"}

// AddToScheme makes a scheme know this package's kinds.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion,
		&NetworkProfile{}, &NetworkProfileList{},
		&NetworkCheck{}, &NetworkCheckList{},
		&NetworkCheckPolicy{}, &NetworkCheckPolicyList{},
	)
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
