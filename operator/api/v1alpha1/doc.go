// Package v1alpha1 is the API group evenkeel.dev, version v1alpha1.
//
// +kubebuilder:object:generate=true
// +groupName=evenkeel.dev
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

//go:generate go tool controller-gen object paths=.
//go:generate go tool controller-gen crd paths=../... output:crd:dir=../../../charts/evenkeel/files/crds

// GroupVersion of every kind in this package.
var GroupVersion = schema.GroupVersion{Group: "evenkeel.dev", Version: "v1alpha1"}

// AddToScheme makes a scheme know this package's kinds.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion,
		&NetworkProfile{}, &NetworkProfileList{},
		&NetworkCheck{}, &NetworkCheckList{},
		&NetworkCheckPolicy{}, &NetworkCheckPolicyList{},
		&NodeNetworkHealth{}, &NodeNetworkHealthList{},
		&ReductionService{}, &ReductionServiceList{},
	)
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
