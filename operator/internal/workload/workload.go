// Package workload finds the pod templates inside the kinds of job that Evenkeel knows. The kinds are handled as
// unstructured objects through one table, so none of their modules is needed and absent kinds cost nothing.
package workload

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// kinds says where each kind keeps its pod templates; "*" stands for every key of a map.
var kinds = map[schema.GroupKind][]string{
	{Group: "kubeflow.org", Kind: "PyTorchJob"}: {"spec", "pytorchReplicaSpecs", "*", "template"},
	{Group: "batch", Kind: "Job"}:               {"spec", "template"},
}

// A Template is one pod template of a job, in place: changes to it are changes to the job.
type Template struct {
	// Path says where in the job it is, such as spec.pytorchReplicaSpecs.Worker.template.
	Path    string
	content map[string]any
}

// Known reports whether the table has the kind.
func Known(kind schema.GroupKind) bool { return kinds[kind] != nil }

// Kinds are those of the table, sorted.
func Kinds() []schema.GroupKind {
	return slices.SortedFunc(maps.Keys(kinds), func(a, b schema.GroupKind) int { return strings.Compare(a.String(), b.String()) })
}

// Templates returns the job's pod templates, ordered by path.
func Templates(job *unstructured.Unstructured) ([]Template, error) {
	kind := job.GroupVersionKind().GroupKind()
	path, ok := kinds[kind]
	if !ok {
		return nil, fmt.Errorf("kind %s is not one that Evenkeel can inject", kind)
	}
	return collect(job.Object, path, "")
}

func collect(at map[string]any, path []string, walked string) ([]Template, error) {
	if len(path) == 0 {
		return []Template{{Path: walked, content: at}}, nil
	}
	keys := []string{path[0]}
	if path[0] == "*" {
		keys = slices.Sorted(maps.Keys(at))
	}
	var found []Template
	for _, key := range keys {
		name := key
		if walked != "" {
			name = walked + "." + key
		}
		next, ok := at[key].(map[string]any)
		if !ok {
			return nil, fmt.Errorf("%s is not an object", name)
		}
		templates, err := collect(next, path[1:], name)
		if err != nil {
			return nil, err
		}
		found = append(found, templates...)
	}
	return found, nil
}

// Containers are the names of the template's containers.
func (t Template) Containers() []string {
	list, _, _ := unstructured.NestedSlice(t.content, "spec", "containers") // the API server has yet to validate: absent is fine
	var names []string
	for _, item := range list {
		if c, ok := item.(map[string]any); ok {
			if name, ok := c["name"].(string); ok {
				names = append(names, name)
			}
		}
	}
	return names
}

// Label returns the value of a label, empty if absent.
func (t Template) Label(key string) string {
	value, _, _ := unstructured.NestedString(t.content, "metadata", "labels", key)
	return value
}

// Annotations are the template's.
func (t Template) Annotations() map[string]string {
	values, _, _ := unstructured.NestedStringMap(t.content, "metadata", "annotations") // what is not text is not ours
	return values
}

// Add sets labels and annotations of the template.
func (t Template) Add(labels, annotations map[string]string) error {
	for field, values := range map[string]map[string]string{"labels": labels, "annotations": annotations} {
		for key, value := range values {
			if err := unstructured.SetNestedField(t.content, value, "metadata", field, key); err != nil {
				return fmt.Errorf("%s.metadata.%s: %w", t.Path, field, err)
			}
		}
	}
	return nil
}

// Controlled reports whether another object's controller made this one: then that object is the one to annotate.
func Controlled(job *unstructured.Unstructured) bool { return metav1.GetControllerOf(job) != nil }
