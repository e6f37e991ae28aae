package preflight

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
	webhooks "evenkeel.dev/evenkeel/operator/internal/admission"
	"evenkeel.dev/evenkeel/operator/internal/cli"
	"evenkeel.dev/evenkeel/operator/internal/workload"
	"evenkeel.dev/evenkeel/operator/test/apiserver"
)

// These tests have the two clusters of MultiKueue, each with an API server and Evenkeel. The worker's is the one of all
// other tests. Kueue's controllers do not run: the tests make what version 0.19.2 makes, by its source
// (pkg/controller/admissionchecks/multikueue, pkg/controller/jobs/kubeflow/kubeflowjob, pkg/util/equality).

// A managerCluster is the cluster in which users create jobs. It starts when a test asks for it.
type managerCluster struct {
	admin  client.Client
	config *rest.Config
	work   string
	stop   func() error
}

var dispatcher struct {
	sync.Mutex
	cluster *managerCluster
}

func newManagerCluster(t *testing.T) *managerCluster {
	t.Helper()
	dispatcher.Lock()
	defer dispatcher.Unlock()
	if dispatcher.cluster != nil {
		return dispatcher.cluster
	}
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	m := &managerCluster{}
	if m.work, err = os.MkdirTemp("", "evenkeel-manager-"); err != nil {
		t.Fatal(err)
	}
	if m.config, m.stop, err = apiserver.Start(m.work, definitions...); err != nil {
		t.Fatal(err)
	}
	dispatcher.cluster = m
	if m.admin, err = client.New(m.config, client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	if err := prepare(root, m.admin); err != nil {
		t.Fatal(err)
	}
	return m
}

func stopManagerCluster() error {
	dispatcher.Lock()
	defer dispatcher.Unlock()
	if dispatcher.cluster == nil {
		return nil
	}
	defer os.RemoveAll(dispatcher.cluster.work)
	return dispatcher.cluster.stop()
}

// serveWebhooks has the API server call Evenkeel's webhooks for the namespace, by the chart's rules, until the test
// ends.
func serveWebhooks(t *testing.T, c client.Client, namespace string) {
	t.Helper()
	mux := http.NewServeMux()
	for path, webhook := range map[string]*admission.Webhook{
		"/mutate-workload": webhooks.Workloads(c, c, ""),
		"/mutate-pod":      webhooks.Pods(scheme, c, func() string { return "" }),
	} {
		handler, err := admission.StandaloneWebhook(webhook, admission.StandaloneOptions{})
		if err != nil {
			t.Fatal(err)
		}
		mux.Handle(path, handler)
	}
	server := httptest.NewTLSServer(mux)
	t.Cleanup(server.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	objects, err := apiserver.Chart(root, "evenkeel-system")
	if err != nil {
		t.Fatal(err)
	}
	for _, object := range objects {
		if object.GetKind() != "MutatingWebhookConfiguration" {
			continue
		}
		object = object.DeepCopy()
		list, _, err := unstructured.NestedSlice(object.Object, "webhooks")
		if err != nil {
			t.Fatal(err)
		}
		var served []any
		for _, item := range list {
			webhook := item.(map[string]any)
			path, _, _ := unstructured.NestedString(webhook, "clientConfig", "service", "path")
			if path == "/mutate-annotated-pod" {
				continue // of kinds that the tests do not have
			}
			webhook["clientConfig"] = map[string]any{"url": server.URL + path, "caBundle": toBase64(ca)}
			webhook["timeoutSeconds"] = int64(30)
			webhook["namespaceSelector"] = map[string]any{
				"matchLabels": map[string]any{"kubernetes.io/metadata.name": namespace},
			}
			served = append(served, webhook)
		}
		if err := unstructured.SetNestedSlice(object.Object, served, "webhooks"); err != nil {
			t.Fatal(err)
		}
		if err := c.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.Delete(context.Background(), object); err != nil {
				t.Error(err)
			}
		})
	}
	probe := queuedJob(t, "probe", namespace)
	eventually(t, "the API server calls the webhooks", func(ctx context.Context) (bool, error) {
		job := probe.DeepCopy()
		job.SetAnnotations(map[string]string{evenkeel.ProfileKey: "nobody's"})
		err := c.Create(ctx, job, client.DryRunAll)
		return err != nil && strings.Contains(err.Error(), `no NetworkProfile is named "nobody's"`), nil
	})
}

