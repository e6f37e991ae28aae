package preflight

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/cli"
)

// kubeconfig writes a kubeconfig of the API server's administrator and returns its path.
func kubeconfig(t *testing.T) string {
	t.Helper()
	return kubeconfigOf(t, config)
}

func kubeconfigOf(t *testing.T, config *rest.Config) string {
	t.Helper()
	encode := func(data []byte) string { return base64.StdEncoding.EncodeToString(data) }
	text, err := yaml.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"contexts": []any{map[string]any{"name": "test", "context": map[string]any{"cluster": "test", "user": "test"}}},
		"clusters": []any{map[string]any{"name": "test", "cluster": map[string]any{"server": config.Host, "certificate-authority-data": encode(config.CAData)}}},
		"users":    []any{map[string]any{"name": "test", "user": map[string]any{"client-certificate-data": encode(config.CertData), "client-key-data": encode(config.KeyData)}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// plugin runs `kubectl evenkeel`, and fails the test if it does not end with the status and say all of the words.
func plugin(t *testing.T, config string, status int, args string, words ...string) string {
	t.Helper()
	var out, errs bytes.Buffer
	code := cli.Run(t.Context(), append(strings.Fields(args), "--kubeconfig", config), &out, &errs)
	missing := slices.DeleteFunc(words, func(word string) bool { return strings.Contains(out.String()+errs.String(), word) })
	if code != status || len(missing) > 0 {
		t.Errorf("kubectl evenkeel %s: exit status %d, want %d; does not say %q\n%s%s", args, code, status, missing, out.String(), errs.String())
	}
	return out.String()
}

func TestKubectlPluginChecks(t *testing.T) {
	f := newFleet(t, links(map[string]float64{"cli-2": 0.1}))
	start(t, f, &clock{}, &clock{})
	newNodes(t, "cli", 4)
	config := kubeconfig(t)
	t.Cleanup(func() {
		if err := admin.DeleteAllOf(context.Background(), &evenkeel.NetworkCheck{}, client.InNamespace(namespace)); err != nil {
			t.Error(err)
		}
	})

	plugin(t, config, cli.ExitError, "check why cli-9", `no node is named "cli-9"`)
	plugin(t, config, cli.ExitPass, "check why cli-0", "cli-0: Unknown", "check run --nodes cli-0,")
	plugin(t, config, cli.ExitPass, "check run --launcher IndexedJob --nodes cli-0,cli-1 --min-bandwidth 500M --wait --name cli-good", "cli-good: Pass", "all 2 nodes passed", "over Evenkeel (ncclNet v10)", "median 1 GB/s")
	plugin(t, config, cli.ExitFail, "check run --launcher IndexedJob -l pool=cli --wait --name cli-slow", "cli-slow: Fail", "cli-2", "TooSlow", "100 MB/s", "check why cli-2", "ended")
	plugin(t, config, cli.ExitError, "check run --name cli-slow", "already exists")
	plugin(t, config, cli.ExitInconclusive, "check run -l pool=nobody --wait --name cli-none", "cli-none: Inconclusive", "no node matches")
	plugin(t, config, cli.ExitError, "check run --stage Rails", "stage Rails needs rails")

	eventually(t, "the result has reached the node", func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKey{Name: "cli-2"}, &evenkeel.NodeNetworkHealth{})
		return err == nil, client.IgnoreNotFound(err)
	})
	eventually(t, "and its status too", func(ctx context.Context) (bool, error) {
		state := &evenkeel.NodeNetworkHealth{}
		err := admin.Get(ctx, client.ObjectKey{Name: "cli-2"}, state)
		return state.Status.Health == evenkeel.HealthUnhealthy, err
	})
	plugin(t, config, cli.ExitPass, "check why cli-2", "cli-2: Unhealthy since", "TooSlow", "measured   100 MB/s", "at least   468 MB/s", "in check cli-slow", "Pairs   1", "Pairs   2", "too slow, over Evenkeel",
		"no NetworkCheckPolicy selects the node", "ethtool", "check run --nodes cli-2,cli-")
	plugin(t, config, cli.ExitPass, "check status", "1 unhealthy (cli-2)", "no NetworkCheckPolicy", "cli-slow", "Inconclusive", "check why cli-2")
	plugin(t, config, cli.ExitPass, "check status cli-slow", "cli-slow: Fail", "4 nodes: 3 passed, 1 failed", "report cli-slow --svg")
	plugin(t, config, cli.ExitError, "check status nothing", `"nothing" not found`)

	svg := filepath.Join(t.TempDir(), "pairs.svg")
	if report := plugin(t, config, cli.ExitPass, "report cli-slow --svg "+svg); !strings.HasPrefix(report, "# Network check cli-slow: Fail\n") {
		t.Errorf("the report is %q", report)
	}
	if drawn, err := os.ReadFile(svg); err != nil || !bytes.HasPrefix(drawn, []byte("<svg")) {
		t.Errorf("%v: %q", err, drawn)
	}
	plugin(t, config, cli.ExitError, "report cli-none", "check cli-none has no report: no node matches")

	if err := admin.Delete(t.Context(), &evenkeel.NetworkCheck{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "cli-slow"}}); err != nil {
		t.Fatal(err)
	}
	plugin(t, config, cli.ExitPass, "check why cli-2", "cli-2: Unhealthy since", "Check cli-slow", "was deleted")
}

