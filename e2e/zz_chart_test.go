//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/env"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// The file's name puts these tests behind those of other files, as the last one uninstalls Evenkeel from the cluster.

func TestChartUpgradeKeepsWorking(t *testing.T) {
	ctx, ns := testContext(t), newNamespace(t)
	if err := cluster.InstallChart(ctx, "--set", "webhook.replicas=1", "--set", "defaultProfile.spec.transport.tcp.flowsPerPeer=2"); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the new controller leads and has applied the new default profile", func(ctx context.Context) (bool, error) {
		flows, err := cluster.Kubectl(ctx, "get", "networkprofile", "default", "-o", "jsonpath={.spec.transport.tcp.flowsPerPeer}")
		return flows == "2", err
	})
	trainingJob{profile: "default", script: "exit 0"}.create(ctx, t, ns)
	waitJob(ctx, t, ns, "Succeeded")
	if got := variable(pod(ctx, t, ns, "train-master-0"), "EVENKEEL_FLOWS"); got != "2" {
		t.Errorf("EVENKEEL_FLOWS is %q after the upgrade, want 2", got)
	}
}

// Whoever deletes the namespace instead of the release leaves much behind, but nothing that refuses jobs. Those that
// wait start, and kubectl evenkeel uninstall removes the rest.
func TestNamespaceDeletionStartsGatedJobs(t *testing.T) {
	ctx, ns := testContext(t), newNamespace(t)
	if err := cluster.Client.DeleteAllOf(ctx, &evenkeel.NodeNetworkHealth{}); err != nil {
		t.Fatal(err)
	}
	policy := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "abandoned"}}
	policy.Spec.Triggers = evenkeel.TriggerSpec{NewNodes: evenkeel.SwitchDisabled, JobStart: evenkeel.SwitchEnabled}
	policy.Spec.Gate.OnTimeout = evenkeel.GateWait
	policy.Spec.Check.Runner = evenkeel.RunnerSpec{Type: evenkeel.RunnerBench, Image: "registry.invalid/none:1"}
	if err := cluster.Client.Create(ctx, policy); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Client.Delete(context.Background(), policy); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	job := trainingJob{profile: "default", script: "true"}.object(ns)
	eventually(ctx, t, "the webhook has read the policy", func(ctx context.Context) (bool, error) {
		try := job.DeepCopy()
		err := cluster.Client.Create(ctx, try, client.DryRunAll)
		return isSuspended(try), err
	})
	if err := cluster.Client.Create(ctx, job); err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.Kubectl(ctx, "delete", "namespace", env.Namespace, "--timeout=3m"); err != nil {
		t.Fatal(err)
	}
	waitJob(ctx, t, ns, "Succeeded")
	late := trainingJob{profile: "default", script: "true"}.object(ns)
	late.SetName("late")
	if err := cluster.Client.Create(ctx, late, client.DryRunAll); err != nil {
		t.Errorf("an annotated job, while nobody answers: %v", err)
	}
	out, err := exec.CommandContext(ctx, kubectlPlugin(t), "uninstall", "--kubeconfig", cluster.Kubeconfig).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "nothing waits for Evenkeel any more") {
		t.Errorf("kubectl evenkeel uninstall: %v\n%s", err, out)
	}
	if err := cluster.InstallChart(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestChartUninstallLeavesNothing(t *testing.T) {
	ctx := testContext(t)
	markNode(ctx, t)
	if _, err := cluster.Helm(ctx, "uninstall", env.Release, "--namespace", env.Namespace, "--wait", "--timeout", "2m"); err != nil {
		t.Fatal(err)
	}
	awaitMarks(ctx, t, "the nodes have no marks", unmarked)
	isGone(ctx, t, "nothing of Evenkeel is left but its namespace, and the CRDs with their objects", func(kind schema.GroupResource, name string) bool {
		// The API server has an APIService for the group of CRDs.
		ofCRDs := kind.Resource == "customresourcedefinitions" || kind.Resource == "apiservices"
		return kind.Group == evenkeel.GroupVersion.Group || ofCRDs && strings.HasSuffix(name, "."+evenkeel.GroupVersion.Group)
	})
	out, err := exec.CommandContext(ctx, kubectlPlugin(t), "uninstall", "--crds", "--kubeconfig", cluster.Kubeconfig).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "nothing waits for Evenkeel any more") {
		t.Errorf("kubectl evenkeel uninstall: %v\n%s", err, out)
	}
	isGone(ctx, t, "nothing of Evenkeel is left but its namespace", func(schema.GroupResource, string) bool { return false })
}

