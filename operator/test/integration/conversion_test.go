package integration

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/api/v1beta1"
	"evenkeel.dev/evenkeel/operator/internal/uninstall"
)

// versioned is an object of a version. Its text has the spec.
func versioned(t *testing.T, version, kind, name, spec string) *unstructured.Unstructured {
	t.Helper()
	object := &unstructured.Unstructured{Object: map[string]any{}}
	object.SetAPIVersion("evenkeel.dev/" + version)
	object.SetKind(kind)
	object.SetName(name)
	if kind == "NetworkCheck" {
		object.SetNamespace("default") // where no controller runs it
	}
	var fields map[string]any
	if err := yaml.Unmarshal([]byte(spec), &fields); err != nil {
		t.Fatal(err)
	}
	object.Object["spec"] = fields
	return object
}

// in reads the object in another version.
func in(ctx context.Context, version string, object *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	live := &unstructured.Unstructured{}
	live.SetAPIVersion("evenkeel.dev/" + version)
	live.SetKind(object.GetKind())
	return live, admin.Get(ctx, client.ObjectKeyFromObject(object), live)
}

// twins are specs of the same meaning in both versions. Quantities are not as Go would write them.
var twins = []struct{ name, kind, alpha, beta string }{
	{"minimal-profile", "NetworkProfile", `plugin: {delivery: Preinstalled}`, `plugin: {delivery: Preinstalled}`},
	{"profile", "NetworkProfile", `
plugin: {delivery: Preinstalled, strict: true, python: Enabled}
imagePullSecrets: [one, two]
environment: [{name: A, value: b}]
transport: {encryption: "Off", mode: RDMA, rdma: {network: Trusted, networks: sriov}}
reduction:
  mode: "Off"
  sizing: {workerBandwidth: 12500M, serverBandwidth: 25000M}
  server: {cpu: 2, memory: 2048Mi}`, `
plugin: {delivery: Preinstalled, unavailablePolicy: Fail, python: Enabled}
imagePullSecrets: [{name: one}, {name: two}]
env: [{name: A, value: b}]
transport: {encryption: Disabled, mode: RDMA, rdma: {networkTrust: Trusted, additionalNetworks: sriov}}
reduction:
  mode: Disabled
  sizing: {workerBandwidth: 12500M, serverBandwidth: 25000M}
  server: {cpu: 2, bufferMemory: 2048Mi}`},
	{"minimal-check", "NetworkCheck", `nodes: {selector: {}}`, `nodes: {selector: {}}`},
	{"check", "NetworkCheck", `
nodes: {names: [a, b]}
stages: [Pairs, Rails]
rails: 8
runner:
  type: Bench
  resources: {requests: {cpu: 2, memory: 1024Mi}, limits: {memory: 1024Mi}}
  environment: [{name: A, value: b}]
  podLabels: {a: b}
  podAnnotations: {c: d}
  tolerations: [{key: k, operator: Exists}]
  imagePullSecrets: [{name: one}]
  runtimeClassName: nvidia
  supplementalGroups: [44]`, `
nodes: {names: [a, b]}
stages: [Pairs, Rails]
railsPerNode: 8
runner:
  type: Bench
  resources: {requests: {cpu: 2, memory: 1024Mi}, limits: {memory: 1024Mi}}
  env: [{name: A, value: b}]
  podTemplate:
    metadata: {labels: {a: b}, annotations: {c: d}}
    spec:
      tolerations: [{key: k, operator: Exists}]
      imagePullSecrets: [{name: one}]
      runtimeClassName: nvidia
      securityContext: {supplementalGroups: [44]}`},
	{"minimal-policy", "NetworkCheckPolicy", `{nodeSelector: {matchLabels: {a: twin}}, check: {runner: {type: Bench}}}`,
		`{nodeSelector: {matchLabels: {a: twin}}, check: {runner: {type: Bench}}}`},
	{"policy", "NetworkCheckPolicy", `
nodeSelector: {matchLabels: {a: twin}}
history: 3
onFail: {maxUnhealthyPercent: 10}
check: {runner: {type: Bench, podLabels: {a: b}}, thresholds: {minBusBandwidth: 1000M}}`, `
nodeSelector: {matchLabels: {a: twin}}
historyLimit: 3
maxUnhealthyPercent: 10
check: {runner: {type: Bench, podTemplate: {metadata: {labels: {a: b}}}}, thresholds: {minBusBandwidth: 1000M}}`},
}

