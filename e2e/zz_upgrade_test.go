//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"evenkeel.dev/evenkeel/hack/ci/artifacts"
	"evenkeel.dev/evenkeel/hack/env"
	evenkeel "evenkeel.dev/evenkeel/operator/api/v1alpha1"
)

// The file's name puts this test last: it installs an earlier version of Evenkeel in the place of this one.

// earlierCommit is the version that is upgraded from: chart and operator are from before the certificates had an
// account of their own.
const earlierCommit = "88b103b"

// earlierPolicy gates jobs, and no check of it can end: nobody has its image. All versions have its fields.
const earlierPolicy = `
apiVersion: evenkeel.dev/v1alpha1
kind: NetworkCheckPolicy
metadata: {name: upgrade}
spec:
  triggers: {newNodes: Disabled, jobStart: Enabled}
  gate: {onTimeout: Wait}
  check: {runner: {type: Bench, image: "registry.invalid/none:1"}}
`

// An earlier version is installed, and upgraded to this one, back, and again, with the controllers and webhooks of
// both. A job runs through all of it. Jobs that are held stay so, whichever version held them, and start when their
// gate opens. At each moment a new annotated job gets the plugin.
func TestChartUpgradeAndRollbackWithJobs(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	t.Cleanup(cancel)
	name, chart, err := artifacts.Builder{Progress: os.Stderr}.Earlier(ctx, earlierCommit, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	earlier, err := cluster.Local.Load(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.Helm(ctx, "uninstall", env.Release, "--namespace", env.Namespace, "--ignore-not-found", "--wait", "--timeout", "2m"); err != nil {
		t.Fatal(err)
	}
	if err := cluster.InstallChartOf(ctx, chart, earlier); err != nil {
		t.Fatal(err)
	}
	// Jobs wait while no node is proven, and other tests have left results.
	if err := cluster.Client.DeleteAllOf(ctx, &evenkeel.NodeNetworkHealth{}); err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.KubectlInput(ctx, earlierPolicy, "create", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, args := range [][]string{{"get", "pods,pytorchjobs,netcheck,netcheckpolicy", "-A", "-o", "wide"}, {"-n", env.Namespace, "logs", "deployment/evenkeel-controller", "--tail=40"}} {
			if t.Failed() {
				out, err := cluster.Kubectl(context.Background(), args...)
				t.Logf("%s %v", out, err)
			}
		}
		if _, err := cluster.Kubectl(context.Background(), "delete", "netcheckpolicy", "upgrade", "--ignore-not-found"); err != nil {
			t.Error(err)
		}
	})

	// It opts out of the gate, and its ranks meet only when all upgrades are done.
	free := trainingJob{profile: "default", script: "exit 0"}
	through := newNamespace(t)
	create := func(j trainingJob, ns string, annotations map[string]string) *unstructured.Unstructured {
		t.Helper()
		job := j.object(ns)
		all := job.GetAnnotations()
		for key, value := range annotations {
			all[key] = value
		}
		job.SetAnnotations(all)
		if err := cluster.Client.Create(ctx, job); err != nil {
			t.Fatal(err)
		}
		return job
	}
	optOut := map[string]string{evenkeel.GateKey: evenkeel.GateDisabled}
	create(trainingJob{profile: "default", script: "until [ -e /tmp/end ]; do sleep 0.2; done; " + allreduce}, through, optOut)
	ranks := []string{"train-master-0", "train-worker-0"}
	started := map[string]types.UID{}
	for _, rank := range ranks {
		if _, err := cluster.Kubectl(ctx, "-n", through, "wait", "pod/"+rank, "--for=create", "--timeout=60s"); err != nil {
			t.Fatal(err)
		}
		if _, err := cluster.Kubectl(ctx, "-n", through, "wait", "pod/"+rank, "--for=condition=Ready", "--timeout=120s"); err != nil {
			t.Fatal(err)
		}
		started[rank] = pod(ctx, t, through, rank).UID
	}

	var held []string
	works := func(version string) {
		t.Helper()
		if err := cluster.DefaultProfile(ctx); err != nil {
			t.Fatal(err)
		}
		for _, rank := range ranks {
			p := pod(ctx, t, through, rank)
			if p.UID != started[rank] || p.Status.Phase != corev1.PodRunning || p.Status.ContainerStatuses[0].RestartCount != 0 {
				t.Errorf("%s: %s is %s, started %d times", version, rank, p.Status.Phase, 1+p.Status.ContainerStatuses[0].RestartCount)
			}
		}
		ns := newNamespace(t)
		eventually(ctx, t, version+": the webhook gates a job", func(ctx context.Context) (bool, error) {
			try := free.object(ns)
			err := cluster.Client.Create(ctx, try, client.DryRunAll)
			return isSuspended(try), err
		})
		create(free, ns, nil)
		held = append(held, ns)
		for _, ns := range held {
			job := free.object(ns)
			if err := cluster.Client.Get(ctx, client.ObjectKeyFromObject(job), job); err != nil || !isSuspended(job) || job.GetLabels()[evenkeel.GatedKey] == "" {
				t.Errorf("%s: the held job of %s has started: %v %v", version, ns, job.Object["spec"], err)
			}
		}
		ns = newNamespace(t)
		create(free, ns, optOut)
		waitJob(ctx, t, ns, "Succeeded")
		for _, rank := range ranks {
			if p := pod(ctx, t, ns, rank); variable(p, "NCCL_NET_PLUGIN") == "" || p.Annotations[evenkeel.InjectedKey] == "" {
				t.Errorf("%s: %s did not get the plugin: %+v", version, rank, p.Spec)
			}
		}
	}
	helm := func(what string, change func() error) {
		t.Helper()
		stop := keepCreating(ctx, t, what, free.object(through))
		err := change()
		stop()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	works("the earlier version")
	helm("upgrade", func() error { return cluster.InstallChart(ctx) })
	works("this version")
	helm("rollback", func() error {
		_, err := cluster.Helm(ctx, "rollback", env.Release, "1", "--namespace", env.Namespace, "--wait", "--timeout", "3m")
		return err
	})
	works("the earlier version, again")
	helm("second upgrade", func() error { return cluster.InstallChart(ctx) })
	works("this version, again")

	if _, err := cluster.Kubectl(ctx, "delete", "netcheckpolicy", "upgrade"); err != nil {
		t.Fatal(err)
	}
	for _, ns := range held {
		waitJob(ctx, t, ns, "Succeeded")
	}
	for _, rank := range ranks {
		if _, err := cluster.Kubectl(ctx, "-n", through, "exec", rank, "-c", "pytorch", "--", "touch", "/tmp/end"); err != nil {
			t.Fatal(err)
		}
	}
	waitJob(ctx, t, through, "Succeeded")
	if said := logs(ctx, through, ranks[0]); !strings.Contains(said, "# Network: Evenkeel carried") {
		t.Errorf("the job that ran through all versions did not use the plugin: %s", said)
	}
}

// keepCreating creates an annotated job again and again, in dry runs, until stop. None may come through without the
// plugin, and none may be refused.
func keepCreating(ctx context.Context, t *testing.T, what string, job *unstructured.Unstructured) (stop func()) {
	t.Helper()
	job.SetName("")
	job.SetGenerateName("meanwhile-")
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	var problems []string
	tries := 0
	group.Go(func() {
		wait.UntilWithContext(ctx, func(context.Context) {
			try := job.DeepCopy()
			// A request that has begun is not cut off.
			err := cluster.Client.Create(context.WithoutCancel(ctx), try, client.DryRunAll)
			tries++
			pinned, _, _ := unstructured.NestedString(try.Object, "spec", "pytorchReplicaSpecs", "Worker", "template", "metadata", "labels", evenkeel.ProfileKey)
			switch {
			case err != nil:
				problems = append(problems, err.Error())
			case pinned == "":
				problems = append(problems, "it was created without the plugin")
			}
		}, 100*time.Millisecond)
	})
	return func() {
		t.Helper()
		cancel()
		group.Wait()
		if tries == 0 || len(problems) > 0 {
			t.Errorf("during the %s, of %d new jobs %s", what, tries, fmt.Sprintf("%d had problems: %q", len(problems), problems))
		}
	}
}