// buildKubectlPlugin builds kubectl-evenkeel once, in a folder that goes with the cluster.
var buildKubectlPlugin = sync.OnceValues(func() (path string, err error) {
	path = filepath.Join(filepath.Dir(cluster.Kubeconfig), "kubectl-evenkeel")
	if out, err := exec.Command("go", "build", "-o", path, "../operator/cmd/kubectl-evenkeel").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build kubectl's plugin: %w\n%s", err, out)
	}
	return path, nil
})

// kubectlPlugin is the path of kubectl-evenkeel.
func kubectlPlugin(t *testing.T) string {
	t.Helper()
	path, err := buildKubectlPlugin()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// isGone waits until no object has Evenkeel's name but those that may stay.
func isGone(ctx context.Context, t *testing.T, what string, stays func(kind schema.GroupResource, name string) bool) {
	t.Helper()
	groups, err := cluster.Clientset.Discovery().ServerPreferredResources()
	if err != nil {
		t.Fatal(err)
	}
	// Helm waits for its own objects, but not for the pods of those.
	var left []string
	defer func() {
		if t.Failed() {
			t.Log("left behind:", left)
		}
	}()
	eventually(ctx, t, what, func(ctx context.Context) (bool, error) {
		left = nil
		for _, group := range groups {
			version, err := schema.ParseGroupVersion(group.GroupVersion)
			if err != nil {
				return false, err
			}
			for _, resource := range group.APIResources {
				if !slices.Contains(resource.Verbs, "list") || resource.Name == "events" || resource.Name == "componentstatuses" {
					continue // events expire by themselves
				}
				var objects metav1.PartialObjectMetadataList
				objects.SetGroupVersionKind(version.WithKind(resource.Kind + "List"))
				if err := cluster.Client.List(ctx, &objects); meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
					continue // its CRD has gone meanwhile
				} else if err != nil {
					return false, fmt.Errorf("list %s: %w", resource.Name, err)
				}
				kind := schema.GroupResource{Group: version.Group, Resource: resource.Name}
				for _, object := range objects.Items {
					name := kind.String() + "/" + object.Name
					if strings.Contains(name, "evenkeel") && name != "namespaces/"+env.Namespace && !stays(kind, object.Name) {
						left = append(left, name)
					}
				}
			}
		}
		return len(left) == 0, nil
	})
}

// recordResults records that n2 has failed a check, and that the other nodes have passed it.
func recordResults(ctx context.Context, t *testing.T) {
	t.Helper()
	var nodes corev1.NodeList
	if err := errors.Join(cluster.Client.List(ctx, &nodes), cluster.Client.DeleteAllOf(ctx, &evenkeel.NodeNetworkHealth{})); err != nil {
		t.Fatal(err)
	}
	now := metav1.Now()
	for _, node := range nodes.Items {
		state := &evenkeel.NodeNetworkHealth{ObjectMeta: metav1.ObjectMeta{
			Name: node.Name, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}},
		}}
		if err := cluster.Client.Create(ctx, state); err != nil {
			t.Fatal(err)
		}
		state.Status = evenkeel.NodeNetworkHealthStatus{
			Health: evenkeel.HealthHealthy, Reason: "Passed", ObservedTime: &now,
			History: []evenkeel.HealthResult{{Check: "e2e", UID: "0", Time: now, Verdict: evenkeel.VerdictPass}},
		}
		if node.Name == "n2" {
			state.Status.Health, state.Status.Reason, state.Status.History[0].Verdict = evenkeel.HealthUnhealthy, "TooSlow", evenkeel.VerdictFail
		}
		if err := cluster.Client.Status().Update(ctx, state); err != nil {
			t.Fatal(err)
		}
	}
}

// markNode creates a policy, and results with one unhealthy node.
func markNode(ctx context.Context, t *testing.T) {
	t.Helper()
	recordResults(ctx, t)
	policy := &evenkeel.NetworkCheckPolicy{ObjectMeta: metav1.ObjectMeta{Name: "last"}}
	policy.Spec.Check.Runner.Type = evenkeel.RunnerBench
	policy.Spec.OnFail.Taint = evenkeel.SwitchEnabled
	if err := cluster.Client.Create(ctx, policy); err != nil {
		t.Fatal(err)
	}
	awaitMarks(ctx, t, "the node is marked", map[string]string{
		"n1": "True healthy", "n2": "False unhealthy tainted", "n3": "True healthy", "n4": "True healthy",
	})
}