func toBase64(data []byte) string {
	text, err := json.Marshal(data)
	if err != nil {
		panic(err) // bytes can be encoded
	}
	return strings.Trim(string(text), `"`)
}

// queuedJob is a job of two pods as Kueue's webhook leaves it in the manager cluster, for a queue whose ClusterQueue
// has MultiKueue's check.
func queuedJob(t *testing.T, name, namespace string) *unstructured.Unstructured {
	t.Helper()
	job := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob",
		"spec": map[string]any{
			"runPolicy": map[string]any{"suspend": true, "managedBy": "kueue.x-k8s.io/multikueue"},
			"pytorchReplicaSpecs": map[string]any{"Worker": map[string]any{"replicas": int64(2),
				"template": map[string]any{"spec": map[string]any{
					"containers": []any{map[string]any{"name": "pytorch", "image": "registry.example.com/train:1",
						"resources": map[string]any{"limits": map[string]any{"nvidia.com/gpu": "8"}}}},
				}}}},
		}}}
	job.SetName(name)
	job.SetNamespace(namespace)
	job.SetLabels(map[string]string{workload.QueueKey: "team"})
	job.SetAnnotations(map[string]string{evenkeel.ProfileKey: name})
	return job
}

// dispatched is the copy of the job that MultiKueue creates in the worker cluster.
func dispatched(t *testing.T, job *unstructured.Unstructured) *unstructured.Unstructured {
	t.Helper()
	remote := &unstructured.Unstructured{Object: map[string]any{"spec": job.DeepCopy().Object["spec"]}}
	remote.SetGroupVersionKind(job.GroupVersionKind())
	remote.SetName(job.GetName())
	remote.SetNamespace(job.GetNamespace())
	remote.SetLabels(maps.Clone(job.GetLabels()))
	remote.SetAnnotations(maps.Clone(job.GetAnnotations()))
	unstructured.RemoveNestedField(remote.Object, "spec", "runPolicy", "managedBy")
	labels := remote.GetLabels()
	labels["kueue.x-k8s.io/multikueue-origin"], labels["kueue.x-k8s.io/prebuilt-workload-name"] = "multikueue",
		"pytorchjob-"+job.GetName()
	remote.SetLabels(labels)
	return remote
}

// podSpec is the spec of the pods of the job's one template.
func podSpec(t *testing.T, job *unstructured.Unstructured) (workload.Template, *corev1.PodSpec) {
	t.Helper()
	templates, err := workload.Templates(job)
	if err != nil || len(templates) != 1 {
		t.Fatalf("%d templates, %v", len(templates), err)
	}
	spec, err := templates[0].PodSpec()
	if err != nil {
		t.Fatal(err)
	}
	return templates[0], spec
}

// inSync fails the test if Kueue in the worker cluster would end the Workload, because the copy of the job is not what
// the Workload says. The Workload's templates are those of the job in the manager cluster.
func inSync(t *testing.T, job, remote *unstructured.Unstructured) {
	t.Helper()
	_, want := podSpec(t, job)
	_, is := podSpec(t, remote)
	same := equality.Semantic.DeepEqual
	if !same(is.Containers, want.Containers) || !same(is.InitContainers, want.InitContainers) ||
		!same(is.Tolerations, want.Tolerations) {
		t.Errorf("Kueue ends the Workload as out of sync with its job: the copy has %+v, and the Workload %+v",
			is.Containers, want.Containers)
	}
}

