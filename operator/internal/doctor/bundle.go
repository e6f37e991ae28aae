package doctor

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// maxLogLines and maxLogBytes bound each log, maxLogs the containers that have one in the bundle, maxObjects the
	// objects of each kind.
	maxLogLines int64 = 5000
	maxLogBytes int64 = 4 << 20
	maxLogs           = 20
	maxObjects        = 6000
)

// A bundled kind goes into the support bundle, of all namespaces or of Evenkeel's own.
type bundled struct {
	schema.GroupVersionKind
	own bool
	// keep selects objects, where others may have some too; nil: all.
	keep func(object *unstructured.Unstructured, made []string) bool
	// reduce leaves what a maintainer needs of an object that is not Evenkeel's; nil: all of it.
	reduce func(object map[string]any) map[string]any
}

// bundledKinds are in an order in which Events follow what they are about.
func bundledKinds() []bundled {
	ofUs := func(kind string) bundled { return bundled{GroupVersionKind: evenkeel.GroupVersion.WithKind(kind)} }
	own := func(group, version, kind string) bundled {
		return bundled{GroupVersionKind: schema.GroupVersionKind{Group: group, Version: version, Kind: kind}, own: true, keep: isOurs}
	}
	admission := func(kind string) bundled {
		return bundled{GroupVersionKind: schema.GroupVersionKind{Group: "admissionregistration.k8s.io", Version: "v1", Kind: kind}, keep: isOurs}
	}
	return []bundled{
		ofUs("NetworkProfile"), ofUs("NetworkCheckPolicy"), ofUs("NetworkCheck"), ofUs("NodeNetworkHealth"), ofUs("ReductionService"),
		own("apps", "v1", "Deployment"), own("apps", "v1", "ReplicaSet"), own("batch", "v1", "Job"), own("", "v1", "Pod"), own("", "v1", "Service"),
		{GroupVersionKind: schema.GroupVersionKind{Version: "v1", Kind: "Event"}, own: true, keep: isAbout},
		admission("MutatingWebhookConfiguration"), admission("ValidatingWebhookConfiguration"), admission("MutatingAdmissionPolicy"), admission("MutatingAdmissionPolicyBinding"),
		{GroupVersionKind: schema.GroupVersionKind{Version: "v1", Kind: "Node"}, reduce: nodeSummary},
	}
}

// isOurs reports whether the chart, a check or one of their objects has made the object. Evenkeel's namespace may be
// somebody else's too.
func isOurs(object *unstructured.Unstructured, made []string) bool {
	return ofChart(object.GetLabels()) || isOfCheck(object) ||
		slices.ContainsFunc(object.GetOwnerReferences(), func(owner metav1.OwnerReference) bool { return slices.Contains(made, owner.Name) })
}

func isOfCheck(object *unstructured.Unstructured) bool {
	return object.GetLabels()[evenkeel.CheckKey] != ""
}

