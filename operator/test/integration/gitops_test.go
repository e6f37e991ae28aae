package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/workload"
)

// gitOps is the field manager of a tool that applies, again and again, what is in Git.
const gitOps = client.FieldOwner("gitops")

// applied applies a manifest by server-side apply, and returns what it becomes. It takes no field from another manager: a conflict is
// an error.
func applied(ctx context.Context, manifest *unstructured.Unstructured, options ...client.ApplyOption) (*unstructured.Unstructured, error) {
	object := manifest.DeepCopy()
	if err := admin.Apply(ctx, client.ApplyConfigurationFromUnstructured(object), append(options, gitOps)...); err != nil {
		return nil, fmt.Errorf("apply the %s %s: %w", manifest.GetKind(), manifest.GetName(), err)
	}
	return object, nil
}

// content is the object without what every write changes.
func content(object *unstructured.Unstructured) map[string]any {
	object = object.DeepCopy()
	object.SetManagedFields(nil)
	object.SetResourceVersion("")
	return object.Object
}

// inSync fails the test if the live object differs from what its manifest would make of it, which is how Flux, and Argo CD with
// ServerSideDiff, compare; or if somebody else has written a field of the manifest.
func inSync(t *testing.T, manifest *unstructured.Unstructured) {
	t.Helper()
	live, now := manifest.DeepCopy(), manifest.DeepCopy()
	diff := ""
	eventually(t, fmt.Sprintf("the %s %s is at rest", manifest.GetKind(), manifest.GetName()), func(ctx context.Context) (bool, error) {
		if err := admin.Get(ctx, client.ObjectKeyFromObject(manifest), live); err != nil {
			return false, err
		}
		again, err := applied(ctx, manifest, client.DryRunAll)
		if err != nil {
			return false, err
		}
		if err := admin.Get(ctx, client.ObjectKeyFromObject(manifest), now); err != nil {
			return false, err
		}
		diff = cmp.Diff(content(live), content(again))
		return live.GetResourceVersion() == now.GetResourceVersion(), nil
	})
	if diff != "" {
		t.Errorf("the %s %s drifts: its manifest makes this of it (-live +applied):\n%s", manifest.GetKind(), manifest.GetName(), diff)
	}
	for manager, fields := range contested(t, now) {
		t.Errorf("%s writes fields of the %s %s that are in its manifest: %s", manager, manifest.GetKind(), manifest.GetName(), strings.Join(fields, ", "))
	}
}

// contested are the fields that are the GitOps tool's and another manager's too, by that manager.
func contested(t *testing.T, object *unstructured.Unstructured) map[string][]string {
	t.Helper()
	fields := func(entry metav1.ManagedFieldsEntry) map[string]bool {
		t.Helper()
		var tree map[string]any
		if err := json.Unmarshal(entry.FieldsV1.GetRawBytes(), &tree); err != nil {
			t.Fatal(err)
		}
		leaves := map[string]bool{}
		var collect func(path string, tree map[string]any)
		collect = func(path string, tree map[string]any) {
			for name, below := range tree {
				switch below := below.(map[string]any); {
				case name == ".": // the list's entry itself
				case len(below) == 0:
					leaves[path+"/"+name] = true
				default:
					collect(path+"/"+name, below)
				}
			}
		}
		collect("", tree)
		return leaves
	}
	own, others := map[string]bool{}, map[string]map[string]bool{}
	for _, entry := range object.GetManagedFields() {
		if entry.Manager == string(gitOps) {
			maps.Copy(own, fields(entry))
			continue
		}
		others[entry.Manager+" ("+string(entry.Operation)+")"] = fields(entry)
	}
	if len(own) == 0 {
		t.Fatalf("the GitOps tool has no field of the %s %s", object.GetKind(), object.GetName())
	}
	both := map[string][]string{}
	for manager, theirs := range others {
		for _, path := range slices.Sorted(maps.Keys(theirs)) {
			// Beside the CA, its writer owns what the manifest says of the conversion, so that it can be taken out of the manifest.
			shared := object.GetKind() == "CustomResourceDefinition" && strings.HasPrefix(path, "/f:spec/f:conversion/")
			if own[path] && !shared {
				both[manager] = append(both[manager], path)
			}
		}
	}
	return both
}

// A webhookState is the CA that the API server trusts a webhook by, in base64, and for how many seconds it waits for the answer.
type webhookState struct {
	ca      string
	timeout int64
}

// liveWebhooks are the webhooks of both configurations, by name.
func liveWebhooks(t *testing.T) map[string]webhookState {
	t.Helper()
	all := map[string]webhookState{}
	for _, kind := range []string{"MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"} {
		live := install.objects[kind+"/evenkeel"].DeepCopy()
		if err := admin.Get(t.Context(), client.ObjectKeyFromObject(live), live); err != nil {
			t.Fatal(err)
		}
		states, err := webhookStates(live)
		if err != nil {
			t.Fatal(err)
		}
		maps.Copy(all, states)
	}
	return all
}

