//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"evenkeel.dev/evenkeel/hack/env"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// A jobKind is one way to run pods, under its real controller.
type jobKind struct {
	// manifest holds the objects, without their namespace. POD stands for the spec of a pod that ends by itself, and
	// SERVER for the spec of a pod that runs on. TRAINER is POD with the container's name that Trainer wants.
	manifest string
	// pods is the number of pods that have to get the plugin.
	pods int
	// suspended: the annotation is on the object, which is suspended until its nodes are proven. Of other kinds, the pods
	// wait.
	suspended bool
	// queued: Kueue holds the pods.
	queued bool
	// namespace is that of its objects.
	namespace string
}

// jobKinds are the kinds that are tested. Those that need further controllers are added under another build tag.
var jobKinds = map[string]jobKind{
	"Job": {pods: 2, suspended: true, manifest: `
apiVersion: batch/v1
kind: Job
metadata: {name: train, annotations: {evenkeel.dev/profile: default}}
spec: {completions: 2, parallelism: 2, template: {spec: POD}}`},
	"CronJob": {pods: 1, manifest: `
apiVersion: batch/v1
kind: CronJob
metadata: {name: train}
spec:
  schedule: "* * * * *"
  concurrencyPolicy: Forbid
  jobTemplate: {spec: {template: {metadata: {annotations: {evenkeel.dev/profile: default}}, spec: SERVER}}}`},
	"StatefulSet": {pods: 2, manifest: `
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: train}
spec:
  replicas: 2
  serviceName: train
  selector: {matchLabels: {app: train}}
  template: {metadata: {labels: {app: train}, annotations: {evenkeel.dev/profile: default}}, spec: SERVER}`},
	"Pod": {pods: 1, manifest: `
apiVersion: v1
kind: Pod
metadata: {name: train, annotations: {evenkeel.dev/profile: default}}
spec: POD`},
	"PyTorchJob": {pods: 2, suspended: true, manifest: `
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: train, annotations: {evenkeel.dev/profile: default}}
spec:
  pytorchReplicaSpecs:
    Master: {replicas: 1, restartPolicy: Never, template: {spec: SERVER}}
    Worker: {replicas: 1, restartPolicy: Never, template: {spec: SERVER}}`},
	"MPIJob": {pods: 2, suspended: true, manifest: `
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: train, annotations: {evenkeel.dev/profile: default}}
spec:
  mpiReplicaSpecs:
    Launcher: {replicas: 1, restartPolicy: Never, template: {spec: SERVER}}
    Worker: {replicas: 1, template: {spec: SERVER}}`},
}

// pluginHere fails where the container lacks the plugin's file or variables.
const pluginHere = `test -f "$NCCL_NET_PLUGIN" && test "$NCCL_NET_PLUGIN_REF_COUNT" = 1 && echo "the plugin is here"`

// objects are the kind's objects in the namespace.
func (k jobKind) objects(t *testing.T, namespace string) []*unstructured.Unstructured {
	t.Helper()
	spec := func(container, script, policy string) string {
		return fmt.Sprintf(`{restartPolicy: %s, terminationGracePeriodSeconds: 1,
  securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}},
  containers: [{name: %s, image: %q, command: [sh, -c, %q], resources: {requests: {cpu: 10m}},
    securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}}]}`, policy, container, cluster.Images.Bench, script)
	}
	const forever = pluginHere + " && exec sleep 3600"
	serverPolicy := "Always"
	for _, never := range []string{"kind: CronJob", "kind: PyTorchJob", "kind: MPIJob"} {
		if strings.Contains(k.manifest, never) {
			serverPolicy = "Never" // what these kinds accept
		}
	}
	text := strings.NewReplacer("POD", spec("pytorch", pluginHere, "Never"), "SERVER", spec("pytorch", forever, serverPolicy), "TRAINER", spec("node", pluginHere, "Never")).Replace(k.manifest)
	var all []*unstructured.Unstructured
	for document := range strings.SplitSeq(text, "\n---") {
		object := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict([]byte(document), &object.Object); err != nil {
			t.Fatalf("%v:\n%s", err, document)
		}
		if namespaced, err := cluster.Client.IsObjectNamespaced(object); err != nil || namespaced {
			object.SetNamespace(namespace)
		}
		all = append(all, object)
	}
	return all
}

// Every kind of job under its real controller: it is annotated, held until its nodes are proven, released, and its pods
// have the plugin's files and variables. The containers do not train: a stand-in looks for the plugin.
func TestKindsAreHeldReleasedAndInjected(t *testing.T) {
	ctx := testContext(t)
	policy := gatePolicy(ctx, t, "kinds")
	eventually(ctx, t, "the webhook has read the policy", func(ctx context.Context) (bool, error) {
		job := jobKinds["Job"].objects(t, "default")[0]
		err := cluster.Client.Create(ctx, job, client.DryRunAll)
		return job.GetLabels()[evenkeel.GatedKey] != "", err
	})
	// Nothing is released until every kind has been seen waiting.
	scale := func(replicas string) {
		t.Helper()
		if _, err := cluster.Kubectl(context.Background(), "-n", env.Namespace, "scale", "deployment/evenkeel-controller", "--replicas="+replicas); err != nil {
			t.Fatal(err)
		}
	}
	scale("0")
	release := sync.OnceFunc(func() { scale("1") })
	t.Cleanup(release)
	each := func(what string, do func(t *testing.T, k jobKind, namespace string)) {
		t.Run(what, func(t *testing.T) {
			for name, kind := range jobKinds {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					do(t, kind, kind.namespace)
				})
			}
		})
	}
	for name, kind := range jobKinds {
		kind.namespace = newNamespace(t)
		jobKinds[name] = kind
	}
	each("held", func(t *testing.T, k jobKind, ns string) { k.isHeld(t, ns) })
	// A gate's mark alone holds nothing. By now every other kind has been seen waiting too, and each controller had the
	// time to start pods.
	each("no pod started", func(t *testing.T, k jobKind, ns string) {
		started, err := startedPods(t.Context(), ns)
		if err != nil || len(started) > 0 {
			t.Errorf("started while they were held: %s, %v", strings.Join(started, ", "), err)
		}
	})
	release()
	each("released", func(t *testing.T, k jobKind, ns string) { k.isReleased(t, ns) })
	var checks evenkeel.NetworkCheckList
	if err := cluster.Client.List(t.Context(), &checks, client.MatchingLabels{evenkeel.PolicyKey: policy.Name}); err != nil || len(checks.Items) == 0 {
		t.Errorf("%d checks, %v: nothing was proven", len(checks.Items), err)
	}
}