// isAbout reports whether the Event is about an object of Evenkeel's kinds, or about one whose name begins as that of
// one of ours: pods that are gone already were made by a Deployment or a Job.
func isAbout(event *unstructured.Unstructured, made []string) bool {
	version, _ := field(event.Object, "involvedObject", "apiVersion").(string)
	name, _ := field(event.Object, "involvedObject", "name").(string)
	return strings.HasPrefix(version, evenkeel.GroupVersion.Group+"/") || slices.ContainsFunc(made, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// nodeSummary keeps of a node what decides about delivery, RDMA and checks: no addresses, and no labels of others.
func nodeSummary(node map[string]any) map[string]any {
	kept := map[string]any{"name": field(node, "metadata", "name"), "unschedulable": field(node, "spec", "unschedulable"), "taints": field(node, "spec", "taints")}
	for _, name := range []string{"nodeInfo", "capacity", "allocatable", "conditions"} {
		kept[name] = field(node, "status", name)
	}
	labels := map[string]any{}
	if all, ok := field(node, "metadata", "labels").(map[string]any); ok {
		for key, value := range all {
			if slices.ContainsFunc([]string{"evenkeel.dev/", "nvidia.com/", "amd.com/"}, func(domain string) bool { return strings.HasPrefix(key, domain) }) ||
				slices.Contains(cardLabels, key) || slices.Contains(moduleLabels, key) {
				labels[key] = value
			}
		}
	}
	kept["labels"] = labels
	return kept
}

func field(object map[string]any, path ...string) any {
	value, _, _ := unstructured.NestedFieldNoCopy(object, path...) // absent: null
	return value
}

// bundle is a tar file that is being written.
type bundle struct {
	archive *tar.Writer
	at      time.Time
	// pods are those of the operator.
	pods []corev1.Pod
	// missing describes what could not be read.
	missing []string
}

func (b *bundle) lacks(what string, err error) {
	b.missing = append(b.missing, redactText(what+": "+line(err.Error())))
}

func (b *bundle) add(name string, content []byte) error {
	header := &tar.Header{Name: "evenkeel-bundle/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: b.at, Format: tar.FormatPAX}
	if err := b.archive.WriteHeader(header); err != nil {
		return fmt.Errorf("bundle: %s: %w", name, err)
	}
	if _, err := b.archive.Write(content); err != nil {
		return fmt.Errorf("bundle: %s: %w", name, err)
	}
	return nil
}

func (b *bundle) addJSON(name string, content any) error {
	text, err := json.MarshalIndent(content, "", "  ")
	if err != nil {
		return fmt.Errorf("bundle: %s: %w", name, err)
	}
	return b.add(name, append(text, '\n'))
}

// WriteBundle writes a gzipped tar file: the findings, Evenkeel's objects and the logs of its pods. It reads no Secret,
// and drops what looks like one, wherever it stands. What cannot be read is named in errors.txt.
func (d *Doctor) WriteBundle(ctx context.Context, to io.Writer, findings []Finding) error {
	zipped := gzip.NewWriter(to)
	b := &bundle{archive: tar.NewWriter(zipped), at: d.Now}
	shown := make([]Finding, 0, len(findings))
	for _, f := range findings {
		shown = append(shown, Finding{f.Check, f.Status, redactText(f.Message), redactText(f.Do)})
	}
	if err := b.addJSON("findings.json", shown); err != nil {
		return err
	}
	if version, err := d.Clientset.Discovery().ServerVersion(); err != nil {
		b.lacks("version", err)
	} else if err := b.addJSON("version.json", version); err != nil {
		return err
	}
	if err := d.addObjects(ctx, b); err != nil {
		return err
	}
	if err := d.addLogs(ctx, b); err != nil {
		return err
	}
	if err := b.add("errors.txt", []byte(strings.Join(append(b.missing, ""), "\n"))); err != nil {
		return err
	}
	if err := b.archive.Close(); err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	if err := zipped.Close(); err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	return nil
}

// addPod keeps a pod of the operator for its logs.
func (b *bundle) addPod(object *unstructured.Unstructured) {
	pod := corev1.Pod{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &pod); err != nil {
		b.lacks("logs of "+object.GetName(), err)
		return
	}
	b.pods = append(b.pods, pod)
}

func (d *Doctor) addObjects(ctx context.Context, b *bundle) error {
	var made []string // names of Evenkeel's own objects
	for _, kind := range bundledKinds() {
		all := []any{}
		page := &unstructured.UnstructuredList{}
		page.SetGroupVersionKind(kind.GroupVersionKind)
		var options []client.ListOption
		if kind.own {
			options = append(options, client.InNamespace(d.Namespace))
		}
		err := d.pages(ctx, page, func() error {
			for i := range page.Items {
				object := &page.Items[i]
				if kind.keep != nil && !kind.keep(object, made) {
					continue
				}
				if len(all) == maxObjects {
					return errEnough
				}
				if kind.own {
					made = append(made, object.GetName())
				}
				if kind.Kind == "Pod" && !isOfCheck(object) {
					b.addPod(object)
				}
				kept := object.Object
				redact(kept)
				if kind.reduce != nil {
					kept = kind.reduce(kept)
				}
				all = append(all, kept)
			}
			page.Items = nil
			return nil
		}, options...)
		switch {
		case meta.IsNoMatchError(err):
			continue
		case errors.Is(err, errEnough):
			b.lacks(kind.Kind, fmt.Errorf("there are more than %d", maxObjects))
		case err != nil:
			b.lacks(kind.Kind, err)
			if len(all) == 0 {
				continue
			}
		}
		if err := b.addJSON(plural(kind.Kind)+".json", all); err != nil {
			return err
		}
	}
	return nil
}

// plural is the resource of a kind.
func plural(kind string) string {
	name := strings.ToLower(kind)
	if stem, found := strings.CutSuffix(name, "y"); found {
		return stem + "ies"
	}
	return name + "s"
}

// addLogs adds the logs of the operator's pods, and of those of their containers that ended before, the last ones.
func (d *Doctor) addLogs(ctx context.Context, b *bundle) error {
	logs := 0
	for i := range b.pods {
		pod := &b.pods[i]
		for _, container := range pod.Spec.Containers {
			if logs++; logs > maxLogs {
				b.lacks("logs", fmt.Errorf("there are more than %d containers", maxLogs))
				return nil
			}
			previous := []bool{false}
			if slices.ContainsFunc(pod.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.Name == container.Name && s.RestartCount > 0 }) {
				previous = append(previous, true)
			}
			for _, p := range previous {
				if err := d.addLog(ctx, b, pod, container.Name, p); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (d *Doctor) addLog(ctx context.Context, b *bundle, pod *corev1.Pod, container string, previous bool) error {
	name := pod.Name + "." + container
	if previous {
		name += ".previous"
	}
	lines, bytes := maxLogLines, maxLogBytes
	options := &corev1.PodLogOptions{Container: container, Previous: previous, TailLines: &lines, LimitBytes: &bytes}
	text, err := d.Clientset.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, options).DoRaw(ctx)
	if err != nil {
		b.lacks("log of "+name, err)
		return nil
	}
	return b.add("logs/"+name+".log", []byte(redactText(string(text))))
}
