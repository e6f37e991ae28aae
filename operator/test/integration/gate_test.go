package integration

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	"evenkeel.dev/evenkeel/operator/internal/preflight/gate"
	"evenkeel.dev/evenkeel/operator/internal/workload"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// newReadyNode makes a node that pods may run on.
func newReadyNode(t *testing.T, name string, labels map[string]string) {
	t.Helper()
	newNode(t, name, "v1.36.3", "containerd://2.1.4", labels)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := admin.Patch(t.Context(), node.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"spec": {"taints": null}}`))); err != nil {
		t.Fatal(err)
	}
	ready := []byte(`{"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Test"}]}}`)
	if err := admin.Status().Patch(t.Context(), node, client.RawPatch(types.StrategicMergePatchType, ready)); err != nil {
		t.Fatal(err)
	}
}

// heldJob is an annotated job for the pool's nodes.
func heldJob(t *testing.T, kind, namespace string, pool map[string]string) *unstructured.Unstructured {
	t.Helper()
	job, paths := newJob(kind, namespace, "default")
	for _, path := range paths {
		if err := unstructured.SetNestedStringMap(job.Object, pool, append(append([]string{}, path...), "spec", "nodeSelector")...); err != nil {
			t.Fatal(err)
		}
	}
	return job
}

// said is the Event about the object with the reason, empty if there is none.
func said(t *testing.T, about client.Object, reason string) string {
	t.Helper()
	var events corev1.EventList
	if err := admin.List(t.Context(), &events, client.InNamespace(about.GetNamespace())); err != nil {
		t.Fatal(err)
	}
	for _, e := range events.Items {
		if e.InvolvedObject.UID == about.GetUID() && e.Reason == reason {
			return e.Message
		}
	}
	return ""
}

// isOpenForLaterPods has the pods of a job replaced, while the policy lets no job start that is not proven.
func isOpenForLaterPods(t *testing.T, job *unstructured.Unstructured, policy *evenkeel.NetworkCheckPolicy, pods []*corev1.Pod) {
	t.Helper()
	onTimeout := func(action evenkeel.GateTimeout) {
		patch := fmt.Sprintf(`{"spec": {"gate": {"onTimeout": %q}}}`, action)
		p := policy.DeepCopy()
		if err := admin.Patch(t.Context(), p, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the controller has seen the policy", func(ctx context.Context) (bool, error) {
			err := admin.Get(ctx, client.ObjectKeyFromObject(p), p)
			return p.Status.ObservedGeneration == p.Generation, err
		})
	}
	onTimeout(evenkeel.GateWait)
	defer onTimeout(evenkeel.GateStart)
	gated := map[string]string{evenkeel.GatedKey: evenkeel.GatedValue}
	another := func(pod *corev1.Pod, labels map[string]string, change func(*corev1.Pod)) *corev1.Pod {
		later := pod.DeepCopy()
		later.ObjectMeta = metav1.ObjectMeta{
			Namespace: pod.Namespace, GenerateName: "later-", OwnerReferences: slices.Clone(pod.OwnerReferences), Annotations: maps.Clone(pod.Annotations), Labels: maps.Clone(gated),
		}
		maps.Copy(later.Labels, labels)
		if change != nil {
			change(later)
		}
		return createPod(t, later)
	}
	injected := map[string]string{evenkeel.ProfileKey: pods[0].Labels[evenkeel.ProfileKey]}
	ofController := func(kind *unstructured.Unstructured) func(*corev1.Pod) {
		if kind.GetKind() != "LeaderWorkerSet" {
			return nil
		}
		return func(p *corev1.Pod) { // as its StatefulSets make them
			p.OwnerReferences[0].APIVersion, p.OwnerReferences[0].Kind = "apps/v1", "StatefulSet"
			p.Labels["leaderworkerset.sigs.k8s.io/name"] = kind.GetName()
		}
	}
	// Nobody opens gates while the controller is away.
	if err := install.controller.stop(); err != nil {
		t.Fatal(err)
	}
	install.controller = nil
	for _, pod := range pods {
		// A pod of a busy API server keeps its gate.
		eventually(t, "without a controller, a later pod of "+pod.Annotations[evenkeel.TemplateKey]+" gets no gate", func(context.Context) (bool, error) {
			later := another(pod, injected, ofController(job))
			return len(later.Spec.SchedulingGates) == 0 && later.Labels[evenkeel.GatedKey] == "" && later.Annotations[evenkeel.InjectedKey] != "", nil
		})
	}
	other := another(pods[0], injected, func(p *corev1.Pod) { p.Annotations[evenkeel.TemplateKey] = "spec.another.template" })
	var err error
	if install.controller, err = install.startController(); err != nil {
		t.Fatal(err)
	}
	for _, pod := range pods {
		// As if the webhook had not found out: it is not called for this one.
		later := another(pod, nil, func(p *corev1.Pod) {
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: evenkeel.SchedulingGate}}
		})
		eventually(t, "a later pod of "+pod.Annotations[evenkeel.TemplateKey]+" may be scheduled", func(ctx context.Context) (bool, error) {
			err := admin.Get(ctx, client.ObjectKeyFromObject(later), later)
			return len(later.Spec.SchedulingGates) == 0, err
		})
	}
	if err := admin.Get(t.Context(), client.ObjectKeyFromObject(other), other); err != nil || len(other.Spec.SchedulingGates) != 1 {
		t.Errorf("a pod of a template that was never opened: %v, gates %v", err, other.Spec.SchedulingGates)
	}
	controller, err := client.New(apiserver.As(config, systemNamespace, "evenkeel-controller"), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	for _, patch := range []string{`{"metadata": {"annotations": {"evenkeel.dev/profile": "other"}}}`, `{"metadata": {"labels": {"a": "b"}}}`, `{"metadata": {"finalizers": ["example.com/a"]}}`, `{"spec": {"minAvailable": 1, "replicas": 7}}`} {
		err := controller.Patch(t.Context(), job.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch)))
		refused(t, err, "may change the annotation evenkeel.dev/opened-templates only")
	}
}

// newGate makes two nodes and a policy that gates jobs on them, and returns the policy, the pool and a namespace for jobs, when the
// webhook knows of it.
func newGate(t *testing.T, name string, change func(*evenkeel.NetworkCheckPolicySpec)) (policy *evenkeel.NetworkCheckPolicy, pool map[string]string, namespace string) {
	t.Helper()
	// The leader applies the profile after it has started.
	waitProfile(t, "default", func(p *evenkeel.NetworkProfile) bool { return ready(p) != nil })
	pool = map[string]string{"pool": name}
	for i := range 2 {
		newReadyNode(t, fmt.Sprintf("%s-%d", name, i), pool)
	}
	policy = &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	policy.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: pool}
	policy.Spec.Triggers = evenkeel.TriggerSpec{JobStart: evenkeel.SwitchEnabled, NewNodes: evenkeel.SwitchDisabled}
	policy.Spec.Check.Runner.Type = evenkeel.RunnerBench
	if change != nil {
		change(&policy.Spec)
	}
	if err := admin.Create(t.Context(), policy); err != nil {
		t.Fatal(err)
	}
	remove(t, policy)
	t.Cleanup(func() {
		// The garbage collector would do this.
		if err := admin.DeleteAllOf(context.Background(), &evenkeel.NetworkCheck{}, client.InNamespace(systemNamespace), client.MatchingLabels{evenkeel.PolicyKey: policy.Name}); err != nil {
			t.Error(err)
		}
	})
	// A job whose nodes the controller does not know has nothing to wait for.
	eventually(t, "the controller has the nodes in its cache", func(ctx context.Context) (bool, error) {
		err := admin.Get(ctx, client.ObjectKeyFromObject(policy), policy)
		return policy.Status.Nodes != nil && *policy.Status.Nodes == 2, err
	})
	namespace = newNamespace(t, nil)
	eventually(t, "the webhook has the policy in its cache", func(ctx context.Context) (bool, error) {
		job := heldJob(t, "Job", namespace, pool)
		err := dryRun(ctx, job)
		suspended, _ := workload.Suspended(job)
		return suspended, err
	})
	return policy, pool, namespace
}

// waitRegardless keeps jobs waiting: the installation has no bench image, so that no check can be run.
func waitRegardless(s *evenkeel.NetworkCheckPolicySpec) { s.Gate.OnTimeout = evenkeel.GateWait }

// stateOf is how a job is: suspended or running, and the value of the gate's label.
func stateOf(ctx context.Context, job *unstructured.Unstructured) (string, error) {
	if err := admin.Get(ctx, client.ObjectKeyFromObject(job), job); err != nil {
		return "", err
	}
	text := "runs"
	if suspended, _ := workload.Suspended(job); suspended {
		text = "suspended"
	}
	if label := job.GetLabels()[evenkeel.GatedKey]; label != "" {
		text += ", gated " + label
	}
	return text, nil
}

func isStateOf(t *testing.T, job *unstructured.Unstructured, want string) {
	t.Helper()
	got := ""
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s %s was last seen %q", job.GetKind(), job.GetName(), got)
		}
	})
	eventually(t, fmt.Sprintf("the %s is %s", job.GetKind(), want), func(ctx context.Context) (bool, error) {
		var err error
		got, err = stateOf(ctx, job)
		return got == want, err
	})
}

// Kueue gives a job without a queue the namespace's default one, after Evenkeel has gated the job. It finds the job suspended, and
// starts it when the job has its quota.
func TestGateLeavesJobOfDefaultQueueToKueue(t *testing.T) {
	_, pool, ns := newGate(t, "defaulted", waitRegardless)
	laterWebhook(t, ns, admissionregistrationv1.Rule{APIGroups: []string{"batch", "kubeflow.org"}, APIVersions: []string{"v1"}, Resources: []string{"jobs", "pytorchjobs"}},
		`[{"op": "add", "path": "/metadata/labels/kueue.x-k8s.io~1queue-name", "value": "default"}]`)
	for _, kind := range []string{"Job", "PyTorchJob"} {
		var job *unstructured.Unstructured
		eventually(t, "the other webhook is called", func(ctx context.Context) (bool, error) {
			job = heldJob(t, kind, ns, pool)
			err := dryRun(ctx, job)
			return workload.Queue(job) == "default", err
		})
		if suspended, _ := workload.Suspended(job); !suspended || job.GetLabels()[evenkeel.GatedKey] != "" {
			t.Errorf("the %s runs without quota, or has two gates: %v", kind, job.Object)
		}
	}
}

// A queue's label is left in a template, and the cluster has no Kueue. The label keeps Evenkeel's gate away, a mandatory one too.
func TestQueueWithoutKueueWarns(t *testing.T) {
	_, pool, ns := newGate(t, "queueless", func(s *evenkeel.NetworkCheckPolicySpec) {
		waitRegardless(s)
		s.Gate.OptOut = evenkeel.GateOptOutForbidden
	})
	var warnings recordedWarnings
	as := rest.CopyConfig(config)
	as.WarningHandler = &warnings
	c, err := client.New(as, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		queue string
		want  bool
	}{"in a queue": {"team", true}, "in none": {"", false}} {
		warnings.list = nil
		job := heldJob(t, "Job", ns, pool)
		if test.queue != "" {
			job.SetLabels(map[string]string{workload.QueueKey: test.queue})
		}
		if err := c.Create(t.Context(), job, client.DryRunAll); err != nil {
			t.Fatal(err)
		}
		if said := strings.Join(warnings.list, " "); strings.Contains(said, "label kueue.x-k8s.io/queue-name: team: the cluster has no Kueue") != test.want {
			t.Errorf("a job that is %s: warned %q", name, said)
		}
	}
}

// The webhook gates a job, and the controller starts it. The installation has no bench image, so that its checks cannot be
// run: the job starts because of that.
func TestGateOfInstallation(t *testing.T) {
	policy, pool, ns := newGate(t, "gated", nil)
	for _, kind := range []string{"Job", "PyTorchJob"} {
		t.Run(kind, func(t *testing.T) {
			job := heldJob(t, kind, ns, pool)
			createJob(t, job)
			if suspended, _ := workload.Suspended(job); !suspended || job.GetLabels()[evenkeel.GatedKey] != evenkeel.GatedValue {
				t.Fatalf("the job is not gated: %v", job.Object)
			}
			eventually(t, "the job starts", func(ctx context.Context) (bool, error) {
				err := admin.Get(ctx, client.ObjectKeyFromObject(job), job)
				suspended, _ := workload.Suspended(job)
				_, gated := job.GetLabels()[evenkeel.GatedKey]
				return !suspended && !gated, err
			})
			if said := said(t, job, gate.ReasonNotProven); !strings.Contains(said, "could not be run: spec.runner.image is not set") {
				t.Errorf("the Events of the job are %q", said)
			}

			free := heldJob(t, kind, ns, pool)
			free.SetName("free")
			free.SetAnnotations(map[string]string{evenkeel.ProfileKey: "default", evenkeel.GateKey: evenkeel.GateDisabled})
			mine := heldJob(t, kind, ns, pool)
			mine.SetName("mine")
			if err := workload.Suspend(mine, true); err != nil {
				t.Fatal(err)
			}
			for name, job := range map[string]*unstructured.Unstructured{"free": free, "mine": mine} {
				createJob(t, job)
				if suspended, _ := workload.Suspended(job); suspended != (name == "mine") || job.GetLabels()[evenkeel.GatedKey] != "" {
					t.Errorf("%s: %v", name, job.Object)
				}
			}
		})
	}
	// Jobs that cannot be suspended are gated pod by pod.
	for name, text := range map[string]string{
		"Volcano's Job":   `{apiVersion: batch.volcano.sh/v1alpha1, kind: Job, spec: {minAvailable: 2, tasks: [{name: worker, replicas: 2, template: T}]}}`,
		"LeaderWorkerSet": `{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, spec: {leaderWorkerTemplate: {size: 2, leaderTemplate: T, workerTemplate: T}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			job := &unstructured.Unstructured{}
			text := strings.ReplaceAll(text, "emplate: T", `emplate: {spec: {nodeSelector: {pool: gated}, containers: [{name: c, image: "registry.example.com/train:1"}]}}`)
			if err := yaml.UnmarshalStrict([]byte(text), &job.Object); err != nil {
				t.Fatal(err)
			}
			job.SetNamespace(ns)
			job.SetName("gated")
			job.SetAnnotations(map[string]string{evenkeel.ProfileKey: "default"})
			createJob(t, job)
			templates, err := workload.Templates(job)
			if err != nil {
				t.Fatal(err)
			}
			var pods []*corev1.Pod
			for _, template := range templates {
				spec, err := template.PodSpec()
				if err != nil {
					t.Fatal(err)
				}
				// What the kind's controller makes of the template.
				pod := createPod(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
					Namespace: ns, GenerateName: "gated-", Annotations: template.Annotations(),
					Labels:          map[string]string{evenkeel.ProfileKey: template.Label(evenkeel.ProfileKey), evenkeel.GatedKey: template.Label(evenkeel.GatedKey)},
					OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(job, job.GroupVersionKind())},
				}, Spec: *spec})
				if len(pod.Spec.SchedulingGates) != 1 || pod.Spec.SchedulingGates[0].Name != evenkeel.SchedulingGate || pod.Annotations[evenkeel.InjectedKey] == "" {
					t.Errorf("%s: its pod is %+v", template.Path, pod)
				}
				pods = append(pods, pod)
				eventually(t, "the pod of "+template.Path+" may be scheduled", func(ctx context.Context) (bool, error) {
					err := admin.Get(ctx, client.ObjectKeyFromObject(pod), pod)
					return len(pod.Spec.SchedulingGates) == 0 && pod.Labels[evenkeel.GatedKey] == "", err
				})
			}
			if said := said(t, job, gate.ReasonNotProven); !strings.Contains(said, "could not be run: spec.runner.image is not set") {
				t.Errorf("the Events of the job are %q", said)
			}
			isOpenForLaterPods(t, job, policy, pods)
		})
	}
	// So are pods of owners of any other kind, which their own annotation reaches.
	t.Run("annotated pods", func(t *testing.T) {
		yes := true
		made := func(owner, asked string, labels map[string]string) *corev1.Pod {
			pod := plainPod(ns)
			pod.Annotations = map[string]string{evenkeel.ProfileKey: "default"}
			if asked != "" {
				pod.Annotations[evenkeel.GateKey] = asked
			}
			pod.Labels, pod.Spec.NodeSelector = labels, pool
			pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "ray.io/v1", Kind: "RayCluster", Name: owner, UID: types.UID(owner), Controller: &yes}}
			return pod
		}
		waits := func(pod *corev1.Pod) bool {
			return len(pod.Spec.SchedulingGates) != 0 || pod.Labels[evenkeel.GatedKey] != ""
		}
		pod := createPod(t, made("ray", "", nil))
		if len(pod.Spec.SchedulingGates) != 1 || pod.Spec.SchedulingGates[0].Name != evenkeel.SchedulingGate || pod.Annotations[evenkeel.InjectedKey] == "" {
			t.Fatalf("the pod is %+v", pod)
		}
		eventually(t, "the pod may be scheduled", func(ctx context.Context) (bool, error) {
			err := admin.Get(ctx, client.ObjectKeyFromObject(pod), pod)
			return !waits(pod), err
		})
		queue, podSet := map[string]string{"kueue.x-k8s.io/queue-name": "team"}, map[string]string{"kueue.x-k8s.io/podset": "workers"}
		for what, free := range map[string]*corev1.Pod{
			"opted out": made("free", evenkeel.GateDisabled, nil), "of a queue": made("queued", "", queue), "of an owner in a queue": made("admitted", "", podSet),
			"late": made("ray", "", nil), "late, with what would refuse another": made("ray", "No", nil),
		} {
			if pod := createPod(t, free); waits(pod) {
				t.Errorf("a pod that is %s waits: %+v", what, pod)
			}
		}
		refused(t, admin.Create(t.Context(), made("misspelt", "No", nil)), `evenkeel.dev/gate is "No": Enabled or Disabled`)
	})
	bad := heldJob(t, "Job", ns, pool)
	bad.SetAnnotations(map[string]string{evenkeel.ProfileKey: "default", evenkeel.GateKey: "No"})
	refused(t, dryRun(t.Context(), bad), `evenkeel.dev/gate is "No": Enabled or Disabled`)
}
