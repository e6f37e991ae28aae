package doctor

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

const (
	// maxLogLines and maxLogBytes bound the log of each container, maxObjects the objects of each kind.
	maxLogLines int64 = 5000
	maxLogBytes int64 = 4 << 20
	maxObjects  int64 = 6000
)

// A bundled kind goes into the support bundle, of all namespaces or of Evenkeel's own.
type bundled struct {
	schema.GroupVersionKind
	own    bool
	option []client.ListOption
	// reduce leaves what a maintainer needs of an object that is not Evenkeel's; nil: all of it.
	reduce func(object map[string]any) map[string]any
}

func bundledKinds() []bundled {
	ofUs := func(kind string) bundled { return bundled{GroupVersionKind: evenkeel.GroupVersion.WithKind(kind)} }
	return []bundled{
		ofUs("NetworkProfile"), ofUs("NetworkCheckPolicy"), ofUs("NetworkCheck"), ofUs("NodeNetworkHealth"), ofUs("ReductionService"),
		{GroupVersionKind: schema.GroupVersionKind{Group: "apps", Version: "v1", Kind: "Deployment"}, own: true},
		{GroupVersionKind: schema.GroupVersionKind{Group: "batch", Version: "v1", Kind: "Job"}, own: true},
		{GroupVersionKind: schema.GroupVersionKind{Version: "v1", Kind: "Pod"}, own: true},
		{GroupVersionKind: schema.GroupVersionKind{Version: "v1", Kind: "Event"}, own: true},
		{GroupVersionKind: schema.GroupVersionKind{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "MutatingWebhookConfiguration"}, option: []client.ListOption{ours}},
		{GroupVersionKind: schema.GroupVersionKind{Version: "v1", Kind: "Node"}, reduce: nodeSummary},
	}
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
			if strings.HasPrefix(key, "evenkeel.dev/") || strings.HasPrefix(key, "nvidia.com/") || strings.HasPrefix(key, "amd.com/") {
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

// WriteBundle writes a gzipped tar file: the findings, Evenkeel's objects and the logs of its pods. It reads no Secret, and drops
// values of variables that look like one. What cannot be read is named in errors.txt.
func (d *Doctor) WriteBundle(ctx context.Context, to io.Writer, findings []Finding) error {
	zipped := gzip.NewWriter(to)
	archive := tar.NewWriter(zipped)
	var missing []string
	add := func(name string, content []byte) error {
		header := &tar.Header{Name: "evenkeel-bundle/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: d.Now, Format: tar.FormatPAX}
		if err := archive.WriteHeader(header); err != nil {
			return fmt.Errorf("bundle: %s: %w", name, err)
		}
		if _, err := archive.Write(content); err != nil {
			return fmt.Errorf("bundle: %s: %w", name, err)
		}
		return nil
	}
	addJSON := func(name string, content any) error {
		text, err := json.MarshalIndent(content, "", "  ")
		if err != nil {
			return fmt.Errorf("bundle: %s: %w", name, err)
		}
		return add(name, append(text, '\n'))
	}
	if err := addJSON("findings.json", findings); err != nil {
		return err
	}
	if version, err := d.Clientset.Discovery().ServerVersion(); err != nil {
		missing = append(missing, "version: "+err.Error())
	} else if err := addJSON("version.json", version); err != nil {
		return err
	}
	for _, kind := range bundledKinds() {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind.GroupVersionKind)
		options := append([]client.ListOption{client.Limit(maxObjects)}, kind.option...)
		if kind.own {
			options = append(options, client.InNamespace(d.Namespace))
		}
		switch err := d.Client.List(ctx, list, options...); {
		case meta.IsNoMatchError(err):
			continue
		case err != nil:
			missing = append(missing, kind.Kind+": "+err.Error())
			continue
		}
		var all []any
		for i := range list.Items {
			object := list.Items[i].Object
			redact(object)
			if kind.reduce != nil {
				object = kind.reduce(object)
			}
			all = append(all, object)
		}
		if err := addJSON(strings.ToLower(kind.Kind)+"s.json", all); err != nil {
			return err
		}
	}
	pods := &corev1.PodList{}
	if err := d.Client.List(ctx, pods, client.InNamespace(d.Namespace), ours); err != nil {
		missing = append(missing, "logs: "+err.Error())
	}
	lines, bytes := maxLogLines, maxLogBytes
	for _, pod := range pods.Items {
		for _, container := range pod.Spec.Containers {
			text, err := d.Clientset.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{Container: container.Name, TailLines: &lines, LimitBytes: &bytes}).DoRaw(ctx)
			if err != nil {
				missing = append(missing, "log of "+pod.Name+": "+err.Error())
				continue
			}
			if err := add("logs/"+pod.Name+"."+container.Name+".log", text); err != nil {
				return err
			}
		}
	}
	if err := add("errors.txt", []byte(strings.Join(append(missing, ""), "\n"))); err != nil {
		return err
	}
	if err := archive.Close(); err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	if err := zipped.Close(); err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	return nil
}

// secretName matches names of variables whose value nobody else should see.
var secretName = regexp.MustCompile(`(?i)key|token|secret|passw|credential|auth|private`)

// redacted takes the place of a value.
const redacted = "(redacted)"

// redact removes what others wrote about the object, and values of variables that look like a secret, wherever they are.
func redact(object map[string]any) {
	if metadata, ok := object["metadata"].(map[string]any); ok {
		delete(metadata, "managedFields")
		if annotations, ok := metadata["annotations"].(map[string]any); ok {
			for key := range annotations {
				// The environment of a profile is one of Evenkeel's, and kubectl's last applied configuration has everything again.
				if !strings.HasPrefix(key, "evenkeel.dev/") || key == evenkeel.EnvironmentKey {
					annotations[key] = redacted
				}
			}
		}
	}
	redactVariables(object)
}

func redactVariables(value any) {
	switch value := value.(type) {
	case map[string]any:
		if name, ok := value["name"].(string); ok && secretName.MatchString(name) {
			if _, has := value["value"].(string); has {
				value["value"] = redacted
			}
		}
		for _, inner := range value {
			redactVariables(inner)
		}
	case []any:
		for _, inner := range value {
			redactVariables(inner)
		}
	}
}
