package slim

import (
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Metadata reduces metadata of objects to what names them, their controller, and some labels and annotations.
type Metadata struct {
	labels, annotations []string

	namespaces          Pool[string]
	labelMaps, textMaps Pool[map[string]string]
	controllers         Pool[[]metav1.OwnerReference]
}

// NewMetadata returns a Metadata that keeps the labels and the annotations of these keys.
func NewMetadata(labels, annotations []string) *Metadata {
	return &Metadata{labels: labels, annotations: annotations}
}

// Of returns what is kept of the metadata.
func (m *Metadata) Of(object metav1.Object) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: object.GetName(), Namespace: m.namespace(object.GetNamespace()), UID: object.GetUID(), ResourceVersion: object.GetResourceVersion(),
		CreationTimestamp: object.GetCreationTimestamp(), DeletionTimestamp: object.GetDeletionTimestamp(),
		Labels: keep(&m.labelMaps, object.GetLabels(), m.labels), Annotations: keep(&m.textMaps, object.GetAnnotations(), m.annotations),
		OwnerReferences: m.controller(object),
	}
}

func (m *Metadata) namespace(name string) string {
	return m.namespaces.Get([]byte(name), func() string { return name })
}

// controller returns the owner that is the controller.
func (m *Metadata) controller(object metav1.Object) []metav1.OwnerReference {
	owner := metav1.GetControllerOf(object)
	if owner == nil {
		return nil
	}
	var key []byte
	for _, part := range []string{owner.APIVersion, owner.Kind, owner.Name, string(owner.UID)} {
		key = strconv.AppendQuote(key, part)
	}
	return m.controllers.Get(key, func() []metav1.OwnerReference {
		yes := true
		return []metav1.OwnerReference{{APIVersion: owner.APIVersion, Kind: owner.Kind, Name: owner.Name, UID: owner.UID, Controller: &yes}}
	})
}

// keep returns the values with one of the keys. It keeps the map of an object that is reduced already.
func keep(made *Pool[map[string]string], values map[string]string, keys []string) map[string]string {
	var content []byte
	found := 0
	for _, key := range keys {
		value, has := values[key]
		if has {
			found++
			content = strconv.AppendQuote(append(content, '='), value)
		}
		content = append(content, ' ')
	}
	if found == 0 {
		return nil
	}
	return made.Get(content, func() map[string]string {
		if found == len(values) {
			return values
		}
		kept := make(map[string]string, found)
		for _, key := range keys {
			if value, has := values[key]; has {
				kept[key] = value
			}
		}
		return kept
	})
}