// webhookStates are those of the webhooks of a configuration, by name.
func webhookStates(configuration *unstructured.Unstructured) (map[string]webhookState, error) {
	webhooks, _, err := unstructured.NestedSlice(configuration.Object, "webhooks")
	if err != nil {
		return nil, err
	}
	all := map[string]webhookState{}
	for _, w := range webhooks {
		w := w.(map[string]any)
		name, _, _ := unstructured.NestedString(w, "name")
		var state webhookState
		state.ca, _, _ = unstructured.NestedString(w, "clientConfig", "caBundle")
		state.timeout, _, _ = unstructured.NestedInt64(w, "timeoutSeconds")
		all[name] = state
	}
	return all, nil
}

// restoreWebhooks applies the mutating configuration again, which a test has deleted, and waits until its webhooks are trusted again.
func restoreWebhooks(t *testing.T) {
	t.Helper()
	manifests, err := install.manifests()
	if err != nil {
		t.Error(err)
		return
	}
	err = wait.PollUntilContextTimeout(context.Background(), 50*time.Millisecond, waitTimeout, true, func(ctx context.Context) (bool, error) {
		for _, manifest := range manifests {
			if manifest.GetKind() != "MutatingWebhookConfiguration" {
				continue
			}
			live, err := applied(ctx, manifest)
			if err != nil {
				return false, err
			}
			states, err := webhookStates(live)
			return err == nil && !slices.ContainsFunc(slices.Collect(maps.Values(states)), func(s webhookState) bool { return s.ca == "" }), err
		}
		return false, errors.New("the chart has no MutatingWebhookConfiguration")
	})
	if err != nil {
		t.Errorf("the webhooks are not there again: %v", err)
	}
}

// TestChartDoesNotDrift applies the rendered chart again while the operator runs: the same, with other values, and the first one again.
// The operator and the API server write nothing that is in the manifests.
func TestChartDoesNotDrift(t *testing.T) {
	changes := []string{
		"--set", "webhook.timeoutSeconds=7,webhook.replicas=4,controller.logLevel=debug,revisionHistoryLimit=2,webhook.serviceAnnotations.team=a",
		"--set", "webhook.configurationAnnotations.team=a,controller.resources.limits.memory=1536Mi,defaultProfile.spec.transport.tcp.flowsPerPeer=3,userRoles.enabled=false",
	}
	first, err := install.manifests()
	if err != nil {
		t.Fatal(err)
	}
	second, err := install.manifests(changes...)
	if err != nil {
		t.Fatal(err)
	}
	if len(second) >= len(first) {
		t.Fatalf("the chart has %d objects, and %d without roles for people", len(first), len(second))
	}
	sync := func(step string, manifests []*unstructured.Unstructured) {
		t.Run(step, func(t *testing.T) {
			for _, manifest := range manifests {
				if _, err := applied(t.Context(), manifest); err != nil {
					t.Error(err)
				}
			}
			for _, manifest := range manifests {
				inSync(t, manifest)
			}
		})
	}
	before := liveWebhooks(t)
	sync("no change", first)
	sync("other values", second)
	for name, now := range liveWebhooks(t) {
		if now.ca == "" || now.ca != before[name].ca {
			t.Errorf("an upgrade changes the CA of %s", name)
		}
	}
	if got := liveWebhooks(t)["pods.evenkeel.dev"].timeout; got != 7 {
		t.Errorf("the upgrade was not made: the timeout is %d", got)
	}
	sync("rollback", first)
	if diff := cmp.Diff(before, liveWebhooks(t), cmp.AllowUnexported(webhookState{})); diff != "" {
		t.Errorf("a rollback does not restore the webhooks: %s", diff)
	}
	job, _ := newJob("Job", newNamespace(t, nil), "default")
	if err := dryRun(t.Context(), job); err != nil {
		t.Error(err)
	}
	if templates, err := workload.Templates(job); err != nil || templates[0].Label(evenkeel.ProfileKey) != "default" {
		t.Errorf("the webhook does not answer any more: %v", err)
	}
}

// gitOpsJobs are manifests of jobs, T for their pod template.
var gitOpsJobs = map[string]string{
	"job":     `{apiVersion: batch/v1, kind: Job, spec: {template: T}}`,
	"jobset":  `{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, spec: {replicatedJobs: [{name: a, template: {spec: {template: T}}}, {name: b, template: {spec: {template: T}}}]}}`,
	"pytorch": `{apiVersion: kubeflow.org/v1, kind: PyTorchJob, spec: {pytorchReplicaSpecs: {Master: {template: T}, Worker: {replicas: 2, template: T}}}}`,
}

