// Package charts tests the chart with helm itself: what it renders, and what it refuses.
package charts

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const pinned = "registry.example.com/evenkeel-plugin@sha256:0000000000000000000000000000000000000000000000000000000000000000"

// helmTimeout bounds one run of helm, which takes less than a second.
const helmTimeout = 2 * time.Minute

func helm(args ...string) (string, error) {
	path := os.Getenv("HELM")
	if path == "" {
		return "", errors.New("HELM is not set: run `make test STAGE=chart`")
	}
	ctx, cancel := context.WithTimeout(context.Background(), helmTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// A rendering is what helm made of the chart with some arguments.
type rendering struct {
	once    sync.Once
	objects map[string]*unstructured.Unstructured
	problem string
}

var renderings sync.Map // by the release and the arguments

// render returns the chart's objects as "Kind/name". Tests share them, and read them only.
func render(t *testing.T, release string, args ...string) map[string]*unstructured.Unstructured {
	t.Helper()
	found, _ := renderings.LoadOrStore(fmt.Sprintf("%q", append([]string{release}, args...)), &rendering{})
	r := found.(*rendering)
	r.once.Do(func() { r.objects, r.problem = template(release, args...) })
	if r.problem != "" {
		t.Fatalf("release %s %q: %s", release, args, r.problem)
	}
	return r.objects
}

func template(release string, args ...string) (objects map[string]*unstructured.Unstructured, problem string) {
	out, err := helm(append([]string{"template", release, "evenkeel", "--namespace", "some-namespace"}, args...)...)
	if err != nil {
		return nil, fmt.Sprintf("helm template: %v\n%s", err, out)
	}
	objects = map[string]*unstructured.Unstructured{}
	for _, document := range strings.Split(out, "\n---\n") {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(document), &object.Object); err != nil {
			return nil, fmt.Sprintf("not YAML: %v\n%s", err, document)
		}
		if len(object.Object) > 0 {
			key := object.GetKind() + "/" + object.GetName()
			if objects[key] != nil {
				return nil, key + " is rendered twice"
			}
			objects[key] = object
		}
	}
	return objects, ""
}

func TestLint(t *testing.T) {
	t.Parallel()
	if out, err := helm("lint", "--strict", "evenkeel", "--set", "defaultProfile.spec.plugin.image="+pinned); err != nil {
		t.Errorf("helm lint: %v\n%s", err, out)
	}
}

// GitOps compares what is rendered now with what was: the same values make the same manifests, also where there is no cluster to look
// at. An upgrade of the release changes nothing either.
func TestRenderingsAreTheSame(t *testing.T) {
	t.Parallel()
	everything := []string{"--set", "crds.v1beta1=true,networkPolicy.enabled=true,metrics.dashboard.enabled=true,defaultProfile.spec.plugin.image=" + pinned}
	first, problem := template("evenkeel", everything...)
	if problem != "" {
		t.Fatal(problem)
	}
	for what, args := range map[string][]string{"again": nil, "as an upgrade": {"--is-upgrade"}} {
		second, problem := template("evenkeel", append(args, everything...)...)
		if problem != "" {
			t.Fatal(problem)
		}
		for key := range first {
			if diff := cmp.Diff(first[key], second[key]); diff != "" {
				t.Errorf("rendered %s, %s differs: %s", what, key, diff)
			}
		}
		if len(second) != len(first) {
			t.Errorf("rendered %s, there are %d objects instead of %d", what, len(second), len(first))
		}
	}
}

func TestOddReleaseNames(t *testing.T) {
	t.Parallel()
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

func TestWebhooksFailClosedForLabelledPodsOnly(t *testing.T) {
	t.Parallel()
	webhooks, _, _ := unstructured.NestedSlice(render(t, "evenkeel")["MutatingWebhookConfiguration/evenkeel"].Object, "webhooks")
	if len(webhooks) != 5 {
		t.Fatalf("%d webhooks, want 5", len(webhooks))
	}
	for _, item := range webhooks {
		w := item.(map[string]any)
		rules, _, _ := unstructured.NestedSlice(w, "rules")
		for _, rule := range rules {
			operations, _, _ := unstructured.NestedStringSlice(rule.(map[string]any), "operations")
			switch policy := w["failurePolicy"]; {
			case policy == "Fail" && slices.Equal(operations, []string{"CREATE"}):
			case policy == "Ignore" && slices.Equal(operations, []string{"UPDATE"}):
			default: // while no webhook answers, what exists must stay free to be changed and deleted
				t.Errorf("%v: failurePolicy %v for %v", w["name"], policy, operations)
			}
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

// The webhook that only looks on refuses nothing when it does not answer, and is called for annotated objects alone.
func TestValidatingWebhookRefusesNothing(t *testing.T) {
	t.Parallel()
	objects := render(t, "evenkeel")
	webhooks, _, _ := unstructured.NestedSlice(objects["ValidatingWebhookConfiguration/evenkeel"].Object, "webhooks")
	if len(webhooks) != 1 {
		t.Fatalf("%d webhooks, want 1", len(webhooks))
	}
	w := webhooks[0].(map[string]any)
	conditions, _, _ := unstructured.NestedSlice(w, "matchConditions")
	if w["failurePolicy"] != "Ignore" || w["sideEffects"] != "NoneOnDryRun" || len(conditions) != 2 {
		t.Errorf("%+v", w)
	}
	if service, _, _ := unstructured.NestedString(w, "clientConfig", "service", "name"); objects["Service/"+service] == nil {
		t.Errorf("it calls Service %q, which the chart does not make", service)
	}
	rules, _, _ := unstructured.NestedSlice(w, "rules")
	for _, item := range rules {
		rule := item.(map[string]any)
		operations, _, _ := unstructured.NestedStringSlice(rule, "operations")
		groups, _, _ := unstructured.NestedStringSlice(rule, "apiGroups")
		// Leases are updated every few seconds, for each node.
		if slices.Contains(operations, "UPDATE") && slices.ContainsFunc(groups, func(g string) bool { return slices.Contains([]string{"*", "", "coordination.k8s.io"}, g) }) {
			t.Errorf("updates of the groups %q are looked at", groups)
		}
	}
	if objects["ValidatingAdmissionPolicyBinding/evenkeel-webhook-events"] == nil {
		t.Error("no policy says which Events the webhook may write")
	}
}

// TestInjectionByPolicyHasNoWebhook: no webhook, no certificate and no Service that the API server calls; and what the
// API server cannot evaluate refuses only pods that ask for Evenkeel.
func TestInjectionByPolicyHasNoWebhook(t *testing.T) {
	t.Parallel()
	objects := render(t, "evenkeel", "--kube-version=1.36", "--set", "injection.mode=MutatingAdmissionPolicy,networkPolicy.enabled=true,webhook.certs.source=Supplied")
	policies := 0
	for key, object := range objects {
		kind, name, _ := strings.Cut(key, "/")
		switch {
		case strings.HasSuffix(kind, "WebhookConfiguration") || kind == "Secret" || strings.Contains(name, "webhook") || strings.Contains(name, "certificates") || strings.HasSuffix(name, "reports"):
			t.Errorf("%s goes with the webhook", key)
		case kind == "MutatingAdmissionPolicy":
			policies++
			if objects["MutatingAdmissionPolicyBinding/"+name] == nil {
				t.Errorf("%s is not bound", key)
			}
			if policy, _, _ := unstructured.NestedString(object.Object, "spec", "failurePolicy"); policy != "Ignore" {
				t.Errorf("%s: failurePolicy %s would stop the objects of others", key, policy)
			}
			fallthrough
		case key == "ValidatingAdmissionPolicy/evenkeel-pods":
			selector, _, _ := unstructured.NestedMap(object.Object, "spec", "matchConstraints", "namespaceSelector")
			if text := fmt.Sprint(selector); !strings.Contains(text, "kube-system some-namespace") {
				t.Errorf("%s: its namespaces are %s", key, text)
			}
			if _, found, _ := unstructured.NestedMap(object.Object, "spec", "paramKind"); found && kind == "ValidatingAdmissionPolicy" {
				t.Errorf("%s fails for every pod if its parameter cannot be read", key)
			}
		}
	}
	if policies != 3 {
		t.Errorf("%d mutating policies, want 3", policies)
	}
	if out, err := helm("template", "evenkeel", "evenkeel", "--kube-version=1.35", "--set", "injection.mode=MutatingAdmissionPolicy"); err == nil || !strings.Contains(out, "needs Kubernetes 1.36 or later") {
		t.Errorf("with Kubernetes 1.35: %v\n%s", err, out)
	}
	for key := range render(t, "evenkeel") {
		if strings.HasPrefix(key, "MutatingAdmissionPolicy") {
			t.Errorf("%s beside the webhook", key)
		}
	}
}

// As `helm upgrade --reuse-values` gives the values of a release that had none of it.
func TestInjectionIsByWebhookWithoutTheValue(t *testing.T) {
	t.Parallel()
	if !reflect.DeepEqual(render(t, "evenkeel"), render(t, "evenkeel", "--set", "injection=null")) {
		t.Error("the value's absence changes what is rendered")
	}
}

func TestPodsFitTheRestrictedStandard(t *testing.T) {
	t.Parallel()
	for key, object := range render(t, "evenkeel") {
		if object.GetKind() != "Deployment" && object.GetKind() != "Job" {
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

func TestUserCanBeLeftToTheCluster(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		args []string
		ids  bool
	}{
		{nil, true},
		{[]string{"--set", "podSecurityContext.runAsNonRoot=false"}, true},
		{[]string{"--set", "podSecurityContext=null"}, false},
		{[]string{"--set", "podSecurityContext.runAsUser=null,podSecurityContext.runAsGroup=null,podSecurityContext.fsGroup=null"}, false},
	} {
		seen := 0
		for key, object := range render(t, "evenkeel", test.args...) {
			if object.GetKind() != "Deployment" && object.GetKind() != "Job" {
				continue
			}
			seen++
			context, _, _ := unstructured.NestedMap(object.Object, "spec", "template", "spec", "securityContext")
			if context["runAsNonRoot"] != true || context["seccompProfile"] == nil {
				t.Errorf("%s: %v does not fit the restricted standard", key, context)
			}
			for _, field := range []string{"runAsUser", "runAsGroup", "fsGroup"} {
				if _, found := context[field]; found != test.ids {
					t.Errorf("%v: %s has %v", test.args, key, context)
				}
			}
		}
		if seen != 5 {
			t.Errorf("%d pod templates, want 5", seen)
		}
	}
}

// sentinel are the values by which NVSentinel is told.
const sentinel = "nvsentinel.connector=unix:///var/run/nvsentinel/nvsentinel.sock"

func TestNVSentinelIsToldOnRequest(t *testing.T) {
	t.Parallel()
	const name, key = "evenkeel-nvsentinel", "Deployment/evenkeel-nvsentinel"
	for object := range render(t, "evenkeel") {
		if strings.HasSuffix(object, "/"+name) {
			t.Errorf("%s by default", object)
		}
	}
	for _, test := range []struct {
		values      string
		has, hasNot []string
	}{
		{sentinel, []string{
			`"--connector=unix:///var/run/nvsentinel/nvsentinel.sock"`, `"--processing-strategy=STORE_ONLY"`, `"runAsUser":0`,
			`"hostPath":{"path":"/var/run/nvsentinel","type":"Directory"}`, `"mountPath":"/var/run/nvsentinel"`, `"audience":"platform-connector.nvsentinel.nvidia.com"`,
		}, []string{"--ca-file", "ca.crt"}},
		{"nvsentinel.connector=pc.nvsentinel.svc:50051,nvsentinel.caConfigMap=pc-ca,nvsentinel.processingStrategy=EXECUTE_REMEDIATION,nvsentinel.audience=mine", []string{
			`"--connector=pc.nvsentinel.svc:50051"`, `"--ca-file=/var/run/secrets/nvsentinel/ca.crt"`, `"name":"pc-ca"`, `"--processing-strategy=EXECUTE_REMEDIATION"`,
			`"audience":"mine"`, `"nvsentinel.nvidia.com/health-publisher":"true"`, `"runAsNonRoot":true`,
		}, []string{"hostPath", `"runAsUser":0`, `"runAsNonRoot":false`}},
	} {
		objects := render(t, "evenkeel", "--set", test.values)
		text, err := json.Marshal(objects[key])
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range test.has {
			if !strings.Contains(string(text), want) {
				t.Errorf("%s: %s lacks %s", test.values, text, want)
			}
		}
		for _, not := range test.hasNot {
			if strings.Contains(string(text), not) {
				t.Errorf("%s: %s has %s", test.values, text, not)
			}
		}
		// Whoever has its token can have nodes drained: it may do nothing else.
		rules(objects, func(role string, _ bool, rule map[string]any) {
			verbs, _, _ := unstructured.NestedStringSlice(rule, "verbs")
			resources, _, _ := unstructured.NestedStringSlice(rule, "resources")
			if role == "ClusterRole/"+name && slices.Contains(verbs, "patch") && !slices.Equal(resources, []string{"nodenetworkhealths"}) {
				t.Errorf("it may %v %v", verbs, resources)
			}
		})
	}
	for values, want := range map[string]string{
		"nvsentinel.connector=pc.nvsentinel.svc:50051":         "set nvsentinel.caConfigMap",
		"nvsentinel.connector=/var/run/nvsentinel.sock":        "connector",
		sentinel + ",nvsentinel.processingStrategy=store_only": "processingStrategy",
	} {
		if out, err := helm("template", "evenkeel", "evenkeel", "--set", values); err == nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v, want %q: %s", values, err, want, out)
		}
	}
}

// isUserRole reports whether the role is for people.
func isUserRole(object *unstructured.Unstructured) bool {
	for label := range object.GetLabels() {
		if strings.HasPrefix(label, "rbac.authorization.k8s.io/aggregate-to-") {
			return true
		}
	}
	return false
}

// rules calls visit for every rule of every role, with the role's key.
func rules(objects map[string]*unstructured.Unstructured, visit func(role string, cluster bool, rule map[string]any)) {
	for key, object := range objects {
		if kind := object.GetKind(); (kind == "ClusterRole" || kind == "Role") && !isUserRole(object) {
			list, _, _ := unstructured.NestedSlice(object.Object, "rules")
			for _, rule := range list {
				visit(key, kind == "ClusterRole", rule.(map[string]any))
			}
		}
	}
}

func TestPermissionsAreNarrow(t *testing.T) {
	t.Parallel()
	values := map[string][]string{
		"self-managed": {"--set", "defaultProfile.spec.plugin.image=" + pinned},
		"supplied":     {"--set", "webhook.certs.source=Supplied,webhook.certs.secretName=mine"},
		"reduction":    {"--set", "reduction.image=reduction:1"},
		"policy":       {"--kube-version=1.36", "--set", "injection.mode=MutatingAdmissionPolicy"},
		"nvsentinel":   {"--set", sentinel},
		"v1beta1":      {"--set", "crds.v1beta1=true"},
	}
	// What may be written, and under which names; "" stands for any.
	writes := map[string][]string{
		"networkchecks":                 {""},
		"networkchecks/status":          {""},
		"networkcheckpolicies/status":   {""},
		"nodenetworkhealths":            {""},
		"nodenetworkhealths/status":     {""},
		"nodes":                         {""},
		"nodes/status":                  {""},
		"networkprofiles":               {"default"},
		"networkprofiles/status":        {""},
		"pods":                          {""},
		"pytorchjobs":                   {""},
		"jobsets":                       {""},
		"leaderworkersets":              {""},
		"workloads/status":              {""},
		"admissionchecks/status":        {""},
		"customresourcedefinitions":     {"networkcheckpolicies.evenkeel.dev", "networkchecks.evenkeel.dev", "networkprofiles.evenkeel.dev"},
		"events":                        {""},
		"leases":                        {"evenkeel-controller"},
		"secrets":                       {"evenkeel-webhook-tls"}, // and the CA's, which is seen to below
		"mutatingwebhookconfigurations": {"evenkeel"}, "validatingwebhookconfigurations": {"evenkeel"},
		// Without it, pods do not wait; nothing is changed of anybody's.
		"mutatingadmissionpolicybindings": {"evenkeel-pod-gates"},
	}
	// What checks are made of may be written in the chart's own namespace only.
	for _, resource := range []string{"jobs", "mpijobs", "services", "configmaps"} {
		writes[resource] = []string{""}
	}
	// With reduction servers these in every namespace too, under the eyes of an admission policy, and nothing else with
	// them. With the webhook, which names the keys of jobs, Secrets alone.
	everywhere := map[string][]string{
		"secrets": {"create"}, "services": {"list", "watch", "create", "patch"}, "statefulsets": {"list", "watch", "create", "patch"},
		"poddisruptionbudgets": {"list", "watch", "create", "patch"}, "networkpolicies": {"list", "watch", "create", "patch"},
		"reductionservices": {"get", "list", "watch", "create"}, "reductionservices/status": {"patch"},
	}
	inNamespace := []string{"services", "configmaps", "pods/log", "secrets", "leases"}
	for name, args := range values {
		t.Run(name, func(t *testing.T) {
			seen := 0
			rules(render(t, "evenkeel", args...), func(role string, cluster bool, rule map[string]any) {
				seen++
				if role == "Role/evenkeel-certificates" {
					return // TestWebhookCannotChangeItsConfiguration
				}
				resources, _, _ := unstructured.NestedStringSlice(rule, "resources")
				names, _, _ := unstructured.NestedStringSlice(rule, "resourceNames")
				for _, field := range []string{"apiGroups", "resources", "verbs", "resourceNames", "nonResourceURLs"} {
					if list, _, _ := unstructured.NestedStringSlice(rule, field); slices.ContainsFunc(list, func(s string) bool { return strings.Contains(s, "*") }) {
						t.Errorf("%s: wildcard in %s %v", role, field, list)
					}
				}
				if cluster && len(resources) == 1 && (name == "reduction" && everywhere[resources[0]] != nil || name != "policy" && resources[0] == "secrets") {
					if verbs, _, _ := unstructured.NestedStringSlice(rule, "verbs"); !slices.Equal(verbs, everywhere[resources[0]]) {
						t.Errorf("%s: may %v %s everywhere; want only %v", role, verbs, resources[0], everywhere[resources[0]])
					}
					return
				}
				if slices.Contains(resources, "secrets") && (cluster || len(names) == 0 || name == "supplied") {
					t.Errorf("%s: may use Secrets that are not its own: %v", role, rule)
				}
				verbs, _, _ := unstructured.NestedStringSlice(rule, "verbs")
				verbs = slices.DeleteFunc(verbs, func(v string) bool { return v == "get" || v == "list" || v == "watch" })
				if len(names) == 0 {
					names = []string{""}
				}
				for _, resource := range resources {
					if cluster && slices.Contains(inNamespace, resource) {
						t.Errorf("%s: may %v %s in every namespace", role, rule["verbs"], resource)
					}
					// Gates may be opened in any namespace, and nothing else may be done to jobs and pods.
					if held := []string{"jobs", "mpijobs", "pytorchjobs", "jobsets", "leaderworkersets", "pods"}; cluster && slices.Contains(held, resource) && slices.ContainsFunc(verbs, func(v string) bool { return v != "patch" }) {
						t.Errorf("%s: may %v %s in every namespace", role, verbs, resource)
					}
					if len(verbs) > 0 && !slices.Equal(writes[resource], names) {
						t.Errorf("%s: may %v %s named %q; want only %q", role, verbs, resource, names, writes[resource])
					}
				}
			})
			if seen == 0 {
				t.Error("no rules at all")
			}
		})
	}
}

func TestBindingsAreComplete(t *testing.T) {
	t.Parallel()
	for _, release := range []string{"evenkeel", "a-very-long-release-name-as-long-as-helm-allows-at-53"} {
		objects := render(t, release)
		bound := map[string]bool{}
		for key, object := range objects {
			if !strings.HasSuffix(object.GetKind(), "RoleBinding") {
				continue
			}
			kind, _, _ := unstructured.NestedString(object.Object, "roleRef", "kind")
			name, _, _ := unstructured.NestedString(object.Object, "roleRef", "name")
			bound[kind+"/"+name] = true
			if objects[kind+"/"+name] == nil {
				t.Errorf("%s: binds %s/%s, which the chart does not make", key, kind, name)
			}
			subjects, _, _ := unstructured.NestedSlice(object.Object, "subjects")
			for _, s := range subjects {
				subject := s.(map[string]any)
				if objects["ServiceAccount/"+subject["name"].(string)] == nil || subject["namespace"] != "some-namespace" {
					t.Errorf("%s: binds %v, which is no ServiceAccount of the chart", key, subject)
				}
			}
		}
		for key, object := range objects {
			if kind := object.GetKind(); (kind == "ClusterRole" || kind == "Role") && !bound[key] && !isUserRole(object) {
				t.Errorf("%s is bound to nobody", key)
			}
		}
	}
}

func TestCertificatesAreMountedOnlyIfSupplied(t *testing.T) {
	t.Parallel()
	volumes := func(args ...string) []any {
		list, _, _ := unstructured.NestedSlice(render(t, "evenkeel", args...)["Deployment/evenkeel-webhook"].Object, "spec", "template", "spec", "volumes")
		return list
	}
	if list := volumes(); len(list) != 0 {
		t.Errorf("self-managed certificates are served from memory, and yet: %v", list)
	}
	if list := volumes("--set", "webhook.certs.source=Supplied,webhook.certs.secretName=mine"); len(list) != 1 {
		t.Errorf("supplied certificates: volumes %v, want the Secret", list)
	}
}

func TestDefaultProfile(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
	const crd = "CustomResourceDefinition/networkprofiles.evenkeel.dev"
	// Whoever uninstalls the chart by mistake keeps profiles and results, and running jobs their reduction servers.
	if object := render(t, "evenkeel")[crd]; object == nil || object.GetAnnotations()["helm.sh/resource-policy"] != "keep" {
		t.Errorf("by default the CRD is installed, and stays when the chart goes: %v", object)
	}
	if object := render(t, "evenkeel", "--set", "crds.keep=false")[crd]; object == nil || object.GetAnnotations()["helm.sh/resource-policy"] != "" {
		t.Error("crds.keep=false keeps the CRD")
	}
	if render(t, "evenkeel", "--set", "crds.enabled=false")[crd] != nil {
		t.Error("crds.enabled=false installs the CRD")
	}
}

// TestV1beta1IsServedOnRequest: without the value there is no version that needs the webhook. With it, objects are still
// stored in v1alpha1, which the API server reads without the webhook.
func TestV1beta1IsServedOnRequest(t *testing.T) {
	t.Parallel()
	const certificates = "Deployment/evenkeel-certificates"
	versions := func(crd *unstructured.Unstructured) (names []string) {
		list, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
		for _, v := range list {
			version := v.(map[string]any)
			if version["served"] != true || (version["storage"] == true) != (version["name"] == "v1alpha1") {
				t.Errorf("%s: %v is served: %v, stored: %v", crd.GetName(), version["name"], version["served"], version["storage"])
			}
			names = append(names, version["name"].(string))
		}
		return names
	}
	both := map[string]bool{"networkcheckpolicies.evenkeel.dev": true, "networkchecks.evenkeel.dev": true, "networkprofiles.evenkeel.dev": true}
	for _, args := range [][]string{nil, {"--set", "crds.v1beta1=null"}, {"--set", "crds.v1beta1=true"}} {
		on := slices.Contains(args, "crds.v1beta1=true")
		objects, seen := render(t, "evenkeel", args...), 0
		for _, object := range objects {
			if object.GetKind() != "CustomResourceDefinition" {
				continue
			}
			seen++
			want := []string{"v1alpha1"}
			if on && both[object.GetName()] {
				want = append(want, "v1beta1")
			}
			if got := versions(object); !slices.Equal(got, want) {
				t.Errorf("%q: %s serves %q, want %q", args, object.GetName(), got, want)
			}
			service, converts, _ := unstructured.NestedMap(object.Object, "spec", "conversion", "webhook", "clientConfig", "service")
			if converts != (len(want) > 1) || converts && (objects["Service/"+service["name"].(string)] == nil ||
				service["namespace"] != "some-namespace" || service["path"] != "/convert") {
				t.Errorf("%q: %s is converted by %v", args, object.GetName(), service)
			}
		}
		if seen != 5 {
			t.Errorf("%q: %d CRDs, want 5", args, seen)
		}
		containers, _, _ := unstructured.NestedSlice(objects[certificates].Object, "spec", "template", "spec", "containers")
		flags, _, _ := unstructured.NestedStringSlice(containers[0].(map[string]any), "args")
		if slices.Contains(flags, "--conversion") != on {
			t.Errorf("%q: the certificates' flags are %q", args, flags)
		}
	}
	const crd = "CustomResourceDefinition/networkchecks.evenkeel.dev"
	supplied := render(t, "evenkeel", "--set", "crds.v1beta1=true,webhook.certs.source=Supplied,webhook.certs.secretName=mine,webhook.certs.caBundle=QQ==")
	if ca, _, _ := unstructured.NestedString(supplied[crd].Object, "spec", "conversion", "webhook", "clientConfig", "caBundle"); ca != "QQ==" {
		t.Errorf("a supplied CA is %q in the CRD", ca)
	}
	for value, want := range map[string]string{
		"injection.mode=MutatingAdmissionPolicy": "crds.v1beta1 needs injection.mode Webhook",
		"webhook.certs.source=CertManager":       "crds.v1beta1 needs webhook.certs.source SelfManaged or Supplied",
	} {
		out, err := helm("template", "evenkeel", "evenkeel", "--kube-version=1.36", "--set", "crds.v1beta1=true,"+value)
		if err == nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v, want %q\n%s", value, err, want, out)
		}
	}
}

func TestCleanupRunsBeforeAndAfterDelete(t *testing.T) {
	t.Parallel()
	// By event: the account, its roles and bindings, the guards with their bindings, and the Job. Argo CD takes an object
	// for a hook of an event only if its annotation has that event and no other, and a Job needs all the others.
	want := map[string]int{"pre-delete": 4, "post-delete": 6 + 8}
	got := map[string]int{}
	events := map[string]string{"Job/evenkeel-cleanup": "post-delete", "Job/evenkeel-cleanup-check": "pre-delete"}
	for key, object := range render(t, "evenkeel") {
		if !strings.Contains(object.GetName(), "-cleanup") {
			continue
		}
		event := object.GetAnnotations()["helm.sh/hook"]
		got[event]++
		if strings.HasSuffix(object.GetName(), "-cleanup-check") != (event == "pre-delete") {
			t.Errorf("%s is of %s", key, event)
		}
		if !strings.Contains(object.GetAnnotations()["helm.sh/hook-delete-policy"], "hook-succeeded") {
			t.Errorf("%s would stay after a cleanup", key)
		}
		if deadline, found, _ := unstructured.NestedInt64(object.Object, "spec", "activeDeadlineSeconds"); found && deadline >= 300 {
			t.Errorf("%s may take %d s, and Helm waits for 300", key, deadline)
		}
		if account, found, _ := unstructured.NestedString(object.Object, "spec", "template", "spec", "serviceAccountName"); found && (event != events[key] || account != object.GetName()) {
			t.Errorf("%s of %s runs as %s, which is of another event", key, event, account)
		}
	}
	if !reflect.DeepEqual(want, got) {
		t.Errorf("objects of the cleanup by event: %v, not %v", got, want)
	}
	for key := range events {
		if render(t, "evenkeel", "--set", "preflight.cleanup=false")[key] != nil {
			t.Errorf("preflight.cleanup=false renders %s", key)
		}
	}
}

func TestImagesOfChecks(t *testing.T) {
	t.Parallel()
	args := func(values ...string) string {
		containers, _, _ := unstructured.NestedSlice(render(t, "evenkeel", values...)["Deployment/evenkeel-controller"].Object, "spec", "template", "spec", "containers")
		list, _, _ := unstructured.NestedStringSlice(containers[0].(map[string]any), "args")
		return strings.Join(list, " ")
	}
	if !strings.Contains(args(), "--check-priority-class=evenkeel-check") || !strings.Contains(args("--set", "preflight.priorityClassName=low"), "--check-priority-class=low") {
		t.Error("--check-priority-class does not follow preflight.priorityClassName")
	}
	if strings.Contains(args(), "--bench-image") || !strings.Contains(args("--set", "preflight.benchImage=bench:1"), "--bench-image=bench:1") {
		t.Error("--bench-image does not follow preflight.benchImage")
	}
	if strings.Contains(args(), "--nccl-tests-image") || !strings.Contains(args("--set", "preflight.ncclTestsImage=tests:1"), "--nccl-tests-image=tests:1") {
		t.Error("--nccl-tests-image does not follow preflight.ncclTestsImage")
	}
	if strings.Contains(args(), "--rccl-tests-image") || !strings.Contains(args("--set", "preflight.rcclTestsImage=tests:2"), "--rccl-tests-image=tests:2") {
		t.Error("--rccl-tests-image does not follow preflight.rcclTestsImage")
	}
	if !strings.Contains(args("--set", "imagePullSecrets[0].name=a,imagePullSecrets[1].name=b"), "--image-pull-secrets=a --image-pull-secrets=b") {
		t.Error("checks do not get the imagePullSecrets")
	}
}

func TestMetricsServiceAndDashboard(t *testing.T) {
	t.Parallel()
	on := []string{"--set", "metrics.serviceMonitor.enabled=true,metrics.dashboard.enabled=true,metrics.bindAddress=0.0.0.0:9000,metrics.serviceMonitor.labels.release=prom"}
	objects := render(t, "evenkeel", on...)
	service := objects["Service/evenkeel-metrics"]
	monitor := objects["ServiceMonitor/evenkeel-metrics"]
	dashboard := objects["ConfigMap/evenkeel-dashboard"]
	if service == nil || monitor == nil || dashboard == nil {
		t.Fatalf("Service %v, ServiceMonitor %v, ConfigMap %v", service, monitor, dashboard)
	}
	ports, _, _ := unstructured.NestedSlice(service.Object, "spec", "ports")
	if port := ports[0].(map[string]any); port["targetPort"] != int64(9000) && port["targetPort"] != float64(9000) {
		t.Errorf("the Service's port is %v", port)
	}
	// What is selected has to exist: pods of both deployments by the Service, the Service by the ServiceMonitor.
	selector, _, _ := unstructured.NestedStringMap(service.Object, "spec", "selector")
	for _, deployment := range []string{"Deployment/evenkeel-controller", "Deployment/evenkeel-webhook"} {
		labels, _, _ := unstructured.NestedStringMap(objects[deployment].Object, "spec", "template", "metadata", "labels")
		if !contains(labels, selector) {
			t.Errorf("the Service selects %v, and the pods of %s have %v", selector, deployment, labels)
		}
	}
	wanted, _, _ := unstructured.NestedStringMap(monitor.Object, "spec", "selector", "matchLabels")
	if !contains(service.GetLabels(), wanted) || monitor.GetLabels()["release"] != "prom" {
		t.Errorf("the ServiceMonitor has %v and selects %v, the Service has %v", monitor.GetLabels(), wanted, service.GetLabels())
	}
	text, _, _ := unstructured.NestedString(dashboard.Object, "data", "evenkeel-preflight.json")
	var drawn struct{ Panels []any }
	if err := json.Unmarshal([]byte(text), &drawn); err != nil || len(drawn.Panels) == 0 || dashboard.GetLabels()["grafana_dashboard"] != "1" {
		t.Errorf("%v: %d panels, labels %v", err, len(drawn.Panels), dashboard.GetLabels())
	}

	for what, objects := range map[string]map[string]*unstructured.Unstructured{
		"by default": render(t, "evenkeel"), "without metrics": render(t, "evenkeel", "--set-string", "metrics.bindAddress=0"),
	} {
		if objects["ServiceMonitor/evenkeel-metrics"] != nil || objects["ConfigMap/evenkeel-dashboard"] != nil {
			t.Errorf("%s there is what may not be wanted", what)
		}
		if there := objects["Service/evenkeel-metrics"] != nil; there != (what == "by default") {
			t.Errorf("%s there is a Service: %t", what, there)
		}
	}
}

// alerts are those of the chart with these values, by name.
func alerts(t *testing.T, values ...string) map[string]map[string]any {
	t.Helper()
	rule := render(t, "evenkeel", append([]string{"--set", "metrics.prometheusRule.enabled=true"}, values...)...)["PrometheusRule/evenkeel"]
	if rule == nil {
		t.Fatal("no PrometheusRule")
	}
	all := map[string]map[string]any{}
	groups, _, _ := unstructured.NestedSlice(rule.Object, "spec", "groups")
	for _, group := range groups {
		rules, _, _ := unstructured.NestedSlice(group.(map[string]any), "rules")
		for _, item := range rules {
			alert := item.(map[string]any)
			name, _ := alert["alert"].(string)
			if all[name] != nil {
				t.Errorf("two alerts are named %q", name)
			}
			all[name] = alert
		}
	}
	return all
}

// TestAlerts: each alert says what is wrong, and the manual says what to do about it. That the metrics exist is tested
// where they are served.
func TestAlerts(t *testing.T) {
	t.Parallel()
	manual, err := os.ReadFile("../docs/operate.md")
	if err != nil {
		t.Fatal(err)
	}
	explained := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| `(Evenkeel\\w+)` \\|.*\\|.*\\|$").FindAllStringSubmatch(string(manual), -1) {
		explained[row[1]] = true
	}
	all := alerts(t)
	for name, alert := range all {
		text := func(path ...string) string {
			value, _, _ := unstructured.NestedString(alert, path...)
			return value
		}
		if text("expr") == "" || text("for") == "" || text("annotations", "summary") == "" || text("annotations", "description") == "" ||
			!slices.Contains([]string{"critical", "warning", "info"}, text("labels", "severity")) {
			t.Errorf("%s is incomplete: %v", name, alert)
		}
		if !explained[name] {
			t.Errorf("docs/operate.md has no row for the alert %s", name)
		}
	}
	for name := range explained {
		if all[name] == nil {
			t.Errorf("docs/operate.md has a row for the alert %s, which does not exist", name)
		}
	}
	for _, alert := range alerts(t, "--set", "metrics.prometheusRule.alertLabels.team=net,metrics.prometheusRule.alertLabels.severity=page") {
		if labels, _, _ := unstructured.NestedStringMap(alert, "labels"); labels["team"] != "net" || labels["severity"] != "page" {
			t.Errorf("%v: its labels do not follow metrics.prometheusRule.alertLabels", alert)
		}
	}
	// The webhook's would never end where there is none.
	without := alerts(t, "--kube-version=1.36", "--set", "injection.mode=MutatingAdmissionPolicy")
	for name, alert := range without {
		if strings.Contains(fmt.Sprint(alert["expr"]), "webhook") {
			t.Errorf("%s, without a webhook", name)
		}
	}
	if len(without) == 0 || len(without) == len(all) {
		t.Errorf("%d alerts with the webhook, %d without", len(all), len(without))
	}
}

func TestAlertsAreOnRequest(t *testing.T) {
	t.Parallel()
	const rule = "PrometheusRule/evenkeel"
	for _, values := range []string{"metrics.prometheusRule.enabled=false", "metrics.prometheusRule=null"} { // null: as values of an earlier release
		if render(t, "evenkeel", "--set", values)[rule] != nil {
			t.Errorf("%s makes a PrometheusRule", values)
		}
	}
	if labels := render(t, "evenkeel", "--set", "metrics.prometheusRule.enabled=true,metrics.prometheusRule.labels.release=prom")[rule].GetLabels(); labels["release"] != "prom" {
		t.Errorf("no Prometheus selects it: %v", labels)
	}
	if out, err := helm("template", "evenkeel", "evenkeel", "--set", "metrics.prometheusRule.enabled=true", "--set-string", "metrics.bindAddress=0"); err == nil || !strings.Contains(out, "metrics.prometheusRule.enabled needs") {
		t.Errorf("alerts about metrics that nobody serves: %v\n%s", err, out)
	}
}

// contains reports whether all has everything of some.
func contains(all, some map[string]string) bool {
	for key, value := range some {
		if all[key] != value {
			return false
		}
	}
	return len(some) > 0
}

func TestReductionImage(t *testing.T) {
	t.Parallel()
	const guard = "ValidatingAdmissionPolicy/evenkeel-reduction"
	args := func(objects map[string]*unstructured.Unstructured, deployment string) []string {
		containers, _, _ := unstructured.NestedSlice(objects["Deployment/"+deployment].Object, "spec", "template", "spec", "containers")
		list, _, _ := unstructured.NestedStringSlice(containers[0].(map[string]any), "args")
		return list
	}
	for image, want := range map[string]bool{"": false, "reduction:1": true} {
		objects := render(t, "evenkeel", "--set", "reduction.image="+image)
		if slices.Contains(args(objects, "evenkeel-controller"), "--reduction-image=reduction:1") != want ||
			slices.Contains(args(objects, "evenkeel-webhook"), "--reduction-image=reduction:1") != want || (objects[guard] != nil) != want {
			t.Errorf("reduction.image=%q: controller, webhook and guard do not agree", image)
		}
	}
}

func TestValuesSchemaErrors(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{
		"webhok.replicas=1":                                   "webhok",
		"injection.mode=Policy":                               "mode",
		"webhook.replicas=0":                                  "replicas",
		"logLevel=loud":                                       "logLevel",
		"controller.logLevel=loud":                            "logLevel",
		"logFormat=xml":                                       "logFormat",
		"image.digest=latest":                                 "digest",
		"metrics.bindAddress=80":                              "bindAddress",
		"webhook.certs.source=No":                             "source",
		"defaultProfile.spec.transport.mode=Pigeon":           "mode",
		"defaultProfile.spec.tuner.source=Guess":              "source",
		"defaultProfile.spec.transport.rdma.resourceName=hca": "resourceName",
		"defaultProfile.spec.plugin.image=registry.example.com/plugin:latest": "image",
	} {
		if out, err := helm("template", "evenkeel", "evenkeel", "--set", value); err == nil || !strings.Contains(out, want) {
			t.Errorf("--set %s: %v, want an error that names %s:\n%s", value, err, want, out)
		}
	}
	if out, err := helm("template", "evenkeel", "evenkeel", "--set", "metrics.serviceMonitor.enabled=true,metrics.service.enabled=false"); err == nil || !strings.Contains(out, "needs metrics.service.enabled") {
		t.Errorf("a ServiceMonitor without a Service: %v\n%s", err, out)
	}
	if out, err := helm("template", "evenkeel", "evenkeel", "--set", "webhook.certs.source=Supplied"); err == nil || !strings.Contains(out, "webhook.certs.secretName") {
		t.Errorf("Supplied without a Secret: %v\n%s", err, out)
	}
}

// TestWebhookCannotChangeItsConfiguration has what makes an account as good as the cluster's administrator: whoever may
// change a webhook configuration can have all Secrets sent to him.
func TestWebhookCannotChangeItsConfiguration(t *testing.T) {
	t.Parallel()
	for source, want := range map[string]string{"SelfManaged": "ClusterRole/evenkeel-certificates", "CertManager": "", "Supplied": ""} {
		may := ""
		rules(render(t, "evenkeel", "--set", "webhook.certs.secretName=mine,webhook.certs.source="+source), func(role string, _ bool, rule map[string]any) {
			resources, _, _ := unstructured.NestedStringSlice(rule, "resources")
			verbs, _, _ := unstructured.NestedStringSlice(rule, "verbs")
			names, _, _ := unstructured.NestedStringSlice(rule, "resourceNames")
			if slices.Contains(resources, "mutatingwebhookconfigurations") || slices.Contains(resources, "validatingwebhookconfigurations") {
				// Without it, jobs get no plugin; nothing is sent to anybody.
				if slices.Contains(verbs, "delete") && (role != "ClusterRole/evenkeel-controller" || !slices.Equal(names, []string{"evenkeel"})) {
					t.Errorf("%s: %s may delete the webhook configurations %q", source, role, names)
				}
				if slices.ContainsFunc(verbs, func(v string) bool { return !slices.Contains([]string{"get", "list", "watch", "delete"}, v) }) {
					may += role
				}
			}
			if slices.Contains(names, "evenkeel-webhook-cert") && role != "Role/evenkeel-certificates" {
				t.Errorf("%s: %s may use the CA's key", source, role)
			}
		})
		if may != want {
			t.Errorf("%s: %q may change webhook configurations, want %q", source, may, want)
		}
	}
}

func TestCertManager(t *testing.T) {
	t.Parallel()
	objects := render(t, "evenkeel", "--set", "webhook.certs.source=CertManager")
	for _, key := range []string{"Issuer/evenkeel-webhook-ca", "Issuer/evenkeel-webhook-self-signed", "Certificate/evenkeel-webhook-ca", "Certificate/evenkeel-webhook"} {
		if objects[key] == nil {
			t.Errorf("no %s", key)
		}
	}
	for _, key := range []string{"Deployment/evenkeel-certificates", "Secret/evenkeel-webhook-tls", "Secret/evenkeel-webhook-cert"} {
		if objects[key] != nil {
			t.Errorf("there is a %s", key)
		}
	}
	for _, kind := range []string{"Mutating", "Validating"} {
		if from := objects[kind+"WebhookConfiguration/evenkeel"].GetAnnotations()["cert-manager.io/inject-ca-from"]; from != "some-namespace/evenkeel-webhook" {
			t.Errorf("%s: the CA is injected from %q", kind, from)
		}
	}
	secret, _, _ := unstructured.NestedString(objects["Certificate/evenkeel-webhook"].Object, "spec", "secretName")
	volumes, _, _ := unstructured.NestedSlice(objects["Deployment/evenkeel-webhook"].Object, "spec", "template", "spec", "volumes")
	if mounted, _, _ := unstructured.NestedString(volumes[0].(map[string]any), "secret", "secretName"); mounted != secret {
		t.Errorf("the webhook mounts %q, and cert-manager writes %q", mounted, secret)
	}
	objects = render(t, "evenkeel", "--set", "webhook.certs.source=CertManager,webhook.certs.issuerRef.kind=ClusterIssuer,webhook.certs.issuerRef.name=ours")
	if name, _, _ := unstructured.NestedString(objects["Certificate/evenkeel-webhook"].Object, "spec", "issuerRef", "name"); name != "ours" || objects["Issuer/evenkeel-webhook-ca"] != nil {
		t.Errorf("the issuer is %q", name)
	}
}

// TestComponentValues sets what platform teams set, for each Deployment, and looks for it there and in no other.
func TestComponentValues(t *testing.T) {
	t.Parallel()
	for _, component := range []string{"webhook", "controller", "certificates", "nvsentinel"} {
		args := []string{"--set", sentinel}
		var wanted []string
		for value, want := range map[string]string{
			`nodeSelector={"pool":"system"}`:                     `"nodeSelector":{"kubernetes.io/os":"linux","pool":"system"}`,
			`tolerations=[{"key":"a"}]`:                          `"tolerations":[{"key":"a"}]`,
			`affinity={"podAffinity":{}}`:                        `"affinity":{"podAffinity":{}}`,
			`topologySpreadConstraints=[{"topologyKey":"zone"}]`: `"topologySpreadConstraints":[{"topologyKey":"zone"}]`,
			`priorityClassName="high"`:                           `"priorityClassName":"high"`,
			`podAnnotations={"sidecar.istio.io/inject":"false"}`: `"sidecar.istio.io/inject":"false"`,
			`podLabels={"team":"net"}`:                           `"team":"net"`,
			`logLevel="debug"`:                                   `"--log-level=debug"`,
			`extraArgs=["--namespace=x"]`:                        `"--namespace=x"`,
			`env=[{"name":"HTTPS_PROXY","value":"p"}]`:           `{"name":"HTTPS_PROXY","value":"p"}`,
			`resources={"limits":{"memory":"1Gi"}}`:              `"resources":{"limits":{"memory":"1Gi"}`,
		} {
			args = append(args, "--set-json", component+"."+value)
			wanted = append(wanted, want)
		}
		for key, object := range render(t, "evenkeel", args...) {
			if object.GetKind() != "Deployment" {
				continue
			}
			template, _, _ := unstructured.NestedMap(object.Object, "spec", "template")
			text, err := json.Marshal(template)
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range wanted {
				if found, its := strings.Contains(string(text), want), key == "Deployment/evenkeel-"+component; found != its {
					t.Errorf("values of %s: %s in %s: %t, want %t: %s", component, want, key, found, its, text)
				}
			}
		}
	}
}

func TestCommonValues(t *testing.T) {
	t.Parallel()
	objects := render(t, "evenkeel", "--set", "priorityClassName=high,podLabels.team=net,podAnnotations.a=b,revisionHistoryLimit=7,controller.replicas=2,networkPolicy.enabled=true",
		"--set", "image.registry=mirror.example.com:5000/cache,image.tag=1.2.3", "--set", "webhook.hostNetwork=true,webhook.port=10443,webhook.serviceAnnotations.a=b,webhook.configurationAnnotations.c=d")
	for _, key := range []string{"Deployment/evenkeel-webhook", "Deployment/evenkeel-controller", "Deployment/evenkeel-certificates"} {
		text, err := json.Marshal(objects[key].Object)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{`"priorityClassName":"high"`, `"team":"net"`, `"a":"b"`, `"revisionHistoryLimit":7`, `"image":"mirror.example.com:5000/cache/evenkeel/evenkeel-operator:1.2.3"`, `"kubernetes.io/os":"linux"`} {
			if !strings.Contains(string(text), want) {
				t.Errorf("%s lacks %s", key, want)
			}
		}
	}
	for _, key := range []string{"Job/evenkeel-cleanup", "Job/evenkeel-cleanup-check"} {
		text, err := json.Marshal(objects[key])
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{`"priorityClassName":"high"`, `"team":"net"`, `"a":"b"`, `"kubernetes.io/os":"linux"`} {
			if !strings.Contains(string(text), want) {
				t.Errorf("%s lacks %s", key, want)
			}
		}
	}
	text, err := json.Marshal(objects["Deployment/evenkeel-webhook"].Object)
	if err != nil || !strings.Contains(string(text), `"hostNetwork":true`) || !strings.Contains(string(text), `"--port=10443"`) {
		t.Errorf("%v: %s", err, text)
	}
	if objects["Service/evenkeel-webhook"].GetAnnotations()["a"] != "b" || objects["MutatingWebhookConfiguration/evenkeel"].GetAnnotations()["c"] != "d" ||
		objects["ValidatingWebhookConfiguration/evenkeel"].GetAnnotations()["c"] != "d" {
		t.Error("annotations of the Service or of the webhook configuration are missing")
	}
	for _, key := range []string{"PodDisruptionBudget/evenkeel-webhook", "PodDisruptionBudget/evenkeel-controller", "NetworkPolicy/evenkeel", "NetworkPolicy/evenkeel-checks"} {
		if objects[key] == nil {
			t.Errorf("no %s", key)
		}
	}
	if out, err := helm("template", "evenkeel", "evenkeel", "--set", "webhook.nodeSelectors.a=b"); err == nil || !strings.Contains(out, "nodeSelectors") {
		t.Errorf("a value that does not exist: %v %s", err, out)
	}
}

func TestClientCA(t *testing.T) {
	t.Parallel()
	for source, mounts := range map[string]string{
		"SelfManaged": `"volumeMounts":[{"mountPath":"/client-ca"`, "Supplied": `"volumeMounts":[{"mountPath":"/certs"`,
	} {
		objects := render(t, "evenkeel", "--set", "webhook.clientCA.configMap=clients,webhook.clientCA.name=kube-apiserver,webhook.certs.secretName=own,webhook.certs.source="+source)
		text, err := json.Marshal(objects["Deployment/evenkeel-webhook"].Object)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{`"--client-ca=/client-ca/ca.crt"`, `"--client-name=kube-apiserver"`, `{"configMap":{"name":"clients"},"name":"client-ca"}`, mounts} {
			if !strings.Contains(string(text), want) {
				t.Errorf("%s: the webhook lacks %s: %s", source, want, text)
			}
		}
	}
	text, err := json.Marshal(render(t, "evenkeel")["Deployment/evenkeel-webhook"].Object)
	if err != nil || strings.Contains(string(text), "client-ca") {
		t.Errorf("by default: %v %s", err, text)
	}
}

// In a namespace that denies by default, pods of checks reach each other and DNS.
func TestNetworkPolicyOfChecks(t *testing.T) {
	t.Parallel()
	policy := render(t, "evenkeel", "--set", "networkPolicy.enabled=true")["NetworkPolicy/evenkeel-checks"]
	if policy == nil {
		t.Fatal("no NetworkPolicy selects the pods of checks")
	}
	text, err := json.Marshal(policy.Object["spec"])
	if err != nil {
		t.Fatal(err)
	}
	const checks = `{"matchExpressions":[{"key":"evenkeel.dev/check","operator":"Exists"}]}`
	want := `{"egress":[{"to":[{"podSelector":` + checks + `}]},{"ports":[{"port":53,"protocol":"UDP"},{"port":53,"protocol":"TCP"},{"port":5353,"protocol":"UDP"},{"port":5353,"protocol":"TCP"}]}],` +
		`"ingress":[{"from":[{"podSelector":` + checks + `}]}],"podSelector":` + checks + `,"policyTypes":["Ingress","Egress"]}`
	if string(text) != want {
		t.Errorf("%s, want %s", text, want)
	}
	for key := range render(t, "evenkeel") {
		if strings.HasPrefix(key, "NetworkPolicy/") {
			t.Errorf("%s is made by default", key)
		}
	}
}

func TestLogValues(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ values, want string }{
		{"revisionHistoryLimit=3", `"--log-level=info","--log-format=json"`},
		{"logLevel=null,logFormat=null,webhook.logLevel=null,controller.logLevel=null,certificates.logLevel=null", `"--log-level=info","--log-format=json"`}, // as values of an earlier release
		{"logLevel=error,logFormat=text", `"--log-level=error","--log-format=text"`},
	} {
		seen := 0
		for key, object := range render(t, "evenkeel", "--set", test.values) {
			if object.GetKind() != "Deployment" {
				continue
			}
			seen++
			text, err := json.Marshal(object.Object)
			if err != nil || !strings.Contains(string(text), test.want) {
				t.Errorf("--set %s: %v: %s lacks %s", test.values, err, key, test.want)
			}
		}
		if seen != 3 {
			t.Errorf("%d Deployments, want 3", seen)
		}
	}
}

func TestUserRoles(t *testing.T) {
	t.Parallel()
	objects := render(t, "evenkeel")
	for name, writes := range map[string][]string{"view": nil, "edit": {"networkchecks"}, "admin": {"networkprofiles", "networkcheckpolicies", "nodenetworkhealths", "reductionservices"}} {
		role := objects["ClusterRole/evenkeel-"+name]
		if role == nil || role.GetLabels()["rbac.authorization.k8s.io/aggregate-to-"+name] != "true" {
			t.Errorf("role %s: %v", name, role)
			continue
		}
		list, _, _ := unstructured.NestedSlice(role.Object, "rules")
		for _, rule := range list {
			resources, _, _ := unstructured.NestedStringSlice(rule.(map[string]any), "resources")
			verbs, _, _ := unstructured.NestedStringSlice(rule.(map[string]any), "verbs")
			for _, resource := range resources {
				if slices.Contains(verbs, "delete") != slices.Contains(writes, resource) {
					t.Errorf("%s may %v %s", name, verbs, resource)
				}
				if slices.Contains(verbs, "create") && (resource == "reductionservices" || resource == "nodenetworkhealths") {
					t.Errorf("%s may write %s, which only Evenkeel does", name, resource)
				}
			}
		}
	}
	if render(t, "evenkeel", "--set", "userRoles.enabled=false")["ClusterRole/evenkeel-view"] != nil {
		t.Error("userRoles.enabled=false makes roles")
	}
}

// An API server reads a policy's parameters before it looks at whose request it is. Where the kind of the parameters is
// not served, a policy that fails closed denies everybody's requests for the objects that it is about.
func TestPoliciesThatFailClosedNeedNoForeignKind(t *testing.T) {
	t.Parallel()
	const mode = "injection.mode=MutatingAdmissionPolicy"
	for name, arguments := range map[string][]string{
		"without a cluster":             nil,
		"with Kueue":                    {"--api-versions", "kueue.x-k8s.io/v1beta2/AdmissionCheck"},
		"with an older Kueue":           {"--api-versions", "kueue.x-k8s.io/v1beta1/AdmissionCheck"},
		"without a webhook":             {"--kube-version=1.36", "--set", mode},
		"without a webhook, with Kueue": {"--kube-version=1.36", "--set", mode, "--api-versions", "kueue.x-k8s.io/v1beta2/AdmissionCheck"},
	} {
		foreign := 0
		for key, object := range render(t, "evenkeel", append([]string{"--set", "reduction.image=reduction:1"}, arguments...)...) {
			kind, found, err := unstructured.NestedString(object.Object, "spec", "paramKind", "apiVersion")
			if err != nil {
				t.Errorf("%s: %s: %v", name, key, err)
			}
			if !found || kind == "v1" || strings.HasPrefix(kind, "evenkeel.dev/") {
				continue
			}
			foreign++
			if policy, _, _ := unstructured.NestedString(object.Object, "spec", "failurePolicy"); policy != "Ignore" {
				t.Errorf("%s: %s, with parameters of %s, has failurePolicy %q", name, key, kind, policy)
			}
		}
		want := 0
		if slices.Contains(arguments, "--api-versions") {
			want = 2 // one for each account that answers Kueue
		}
		if foreign != want {
			t.Errorf("%s: %d policies with parameters of others, want %d", name, foreign, want)
		}
	}
}