// newTeam makes a namespace, and a profile of the same name with the plugin's image, in one of the clusters.
func newTeam(t *testing.T, c client.Client, name, image string, mode evenkeel.TransportMode) *evenkeel.NetworkProfile {
	t.Helper()
	if err := c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
		t.Fatal(err)
	}
	profile := &evenkeel.NetworkProfile{ObjectMeta: metav1.ObjectMeta{Name: name}}
	profile.Spec.Plugin = evenkeel.PluginSpec{Image: image, Delivery: evenkeel.DeliveryImageVolume}
	profile.Spec.Transport.Mode = mode
	if err := c.Create(t.Context(), profile); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Delete(context.Background(), profile); err != nil {
			t.Error(err)
		}
	})
	return profile
}

// volumes counts the pod's volumes that Evenkeel adds with the plugin.
func volumes(pod *corev1.Pod) (count int) {
	for _, v := range pod.Spec.Volumes {
		if v.Name == "evenkeel" {
			count++
		}
	}
	return count
}

const managerImage, workerImage = "registry.example.com/manager@" + digest, "registry.example.com/worker@" + digest

// The worker cluster has RDMA devices, and the manager cluster has none. The manager's Evenkeel injects into the job,
// whose pods are never made there, and the worker's again into its copy: with the worker's image, once, and without a
// change that Kueue would end the job for.
func TestMultiKueueCopyStaysInSync(t *testing.T) {
	m := newManagerCluster(t)
	for name, mode := range map[string]evenkeel.TransportMode{
		"rails": evenkeel.TransportAuto, "rdma-only": evenkeel.TransportRDMA,
	} {
		t.Run(name, func(t *testing.T) {
			newTeam(t, m.admin, name, managerImage, mode)
			profile := newTeam(t, admin, name, workerImage, mode)
			profile.Status.RDMAResourceName, profile.Status.ObservedGeneration = "rdma/hca", profile.Generation
			if err := admin.Status().Update(t.Context(), profile); err != nil {
				t.Fatal(err)
			}
			serveWebhooks(t, m.admin, name)
			serveWebhooks(t, admin, name)
			job := queuedJob(t, name, name)
			if err := m.admin.Create(t.Context(), job); err != nil {
				t.Fatalf("the manager cluster refuses the job: %v", err)
			}
			if suspended, _ := workload.Suspended(job); !suspended || job.GetLabels()[evenkeel.GatedKey] != "" {
				t.Errorf("the job is not left to Kueue: %v", job.Object)
			}
			if template, _ := podSpec(t, job); template.Annotations()[evenkeel.PluginImageKey] != managerImage {
				t.Errorf("the job in the manager cluster has the annotations %v", template.Annotations())
			}
			remote := dispatched(t, job)
			if err := admin.Create(t.Context(), remote); err != nil {
				t.Fatal(err)
			}
			inSync(t, job, remote)
			// Kueue starts it: the update is the webhook's business too.
			before := remote.DeepCopy()
			if err := workload.Suspend(remote, false); err != nil {
				t.Fatal(err)
			}
			if err := unstructured.SetNestedField(remote.Object, map[string]any{"flavor": "gpu"}, "spec",
				"pytorchReplicaSpecs", "Worker", "template", "spec", "nodeSelector"); err != nil {
				t.Fatal(err)
			}
			// What it copied over from the manager cluster has no annotations of the worker's.
			template, _ := podSpec(t, remote)
			template.Remove(evenkeel.PluginImageKey)
			if err := admin.Patch(t.Context(), remote, client.MergeFrom(before)); err != nil {
				t.Fatal(err)
			}
			inSync(t, job, remote)

			template, spec := podSpec(t, remote)
			if template.Annotations()[evenkeel.PluginImageKey] != workerImage {
				t.Errorf("the copy has the annotations %v", template.Annotations())
			}
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "worker-0", Namespace: name, Labels: template.Labels(),
				Annotations: template.Annotations()}, Spec: *spec}
			if err := admin.Create(t.Context(), pod); err != nil {
				t.Fatal(err)
			}
			if _, has := pod.Spec.Containers[0].Resources.Limits["rdma/hca"]; !has || volumes(pod) != 1 ||
				pod.Annotations[evenkeel.InjectedKey] == "" {
				t.Errorf("the pod of the copy has %d volumes and the container %+v", volumes(pod), pod.Spec.Containers[0])
			}
			// MultiKueue copies pods of no other owner as the manager's webhook left them.
			again := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "copied", Namespace: name, Labels: pod.Labels,
				Annotations: pod.Annotations}, Spec: *pod.Spec.DeepCopy()}
			if err := admin.Create(t.Context(), again); err != nil {
				t.Fatal(err)
			}
			if !equality.Semantic.DeepEqual(again.Spec, pod.Spec) {
				t.Errorf("a pod that was injected before is injected again: %+v", again.Spec)
			}
			for _, p := range []*corev1.Pod{pod, again} {
				if err := admin.Delete(t.Context(), p, client.GracePeriodSeconds(0)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// dispatchingQueue makes MultiKueue's objects in the manager cluster: its AdmissionCheck and the worker clusters.
func dispatchingQueue(t *testing.T, m *managerCluster) {
	t.Helper()
	for _, text := range []string{
		`{apiVersion: kueue.x-k8s.io/v1beta2, kind: MultiKueueConfig, metadata: {name: workers}, spec: {clusters: [worker-1,
  worker-2]}}`,
		`{apiVersion: kueue.x-k8s.io/v1beta2, kind: AdmissionCheck, metadata: {name: another},
  spec: {controllerName: kueue.x-k8s.io/multikueue, parameters: {apiGroup: kueue.x-k8s.io, kind: MultiKueueConfig,
  name: workers}}}`,
	} {
		kueueObjectIn(t, m.admin, text)
	}
}

// The manager cluster has nodes of its own, which nobody proves. MultiKueue sends the Workload away when all other
// checks are ready, and its pods never run here: Evenkeel's check says where they run, and does not wait.
func TestMultiKueueManagerDoesNotWaitForNodes(t *testing.T) {
	m := newManagerCluster(t)
	controllers{logs: newFleet(t, stuck), clock: &clock{}, calendar: &clock{}, api: m.config}.start(t)
	for i := range 2 {
		newNodeIn(t, m.admin, fmt.Sprintf("manager-%d", i), "manager")
	}
	policy := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "manager"}}
	policy.Spec.Triggers.NewNodes = evenkeel.SwitchDisabled
	policy.Spec.Check.Runner.Type = evenkeel.RunnerBench
	if err := m.admin.Create(t.Context(), policy); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.admin.Delete(context.Background(), policy); err != nil {
			t.Error(err)
		}
	})
	dispatchingQueue(t, m)
	kueueObjectIn(t, m.admin, `{apiVersion: kueue.x-k8s.io/v1beta2, kind: AdmissionCheck, metadata: {name: manager},
  spec: {
  controllerName: evenkeel.dev/preflight, parameters: {apiGroup: evenkeel.dev, kind: NetworkCheckPolicy,
    name: manager}}}`)
	now := time.Now().UTC().Format(time.RFC3339)
	w := kueueObjectIn(t, m.admin, fmt.Sprintf(`{apiVersion: kueue.x-k8s.io/v1beta2, kind: Workload,
  metadata: {name: away, namespace: default}, spec: {
  podSets: [{name: main, count: 2, template: {spec: {restartPolicy: Never, containers: [{name: c,
    image: "registry.example.com/train:1", resources: {}}]}}}]}, status: {
  conditions: [{type: QuotaReserved, status: "True", reason: QuotaReserved, message: m, lastTransitionTime: %[1]q}],
  admissionChecks: [{name: manager, state: Pending, message: "", lastTransitionTime: %[1]q}, {name: another,
    state: Pending, message: "", lastTransitionTime: %[1]q}],
  admission: {clusterQueue: q, podSetAssignments: [{name: main, count: 2, delayedTopologyRequest: Pending}]}}}`, now))
	isAnsweredIn(t, m.admin, w, "manager", "Ready",
		"in another cluster, to which MultiKueue sends it by the AdmissionCheck another: worker-1 or worker-2, whose ClusterQueues have its nodes proven",
	)
	var checks evenkeel.NetworkCheckList
	if err := m.admin.List(t.Context(), &checks); err != nil || len(checks.Items) != 0 {
		t.Errorf("%d checks of nodes on which it never runs, %v", len(checks.Items), err)
	}
}