// TestJobsDoNotDrift applies annotated jobs again and again, on the server and in the client. Some run and some wait. Some templates
// set an affinity of their own, a list that an apply replaces.
func TestJobsDoNotDrift(t *testing.T) {
	_, noJobSets := tryKinds(t, jobSetSource)
	policy, pool, gated := newGate(t, "drifting", waitRegardless)
	devices := newProfile(t, "drifting-rdma", evenkeel.NetworkProfileSpec{Transport: evenkeel.TransportSpec{
		Mode: evenkeel.TransportRDMA, RDMA: evenkeel.RDMASpec{ResourceName: "rdma/drifting"},
	}}).Name
	plain := newNamespace(t, nil)
	queue := map[string]string{"kueue.x-k8s.io/queue-name": "team"}
	ours := map[string]any{"affinity": map[string]any{"nodeAffinity": map[string]any{"requiredDuringSchedulingIgnoredDuringExecution": map[string]any{
		"nodeSelectorTerms": []any{map[string]any{"matchExpressions": []any{map[string]any{"key": "zone", "operator": "In", "values": []any{"a"}}}}},
	}}}}
	var waiting []*unstructured.Unstructured
	for _, c := range []struct {
		name, namespace, profile string
		labels                   map[string]string
		spec                     map[string]any // more of the pods' spec
		state                    string
	}{
		{"runs", plain, "default", nil, map[string]any{"nodeSelector": map[string]any{"pool": "elsewhere"}}, "runs"},
		{"waits", gated, "default", nil, map[string]any{"nodeSelector": pool}, "suspended, gated true"},
		{"device", plain, devices, nil, ours, "runs"},
		{"queue", plain, "default", queue, ours, "runs"},
		{"device-in-queue", plain, devices, queue, ours, "runs"},
	} {
		for kind, text := range gitOpsJobs {
			t.Run(c.name+"/"+kind, func(t *testing.T) {
				if kind == "jobset" && noJobSets != "" {
					t.Skip(noJobSets)
				}
				spec := map[string]any{"restartPolicy": "Never", "containers": []any{map[string]any{
					"name": "c", "image": "registry.example.com/train:1", "resources": map[string]any{"limits": map[string]any{"nvidia.com/gpu": 8}},
				}}}
				maps.Copy(spec, c.spec)
				template, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{"app": "x"}}, "spec": spec})
				if err != nil {
					t.Fatal(err)
				}
				manifest := &unstructured.Unstructured{}
				if err := yaml.UnmarshalStrict([]byte(strings.ReplaceAll(text, "emplate: T", "emplate: "+string(template))), &manifest.Object); err != nil {
					t.Fatal(err)
				}
				manifest.SetNamespace(c.namespace)
				manifest.SetName(c.name + "-" + kind)
				manifest.SetAnnotations(map[string]string{evenkeel.ProfileKey: c.profile})
				manifest.SetLabels(c.labels)
				made, err := applied(t.Context(), manifest)
				if err != nil {
					t.Fatal(err)
				}
				templates, err := workload.Templates(made)
				if err != nil || templates[0].Label(evenkeel.ProfileKey) != c.profile {
					t.Fatalf("the profile is not pinned: %v", err)
				}
				isStateOf(t, made, c.state) // and is so from now on
				inSync(t, manifest)
				again, err := applied(t.Context(), manifest)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(content(made), content(again)); diff != "" {
					t.Errorf("the same manifest changes the job: %s", diff)
				}
				manifest.SetAnnotations(map[string]string{evenkeel.ProfileKey: c.profile, "team": "a"}) // the next commit
				if again, err = applied(t.Context(), manifest); err != nil {
					t.Fatal(err)
				}
				inSync(t, manifest)
				isStateOf(t, again, c.state)
				if c.state != "runs" {
					waiting = append(waiting, manifest)
				}

				// By a client, which computes the patch.
				manifest = manifest.DeepCopy()
				manifest.SetName(manifest.GetName() + "-client")
				read := func() map[string]any {
					t.Helper()
					kubectlApply(t, manifest.Object)
					live := manifest.DeepCopy()
					isStateOf(t, live, c.state)
					return content(live)
				}
				if diff := cmp.Diff(read(), read()); diff != "" {
					t.Errorf("kubectl apply of the same manifest changes the job: %s", diff)
				}
			})
		}
	}
	// The controller starts jobs that Git does not say are suspended.
	if err := admin.Patch(t.Context(), policy, client.RawPatch(types.MergePatchType, []byte(`{"spec": {"gate": {"onTimeout": "Start"}}}`))); err != nil {
		t.Fatal(err)
	}
	for _, manifest := range waiting {
		isStateOf(t, manifest.DeepCopy(), "runs")
		inSync(t, manifest)
		if _, err := applied(t.Context(), manifest); err != nil {
			t.Fatal(err)
		}
		isStateOf(t, manifest.DeepCopy(), "runs")
	}
}
