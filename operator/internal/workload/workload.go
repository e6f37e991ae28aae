// Package workload finds the pod templates in the kinds of jobs that Evenkeel supports, and suspends jobs. The kinds
// are handled as unstructured objects through one table, so their modules are not needed, and kinds that the cluster
// lacks cost nothing.
package workload

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// A kind of job.
type kind struct {
	// version is the API version that Evenkeel uses. The paths are the same in other served versions.
	version string
	// templates are the paths of pod templates. "*" stands for every key of a map, "[]" for every item of a list. A path
	// that ends with "?" may be absent.
	templates [][]string
	// suspend is the path of the field that suspends the job; nil if the kind has none.
	suspend []string
	// size is the path of the number of pods in a group. The first pod is made from the first template, if there are two,
	// and the others from the last. It is nil if templates have their own numbers of replicas.
	size []string
	// podLabel is the label of the job's pods that has its name; empty: the job itself is the controller of its pods.
	podLabel string
	// managedBy is the path of the field that names the job's controller; nil if the kind has none.
	managedBy []string
}

var kinds = map[schema.GroupKind]kind{
	{Group: "kubeflow.org", Kind: "PyTorchJob"}: {
		version: "v1", templates: [][]string{{"spec", "pytorchReplicaSpecs", "*", "template"}}, suspend: []string{"spec", "runPolicy", "suspend"},
		managedBy: []string{"spec", "runPolicy", "managedBy"},
	},
	{Group: "kubeflow.org", Kind: "MPIJob"}: {
		version: "v2beta1", templates: [][]string{{"spec", "mpiReplicaSpecs", "*", "template"}}, suspend: []string{"spec", "runPolicy", "suspend"},
		managedBy: []string{"spec", "runPolicy", "managedBy"},
	},
	{Group: "jobset.x-k8s.io", Kind: "JobSet"}: {
		version: "v1alpha2", templates: [][]string{{"spec", "replicatedJobs", "[]", "template", "spec", "template"}}, suspend: []string{"spec", "suspend"},
		managedBy: []string{"spec", "managedBy"},
	},
	{Group: "batch", Kind: "Job"}: {
		version: "v1", templates: [][]string{{"spec", "template"}}, suspend: []string{"spec", "suspend"},
		managedBy: []string{"spec", "managedBy"},
	},
	{Group: "batch.volcano.sh", Kind: "Job"}: {
		version: "v1alpha1", templates: [][]string{{"spec", "tasks", "[]", "template"}},
	},
	{Group: "leaderworkerset.x-k8s.io", Kind: "LeaderWorkerSet"}: {
		version: "v1", templates: [][]string{{"spec", "leaderWorkerTemplate", "leaderTemplate", "?"}, {"spec", "leaderWorkerTemplate", "workerTemplate"}},
		size: []string{"spec", "leaderWorkerTemplate", "size"}, podLabel: "leaderworkerset.sigs.k8s.io/name",
	},
}

// A Template is one pod template of a job, in place: changes to it are changes to the job.
type Template struct {
	// Path is its position in the job, such as spec.pytorchReplicaSpecs.Worker.template.
	Path string
	// Pods is the number of pods that the job makes from it.
	Pods    int
	content map[string]any
	// id is the path with the names of items in place of their positions in lists.
	id string
}

// Same reports whether both are one template of a job, at different times. Items of a list may have changed places.
func (t Template) Same(other Template) bool { return t.id == other.id }

// Known reports whether Evenkeel supports the kind.
func Known(k schema.GroupKind) bool {
	_, ok := kinds[k]
	return ok
}

// Suspendable returns the kinds that can be suspended, sorted.
func Suspendable() []schema.GroupVersionKind {
	var list []schema.GroupVersionKind
	for gk, k := range kinds {
		if k.suspend != nil {
			list = append(list, gk.WithVersion(k.version))
		}
	}
	slices.SortFunc(list, func(a, b schema.GroupVersionKind) int { return cmp.Compare(a.String(), b.String()) })
	return list
}