func TestKubectlPluginWhyJob(t *testing.T) {
	config := kubeconfig(t)
	newNodes(t, "why", 1)
	bad := []byte(`{"metadata": {"labels": {"evenkeel.dev/network": "unhealthy"}}}`)
	if err := admin.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "why-0"}}, client.RawPatch("application/merge-patch+json", bad)); err != nil {
		t.Fatal(err)
	}
	yes := true
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "llama", Annotations: map[string]string{evenkeel.ProfileKey: "default"}}}
	job.Spec.Suspend = &yes
	// What the workload webhook does.
	job.Spec.Template.Labels = map[string]string{evenkeel.ProfileKey: "default", evenkeel.ReductionClientKey: "llama-reduce-0"}
	job.Spec.Template.Annotations = map[string]string{
		evenkeel.PluginImageKey: pluginName, evenkeel.DeliveryKey: "ImageVolume", evenkeel.PluginPathKey: "/opt/evenkeel/plugin", evenkeel.ConflictPolicyKey: "Keep",
		evenkeel.EnvironmentKey: `{"EVENKEEL_FLOWS": "4"}`, evenkeel.ReductionServersKey: "llama-reduce-0-0.llama-reduce-0.default.svc:7470",
	}
	job.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "c"}}}
	plain := job.DeepCopy()
	plain.Name, plain.Annotations = "plain", nil
	for _, j := range []*batchv1.Job{job, plain} {
		if err := admin.Create(t.Context(), j); err != nil {
			t.Fatal(err)
		}
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "default", Name: "llama-0", OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(job, batchv1.SchemeGroupVersion.WithKind("Job"))},
		Annotations: map[string]string{
			evenkeel.InjectedKey: "1234", evenkeel.SkippedKey: "container c sets NCCL_NET_PLUGIN itself",
			evenkeel.PluginStatusKey: "Failed 2026-11-23T07:00:00Z EVENKEEL_FLOWS=many is not valid",
		},
	}, Spec: job.Spec.Template.Spec}
	pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/gate"}}
	if err := admin.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, object := range []client.Object{pod, job, plain} {
			if err := admin.Delete(context.Background(), object, client.GracePeriodSeconds(0), client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
				t.Error(err)
			}
		}
	})
	words := []string{"Job default/llama: profile default", pluginName, "ImageVolume, in /opt/evenkeel/plugin", "EVENKEEL_FLOWS=4", "reduction servers llama-reduce-0-0.llama-reduce-0.default.svc:7470", "llama-0", "left unchanged: container c sets NCCL_NET_PLUGIN itself",
		"the plugin refused to start, so NCCL does without: EVENKEEL_FLOWS=many", "it is suspended, but not by Evenkeel", "gate example.com/gate", "Its pods avoid\n  why-0"}
	plugin(t, config, cli.ExitPass, "why llama", words...)
	plugin(t, config, cli.ExitPass, "why job/llama -n default", words...)
	text := `{"since":"2026-11-25T10:00:00Z","recorded":"2026-11-25T10:00:41Z","at":%q,"ranks":8,"text":"7 of 8 ranks wait for card eth1 of n3","suspects":[{"class":"link","host":"n3","device":"eth1","confidence":0.9}]}`
	says := func(at time.Time) {
		t.Helper()
		patch := fmt.Sprintf(`{"metadata": {"annotations": {"evenkeel.dev/suspects": %q}}}`, fmt.Sprintf(text, at.UTC().Format(time.RFC3339)))
		if err := admin.Patch(t.Context(), pod.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
			t.Fatal(err)
		}
	}
	if err := admin.Status().Patch(t.Context(), pod.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"status": {"phase": "Running"}}`))); err != nil {
		t.Fatal(err)
	}
	says(time.Now())
	plugin(t, config, cli.ExitPass, "why llama", "Its ranks wait, since 2026-11-25 10:00:00 UTC", "7 of 8 ranks wait for card eth1 of n3", "link, card eth1 of n3: confidence 90 %")
	says(time.Now().Add(-time.Hour))
	if out := plugin(t, config, cli.ExitPass, "why llama"); strings.Contains(out, "Its ranks wait") {
		t.Errorf("nobody has said so for an hour:\n%s", out)
	}
	plugin(t, config, cli.ExitPass, "why plain", "has no annotation evenkeel.dev/profile")
	plugin(t, config, cli.ExitError, "why another", `PyTorchJob named "another"`)
	plugin(t, config, cli.ExitError, "why cronjob/llama", `"llama" not found`)
	plugin(t, config, cli.ExitError, "why sailboat/llama", `the cluster has no kind "sailboat"`)
	plugin(t, config, cli.ExitPass, "why pod/llama-0", "Pod default/llama-0: no pod of it has the plugin", "belongs on its pod template", "EVENKEEL_FLOWS=many")
}

// What is in force is what the template asks for and what the plugin reports.
func TestKubectlPluginWhyEncryption(t *testing.T) {
	config := kubeconfig(t)
	removed := func(object client.Object) {
		t.Cleanup(func() {
			if err := admin.Delete(context.Background(), object, client.GracePeriodSeconds(0), client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
				t.Error(err)
			}
		})
	}
	job := func(name string, labels, annotations map[string]string) *batchv1.Job {
		j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Annotations: map[string]string{evenkeel.ProfileKey: "default"}}}
		j.Spec.Suspend = new(bool)
		*j.Spec.Suspend = true
		// What the workload webhook does.
		j.Spec.Template.Labels = map[string]string{evenkeel.ProfileKey: "default"}
		maps.Copy(j.Spec.Template.Labels, labels)
		j.Spec.Template.Annotations = map[string]string{
			evenkeel.PluginImageKey: pluginName, evenkeel.DeliveryKey: "ImageVolume", evenkeel.PluginPathKey: "/plugin", evenkeel.ConflictPolicyKey: "Keep",
			evenkeel.EnvironmentKey: `{"EVENKEEL_ENCRYPTION": "required", "NCCL_NET": "Evenkeel"}`,
		}
		maps.Copy(j.Spec.Template.Annotations, annotations)
		j.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{
			Name: "c", Image: "c", Env: []corev1.EnvVar{{Name: "EVENKEEL_ENCRYPTION", Value: "required"}}}}}
		if err := admin.Create(t.Context(), j); err != nil {
			t.Fatal(err)
		}
		removed(j)
		return j
	}
	made := job("secret", map[string]string{evenkeel.JobKeyKey: "secret-key-01234567"}, nil)
	job("theirs", nil, map[string]string{evenkeel.JobKeyKey: "their.secret"})
	job("reduced", map[string]string{evenkeel.ReductionClientKey: "reduced-reduce-0"}, map[string]string{evenkeel.ReductionServersKey: "a:1,b:1"})
	const encrypts, old = "encryption required (TLS 1.3), devices: eth0", "devices: eth0"
	for name, text := range map[string]string{"secret-0": encrypts, "secret-1": old} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name, Labels: map[string]string{evenkeel.ProfileKey: "default"}, OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(made, batchv1.SchemeGroupVersion.WithKind("Job"))},
			Annotations: map[string]string{evenkeel.InjectedKey: "1234", evenkeel.PluginStatusKey: "Loaded 2026-11-23T07:00:00Z version 0.2.0, protocol 8, " + text},
		}, Spec: made.Spec.Template.Spec}
		if err := admin.Create(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		removed(pod)
	}
	clear := "sends in clear, although its profile requires encryption"
	out := plugin(t, config, cli.ExitPass, "why secret", "encryption required", "Secret secret-key-01234567, made by Evenkeel", encrypts+"\n", clear)
	if strings.Count(out, clear) != 1 {
		t.Errorf("one of two pods does not encrypt:\n%s", out)
	}
	plugin(t, config, cli.ExitPass, "why theirs", "Secret their.secret, brought by the job's user")
	plugin(t, config, cli.ExitPass, "why reduced", "Secret reduced-reduce-0, made by Evenkeel")
}

// No controller runs here: what is said follows from the objects alone.
func TestKubectlPluginWhyJobWaits(t *testing.T) {
	config := kubeconfig(t)
	newNodes(t, "waits", 2)
	newPolicy(t, "waits", onStart(nil))
	gated := newJob(t, "PyTorchJob", "waits", nil)
	plugin(t, config, cli.ExitPass, "why pytorchjob/pytorchjob-waits", "It waits\n  Evenkeel suspended it: waits until the network of waits-0, waits-1 is checked; it starts in any case at", "It has no pods")
	elsewhere := newJob(t, "Job", "nowhere", nil)
	plugin(t, config, cli.ExitPass, "why "+elsewhere.GetName(), "Evenkeel suspended it: it is about to start: no node that it may run on is there")

	// A pod that the job's controller made by way of another object, and one that is none of the job's.
	child := newJob(t, "Job", "waits", func(j *unstructured.Unstructured) {
		j.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(gated, gated.GroupVersionKind())})
	})
	for _, owner := range []*unstructured.Unstructured{child, elsewhere} {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: users, Name: "of-" + owner.GetName(), Labels: map[string]string{evenkeel.ProfileKey: "default"},
				OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(owner, owner.GroupVersionKind())},
			},
			Spec: corev1.PodSpec{
				NodeSelector: map[string]string{"pool": "waits"}, SchedulingGates: []corev1.PodSchedulingGate{{Name: evenkeel.SchedulingGate}},
				Containers: []corev1.Container{{Name: "main", Image: "registry.example.com/train:1"}},
			},
		}
		if err := admin.Create(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := admin.Delete(context.Background(), pod, client.GracePeriodSeconds(0)); err != nil {
				t.Error(err)
			}
		})
	}
	out := plugin(t, config, cli.ExitPass, "why pytorchjob/pytorchjob-waits", "of-job-waits", "1 of its pods have the scheduling gate evenkeel.dev/preflight since 20", "waits until the network of waits-0, waits-1")
	if strings.Contains(out, "of-job-nowhere") {
		t.Errorf("the pod of another job is listed:\n%s", out)
	}

	queued := newJob(t, "Job", "queued", func(j *unstructured.Unstructured) {
		j.SetLabels(map[string]string{"kueue.x-k8s.io/queue-name": "team"})
	})
	plugin(t, config, cli.ExitPass, "why job-queued", "Kueue's queue team has yet to start it")
	w := reservedWorkload(t, "queued", "network", "waits-0")
	w.SetLabels(map[string]string{"kueue.x-k8s.io/job-uid": string(queued.GetUID())})
	if err := admin.Update(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	plugin(t, config, cli.ExitPass, "why job-queued", "Kueue's admission check network is Pending", "Kueue's admission check another is Pending")
}

// Jobs that wait for nodes which an autoscaler has yet to bring.
func TestKubectlPluginWhyJobWaitsForNodes(t *testing.T) {
	config := kubeconfig(t)
	queued := newJob(t, "Job", "provisioned", func(j *unstructured.Unstructured) {
		j.SetLabels(map[string]string{"kueue.x-k8s.io/queue-name": "team"})
	})
	w := reservedWorkload(t, "provisioned", "network", "provisioned-0")
	w.SetLabels(map[string]string{"kueue.x-k8s.io/job-uid": string(queued.GetUID())})
	if err := admin.Update(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	request := func(name, owner, conditions string) *unstructured.Unstructured {
		return kueueObject(t, fmt.Sprintf(`{apiVersion: autoscaling.x-k8s.io/v1, kind: ProvisioningRequest, metadata: {name: %s, namespace: %s,
  ownerReferences: [{apiVersion: kueue.x-k8s.io/v1beta2, kind: Workload, name: w, uid: %q, controller: true}]},
  spec: {provisioningClassName: check-capacity.autoscaling.x-k8s.io, podSets: [{count: 1, podTemplateRef: {name: t}}]},
  status: {conditions: [%s]}}`, name, users, owner, conditions))
	}
	const at = `lastTransitionTime: "2026-11-21T12:00:00Z", reason: R`
	request("of-another", "1234", "")
	request("failed-1", string(w.GetUID()), `{type: Failed, status: "True", message: out of stock, `+at+`}`)
	request("pending-2", string(w.GetUID()), `{type: Accepted, status: "True", message: it was read, `+at+`}, {type: Provisioned, status: "False", message: capacity is short, `+at+`}`)
	out := plugin(t, config, cli.ExitPass, "why "+queued.GetName(),
		"It waits\n  it waits for nodes, and not for a check of them: ProvisioningRequest pending-2 (check-capacity.autoscaling.x-k8s.io) asks an autoscaler for them: capacity is short\n",
		"Kueue's admission check network is Pending")
	if strings.Contains(out, "of-another") || strings.Contains(out, "failed-1") {
		t.Errorf("a request that is not waited for is named:\n%s", out)
	}

	owner := newJob(t, "Job", "unschedulable", nil)
	pod := func(name string, events ...corev1.Event) {
		t.Helper()
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: users, Name: name, Labels: map[string]string{evenkeel.ProfileKey: "default"},
				OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(owner, owner.GroupVersionKind())},
			},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "registry.example.com/train:1"}}},
		}
		if err := admin.Create(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := admin.Delete(context.Background(), p, client.GracePeriodSeconds(0)); err != nil {
				t.Error(err)
			}
		})
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}}
		if err := admin.Status().Update(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		for i, e := range events {
			e.Namespace, e.Name = users, fmt.Sprintf("%s-%d", name, i)
			e.InvolvedObject = corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: users, Name: name, UID: p.UID}
			if err := admin.Create(t.Context(), &e); err != nil {
				t.Fatal(err)
			}
		}
	}
	event := func(minutes int, component, reason, message string) corev1.Event {
		return corev1.Event{Source: corev1.EventSource{Component: component}, Reason: reason, Message: message, LastTimestamp: metav1.NewTime(time.Now().Add(-time.Duration(minutes) * time.Minute))}
	}
	pod("scaled", event(9, "cluster-autoscaler", "NotTriggerScaleUp", "pod did not trigger scale-up"), event(5, "cluster-autoscaler", "TriggeredScaleUp", "pod triggered scale-up: [{gpus 3->4 (max: 8)}]"), event(1, "default-scheduler", "FailedScheduling", "0/3"))
	pod("nominated", event(5, "karpenter", "Nominated", "Pod should schedule on: nodeclaim/gpu-4x7"))
	pod("full", event(9, "cluster-autoscaler", "TriggeredScaleUp", "pod triggered scale-up: [{gpus 7->8 (max: 8)}]"), event(5, "cluster-autoscaler", "NotTriggerScaleUp", "pod did not trigger scale-up: 1 max node group size reached"))
	pod("alone")
	plugin(t, config, cli.ExitPass, "why "+owner.GetName(),
		"pod scaled fits on no node: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu; a node is on its way, said cluster-autoscaler 5m", "pod triggered scale-up: [{gpus 3->4",
		"3 Insufficient nvidia.com/gpu; a node is on its way, said karpenter 5m", "ago: Pod should schedule on: nodeclaim/gpu-4x7",
		"3 Insufficient nvidia.com/gpu; no node comes for it, said cluster-autoscaler 5m", "max node group size reached",
		"pod alone fits on no node: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu\n")
}

// Objects of any kind whose pods wait. No controller runs here: their pods and what is between are made as controllers make them.
func TestKubectlPluginWhyPodsOfAnyKindWait(t *testing.T) {
	config := kubeconfig(t)
	newNodes(t, "kinds", 2)
	policy := newPolicy(t, "kinds", onStart(nil))
	ray := newRayKind(t)
	object := func(version, kind, spec string) *unstructured.Unstructured {
		made := &unstructured.Unstructured{}
		text := strings.ReplaceAll(spec, "TEMPLATE", `{metadata: {labels: {app: kinds}}, spec: {restartPolicy: POLICY, containers: [{name: main, image: "registry.example.com/train:1"}]}}`)
		policy := "Always"
		if strings.Contains(kind, "Job") {
			policy = "Never"
		}
		if err := yaml.Unmarshal([]byte(fmt.Sprintf("{apiVersion: %s, kind: %s, metadata: {name: why-%s}, spec: %s}", version, kind, strings.ToLower(kind), strings.ReplaceAll(text, "POLICY", policy))), &made.Object); err != nil {
			t.Fatal(err)
		}
		made.SetNamespace(users)
		eventually(t, kind+" is created", func(ctx context.Context) (bool, error) {
			return admin.Create(ctx, made) == nil, nil // a kind may be served a moment after it is established
		})
		t.Cleanup(func() {
			if err := admin.Delete(context.Background(), made, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
				t.Error(err)
			}
		})
		return made
	}
	ownedBy := func(child, owner *unstructured.Unstructured) *unstructured.Unstructured {
		patch := client.MergeFrom(child.DeepCopy())
		child.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(owner, owner.GroupVersionKind())})
		if err := admin.Patch(t.Context(), child, patch); err != nil {
			t.Fatal(err)
		}
		return child
	}
	set := object("apps/v1", "StatefulSet", "{serviceName: kinds, selector: {matchLabels: {app: kinds}}, template: TEMPLATE}")
	deployment := object("apps/v1", "Deployment", "{selector: {matchLabels: {app: kinds}}, template: TEMPLATE}")
	replicas := ownedBy(object("apps/v1", "ReplicaSet", "{selector: {matchLabels: {app: kinds}}, template: TEMPLATE}"), deployment)
	cron := object("batch/v1", "CronJob", `{schedule: "* * * * *", jobTemplate: {spec: {template: TEMPLATE}}}`)
	job := ownedBy(object("batch/v1", "Job", "{template: TEMPLATE}"), cron)
	cluster := object(ray.GroupVersion().String(), ray.Kind, "{}")
	for name, test := range map[string]struct{ asked, owner *unstructured.Unstructured }{
		"statefulset": {set, set}, "deployment": {deployment, replicas}, "cronjob": {cron, job}, "raycluster": {cluster, cluster},
	} {
		owner := *metav1.NewControllerRef(test.owner, test.owner.GroupVersionKind())
		pods := []*corev1.Pod{gangPod(t, name+"-0", []string{"kinds"}, owner, nil), gangPod(t, name+"-1", []string{"kinds"}, owner, nil)}
		words := []string{"have the scheduling gate evenkeel.dev/preflight since 20", "waits until the network of kinds-0, kinds-1 is checked", "it starts in any case at", fmt.Sprintf("kubectl annotate pod %s-0 -n default evenkeel.dev/gate=Disabled", name)}
		plugin(t, config, cli.ExitPass, "why "+name+"/"+test.asked.GetName(), append(words, "profile default, by the annotation of its pods", "It waits\n  2 of its pods")...)
		plugin(t, config, cli.ExitPass, "why pod/"+pods[1].Name, append(words, "It waits\n  1 of its pods", "with 1 others of "+test.owner.GetKind()+" "+test.owner.GetName())...)
	}
	if err := admin.Patch(t.Context(), policy, client.RawPatch("application/merge-patch+json", []byte(`{"spec": {"gate": {"onTimeout": "Wait", "optOut": "Forbidden"}}}`))); err != nil {
		t.Fatal(err)
	}
	plugin(t, config, cli.ExitPass, "why raycluster/"+cluster.GetName(), "its policy lets it wait without a limit", "NetworkCheckPolicy kinds makes the gate mandatory")
}

// newRayKind has the API server serve RayClusters, of which nobody knows anything here.
func newRayKind(t *testing.T) schema.GroupVersionKind {
	t.Helper()
	definition := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(`{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: rayclusters.ray.io}, spec: {
  group: ray.io, scope: Namespaced, names: {kind: RayCluster, listKind: RayClusterList, plural: rayclusters, singular: raycluster},
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]}}`), &definition.Object); err != nil {
		t.Fatal(err)
	}
	if err := admin.Create(t.Context(), definition); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := admin.Delete(context.Background(), definition); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "RayClusters are served", func(ctx context.Context) (bool, error) {
		if err := admin.Get(ctx, client.ObjectKeyFromObject(definition), definition); err != nil {
			return false, err
		}
		conditions, _, _ := unstructured.NestedSlice(definition.Object, "status", "conditions") // a new one has none
		return slices.ContainsFunc(conditions, func(item any) bool {
			c, _ := item.(map[string]any)
			return c["type"] == "Established" && c["status"] == "True"
		}), nil
	})
	return schema.GroupVersionKind{Group: "ray.io", Version: "v1", Kind: "RayCluster"}
}