// In the worker cluster the Workload comes before the copy of its job, which Kueue makes when the Workload is admitted.
// Nobody owns it, and it waits for Evenkeel's check as any other. The reason is on the Workload: Kueue sends nothing of
// it back to the manager cluster.
func TestMultiKueueWorkerGatesTheCopy(t *testing.T) {
	start(t, newFleet(t, links(map[string]float64{"copies-1": 0.1})), &clock{}, &clock{})
	newNodes(t, "copies", 4)
	newPolicy(t, "copies", nil)
	admissionCheck(t, "copies", "copies")
	carries(t, "copies-1", "False TooSlow|unhealthy|")
	fromManager := func(name string, hosts ...string) *unstructured.Unstructured {
		w := reservedWorkload(t, name, "copies", hosts...)
		patch := `{"metadata": {"labels": {"kueue.x-k8s.io/multikueue-origin": "multikueue"}}}`
		if err := admin.Patch(t.Context(), w, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
			t.Fatal(err)
		}
		return w
	}
	failed := fromManager("copy-failed", "copies-0", "copies-1")
	isAnswered(t, failed, "copies", "Retry", "the network of copies-1 failed")
	isAnswered(t, fromManager("copy-proven", "copies-2", "copies-3"), "copies", "Ready", "all 2 nodes")
	plugin(t, kubeconfig(t), cli.ExitPass, "why workload.kueue.x-k8s.io/copy-failed",
		"Workload default/copy-failed: of Kueue",
		"It waits\n  Kueue's admission check copies is Retry: the network of copies-1 failed", "EvenkeelUnhealthyHost")
}

