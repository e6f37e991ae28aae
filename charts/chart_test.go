// Package charts tests the chart with helm itself: what it renders, and what it refuses.
package charts

import (
	"bytes"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const pinned = "registry.example.com/evenkeel-plugin@sha256:0000000000000000000000000000000000000000000000000000000000000000"

func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	path := os.Getenv("HELM")
	if path == "" {
		t.Fatal("HELM is not set: run `make test-chart`")
	}
	cmd := exec.CommandContext(t.Context(), path, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// render returns the chart's objects as "Kind/name".
func render(t *testing.T, release string, args ...string) map[string]*unstructured.Unstructured {
	t.Helper()
	out, err := helm(t, append([]string{"template", release, "evenkeel", "--namespace", "some-namespace"}, args...)...)
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, out)
	}
	objects := map[string]*unstructured.Unstructured{}
	for _, document := range strings.Split(out, "\n---\n") {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(document), &object.Object); err != nil {
			t.Fatalf("not YAML: %v\n%s", err, document)
		}
		if len(object.Object) > 0 {
			key := object.GetKind() + "/" + object.GetName()
			if objects[key] != nil {
				t.Errorf("%s is rendered twice", key)
			}
			objects[key] = object
		}
	}
	return objects
}

func TestLint(t *testing.T) {
	if out, err := helm(t, "lint", "--strict", "evenkeel", "--set", "defaultProfile.spec.plugin.image="+pinned); err != nil {
		t.Errorf("helm lint: %v\n%s", err, out)
	}
}

func TestOddReleaseNames(t *testing.T) {
	for _, release := range []string{"evenkeel", "x", "a-very-long-release-name-as-long-as-helm-allows-at-53"} {
		objects := render(t, release)
		var config *unstructured.Unstructured
		for key, object := range objects {
			if len(object.GetName()) > 63 {
				t.Errorf("release %s: the name of %s is longer than 63 characters", release, key)
			}
			if object.GetKind() == "MutatingWebhookConfiguration" {
				config = object
			}
		}
		if config == nil {
			t.Fatalf("release %s: no MutatingWebhookConfiguration", release)
		}
		webhooks, _, _ := unstructured.NestedSlice(config.Object, "webhooks")
		for _, w := range webhooks {
			service, _, _ := unstructured.NestedString(w.(map[string]any), "clientConfig", "service", "name")
			if objects["Service/"+service] == nil {
				t.Errorf("release %s: webhook %v calls Service %q, which the chart does not make", release, w.(map[string]any)["name"], service)
			}
		}
		for key, object := range objects {
			account, found, _ := unstructured.NestedString(object.Object, "spec", "template", "spec", "serviceAccountName")
			if found && objects["ServiceAccount/"+account] == nil {
				t.Errorf("release %s: %s runs as ServiceAccount %q, which the chart does not make", release, key, account)
			}
		}
	}
}

func TestWebhooksFailClosedForOurPodsOnly(t *testing.T) {
	webhooks, _, _ := unstructured.NestedSlice(render(t, "evenkeel")["MutatingWebhookConfiguration/evenkeel"].Object, "webhooks")
	if len(webhooks) != 2 {
		t.Fatalf("%d webhooks, want 2", len(webhooks))
	}
	for _, item := range webhooks {
		w := item.(map[string]any)
		if w["failurePolicy"] != "Fail" {
			t.Errorf("%v: failurePolicy %v", w["name"], w["failurePolicy"])
		}
		if bundle, found, _ := unstructured.NestedString(w, "clientConfig", "caBundle"); found {
			t.Errorf("%v: the chart writes caBundle %q, which the operator owns", w["name"], bundle)
		}
		_, selected, _ := unstructured.NestedMap(w, "objectSelector")
		conditions, _, _ := unstructured.NestedSlice(w, "matchConditions")
		if !selected && len(conditions) == 0 {
			t.Errorf("%v: is called for every object", w["name"])
		}
	}
}

func TestPodsFitTheRestrictedStandard(t *testing.T) {
	for key, object := range render(t, "evenkeel") {
		if object.GetKind() != "Deployment" {
			continue
		}
		pod, _, _ := unstructured.NestedMap(object.Object, "spec", "template", "spec")
		if nonRoot, _, _ := unstructured.NestedBool(pod, "securityContext", "runAsNonRoot"); !nonRoot {
			t.Errorf("%s: may run as root", key)
		}
		containers, _, _ := unstructured.NestedSlice(pod, "containers")
		for _, c := range containers {
			drop, _, _ := unstructured.NestedStringSlice(c.(map[string]any), "securityContext", "capabilities", "drop")
			if !slices.Contains(drop, "ALL") {
				t.Errorf("%s: keeps capabilities", key)
			}
		}
	}
}

func TestDefaultProfile(t *testing.T) {
	const config = "ConfigMap/evenkeel-default-profile"
	if render(t, "evenkeel")[config] != nil {
		t.Error("a default profile without an image")
	}
	object := render(t, "evenkeel", "--set", "defaultProfile.spec.plugin.image="+pinned)[config]
	if object == nil {
		t.Fatal("no default profile")
	}
	text, _, _ := unstructured.NestedString(object.Object, "data", "default-profile.yaml")
	profile := &unstructured.Unstructured{}
	if err := yaml.UnmarshalStrict([]byte(text), &profile.Object); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if image, _, _ := unstructured.NestedString(profile.Object, "spec", "plugin", "image"); image != pinned || profile.GetName() != "default" {
		t.Errorf("profile %s with image %q", profile.GetName(), image)
	}
}

func TestCRDsCanBeKeptOrLeftOut(t *testing.T) {
	const crd = "CustomResourceDefinition/networkprofiles.evenkeel.dev"
	if object := render(t, "evenkeel")[crd]; object == nil || object.GetAnnotations()["helm.sh/resource-policy"] != "" {
		t.Errorf("by default the CRD is installed, and goes with the chart: %v", object)
	}
	if object := render(t, "evenkeel", "--set", "crds.keep=true")[crd]; object == nil || object.GetAnnotations()["helm.sh/resource-policy"] != "keep" {
		t.Error("crds.keep does not keep the CRD")
	}
	if render(t, "evenkeel", "--set", "crds.enabled=false")[crd] != nil {
		t.Error("crds.enabled=false installs the CRD")
	}
}

func TestBadValuesAreRefusedByName(t *testing.T) {
	for value, want := range map[string]string{
		"webhok.replicas=1":       "webhok",
		"webhook.replicas=0":      "replicas",
		"image.digest=latest":     "digest",
		"webhook.certs.source=No": "source",
		"defaultProfile.spec.plugin.image=registry.example.com/plugin:latest": "image",
	} {
		if out, err := helm(t, "template", "evenkeel", "evenkeel", "--set", value); err == nil || !strings.Contains(out, want) {
			t.Errorf("--set %s: %v, want an error that names %s:\n%s", value, err, want, out)
		}
	}
	if out, err := helm(t, "template", "evenkeel", "evenkeel", "--set", "webhook.certs.source=Supplied"); err == nil || !strings.Contains(out, "webhook.certs.secretName") {
		t.Errorf("Supplied without a Secret: %v\n%s", err, out)
	}
}