// TestBothVersionsAreOneObject writes the same object in either version. It is stored alike, with the defaults of both,
// and read alike in both. The same manifest again changes nothing, also of a check, which is immutable.
func TestBothVersionsAreOneObject(t *testing.T) {
	for _, twin := range twins {
		t.Run(twin.name, func(t *testing.T) {
			written := map[string]*unstructured.Unstructured{
				"v1alpha1": versioned(t, "v1alpha1", twin.kind, twin.name+"-alpha", twin.alpha),
				"v1beta1":  versioned(t, "v1beta1", twin.kind, twin.name+"-beta", twin.beta),
			}
			for version, manifest := range written {
				if _, err := applied(t.Context(), manifest); err != nil {
					t.Fatal(err)
				}
				remove(t, manifest)
				if _, err := applied(t.Context(), manifest); err != nil {
					t.Errorf("the same manifest of %s again: %v", version, err)
				}
				inSync(t, manifest)
				by := manifest.DeepCopy()
				by.SetName(by.GetName() + "-client")
				kubectlApply(t, by.Object)
				remove(t, by)
				kubectlApply(t, by.Object)
			}
			for _, version := range []string{"v1alpha1", "v1beta1"} {
				a, err := in(t.Context(), version, written["v1alpha1"])
				if err != nil {
					t.Fatal(err)
				}
				b, err := in(t.Context(), version, written["v1beta1"])
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(a.Object["spec"], b.Object["spec"]); diff != "" {
					t.Errorf("read in %s (-written in v1alpha1 +in v1beta1):\n%s", version, diff)
				}
			}
		})
	}
}

