package admission

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/inject"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// restoreTemplates puts back what the update of a job takes from its pod templates of what Evenkeel wrote on them, and reports whether
// anything was missing. Nobody means to take it: a client-side apply replaces whole lists of a custom resource, and so the templates in
// them, by what they are in the file. Any apply does so with the alternatives of a node affinity, which are one list in every kind.
func restoreTemplates(job *unstructured.Unstructured, old []byte) (restored bool, err error) {
	before := &unstructured.Unstructured{}
	if err := json.Unmarshal(old, &before.Object); err != nil {
		return false, fmt.Errorf("decode the %s before the update: %w", job.GetKind(), err)
	}
	if !workload.Known(job.GroupVersionKind().GroupKind()) {
		return false, nil
	}
	had, err := workload.Templates(before)
	if err != nil {
		return false, err
	}
	have, err := workload.Templates(job)
	if err != nil {
		return false, err
	}
	given := job.DeepCopy()
	for _, was := range had {
		at := slices.IndexFunc(have, was.Same)
		if at < 0 || !pinned(was) {
			continue
		}
		is := have[at]
		labels, annotations := lost(was.Labels(), is.Labels()), lost(was.Annotations(), is.Annotations())
		if len(labels)+len(annotations) == 0 {
			// What was not there before the update either may be impossible to add now.
			if whole, err := hasSpec(before, was); err != nil {
				return !same(given, job), err
			} else if !whole {
				continue
			}
		}
		if err := is.Add(labels, annotations); err != nil {
			return !same(given, job), err
		}
		if err := restoreSpec(before, is); err != nil {
			return !same(given, job), err
		}
	}
	return !same(given, job), nil
}

// hasSpec reports whether the job's template has all that restoreSpec would add.
func hasSpec(job *unstructured.Unstructured, t workload.Template) (bool, error) {
	restored := job.DeepCopy()
	templates, err := workload.Templates(restored)
	if err != nil {
		return false, err
	}
	if err := restoreSpec(job, templates[slices.IndexFunc(templates, t.Same)]); err != nil {
		return false, err
	}
	return same(job, restored), nil
}

// same compares what the objects are on the wire.
func same(a, b *unstructured.Unstructured) bool {
	one, err := json.Marshal(a.Object)
	if err != nil {
		return false
	}
	other, err := json.Marshal(b.Object)
	return err == nil && bytes.Equal(one, other)
}

// restoreSpec changes the pods of a template of the job as when the job was created.
func restoreSpec(job *unstructured.Unstructured, t workload.Template) error {
	resolved, err := inject.FromPod(t.Labels(), t.Annotations())
	if err != nil {
		return fmt.Errorf("%s: %w", t.Path, err)
	}
	if resolved.RDMA != nil && !workload.Copied(job) {
		if err := t.AddResources(func(spec *corev1.PodSpec) error { return inject.AddDevices(spec, t.Annotations(), resolved) }); err != nil {
			return err
		}
	}
	if workload.Queued(job) {
		return t.ChangeAffinity(avoidUnhealthyNodes)
	}
	return nil
}

// lost are Evenkeel's own of the labels or annotations, where they are not the same now.
func lost(before, now map[string]string) map[string]string {
	all := map[string]string{}
	for key, value := range before {
		if is, has := now[key]; strings.HasPrefix(key, evenkeel.GroupVersion.Group+"/") && (!has || is != value) {
			all[key] = value
		}
	}
	return all
}