// describe logs what is in the namespace if the test fails.
func describe(t *testing.T, namespace string) {
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for _, args := range [][]string{{"get", "pods", "-o", "yaml"}, {"get", "events"}, {"logs", "--selector", evenkeel.ProfileKey, "--prefix", "--all-containers", "--tail", "20"}} {
			out, err := cluster.Kubectl(context.Background(), append([]string{"-n", namespace}, args...)...)
			t.Logf("%s %v", out, err)
		}
	})
}

// injectedPods are the pods of the namespace that have the plugin.
func injectedPods(ctx context.Context, namespace string) ([]corev1.Pod, error) {
	var list corev1.PodList
	err := cluster.Client.List(ctx, &list, client.InNamespace(namespace))
	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.Annotations[evenkeel.InjectedKey] == "" }), err
}

// startedPods names the pods of the namespace, injected or not, that have a node or have left the phase Pending.
func startedPods(ctx context.Context, namespace string) (started []string, err error) {
	var list corev1.PodList
	err = cluster.Client.List(ctx, &list, client.InNamespace(namespace))
	for _, p := range list.Items {
		if p.Spec.NodeName != "" || p.Status.Phase != corev1.PodPending {
			started = append(started, fmt.Sprintf("%s (%s on %q)", p.Name, p.Status.Phase, p.Spec.NodeName))
		}
	}
	return started, err
}

// isHeld creates the objects, and waits until the job is suspended, or until its pods wait.
func (k jobKind) isHeld(t *testing.T, ns string) {
	ctx := testContext(t)
	describe(t, ns)
	var job *unstructured.Unstructured
	for _, object := range k.objects(t, ns) {
		eventually(ctx, t, "the "+object.GetKind()+" is created", func(ctx context.Context) (bool, error) {
			job = object.DeepCopy()
			err := cluster.Client.Create(ctx, job)
			if err != nil && strings.Contains(err.Error(), "failed calling webhook") {
				return false, nil // its controller starts
			}
			return err == nil, err
		})
	}
	if k.suspended {
		if job.GetLabels()[evenkeel.GatedKey] == "" {
			t.Errorf("the job is not gated: %v", job.Object)
		}
		return
	}
	wanted := evenkeel.SchedulingGate
	if k.queued {
		wanted = "kueue.x-k8s.io/admission"
	}
	eventually(ctx, t, "pods wait", func(ctx context.Context) (bool, error) {
		pods, err := injectedPods(ctx, ns)
		for _, p := range pods {
			if len(p.Spec.SchedulingGates) == 0 || p.Spec.SchedulingGates[0].Name != wanted {
				return false, fmt.Errorf("%s does not wait: %v", p.Name, p.Spec.SchedulingGates)
			}
		}
		return len(pods) > 0, err
	})
}

// said is what the pod's one container has written.
func said(ctx context.Context, pod *corev1.Pod) string {
	raw, err := cluster.Clientset.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{}).DoRaw(ctx)
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

// isReleased waits until the job's pods have found the plugin.
func (k jobKind) isReleased(t *testing.T, ns string) {
	ctx := testContext(t)
	describe(t, ns)
	var pods []corev1.Pod
	eventually(ctx, t, fmt.Sprintf("%d pods have found the plugin", k.pods), func(ctx context.Context) (_ bool, err error) {
		if pods, err = injectedPods(ctx, ns); err != nil {
			return false, err
		}
		found := 0
		for _, p := range pods {
			switch {
			case p.Status.Phase == corev1.PodFailed:
				return false, fmt.Errorf("%s failed: %s", p.Name, said(ctx, &p))
			case p.Spec.NodeName != "" && strings.Contains(said(ctx, &p), "the plugin is here"):
				found++
			}
		}
		return found >= k.pods, nil
	})
	for _, p := range pods {
		if got := variable(&p, "NCCL_NET_PLUGIN"); got != library {
			t.Errorf("%s: NCCL_NET_PLUGIN is %q, want %q", p.Name, got, library)
		}
		if p.Labels[evenkeel.ProfileKey] != "default" {
			t.Errorf("%s: its labels are %v", p.Name, p.Labels)
		}
	}
	if k.queued {
		return // Kueue's conditions say why it started, which other tests read
	}
	// Of jobs that are held at the same time, some wait for others to have their nodes proven, and find nothing left to
	// check.
	started := []string{"EvenkeelNetworkProven", "EvenkeelNothingToCheck"}
	eventually(ctx, t, "an Event says why it started", func(ctx context.Context) (bool, error) {
		var list corev1.EventList
		err := cluster.Client.List(ctx, &list, client.InNamespace(ns))
		return slices.ContainsFunc(list.Items, func(e corev1.Event) bool { return slices.Contains(started, e.Reason) }), err
	})
}