// TestReadingChangesNoStoredObject reads and lists objects of v1alpha1 in v1beta1, and changes one's label in it.
func TestReadingChangesNoStoredObject(t *testing.T) {
	old := versioned(t, "v1alpha1", "NetworkProfile", "from-before", twins[1].alpha)
	if err := admin.Create(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	remove(t, old)
	waitProfile(t, old.GetName(), func(p *v1alpha1.NetworkProfile) bool { return ready(p) != nil })
	before, err := in(t.Context(), "v1alpha1", old)
	if err != nil {
		t.Fatal(err)
	}
	var profiles v1beta1.NetworkProfileList
	if err := admin.List(t.Context(), &profiles); err != nil {
		t.Fatal(err)
	}
	if len(profiles.Items) < 2 {
		t.Errorf("%d profiles in v1beta1, want the default one too", len(profiles.Items))
	}
	unchanged := func(step string) {
		t.Helper()
		now, err := in(t.Context(), "v1alpha1", old)
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range []string{"spec", "status"} {
			if diff := cmp.Diff(before.Object[part], now.Object[part]); diff != "" {
				t.Errorf("%s: %s has changed: %s", step, part, diff)
			}
		}
	}
	unchanged("listed")
	newer, err := in(t.Context(), "v1beta1", old)
	if err != nil {
		t.Fatal(err)
	}
	label := client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"labels": {"team": "a"}}}`))
	if err := admin.Patch(t.Context(), newer, label); err != nil {
		t.Fatal(err)
	}
	unchanged("written")
}

// TestValidationOfV1beta1 has rules about fields that v1beta1 names otherwise.
func TestValidationOfV1beta1(t *testing.T) {
	const plugin = `plugin: {delivery: Preinstalled}`
	for _, test := range []struct{ kind, spec, want string }{
		{"NetworkProfile", `{plugin: {delivery: Preinstalled, unavailablePolicy: Fail}, env: [{name: NCCL_NET, value: x}]}`,
			"plugin.unavailablePolicy Fail sets NCCL_NET"},
		{"NetworkProfile", `{plugin: {delivery: Preinstalled}, env: [{name: NCCL_NET, value: x}]}`, ""},
		{"NetworkProfile", `{` + plugin + `, transport: {encryption: Required, mode: RDMA}}`, "rdma.networkTrust is Trusted"},
		{"NetworkProfile",
			`{` + plugin + `, transport: {encryption: Required, mode: RDMA, rdma: {networkTrust: Trusted}}}`, ""},
		{"NetworkProfile", `{` + plugin + `, transport: {encryption: "Off"}}`, `supported values: "Disabled", "Required"`},
		{"NetworkProfile", `{` + plugin + `, environment: [{name: A, value: b}]}`, `unknown field "spec.environment"`},
		{"NetworkProfile", `{` + plugin + `, imagePullSecrets: [{name: a}, {name: a}]}`, "Duplicate value"},
		{"NetworkCheck", `{nodes: {selector: {}}, stages: [Pairs, Rails]}`, "stage Rails needs railsPerNode"},
		{"NetworkCheck", `{nodes: {selector: {}}, runner: {podTemplate: {}}}`, "at least 1 properties"},
		{"NetworkCheck", `{nodes: {selector: {}}, runner: {podTemplate: {metadata: {labels: {evenkeel.dev/run: x}}}}}`,
			"are Evenkeel's own"},
		{"NetworkCheck", `{nodes: {selector: {}}, runner: {podTemplate: {spec: {serviceAccountName: evenkeel-controller}}}}`,
			"unknown field"},
		{"NetworkCheckPolicy", `{check: {}, maxUnhealthyPercent: 101}`, "maxUnhealthyPercent"},
	} {
		object := versioned(t, "v1beta1", test.kind, "invalid", test.spec)
		err := admin.Create(t.Context(), object, client.DryRunAll, client.FieldValidation("Strict"))
		if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s %s: %v, want %q", test.kind, test.spec, err, test.want)
		}
	}
}

func TestSamplesOfV1beta1(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "..", "config", "samples", "v1beta1", "*.yaml"))
	if err != nil || len(files) != 3 {
		t.Fatalf("%q, %v: want one for each kind", files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		object := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict(text, &object.Object); err != nil {
			t.Fatal(err)
		}
		if object.GetAPIVersion() != v1beta1.GroupVersion.String() {
			t.Errorf("%s is of %s", file, object.GetAPIVersion())
		}
		if err := admin.Create(t.Context(), object, client.DryRunAll, client.FieldValidation("Strict")); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// TestStoredVersionNeedsNoWebhook stops the webhook. Nobody reads v1beta1 then, and v1alpha1 is as it was, also of what
// was written in v1beta1. What an uninstall does serves v1alpha1 alone.
func TestStoredVersionNeedsNoWebhook(t *testing.T) {
	t.Cleanup(func() { restoreDefinitions(t) })
	written := versioned(t, "v1beta1", "NetworkProfile", "without-webhook", twins[1].beta)
	if err := admin.Create(t.Context(), written); err != nil {
		t.Fatal(err)
	}
	stored, err := in(t.Context(), "v1alpha1", written)
	if err != nil {
		t.Fatal(err)
	}
	remove(t, stored)
	stopWebhook(t)
	works := func(step string) {
		t.Helper()
		live, err := in(t.Context(), "v1alpha1", written)
		if err != nil {
			t.Fatalf("%s: %v", step, err)
		}
		label := client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"labels": {"step": "`+step+`"}}}`))
		if err := admin.Patch(t.Context(), live, label); err != nil {
			t.Errorf("%s: %v", step, err)
		}
		var all v1alpha1.NetworkProfileList
		if err := admin.List(t.Context(), &all); err != nil || len(all.Items) < 2 {
			t.Errorf("%s: %d profiles, %v", step, len(all.Items), err)
		}
	}
	if _, err := in(t.Context(), "v1beta1", written); err == nil || !strings.Contains(err.Error(), "conversion webhook") {
		t.Errorf("v1beta1 is read without a webhook: %v", err)
	}
	// A server-side apply compares the object in every version in which it was written.
	apply := versioned(t, "v1alpha1", "NetworkProfile", written.GetName(), twins[1].alpha)
	if _, err := applied(t.Context(), apply); err == nil || !strings.Contains(err.Error(), "conversion webhook") {
		t.Errorf("server-side apply of what was written in v1beta1, without a webhook: %v", err)
	}
	works("down")
	release := uninstall.Release{Name: "evenkeel", Namespace: systemNamespace}
	var said strings.Builder
	if err := uninstall.Run(t.Context(), &said, clock.RealClock{}, release.Conversion(admin)); err != nil {
		t.Fatalf("%v\n%s", err, said.String())
	}
	eventually(t, "v1beta1 is not served", func(ctx context.Context) (bool, error) {
		_, err := in(ctx, "v1beta1", written)
		return apierrors.IsNotFound(err), nil
	})
	works("uninstalled")
	if left, err := release.Conversion(admin).List(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("an uninstall would find %d definitions, %v", len(left), err)
	}
	other := uninstall.Release{Namespace: "elsewhere"}
	restoreDefinitions(t)
	if left, err := other.Conversion(admin).List(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("an uninstall of another release would change %d definitions, %v", len(left), err)
	}
}

