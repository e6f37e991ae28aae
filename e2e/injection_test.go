//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

const (
	allreduce = "exec evenkeel-bench allreduce -b 64K -e 4M -f 8 -n 3 -w 1"
	library   = "/opt/evenkeel/plugin/libnccl-net-evenkeel.so"
)

// profile creates a NetworkProfile, which is deleted after the test.
func profile(t *testing.T, name, plugin string) {
	t.Helper()
	manifest := fmt.Sprintf("{apiVersion: evenkeel.dev/v1alpha1, kind: NetworkProfile, metadata: {name: %s}, spec: {plugin: %s}}", name, plugin)
	if _, err := cluster.KubectlInput(t.Context(), manifest, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := cluster.Kubectl(context.Background(), "delete", "networkprofile", name); err != nil {
			t.Error(err)
		}
	})
	if _, err := cluster.Kubectl(t.Context(), "wait", "networkprofile/"+name, "--for=condition=Ready", "--timeout=120s"); err != nil {
		t.Fatal(err)
	}
}

func TestInjectionRunsJobOverEvenkeel(t *testing.T) {
	profile(t, "by-init-container", fmt.Sprintf("{image: %q, delivery: InitContainer}", cluster.Images.Plugin))
	profile(t, "by-preinstalled", `{delivery: Preinstalled, path: /opt/evenkeel/plugin}`)
	for _, test := range []struct {
		name, profile, image string
		delivered            func(*corev1.Pod) error
	}{
		{name: "image volume", profile: "default", delivered: func(p *corev1.Pod) error {
			for _, v := range p.Spec.Volumes {
				if v.Image != nil && v.Image.Reference == cluster.Images.Plugin {
					return nil
				}
			}
			return fmt.Errorf("no volume of image %s in %+v", cluster.Images.Plugin, p.Spec.Volumes)
		}},
		{name: "init container", profile: "by-init-container", delivered: func(p *corev1.Pod) error {
			for _, c := range p.Spec.InitContainers {
				if c.Image == cluster.Images.Plugin {
					return nil
				}
			}
			return fmt.Errorf("no init container of image %s in %+v", cluster.Images.Plugin, p.Spec.InitContainers)
		}},
		{name: "preinstalled", profile: "by-preinstalled", image: cluster.Images.Training, delivered: func(p *corev1.Pod) error {
			for _, v := range p.Spec.Volumes {
				if v.Name == "evenkeel" {
					return fmt.Errorf("a volume was added: %+v", v)
				}
			}
			return nil
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx, ns := testContext(t), newNamespace(t)
			trainingJob{profile: test.profile, image: test.image, script: allreduce}.create(ctx, t, ns)
			if end := waitJob(ctx, t, ns, "Succeeded", "Failed"); end != "Succeeded" {
				t.Fatalf("the job %s", end)
			}
			master, worker := pod(ctx, t, ns, "train-master-0"), pod(ctx, t, ns, "train-worker-0")
			if master.Spec.NodeName == worker.Spec.NodeName {
				t.Fatalf("both pods ran on %s: nothing crossed a network", master.Spec.NodeName)
			}
			for _, p := range []*corev1.Pod{master, worker} {
				if err := test.delivered(p); err != nil {
					t.Errorf("%s: %v", p.Name, err)
				}
				if got := variable(p, "NCCL_NET_PLUGIN"); got != library {
					t.Errorf("%s: NCCL_NET_PLUGIN is %q, want %q", p.Name, got, library)
				}
				if !strings.Contains(logs(ctx, ns, p.Name), "evenkeel: connection closed") {
					t.Errorf("%s: the plugin logged no connection", p.Name)
				}
			}
			out := logs(ctx, ns, master.Name)
			for _, want := range []string{"# Network: Evenkeel", "# Out of bounds values : 0 OK", "# Avg bus bandwidth"} {
				if !strings.Contains(out, want) {
					t.Errorf("the master's output lacks %q", want)
				}
			}
		})
	}
}

func TestLostWorkerIsNamed(t *testing.T) {
	ctx, ns := testContext(t), newNamespace(t)
	trainingJob{profile: "default", script: "evenkeel-bench allreduce -b 1M -e 1M -n 5 -w 1 -N 0; exit $?"}.create(ctx, t, ns)
	eventually(ctx, t, "the all-reduce runs", func(ctx context.Context) (bool, error) {
		return strings.Contains(logs(ctx, ns, "train-master-0"), "1048576"), nil
	})
	// The container ends with its program, and may end this shell before it has exited.
	if _, err := cluster.Kubectl(ctx, "-n", ns, "exec", "train-worker-0", "-c", "pytorch", "--", "sh", "-c", "kill -9 $(pidof evenkeel-bench)"); err != nil {
		t.Logf("end the worker's program: %v", err)
	}
	waitJob(ctx, t, ns, "Failed")
	eventually(ctx, t, "the master exits", func(ctx context.Context) (bool, error) {
		phase := pod(ctx, t, ns, "train-master-0").Status.Phase
		return phase == corev1.PodFailed, nil
	})
	if out := logs(ctx, ns, "train-master-0"); !strings.Contains(out, "rank 1") || !strings.Contains(out, "train-worker-0") {
		t.Errorf("the master's output does not name the lost peer (rank 1, train-worker-0):\n%s", out)
	}
}

// variable is the value of an environment variable of the pod's first container.
func variable(p *corev1.Pod, name string) string {
	for _, e := range p.Spec.Containers[0].Env {
		if e.Name == name {
			return e.Value
		}
	}
	return ""
}