// OfPod returns kind and name of the job that made the pod, if it is of a kind that cannot be suspended.
func OfPod(pod metav1.Object) (job schema.GroupVersionKind, name string, ok bool) {
	if o := metav1.GetControllerOfNoCopy(pod); o != nil {
		gk := schema.FromAPIVersionAndKind(o.APIVersion, o.Kind).GroupKind()
		if k, known := kinds[gk]; known && k.suspend == nil {
			return gk.WithVersion(k.version), o.Name, true
		}
	}
	for gk, k := range kinds {
		if name := pod.GetLabels()[k.podLabel]; k.podLabel != "" && name != "" {
			return gk.WithVersion(k.version), name, true
		}
	}
	return schema.GroupVersionKind{}, "", false
}

// Labels of JobSet on its pods, which belong to Jobs of it.
const jobSetName, jobSetUID = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/jobset-uid"

// JobOf returns the object that the pod belongs to: the JobSet, if it is of one, else what controls the pod, else the
// pod itself.
func JobOf(pod metav1.Object) corev1.ObjectReference {
	name, uid := pod.GetLabels()[jobSetName], pod.GetLabels()[jobSetUID]
	owner := metav1.GetControllerOfNoCopy(pod)
	switch {
	case name != "" && uid != "":
		return corev1.ObjectReference{APIVersion: "jobset.x-k8s.io/v1alpha2", Kind: "JobSet", Namespace: pod.GetNamespace(), Name: name, UID: types.UID(uid)}
	case owner != nil:
		return corev1.ObjectReference{APIVersion: owner.APIVersion, Kind: owner.Kind, Namespace: pod.GetNamespace(), Name: owner.Name, UID: owner.UID}
	}
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.GetNamespace(), Name: pod.GetName(), UID: pod.GetUID()}
}

// GangOf returns the object whose pods wait at the same gate: the job of a kind that cannot be suspended, else what
// JobOf returns. Where pods know only the job's name, the UID is empty.
func GangOf(pod metav1.Object) corev1.ObjectReference {
	kind, name, ok := OfPod(pod)
	if !ok {
		return JobOf(pod)
	}
	job := corev1.ObjectReference{APIVersion: kind.GroupVersion().String(), Kind: kind.Kind, Namespace: pod.GetNamespace(), Name: name}
	if kinds[kind.GroupKind()].podLabel == "" {
		job.UID = metav1.GetControllerOfNoCopy(pod).UID
	}
	return job
}

// SameJob reports whether the pods belong to the same job.
func SameJob(a, b metav1.Object) bool {
	one, other := GangOf(a), GangOf(b)
	return one.Namespace == other.Namespace && one.Kind == other.Kind && one.Name == other.Name && one.UID == other.UID
}

// GangSelector selects the pods of a gang whose own annotation asked for a profile, among those of its namespace; nil:
// only the pod itself is known to be of it.
func GangSelector(pod metav1.Object) map[string]string {
	if kind, name, ok := OfPod(pod); ok && kinds[kind.GroupKind()].podLabel != "" {
		return map[string]string{kinds[kind.GroupKind()].podLabel: name}
	}
	if owner := pod.GetLabels()[evenkeel.OwnerKey]; owner != "" {
		return map[string]string{evenkeel.OwnerKey: owner}
	}
	return nil
}

// JobLabels are the labels of pods that JobOf reads.
func JobLabels() []string { return []string{jobSetName, jobSetUID} }

// SameJobLabels are the labels of pods that SameJob and GangOf read.
func SameJobLabels() []string {
	read := JobLabels()
	for _, k := range kinds {
		if k.podLabel != "" {
			read = append(read, k.podLabel)
		}
	}
	slices.Sort(read)
	return read
}

// GangLabels are the labels of pods that GangOf and GangSelector read.
func GangLabels() []string {
	read := append(SameJobLabels(), evenkeel.OwnerKey)
	slices.Sort(read)
	return read
}

// Kinds returns the supported kinds, sorted.
func Kinds() []schema.GroupKind {
	return slices.SortedFunc(maps.Keys(kinds), func(a, b schema.GroupKind) int { return strings.Compare(a.String(), b.String()) })
}