// TestDefinitionsNeedNoWebhookWhenNamespaceIsDeleted: the issuer of a namespace that is being deleted is the last one.
func TestDefinitionsNeedNoWebhookWhenNamespaceIsDeleted(t *testing.T) {
	t.Cleanup(func() { restoreDefinitions(t) })
	const name, crd = "leaving-certs", "networkchecks.evenkeel.dev"
	leaving := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	account := []rbacv1.Subject{{
		Kind: rbacv1.ServiceAccountKind, Namespace: systemNamespace, Name: "evenkeel-certificates",
	}}
	global := metav1.ObjectMeta{Name: name}
	for _, object := range []client.Object{
		leaving,
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "tls"}},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "ca"}},
		&admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: global},
		&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "everything"}, Subjects: account,
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"}},
		&rbacv1.ClusterRole{ObjectMeta: global, Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{admissionregistrationv1.GroupName}, ResourceNames: []string{name},
			Resources: []string{"mutatingwebhookconfigurations", "validatingwebhookconfigurations"},
			Verbs:     []string{"get", "list", "watch", "patch"},
		}}},
		&rbacv1.ClusterRoleBinding{ObjectMeta: global, Subjects: account,
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}},
	} {
		if err := admin.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
		if object.GetNamespace() == "" && object != leaving {
			remove(t, object)
		}
	}
	definition := &unstructured.Unstructured{}
	definition.SetAPIVersion("apiextensions.k8s.io/v1")
	definition.SetKind("CustomResourceDefinition")
	definition.SetName(crd)
	moved := client.RawPatch(types.MergePatchType,
		[]byte(`{"spec": {"conversion": {"webhook": {"clientConfig": {"service": {"namespace": "`+name+`"}}}}}}`))
	if err := admin.Patch(t.Context(), definition, moved); err != nil {
		t.Fatal(err)
	}
	kubeconfig, err := install.kubeconfig("evenkeel-certificates")
	if err != nil {
		t.Fatal(err)
	}
	for _, deleted := range []bool{false, true} {
		last, err := launch(install.binary, kubeconfig, []string{
			"certificates", "--namespace=" + name, "--webhook-config=" + name, "--service=evenkeel-webhook",
			"--secret=tls", "--ca-secret=ca", "--conversion",
		})
		if err != nil {
			t.Fatal(err)
		}
		if deleted {
			if err := admin.Delete(t.Context(), leaving); err != nil {
				t.Fatal(err)
			}
		}
		if err := last.stop(); err != nil {
			t.Fatal(err)
		}
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(definition), definition); err != nil {
			t.Fatal(err)
		}
		versions, _, _ := unstructured.NestedSlice(definition.Object, "spec", "versions")
		if (len(versions) == 1) != deleted {
			t.Errorf("deleted %t: %s has %d versions", deleted, crd, len(versions))
		}
	}
}

// TestV1beta1CanBeTurnedOff applies the CRDs without v1beta1, as an upgrade with another value does, or a rollback to a
// release from before there was one. Nothing is in the way, although the CA in the CRDs is not the chart's.
func TestV1beta1CanBeTurnedOff(t *testing.T) {
	t.Cleanup(func() { restoreDefinitions(t) })
	manifests, err := install.manifests("--set", "crds.v1beta1=false")
	if err != nil {
		t.Fatal(err)
	}
	for _, manifest := range manifests {
		if manifest.GetKind() != "CustomResourceDefinition" {
			continue
		}
		live, err := applied(t.Context(), manifest)
		if err != nil {
			t.Fatal(err)
		}
		if versions, _, _ := unstructured.NestedSlice(live.Object, "spec", "versions"); len(versions) != 1 {
			t.Errorf("%s has %d versions", manifest.GetName(), len(versions))
		}
		inSync(t, manifest)
	}
	eventually(t, "v1beta1 is not served", func(ctx context.Context) (bool, error) {
		var profiles v1beta1.NetworkProfileList
		err := admin.List(ctx, &profiles)
		return meta.IsNoMatchError(err) || apierrors.IsNotFound(err), nil
	})
	var profiles v1alpha1.NetworkProfileList
	if err := admin.List(t.Context(), &profiles); err != nil || len(profiles.Items) == 0 {
		t.Errorf("%d profiles, %v", len(profiles.Items), err)
	}
}

// restoreDefinitions applies the CRDs again, of which a test has left one version, and waits until they are trusted. It
// takes no field from another manager.
func restoreDefinitions(t *testing.T) {
	t.Helper()
	manifests, err := install.manifests()
	if err != nil {
		t.Error(err)
		return
	}
	for _, manifest := range manifests {
		if manifest.GetKind() != "CustomResourceDefinition" {
			continue
		}
		trusted := func(ctx context.Context) (bool, error) {
			live, err := applied(ctx, manifest)
			if err != nil {
				return false, err
			}
			config, converts, err := unstructured.NestedMap(live.Object, "spec", "conversion", "webhook", "clientConfig")
			return !converts || config["caBundle"] != nil, err
		}
		err := wait.PollUntilContextTimeout(context.Background(), 50*time.Millisecond, waitTimeout, true, trusted)
		if err != nil {
			t.Errorf("%s is not as it was: %v", manifest.GetName(), err)
		}
	}
}
