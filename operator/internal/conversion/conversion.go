// Package conversion converts objects of evenkeel.dev between v1alpha1, in which they are stored, and v1beta1, and
// serves that as a conversion webhook.
//
// It moves values inside the JSON of an object, and does not decode them into Go types. A value stays as it was
// written, such as a quantity "1024Mi" that a Go type would write as "1Gi": a check is immutable, so a manifest that is
// applied again has to be the same text. A field that this program does not know stays too, as in a rolling upgrade.
package conversion

import (
	"fmt"
	"slices"

	"evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/api/v1beta1"
)

// Definitions are the names of the CustomResourceDefinitions with both versions.
func Definitions() []string {
	return []string{"networkcheckpolicies.evenkeel.dev", "networkchecks.evenkeel.dev", "networkprofiles.evenkeel.dev"}
}

// Convert changes an object of one of the kinds with both versions into the wanted version, such as
// evenkeel.dev/v1beta1. What has an unexpected type or value stays where it is, as an object that cannot be converted
// cannot be read.
func Convert(object map[string]any, apiVersion string) error {
	kind, _ := object["kind"].(string)
	moves, known := kinds[kind]
	if !known {
		return fmt.Errorf("kind %q has one version only", kind)
	}
	alpha, beta := v1alpha1.GroupVersion.String(), v1beta1.GroupVersion.String()
	switch from, _ := object["apiVersion"].(string); {
	case from == apiVersion:
	case from == alpha && apiVersion == beta:
		for _, m := range moves {
			relocate(object, m.alpha, m.beta, m.toBeta)
		}
	case from == beta && apiVersion == alpha:
		for _, m := range moves {
			relocate(object, m.beta, m.alpha, m.toAlpha)
		}
	default:
		return fmt.Errorf("%s cannot be converted from %q to %q: want %s and %s", kind, from, apiVersion, alpha, beta)
	}
	object["apiVersion"] = apiVersion
	return nil
}

// relocate moves a value, if it is there, and changes it. Objects that this empties go, and objects on the new path are
// made. Neither version allows such an object to be empty, so a move back restores what was there.
func relocate(object map[string]any, from, to path, change func(any) any) {
	source := from.parent(object, false)
	value, found := source[from.last()]
	if !found {
		return
	}
	target := to.parent(object, true)
	if target == nil {
		return
	}
	delete(source, from.last())
	if change != nil {
		value = change(value)
	}
	target[to.last()] = value
	for end := len(from) - 1; end > 0; end-- {
		if emptied := from[:end]; len(from[:end+1].parent(object, false)) == 0 {
			delete(emptied.parent(object, false), emptied.last())
		}
	}
}

// A path has the names of nested fields.
type path []string

func (p path) last() string { return p[len(p)-1] }

// parent is the object with the last field of the path. It is nil if it is not there, unless it is made, or if there is
// something else in its place.
func (p path) parent(object map[string]any, create bool) map[string]any {
	for _, name := range p[:len(p)-1] {
		below, found := object[name]
		if !found && create {
			below = map[string]any{}
			object[name] = below
		}
		var isObject bool
		if object, isObject = below.(map[string]any); !isObject {
			return nil
		}
	}
	return object
}

// at puts moves below a field, such as spec.
func at(field string, moves ...move) []move {
	var all []move
	for _, m := range moves {
		m.alpha, m.beta = slices.Concat(path{field}, m.alpha), slices.Concat(path{field}, m.beta)
		all = append(all, m)
	}
	return all
}