// The user asks in the manager cluster, where the job has no pods.
func TestKubectlPluginWhyJobRunsElsewhere(t *testing.T) {
	m := newManagerCluster(t)
	dispatchingQueue(t, m)
	job := queuedJob(t, "elsewhere", "default")
	if err := m.admin.Create(t.Context(), job); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.admin.Delete(context.Background(), job); err != nil {
			t.Error(err)
		}
	})
	w := kueueObjectIn(t, m.admin, fmt.Sprintf(`{apiVersion: kueue.x-k8s.io/v1beta2, kind: Workload,
  metadata: {name: pytorchjob-elsewhere-1a2b3, namespace: default, labels: {kueue.x-k8s.io/job-uid: %q}}, spec: {
  podSets: [{name: main, count: 2, template: {spec: {restartPolicy: Never, containers: [{name: c,
    image: "registry.example.com/train:1", resources: {}}]}}}]}, status: {
  conditions: [{type: QuotaReserved, status: "True", reason: QuotaReserved, message: m,
    lastTransitionTime: "2026-11-21T12:00:00Z"}],
  admissionChecks: [{name: another, state: Pending, message: "", lastTransitionTime: "2026-11-21T12:00:00Z"}],
  nominatedClusterNames: [worker-1, worker-2]}}`, job.GetUID()))
	config := kubeconfigOf(t, m.config)
	plugin(t, config, cli.ExitPass, "why pytorchjob/elsewhere",
		"MultiKueue has sent it to the clusters worker-1 and worker-2: it runs in the first that admits it. Kueue does not send back what it waits for there; there, this says it: kubectl evenkeel why workload.kueue.x-k8s.io/pytorchjob-elsewhere-1a2b3 -n default",
		"Kueue's admission check another is Pending")
	status := w.Object["status"].(map[string]any)
	delete(status, "nominatedClusterNames")
	status["clusterName"] = "worker-2"
	if err := m.admin.Status().Update(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	if err := workload.Suspend(job, false); err != nil {
		t.Fatal(err)
	}
	if err := m.admin.Update(t.Context(), job); err != nil {
		t.Fatal(err)
	}
	plugin(t, config, cli.ExitPass, "why pytorchjob/elsewhere",
		"It runs in the cluster worker-2, by MultiKueue. There: kubectl evenkeel why pytorchjob/elsewhere -n default")
}
