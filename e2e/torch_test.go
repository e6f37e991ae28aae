//go:build e2e && torch

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"evenkeel.dev/evenkeel/hack/cluster/toolbox"
)

func init() { withTorch = true }

// TestTorchTrains: PyTorch trains over backend evenkeel in an image that holds nothing of Evenkeel, on two nodes,
// whichever way the package came into the pods. The script is the demo's.
func TestTorchTrains(t *testing.T) {
	root, err := toolbox.Root()
	if err != nil {
		t.Fatal(err)
	}
	script, err := os.ReadFile(filepath.Join(root, "hack", "demo", "train.py"))
	if err != nil {
		t.Fatal(err)
	}
	profile(t, "torch-copied", fmt.Sprintf("{image: %q, delivery: InitContainer, python: Enabled}", cluster.Images.Plugin))
	for name, test := range map[string]struct{ profile, own, want string }{
		"image volume":   {"default", "", "/opt/evenkeel/plugin/python"},
		"init container": {"torch-copied", "/mine", "/mine:/opt/evenkeel/plugin/python"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, ns := testContext(t), newNamespace(t)
			variables := map[string]string{"SCRIPT": string(script), "EVENKEEL_METRICS": "127.0.0.1:9600"}
			if test.own != "" {
				variables["PYTHONPATH"] = test.own
			}
			trainingJob{profile: test.profile, image: cluster.Images.PyTorch, script: `exec python3 -c "$SCRIPT"`, env: variables}.create(ctx, t, ns)
			if end := waitJob(ctx, t, ns, "Succeeded", "Failed"); end != "Succeeded" {
				t.Fatalf("the job %s", end)
			}
			master := pod(ctx, t, ns, "train-master-0")
			if got := variable(master, "PYTHONPATH"); got != test.want {
				t.Errorf("PYTHONPATH is %q, want %q", got, test.want)
			}
			if worker := pod(ctx, t, ns, "train-worker-0"); worker.Spec.NodeName == master.Spec.NodeName {
				t.Errorf("both pods ran on %s: nothing crossed a network", master.Spec.NodeName)
			}
			out := logs(ctx, ns, master.Name)
			value := func(pattern string) float64 {
				t.Helper()
				found := regexp.MustCompile(pattern).FindStringSubmatch(out)
				if found == nil {
					t.Fatalf("no %s in\n%s", pattern, out)
				}
				number, err := strconv.ParseFloat(found[1], 64)
				if err != nil {
					t.Fatalf("%s: %v", found[0], err)
				}
				return number
			}
			if first, last := value(`step 0 loss (\S+)`), value(`step 99 loss (\S+)`); last > first/2 {
				t.Errorf("the loss fell from %g to %g only", first, last)
			}
			if difference := value(`largest difference of a weight from one process (\S+)`); !(difference < 1e-6) {
				t.Errorf("a weight differs by %g from that of one process", difference)
			}
			// Each rank sends half of the gradients and half of their sum at least.
			least := 100 * value(`(\d+) bytes of gradients each`)
			if sent := value(`evenkeel_message_bytes_total\{direction="send"[^}]*\} (\d+)`); sent < least {
				t.Errorf("the plugin sent %g bytes, and the gradients have %g", sent, least)
			}
		})
	}
}

// TestTorchHangs: of a job that hangs, `kubectl evenkeel why` names the call, and the rank that never called it.
func TestTorchHangs(t *testing.T) {
	const script = `
import time
import torch
import torch.distributed as dist

dist.init_process_group("evenkeel")
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    time.sleep(3600)
dist.all_reduce(torch.ones(2, 3))
`
	ctx, ns := testContext(t), newNamespace(t)
	variables := map[string]string{"SCRIPT": script, "USE_LIBUV": "0"} // Debian's torch has no libuv
	trainingJob{profile: "default", image: cluster.Images.PyTorch, script: `exec python3 -c "$SCRIPT"`, env: variables}.create(ctx, t, ns)
	plugin, last := kubectlPlugin(t), ""
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(last)
		}
	})
	eventually(ctx, t, "why names the call", func(ctx context.Context) (bool, error) {
		out, err := exec.CommandContext(ctx, plugin, "why", "pytorchjob/train", "-n", ns, "--kubeconfig", cluster.Kubeconfig).CombinedOutput()
		last = fmt.Sprintf("%v: %s", err, out)
		return err == nil && strings.Contains(last, "group default_pg: rank 1 never called all_reduce #2, in which rank 0 waits"), nil
	})
}