// Templates returns the job's pod templates, ordered by path.
func Templates(job *unstructured.Unstructured) ([]Template, error) {
	gk := job.GroupVersionKind().GroupKind()
	k, ok := kinds[gk]
	if !ok {
		return nil, fmt.Errorf("kind %s is not one that Evenkeel can inject", gk)
	}
	var all []Template
	for _, path := range k.templates {
		found, err := findTemplates(job.Object, path, "", "")
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	if k.size != nil && len(all) > 0 {
		value, _, _ := unstructured.NestedFieldNoCopy(job.Object, k.size...)
		size, ok := number(value)
		if !ok {
			size = 1 // the default; the API server reports invalid values
		}
		all[len(all)-1].Pods *= max(0, size-len(all)+1)
	}
	return all, nil
}

// findTemplates returns the templates at the rest of a path. Walked is the path so far, and id the same as [Template]
// has it.
func findTemplates(at any, path []string, walked, id string) ([]Template, error) {
	object, isObject := at.(map[string]any)
	switch {
	case len(path) == 1 && path[0] == "?" && at == nil:
		return nil, nil
	case len(path) > 0 && path[0] == "[]":
		list, ok := at.([]any)
		if !ok {
			return nil, fmt.Errorf("%s is not a list", walked)
		}
		var found []Template
		for i, item := range list {
			place := strconv.Itoa(i)
			name := place
			if fields, ok := item.(map[string]any); ok {
				name, _ = fields["name"].(string)
				name = cmp.Or(name, place)
			}
			templates, err := findTemplates(item, path[1:], walked+"["+place+"]", id+"["+name+"]")
			if err != nil {
				return nil, err
			}
			found = append(found, templates...)
		}
		return found, nil
	case !isObject:
		return nil, fmt.Errorf("%s is not an object", walked)
	case len(path) == 0, path[0] == "?":
		return []Template{{Path: walked, Pods: 1, content: object, id: id}}, nil
	}
	keys := []string{path[0]}
	if path[0] == "*" {
		keys = slices.Sorted(maps.Keys(object))
	}
	var found []Template
	for _, key := range keys {
		templates, err := findTemplates(object[key], path[1:], field(walked, key), field(id, key))
		if err != nil {
			return nil, err
		}
		for i := range templates {
			templates[i].Pods *= podCount(object)
		}
		found = append(found, templates...)
	}
	return found, nil
}

// field is the path of a field of an object, which may be the job itself.
func field(object, key string) string {
	if object == "" {
		return key
	}
	return object + "." + key
}

// Suspended reports whether the job is suspended; can is false where its kind has no such field.
func Suspended(job *unstructured.Unstructured) (is, can bool) {
	path := kinds[job.GroupVersionKind().GroupKind()].suspend
	if path == nil {
		return false, false
	}
	is, _, _ = unstructured.NestedBool(job.Object, path...) // not validated yet: an absent or invalid field counts as empty
	return is, true
}

// SuspendPath is the path of the field that suspends the job; nil if its kind has none.
func SuspendPath(job *unstructured.Unstructured) []string {
	return kinds[job.GroupVersionKind().GroupKind()].suspend
}

// Suspend suspends or resumes the job.
func Suspend(job *unstructured.Unstructured, yes bool) error {
	gk := job.GroupVersionKind().GroupKind()
	path := kinds[gk].suspend
	if path == nil {
		return fmt.Errorf("kind %s cannot be suspended", gk)
	}
	return unstructured.SetNestedField(job.Object, yes, path...)
}

// PodSpec returns the spec of the template's pods.
func (t Template) PodSpec() (*corev1.PodSpec, error) {
	var template corev1.PodTemplateSpec
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(t.content, &template); err != nil {
		return nil, fmt.Errorf("%s: %w", t.Path, err)
	}
	return &template.Spec, nil
}

// ChangeAffinity changes the affinity of the template's pods, which may be nil.
func (t Template) ChangeAffinity(change func(*corev1.Affinity) *corev1.Affinity) error {
	spec, err := t.PodSpec()
	if err != nil {
		return err
	}
	changed := change(spec.Affinity)
	if changed == nil {
		return nil
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(changed)
	if err != nil {
		return fmt.Errorf("%s.spec.affinity: %w", t.Path, err)
	}
	if err := unstructured.SetNestedMap(t.content, content, "spec", "affinity"); err != nil {
		return fmt.Errorf("%s.spec.affinity: %w", t.Path, err)
	}
	return nil
}

// AddResources adds to the resources of the template's containers. Other changes that add makes are ignored.
func (t Template) AddResources(add func(*corev1.PodSpec) error) error {
	before, err := t.PodSpec()
	if err != nil {
		return err
	}
	after := before.DeepCopy()
	if err := add(after); err != nil {
		return err
	}
	list, _, err := unstructured.NestedSlice(t.content, "spec", "containers")
	if err != nil {
		return fmt.Errorf("%s.spec.containers: %w", t.Path, err)
	}
	for i := range list {
		container, ok := list[i].(map[string]any)
		if !ok {
			continue // not a container
		}
		was, is := before.Containers[i].Resources, after.Containers[i].Resources
		for _, kind := range []struct {
			field   string
			was, is corev1.ResourceList
		}{{"limits", was.Limits, is.Limits}, {"requests", was.Requests, is.Requests}} {
			for name, quantity := range kind.is {
				if _, had := kind.was[name]; had {
					continue // keep the user's notation: 1000m would be written as 1
				}
				ensureObject(ensureObject(container, "resources"), kind.field)[string(name)] = quantity.String()
			}
		}
	}
	return unstructured.SetNestedSlice(t.content, list, "spec", "containers")
}

// ensureObject returns the object in a field. It creates the object if the field is absent or null.
func ensureObject(holder map[string]any, field string) map[string]any {
	in, ok := holder[field].(map[string]any)
	if !ok {
		in = map[string]any{}
		holder[field] = in
	}
	return in
}

// podCount is the factor by which an object on the path to a template multiplies its pods: replicas or parallelism,
// else one.
func podCount(holder map[string]any) int {
	for _, field := range []string{"replicas", "parallelism"} {
		if n, ok := number(holder[field]); ok {
			return n
		}
	}
	return 1
}

func number(value any) (n int, ok bool) {
	switch n := value.(type) {
	case int64:
		return int(n), true
	case float64: // as JSON has it
		return int(n), true
	}
	return 0, false
}

// Containers returns the names of the template's containers.
func (t Template) Containers() []string {
	list, _, _ := unstructured.NestedSlice(t.content, "spec", "containers") // not validated yet: an absent or invalid field counts as empty
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

// Labels returns the template's labels.
func (t Template) Labels() map[string]string {
	values, _, _ := unstructured.NestedStringMap(t.content, "metadata", "labels") // labels that are no strings are not ours
	return values
}

// Annotations returns the template's annotations.
func (t Template) Annotations() map[string]string {
	values, _, _ := unstructured.NestedStringMap(t.content, "metadata", "annotations") // annotations that are no strings are not ours
	return values
}

// PriorityClass returns the name of the pods' priority class; empty if they have none.
func (t Template) PriorityClass() string {
	name, _, _ := unstructured.NestedString(t.content, "spec", "priorityClassName")
	return name
}

// Remove removes a label or annotation.
func (t Template) Remove(key string) {
	unstructured.RemoveNestedField(t.content, "metadata", "labels", key)
	unstructured.RemoveNestedField(t.content, "metadata", "annotations", key)
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

// Owner returns the object whose controller made the job; nil: a user made it. The owner is the one to annotate.
func Owner(job *unstructured.Unstructured) *metav1.OwnerReference { return metav1.GetControllerOf(job) }

const (
	// KueueGroup is the API group of Kueue.
	KueueGroup = "kueue.x-k8s.io"
	// QueueKey is the label of jobs that Kueue suspends and resumes.
	QueueKey = KueueGroup + "/queue-name"
)

// Queue returns the name of the job's Kueue queue; empty if it is in none.
func Queue(job metav1.Object) string { return job.GetLabels()[QueueKey] }

// Queued reports whether Kueue decides when the job starts.
func Queued(job metav1.Object) bool { return Queue(job) != "" }

// Marks of pods whose owner is in a queue. Kueue sets them on the pods of an admitted job, and on pods that it suspends
// by themselves.
const (
	podSetKey           = "kueue.x-k8s.io/podset"
	suspendingParentKey = "kueue.x-k8s.io/pod-suspending-parent"
)

// QueuedPod reports whether Kueue decides when the pod starts, by itself or with its owner.
func QueuedPod(pod metav1.Object) bool {
	return Queued(pod) || pod.GetLabels()[podSetKey] != "" || pod.GetAnnotations()[suspendingParentKey] != ""
}
